//! Requests: what comes in, what goes out, what is refused, and the engine's state of each.

pub(crate) mod input;
pub(crate) mod output;
pub(crate) mod refusal;
pub(crate) mod state;
pub(crate) mod validate;
