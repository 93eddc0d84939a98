// SPDX-License-Identifier: Apache-2.0

//! Verifies a resident generation: imports it read-only and computes its checksums on the device.
//!
//! ```text
//! weight-server                          loader
//!   VerifyJob                   ->       creates a context
//!   FdBatch + descriptors       ->       (manifest first)
//!                               <-       BatchReceived
//!                               <-       Verified, or LoadFailed
//! ```
//! The driver checks that each descriptor is an allocation of the manifest's size. The checksums
//! check that its bytes are those that were loaded.

use handoff::fd_batches::FdBatchError;
use handoff::manifest::{SplitHandoffError, split_handoff};
use handoff::seqpacket::Connection;
use memory::manifest::Manifest;
use memory::numa::is_host_device;
use proto::weights::v1::{self as wire, LoadFailure, loader_frame};
use service::exit::one_line;

use super::channel::{LoaderError, ReceiveFdsError, receive_fds, send_failure, send_frame};
use super::checksum;
use super::device::open_for_checksums;
use super::load_error::{DeviceFailure, OpenTargetError};
use super::sandbox::{self, SandboxProfile};

/// More damaged tensors are counted, but not named.
const MAX_REPORTED_NAMES: usize = 16;

#[derive(Debug, thiserror::Error)]
enum VerifyError {
    #[error(transparent)]
    Open(#[from] OpenTargetError),
    #[error(transparent)]
    Device(#[from] DeviceFailure),
    #[error("the weight-server sent inconsistent descriptors")]
    Handoff(#[from] FdBatchError),
    #[error("cannot read the generation's manifest")]
    Manifest(#[from] SplitHandoffError),
    #[error(transparent)]
    Loader(#[from] LoaderError),
}

pub(super) fn run(connection: &Connection, job: &wire::VerifyJob) -> Result<(), LoaderError> {
    let error = match verify(connection, job) {
        Ok(verified) => return send_frame(connection, loader_frame::Kind::Verified(verified), &[]),
        Err(VerifyError::Loader(error)) => return Err(error),
        Err(error) => error,
    };
    let failure = match &error {
        VerifyError::Device(error) | VerifyError::Open(OpenTargetError::Device(error)) => error.failure(),
        _ => LoadFailure::Device,
    };
    send_failure(connection, failure, one_line(&error))
}

fn verify(connection: &Connection, job: &wire::VerifyJob) -> Result<wire::Verified, VerifyError> {
    let compute_checksums = open_for_checksums(&job.device)?;
    let profile = if is_host_device(&job.device) { SandboxProfile::Host } else { SandboxProfile::Gpu };
    sandbox::enter(profile).map_err(LoaderError::Sandbox)?;
    service::logging::start_thread();
    let fds = match receive_fds(connection, job.fds) {
        Ok(fds) => fds,
        Err(ReceiveFdsError::Loader(error)) => return Err(error.into()),
        Err(ReceiveFdsError::Batch(error)) => return Err(error.into()),
    };
    let (manifest, fds) = split_handoff(fds)?;
    let chunks = compute_checksums(&manifest, fds)?;
    Ok(compare(&manifest, &chunks))
}

/// Compares the checksums with those in the manifest.
fn compare(manifest: &Manifest, chunks: &[Vec<u128>]) -> wire::Verified {
    let mut verified = wire::Verified { checked_bytes: manifest.tensor_bytes(), ..Default::default() };
    for (tensor, chunks) in manifest.tensors.iter().zip(chunks) {
        if checksum::tensor_checksum(chunks) != tensor.checksum {
            verified.damaged_count += 1;
            if verified.damaged.len() < MAX_REPORTED_NAMES {
                verified.damaged.push(tensor.name.clone());
            }
        }
    }
    verified
}

#[cfg(test)]
mod tests {
    use memory::manifest::{Allocation, DeviceKind, ManifestDevice, TensorEntry};

    use super::*;

    #[test]
    fn damaged_tensors_are_named_and_counted() {
        let chunks: Vec<Vec<u128>> = (0..40u128).map(|tensor| vec![tensor, tensor + 1]).collect();
        let tensor = |index: usize| TensorEntry {
            name: format!("blk.{index}.weight"),
            dtype: 0,
            layout: 1,
            shape: vec![8],
            shard: None,
            allocation: 0,
            offset: 32 * index as u64,
            bytes: 32,
            raw_checksum: [0; 16],
            checksum: checksum::tensor_checksum(&chunks[index]),
        };
        let manifest = Manifest {
            model: "m".to_owned(),
            digest: [0; 32],
            generation: 1,
            files: Vec::new(),
            devices: vec![ManifestDevice {
                kind: DeviceKind::Cuda,
                id: "GPU-1".to_owned(),
                compute_capability: 90,
            }],
            layout: 1,
            one_per_tensor: false,
            allocations: vec![Allocation { device: 0, bytes: 2 << 20, inode: 0 }],
            tensors: (0..40).map(tensor).collect(),
            gguf_metadata: bytes::Bytes::new(),
            created_unix_seconds: 0,
        };
        let whole = compare(&manifest, &chunks);
        assert_eq!((whole.damaged_count, whole.damaged.len(), whole.checked_bytes), (0, 0, 40 * 32));
        let mut damaged = chunks;
        for chunks in &mut damaged[3..30] {
            chunks.swap(0, 1);
        }
        let found = compare(&manifest, &damaged);
        assert_eq!((found.damaged_count, found.damaged.len()), (27, MAX_REPORTED_NAMES));
        assert_eq!(found.damaged[0], "blk.3.weight");
    }
}
