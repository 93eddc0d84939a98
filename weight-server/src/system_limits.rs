// SPDX-License-Identifier: Apache-2.0

//! The limits of the machine and the process: available memory and open descriptors.

use std::collections::BTreeSet;

use memory::numa::{self, NumaNode, node_of_device};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Not available to the ledger: sockets, the runtime, libraries, a loader's socket and files, and
/// connections without a lease.
const RESERVED_FDS: u64 = 256;

/// With fewer descriptors the weight-server cannot hold even one small model and its workers.
const MIN_FDS: u64 = 64;

/// Memory that a load may take now: the machine's or the cgroup's, whichever is less.
///
/// If it cannot be read (no /proc), no load is refused for it; the allocation itself then fails
/// with its own error.
pub(crate) fn available_bytes() -> u64 {
    service::meminfo::available_bytes().unwrap_or_else(|error| {
        tracing::debug!(%error, "cannot tell how much memory is available");
        u64::MAX
    })
}

/// The same without NUMA nodes that are memory of GPUs.
pub(crate) fn available_bytes_without(gpu_nodes: &BTreeSet<u32>) -> u64 {
    available_bytes().saturating_sub(numa::available_on(gpu_nodes.iter().copied()))
}

/// The memory of each NUMA node of this machine, by its device.
pub(crate) fn node_bytes_without(gpu_nodes: &BTreeSet<u32>) -> impl Iterator<Item = (String, u64)> {
    let nodes = numa::nodes().into_iter().filter(|number| !gpu_nodes.contains(number));
    let nodes = nodes.filter_map(|number| NumaNode::find(number).ok());
    nodes.map(|node| (numa::device_of_node(node.number), node.memory_bytes))
}

/// What [`available_bytes`] leaves for a load onto a device: a NUMA node has a part of the memory.
pub(crate) fn available_bytes_for(device: &str) -> u64 {
    let of_node = |number| {
        NumaNode::available_bytes(number).unwrap_or_else(|error| {
            tracing::debug!(%error, "cannot tell how much memory of a NUMA node is available");
            u64::MAX
        })
    };
    available_bytes().min(node_of_device(device).map_or(u64::MAX, of_node))
}

#[derive(Debug, thiserror::Error)]
#[error(
    "RLIMIT_NOFILE allows {limit} file descriptors, at least {} are needed: raise it with ulimit -n",
    RESERVED_FDS + MIN_FDS
)]
pub struct FdLimitError {
    pub limit: u64,
}

/// Raises the soft limit to the hard limit; returns the number of descriptors for the ledger.
pub(crate) fn fd_capacity() -> Result<u64, FdLimitError> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap_or((RESERVED_FDS, RESERVED_FDS));
    let limit = match setrlimit(Resource::RLIMIT_NOFILE, hard, hard) {
        Ok(()) => hard,
        Err(_) => soft,
    };
    match limit.checked_sub(RESERVED_FDS) {
        Some(capacity) if capacity >= MIN_FDS => Ok(capacity),
        _ => Err(FdLimitError { limit }),
    }
}
