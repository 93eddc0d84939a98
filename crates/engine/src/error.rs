//! Why an engine could not start, and why a step failed.

use crate::config::EngineConfigError;
use ops::OpError;

/// Why an engine could not start.
#[derive(Debug, thiserror::Error)]
pub enum EngineStartError {
    #[error("engine configuration refused")]
    Config(#[from] EngineConfigError),
    #[error("no room for the KV cache of {blocks} blocks, {bytes} bytes")]
    Kv { blocks: usize, bytes: u64, source: OpError },
}

/// The model could not compute a step. The requests that were part of it have ended with `StepFailed`; the others and
/// the engine itself go on, unless the device is gone.
#[derive(Debug, thiserror::Error)]
#[error("step of {rows} rows failed, {requests} requests lost")]
pub struct StepError {
    pub rows: usize,
    pub requests: usize,
    pub source: OpError,
}

impl StepError {
    /// No later step can succeed: the process should end.
    pub fn is_fatal(&self) -> bool {
        matches!(self.source, OpError::Device { .. })
    }
}
