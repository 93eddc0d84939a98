// SPDX-License-Identifier: Apache-2.0

//! `ballast doctor-peer`: the child process of the doctor's hand-off. It loads the test model,
//! sends its descriptors to the parent, and waits until the parent kills it.

use std::os::fd::{AsFd, OwnedFd};

use handoff::fd_batches::fd_batches;
use handoff::manifest::seal_manifest;
use handoff::seqpacket::Connection;
use memory::host::HostAllocation;
use memory::manifest::{Manifest, ManifestDevice};
use memory::memfd::SealedMemfd;
use proto::weights::v1::FdBatch;
use service::Exit;

use super::finding::CheckResult;
use super::hand_off::TIMEOUT;
use super::test_model::{ALLOCATION_BYTES, contents, manifest};
use crate::cli_error::{CliError, CliResult};
use crate::gpu_support;

/// Only the doctor starts this command, with a socket as standard input.
#[derive(clap::Args)]
pub(crate) struct PeerArguments {
    /// "host", or a GPU
    device: String,
    /// Seed of the contents
    seed: u64,
}

pub(crate) fn run_peer(arguments: PeerArguments) -> CliResult {
    send_model(&arguments).map_err(|error| CliError::new(Exit::Internal, service::exit::one_line(&*error)))
}

fn send_model(arguments: &PeerArguments) -> CheckResult<()> {
    let socket = Connection::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    socket.set_timeouts(Some(TIMEOUT), Some(TIMEOUT))?;
    let (manifest, allocations) = match arguments.device.as_str() {
        "host" => load_host(arguments.seed)?,
        device => gpu_support::load_test_model(device, arguments.seed)?,
    };
    let manifest = seal_manifest(&manifest)?;
    let fds: Vec<_> = std::iter::once(manifest.as_fd()).chain(allocations.iter().map(AsFd::as_fd)).collect();
    for batch in fd_batches(fds.len() as u32) {
        let first = batch.first as usize;
        socket.send(&batch, &fds[first..first + batch.count as usize])?;
    }
    // Waits until the parent has all descriptors and kills this process.
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
