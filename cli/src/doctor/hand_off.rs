// SPDX-License-Identifier: Apache-2.0

//! The doctor's hand-off test: a child process loads a small model, sends its descriptors, and is
//! killed. The doctor then maps the memory and compares its contents.
//!
//! The test makes the same calls as a fleet, without the fleet's processes. If it fails, a fleet
//! fails in the same way.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use handoff::fd_batches::FdCollector;
use handoff::manifest::split_handoff;
use handoff::seqpacket::Connection;
use memory::host_import::import_host;
use proto::weights::v1::FdBatch;

use super::finding::CheckResult;
use super::test_model::{ALLOCATION_BYTES, check_contents, contents};

/// The hidden subcommand that the child process runs.
const PEER: &str = "doctor-peer";

/// A driver may take seconds to start on a machine without persistence mode.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// How long a hand-off took.
pub(crate) struct HandOffTimes {
    /// From the start of the child process to the last descriptor.
    pub(crate) loading: Duration,
    /// Mapping the memory in this process.
    pub(crate) import: Duration,
}

/// Descriptors of a model whose loader process is dead.
pub(crate) struct ReceivedModel {
    pub(crate) seed: u64,
    /// The manifest's memfd, then one descriptor for each allocation.
    pub(crate) fds: Vec<OwnedFd>,
    pub(crate) loading: Duration,
}

/// Tests a hand-off of host memory.
pub(super) fn over_host() -> CheckResult<HandOffTimes> {
    let received = receive_from_child("host")?;
    let written = File::from(received.fds[1].try_clone()?).write_at(&[0], 0);
    if written.is_ok() {
        return Err("a sealed memfd accepts writes".into());
    }
    let started = Instant::now();
    let (manifest, fds) = split_handoff(received.fds)?;
    let (tensors, _) = import_host(&manifest, fds)?;
    let import = started.elapsed();
    for (index, tensor) in tensors.iter().enumerate() {
        check_contents(&tensor.name, &tensor.bytes, &contents(received.seed, index))?;
    }
    Ok(HandOffTimes { loading: received.loading, import })
}

/// Starts a child process that loads the test model, receives its descriptors, and kills it.
pub(crate) fn receive_from_child(device: &str) -> CheckResult<ReceivedModel> {
    let started = Instant::now();
    let seed = SystemTime::now().duration_since(UNIX_EPOCH)?.subsec_nanos().into();
    let (socket, theirs) = Connection::pair()?;
    socket.set_timeouts(Some(TIMEOUT), Some(TIMEOUT))?;
    let child = Command::new("/proc/self/exe")
        .args([PEER, device, &format!("{seed}")])
        .stdin(OwnedFd::from(theirs))
        .stdout(Stdio::null())
        .spawn()?;
    let _killed = KilledOnDrop(child);
    let mut collector = FdCollector::new(ALLOCATION_BYTES.len() as u32 + 1)?;
    while !collector.is_complete() {
        let (batch, fds) = socket.receive::<FdBatch>()?;
        collector.accept(&batch, fds)?;
    }
    Ok(ReceivedModel { seed, fds: collector.into_fds(), loading: started.elapsed() })
}

struct KilledOnDrop(Child);

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        // This fails only if the child has already ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
