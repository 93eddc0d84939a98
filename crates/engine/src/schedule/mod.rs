//! Which sequences get how many rows of the next step.

pub mod admission;
pub(crate) mod batch;
pub(crate) mod budget;
pub mod integrity;
pub(crate) mod prefill_rate;
pub mod scheduler;
pub mod sequence;
pub mod sequence_id;
pub mod step_plan;
pub mod waiting_queue;
