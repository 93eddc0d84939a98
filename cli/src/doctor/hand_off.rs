//! A live hand-off: a child loads a small model, hands it over, is killed, and the model is read here.
//!
//! The same calls as in a fleet, without its processes: what fails here fails there.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use handoff::fd_batches::{FdCollector, fd_batches};
use handoff::manifest::{seal_manifest, split_handoff};
use handoff::seqpacket::Connection;
use memory::host::HostAllocation;
use memory::host_import::import_host;
use memory::manifest::{Allocation, LAYOUT_GGML, Manifest, ManifestDevice, TensorEntry};
use memory::memfd::SealedMemfd;
use proto::weights::v1::FdBatch;
use service::Exit;

use super::CheckResult;
use crate::cli_error::{CliError, CliResult};

pub(crate) const PEER: &str = "doctor-peer";

/// Several descriptors, small and large allocations.
pub(super) const ALLOCATION_BYTES: [u64; 4] = [2 << 20, 32 << 20, 2 << 20, 4 << 20];

/// A driver may take seconds to start on a machine without persistence mode.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The child's side; started by the doctor alone, with a socket as its standard input.
#[derive(clap::Args)]
pub(crate) struct PeerArguments {
    /// "host", or a GPU
    device: String,
    /// What the contents are made from
    seed: u64,
}

/// How a hand-off went.
pub(super) struct HandOffTimes {
    /// From the start of the child to the last descriptor.
    pub(super) loading: Duration,
    pub(super) import: Duration,
}

pub(super) fn bytes() -> u64 {
    ALLOCATION_BYTES.iter().sum()
}

pub(crate) fn run_peer(arguments: PeerArguments) -> CliResult {
    send_model(&arguments).map_err(|error| CliError::new(Exit::Internal, service::exit::one_line(&*error)))
}

fn send_model(arguments: &PeerArguments) -> CheckResult<()> {
    let socket = Connection::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    socket.set_timeouts(Some(TIMEOUT), Some(TIMEOUT))?;
    let (manifest, allocations) = match arguments.device.as_str() {
        "host" => load_host(arguments.seed)?,
        #[cfg(feature = "cuda")]
        device => super::gpu::load(&device.parse()?, arguments.seed)?,
        #[cfg(not(feature = "cuda"))]
        device => return Err(format!("{device} is no device of this executable").into()),
    };
    let manifest = seal_manifest(&manifest)?;
    let fds: Vec<_> = std::iter::once(manifest.as_fd()).chain(allocations.iter().map(AsFd::as_fd)).collect();
    for batch in fd_batches(fds.len() as u32) {
        let first = batch.first as usize;
        socket.send(&batch, &fds[first..first + batch.count as usize])?;
    }
    // Until the parent has everything, and kills this process.
    let _ = socket.receive::<FdBatch>();
    Ok(())
}

fn load_host(seed: u64) -> CheckResult<(Manifest, Vec<OwnedFd>)> {
    let mut memfds = Vec::new();
    for (index, bytes) in ALLOCATION_BYTES.into_iter().enumerate() {
        let mut allocation = HostAllocation::create("ballast-doctor", bytes)?;
        let (slice, backing) = allocation.parts();
        backing.ensure(0, bytes)?;
        slice.copy_from_slice(&contents(seed, index));
        memfds.push(allocation.seal()?);
    }
    let inodes: Vec<u64> = memfds.iter().map(SealedMemfd::inode).collect();
    let fds = memfds.iter().map(|memfd| memfd.as_fd().try_clone_to_owned()).collect::<Result<_, _>>()?;
    Ok((manifest(ManifestDevice::host(), &inodes), fds))
}

/// One tensor in each allocation.
pub(super) fn manifest(device: ManifestDevice, inodes: &[u64]) -> Manifest {
    let tensor = |(allocation, bytes): (usize, u64)| TensorEntry {
        name: format!("tensor.{allocation}"),
        dtype: 0,
        layout: LAYOUT_GGML,
        shape: vec![bytes / 4],
        shard: None,
        allocation,
        offset: 0,
        bytes,
        raw_checksum: [0; 16],
        checksum: [0; 16],
    };
    Manifest {
        model: "doctor".to_owned(),
        digest: [0; 32],
        generation: 1,
        files: Vec::new(),
        devices: vec![device],
        layout: LAYOUT_GGML,
        allocations: ALLOCATION_BYTES
            .iter()
            .zip(inodes)
            .map(|(&bytes, &inode)| Allocation { device: 0, bytes, inode })
            .collect(),
        tensors: ALLOCATION_BYTES.into_iter().enumerate().map(tensor).collect(),
        gguf_metadata: Bytes::new(),
        created_unix_seconds: 0,
    }
}

/// What an allocation holds: never the same in two runs, so that old memory cannot pass for new.
pub(super) fn contents(seed: u64, index: usize) -> Vec<u8> {
    let mut state = seed ^ (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let words = ALLOCATION_BYTES[index] as usize / size_of::<u64>();
    let mut bytes = Vec::with_capacity(words * size_of::<u64>());
    for _ in 0..words {
        // Marsaglia's xorshift: 13, 7, 17.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes
}

/// Host memory that another process loaded.
pub(super) fn over_host() -> CheckResult<HandOffTimes> {
    let received = receive_from_child("host")?;
    let written = File::from(received.fds[1].try_clone()?).write_at(&[0], 0);
    if written.is_ok() {
        return Err("a sealed memfd took a write".into());
    }
    let started = Instant::now();
    let (manifest, fds) = split_handoff(received.fds)?;
    let (tensors, _) = import_host(&manifest, fds)?;
    let import = started.elapsed();
    for (index, tensor) in tensors.iter().enumerate() {
        compare(&tensor.name, &tensor.bytes, &contents(received.seed, index))?;
    }
    Ok(HandOffTimes { loading: received.loading, import })
}

/// Descriptors whose maker is dead.
pub(super) struct ReceivedModel {
    pub(super) seed: u64,
    pub(super) fds: Vec<OwnedFd>,
    pub(super) loading: Duration,
}

pub(super) fn receive_from_child(device: &str) -> CheckResult<ReceivedModel> {
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

pub(super) fn compare(name: &str, found: &[u8], expected: &[u8]) -> CheckResult<()> {
    if found == expected { Ok(()) } else { Err(format!("{name} does not hold what was written").into()) }
}

struct KilledOnDrop(Child);

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        // Only fails on a child that has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
