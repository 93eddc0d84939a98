// SPDX-License-Identifier: Apache-2.0

//! Callers that wait for a load, and the progress reports that they get.

use bytes::Bytes;

use crate::ids::{CallId, ConnectionId};
use crate::lease_table::WorkerProcess;

/// A caller that waits for a load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Waiter {
    /// An admin call.
    Call(CallId),
    /// A worker that attaches as soon as the model is ready.
    Worker { connection: ConnectionId, peer: WorkerProcess, params: AttachParams },
}

/// The content of an Attach frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttachParams {
    pub protocol: u32,
    pub layout: u32,
    pub manifest_format: u32,
    pub device: String,
    pub model: String,
    pub token: Bytes,
    pub kv_bytes: u64,
    pub workspace_bytes: u64,
}

/// The content of a Reclaim frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseClaim {
    pub protocol: u32,
    pub generation: u64,
    pub lease: u64,
    pub token: Bytes,
    /// What was granted, for a weight-server that has lost the lease.
    pub digest: Bytes,
    pub device: String,
    pub kv_bytes: u64,
    pub workspace_bytes: u64,
    /// Descriptors that the worker can send back.
    pub fds: u32,
    pub manifest_inode: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaiterId {
    Call(CallId),
    Worker(ConnectionId),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadProgress {
    pub done_bytes: u64,
    pub total_bytes: u64,
    pub jobs_ahead: u32,
}
