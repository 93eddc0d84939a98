// SPDX-License-Identifier: Apache-2.0

//! Errors of engine start and of a step.

use crate::config::EngineConfigError;
use ops::OpError;

/// Why an engine could not start.
#[derive(Debug, thiserror::Error)]
pub enum EngineStartError {
    #[error("invalid engine configuration")]
    Config(#[from] EngineConfigError),
    #[error("cannot allocate the KV cache of {blocks} blocks, {bytes} bytes")]
    Kv { blocks: usize, bytes: u64, source: OpError },
}

/// The model could not compute a step. The requests in the step ended with `StepFailed`. Other
/// requests and the engine go on, unless the error is fatal.
#[derive(Debug, thiserror::Error)]
#[error("step of {rows} rows failed and ended {requests} requests")]
pub struct StepError {
    pub rows: usize,
    pub requests: usize,
    pub source: OpError,
}

impl StepError {
    /// Whether no later step can succeed. The process should then exit.
    pub fn is_fatal(&self) -> bool {
        matches!(self.source, OpError::Device { .. })
    }
}
