//! Measures a fleet from outside, as its clients and operators see it: the code behind `ballast bench`.
//!
//! It starts the real executable and talks to its sockets; no process of the fleet is linked in. Figures are wall-clock
//! times on this side of the sockets. Streams do not stop early, and share a prefix only where that is what is measured, so
//! that every run does the same work.

#![forbid(unsafe_code)]

mod burst;
mod drafts;
mod fleet;
mod lives;
mod report;
mod streams;
mod structured;

pub use burst::{Burst, BurstReport, shared_against_apart};
pub use drafts::{DraftError, DraftLoad, DraftReport, drafts_against_plain};
pub use fleet::{FleetError, MeasuredFleet, StartOptions};
pub use lives::{LifeError, NewWorker, attach_times, dead_worker_back, one_more_worker, vocabulary};
pub use report::{Summary, summary};
pub use streams::{Load, LoadError, LoadReport, run_load};
pub use structured::{Decode, StructuredReport, structured_against_free};
