// SPDX-License-Identifier: Apache-2.0

//! Callers that wait for a load, and the progress reports that they get.

use bytes::Bytes;

use crate::ids::{CallId, ConnectionId};
use crate::lease_table::WorkerProcess;

/// A caller that waits for a load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Waiter {
    /// An admin call.
    Call(CallId),
    /// A worker that attaches as soon as the model is ready.
    Worker { connection: ConnectionId, peer: WorkerProcess, params: AttachParams },
}

/// The content of an Attach frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AttachParams {
    pub(crate) protocol: u32,
    pub(crate) layout: u32,
    pub(crate) manifest_format: u32,
    pub(crate) device: String,
    pub(crate) model: String,
    pub(crate) token: Bytes,
    pub(crate) kv_bytes: u64,
    pub(crate) workspace_bytes: u64,
}

/// The content of a Reclaim frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LeaseClaim {
    pub(crate) protocol: u32,
    pub(crate) generation: u64,
    pub(crate) lease: u64,
    pub(crate) token: Bytes,
    /// What was granted, for a weight-server that has lost the lease.
    pub(crate) digest: Bytes,
    pub(crate) device: String,
    pub(crate) kv_bytes: u64,
    pub(crate) workspace_bytes: u64,
    /// Descriptors that the worker can send back.
    pub(crate) fds: u32,
    pub(crate) manifest_inode: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WaiterId {
    Call(CallId),
    Worker(ConnectionId),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LoadProgress {
    pub(crate) done_bytes: u64,
    pub(crate) total_bytes: u64,
    pub(crate) jobs_ahead: u32,
}
