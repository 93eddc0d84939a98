// SPDX-License-Identifier: Apache-2.0

//! Finds the workers that may hold weights of which this weight-server has no descriptor.
//!
//! If supervisor and weight-server die together, the FD store is lost with them. The runtime
//! directory still records which workers run.

use std::os::fd::OwnedFd;

use handoff::lease_record::LeaseRecord;
use handoff::pidfd;
use service::RuntimeDir;

use crate::held_fds::LeaseFds;
use crate::lease_table::WorkerProcess;

const WORKER_PREFIX: &str = "worker-";

/// Distance between the first numbers of incarnations that know nothing of each other.
const ID_STEP: u64 = 1024;

/// Living workers without an adopted lease, each with its pidfd.
pub(crate) fn find(
    directory: &RuntimeDir,
    adopted: &[(LeaseRecord, LeaseFds)],
) -> Vec<(WorkerProcess, OwnedFd)> {
    let living = directory.living_children().unwrap_or_else(|error| {
        tracing::warn!(%error, "cannot read the runtime directory: awaiting no worker");
        Vec::new()
    });
    let is_worker = |name: &str| name.starts_with(WORKER_PREFIX);
    let pids = living.into_iter().filter(|(name, _)| is_worker(name)).map(|(_, pid)| pid.cast_signed());
    pids.filter(|pid| !adopted.iter().any(|(record, _)| record.pid == *pid)).filter_map(open).collect()
}

fn open(pid: i32) -> Option<(WorkerProcess, OwnedFd)> {
    let pidfd = pidfd::open(pid).ok()?;
    let uid = nix::unistd::geteuid().as_raw();
    let worker = WorkerProcess { pid, uid, start_ticks: pidfd::start_ticks(pid)? };
    tracing::info!(pid, "awaiting a worker, which may return the weights that it holds");
    Some((worker, pidfd))
}

/// Where an incarnation starts to number generations and leases. One that has lost its history
/// leaves the numbers alone that workers may still claim.
pub fn first_id(knows_history: bool, pid: u32) -> u64 {
    if knows_history { 1 } else { ID_STEP * u64::from(1 + pid % ID_STEP as u32) }
}
