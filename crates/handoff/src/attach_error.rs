// SPDX-License-Identifier: Apache-2.0

//! [`AttachModelError`]: why a worker has no model.

use std::time::Duration;

use memory::device::ImportModelError;
use memory::host_import::ImportHostError;
use proto::weights::v1 as wire;

use crate::fd_batches::FdBatchError;
use crate::manifest::SplitHandoffError;
use crate::seqpacket::{FrameError, SocketError};

/// Longest wait for the next frame. While a model loads, the weight-server reports at least every
/// second.
pub(crate) const SILENCE: Duration = Duration::from_secs(30);

#[derive(Debug, thiserror::Error)]
pub enum AttachModelError {
    #[error(transparent)]
    Socket(#[from] SocketError),
    #[error("the weight-server refused: {text}")]
    Refused { reason: wire::RefusalReason, text: String },
    #[error("the connection to the weight-server broke")]
    Connection(#[source] FrameError),
    #[error("the weight-server sent nothing for {} s", SILENCE.as_secs())]
    Silence,
    #[error("the weight-server sent {found} instead of {expected}")]
    Unexpected { expected: &'static str, found: &'static str },
    #[error("the hand-off is inconsistent")]
    Batch(#[from] FdBatchError),
    #[error("the model that was handed over cannot be used")]
    Split(#[from] SplitHandoffError),
    #[error("the model that was handed over cannot be used")]
    ImportHost(#[from] ImportHostError),
    #[error("the model that was handed over cannot be used")]
    ImportDevice(#[from] ImportModelError),
    #[error("cannot keep the model's descriptors: raise RLIMIT_NOFILE (ulimit -n)")]
    Keep(#[source] std::io::Error),
    #[error("cannot watch the lease")]
    Lease(#[source] std::io::Error),
}

impl From<FrameError> for AttachModelError {
    fn from(error: FrameError) -> Self {
        match error {
            FrameError::NotReady => Self::Silence,
            error => Self::Connection(error),
        }
    }
}
