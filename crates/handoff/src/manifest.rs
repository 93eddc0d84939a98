// SPDX-License-Identifier: Apache-2.0

//! The manifest as bytes: `ballast.weights.v1.Manifest`, in one sealed memfd per generation.
//!
//! A decoded manifest has passed [`Manifest::validate`], whichever process wrote it.

use std::os::fd::OwnedFd;

use bytes::Bytes;
use memory::manifest::{
    Allocation, Checksum, DeviceKind, FileIdentity, Manifest, ManifestDevice, ManifestError, Shard,
    TensorEntry,
};
use memory::memfd::{MemfdError, SealedMemfd};
use prost::Message;
use proto::weights::v1 as wire;

/// The format that this crate writes.
pub const MANIFEST_FORMAT: u32 = 1;

/// The oldest format that it reads: the one before its own.
pub const OLDEST_MANIFEST_FORMAT: u32 = if MANIFEST_FORMAT > 1 { MANIFEST_FORMAT - 1 } else { 1 };

/// A vocabulary of 256k tokens with merges is below 32 MiB.
pub const MAX_MANIFEST_BYTES: u64 = 256 << 20;

#[derive(Debug, thiserror::Error)]
pub enum DecodeManifestError {
    #[error(transparent)]
    Memfd(#[from] MemfdError),
    #[error("the manifest is not a protobuf message")]
    Malformed(#[from] prost::DecodeError),
    #[error(
        "manifest format {found} is not readable here ({OLDEST_MANIFEST_FORMAT} to {MANIFEST_FORMAT} are): load the model anew"
    )]
    Format { found: u32 },
    #[error(transparent)]
    Invalid(#[from] ManifestError),
}

#[derive(Debug, thiserror::Error)]
pub enum SplitHandoffError {
    #[error("the hand-off held no manifest")]
    NoManifest,
    #[error("the manifest cannot be read")]
    Manifest(#[source] DecodeManifestError),
    #[error("the manifest lists {expected} allocations, {found} descriptors came")]
    Count { expected: usize, found: usize },
}

/// The first field alone: a later format may have changed all other fields.
#[derive(Clone, PartialEq, Message)]
struct FormatOnly {
    #[prost(uint32, tag = "1")]
    format: u32,
}

/// Writes a manifest into a new memfd and seals it.
pub fn seal_manifest(manifest: &Manifest) -> Result<SealedMemfd, MemfdError> {
    SealedMemfd::from_bytes("ballast-manifest", &encode_manifest(manifest))
}

/// Reads a manifest from a descriptor that any process may have sent. The GGUF metadata stays in
/// the mapping.
pub fn read_manifest(memfd: &SealedMemfd) -> Result<Manifest, DecodeManifestError> {
    decode_manifest(memfd.map("manifest", MAX_MANIFEST_BYTES)?)
}

pub fn encode_manifest(manifest: &Manifest) -> Vec<u8> {
    to_wire(manifest.clone()).encode_to_vec()
}

pub fn decode_manifest(bytes: Bytes) -> Result<Manifest, DecodeManifestError> {
    let FormatOnly { format } = FormatOnly::decode(bytes.clone())?;
    if !(OLDEST_MANIFEST_FORMAT..=MANIFEST_FORMAT).contains(&format) {
        return Err(DecodeManifestError::Format { found: format });
    }
    Ok(from_wire(wire::Manifest::decode(bytes)?)?)
}

/// Splits the descriptors of a hand-off: the first holds the manifest, the others are its
/// allocations in order.
pub fn split_handoff(fds: Vec<OwnedFd>) -> Result<(Manifest, Vec<OwnedFd>), SplitHandoffError> {
    let mut fds = fds.into_iter();
    let first = fds.next().ok_or(SplitHandoffError::NoManifest)?;
    let memfd = SealedMemfd::verify(first).map_err(|error| SplitHandoffError::Manifest(error.into()))?;
    let manifest = read_manifest(&memfd).map_err(SplitHandoffError::Manifest)?;
    let allocations: Vec<OwnedFd> = fds.collect();
    if allocations.len() != manifest.allocations.len() {
        let (expected, found) = (manifest.allocations.len(), allocations.len());
        return Err(SplitHandoffError::Count { expected, found });
    }
    Ok((manifest, allocations))
}

fn to_wire(manifest: Manifest) -> wire::Manifest {
    let allocation =
        |a: Allocation| wire::Allocation { device: a.device as u32, bytes: a.bytes, inode: a.inode };
    wire::Manifest {
        format: MANIFEST_FORMAT,
        model: manifest.model,
        digest: Bytes::copy_from_slice(&manifest.digest),
        generation: manifest.generation,
        files: manifest.files.into_iter().map(file_identity_to_wire).collect(),
        devices: manifest.devices.into_iter().map(device_to_wire).collect(),
        layout: manifest.layout,
        one_per_tensor: manifest.one_per_tensor,
        allocations: manifest.allocations.into_iter().map(allocation).collect(),
        tensors: manifest.tensors.into_iter().map(tensor_to_wire).collect(),
        gguf_metadata: manifest.gguf_metadata,
        checksum_kind: wire::ChecksumKind::Xxh3128OfMib.into(),
        created_unix_seconds: manifest.created_unix_seconds,
    }
}

fn from_wire(wire: wire::Manifest) -> Result<Manifest, ManifestError> {
    let invalid = |field| ManifestError::Field { field };
    if wire.checksum_kind() != wire::ChecksumKind::Xxh3128OfMib {
        return Err(invalid("checksum_kind"));
    }
    let allocation =
        |a: wire::Allocation| Allocation { device: a.device as usize, bytes: a.bytes, inode: a.inode };
    let manifest = Manifest {
        digest: wire.digest[..].try_into().map_err(|_| invalid("digest"))?,
        model: wire.model,
        generation: wire.generation,
        files: wire.files.into_iter().map(file_identity_from_wire).collect(),
        devices: wire.devices.into_iter().map(device_from_wire).collect::<Result<_, _>>()?,
        layout: wire.layout,
        one_per_tensor: wire.one_per_tensor,
        allocations: wire.allocations.into_iter().map(allocation).collect(),
        tensors: wire.tensors.into_iter().map(tensor_from_wire).collect::<Result<_, _>>()?,
        gguf_metadata: wire.gguf_metadata,
        created_unix_seconds: wire.created_unix_seconds,
    };
    manifest.validate()?;
    Ok(manifest)
}

fn tensor_from_wire(wire: wire::Tensor) -> Result<TensorEntry, ManifestError> {
    let checksum = |field, bytes: &[u8]| -> Result<Checksum, ManifestError> {
        bytes.try_into().map_err(|_| ManifestError::Tensor { tensor: wire.name.clone(), field })
    };
    Ok(TensorEntry {
        raw_checksum: checksum("raw_checksum", &wire.raw_checksum)?,
        checksum: checksum("checksum", &wire.checksum)?,
        name: wire.name,
        dtype: wire.dtype,
        layout: wire.layout,
        shape: wire.shape,
        shard: wire.shard.map(|s| Shard { axis: s.axis, index: s.index, count: s.count }),
        allocation: wire.allocation as usize,
        offset: wire.offset,
        bytes: wire.bytes,
    })
}

fn tensor_to_wire(tensor: TensorEntry) -> wire::Tensor {
    wire::Tensor {
        name: tensor.name,
        dtype: tensor.dtype,
        layout: tensor.layout,
        shape: tensor.shape,
        shard: tensor.shard.map(|s| wire::Shard { axis: s.axis, index: s.index, count: s.count }),
        allocation: tensor.allocation as u32,
        offset: tensor.offset,
        bytes: tensor.bytes,
        raw_checksum: Bytes::copy_from_slice(&tensor.raw_checksum),
        checksum: Bytes::copy_from_slice(&tensor.checksum),
    }
}

fn device_to_wire(device: ManifestDevice) -> wire::Device {
    let kind = match device.kind {
        DeviceKind::Host => wire::DeviceKind::Host,
        DeviceKind::Cuda => wire::DeviceKind::Cuda,
    };
    wire::Device { kind: kind.into(), id: device.id, compute_capability: device.compute_capability }
}

fn device_from_wire(wire: wire::Device) -> Result<ManifestDevice, ManifestError> {
    let kind = match wire.kind() {
        wire::DeviceKind::Host => DeviceKind::Host,
        wire::DeviceKind::Cuda => DeviceKind::Cuda,
        wire::DeviceKind::Unspecified => return Err(ManifestError::Field { field: "devices.kind" }),
    };
    Ok(ManifestDevice { kind, id: wire.id, compute_capability: wire.compute_capability })
}

pub fn file_identity_to_wire(file: FileIdentity) -> wire::FileIdentity {
    wire::FileIdentity {
        path: file.path.to_string_lossy().into_owned(),
        device: file.device,
        inode: file.inode,
        bytes: file.bytes,
        modified_seconds: file.modified_seconds,
        modified_nanoseconds: file.modified_nanoseconds,
        head_digest: file.head_digest.map_or_else(Bytes::new, |digest| Bytes::copy_from_slice(&digest)),
    }
}

pub fn file_identity_from_wire(wire: wire::FileIdentity) -> FileIdentity {
    FileIdentity {
        path: wire.path.into(),
        device: wire.device,
        inode: wire.inode,
        bytes: wire.bytes,
        modified_seconds: wire.modified_seconds,
        modified_nanoseconds: wire.modified_nanoseconds,
        // Absent in manifests of earlier versions.
        head_digest: wire.head_digest[..].try_into().ok(),
    }
}

#[cfg(test)]
mod tests {
    use memory::manifest::LAYOUT_GGML;
    use proptest::prelude::*;

    use super::*;

    fn sample() -> Manifest {
        let tensor = |name: &str, allocation, offset, bytes| TensorEntry {
            name: name.to_owned(),
            dtype: 8,
            layout: LAYOUT_GGML,
            shape: vec![64, 2],
            shard: None,
            allocation,
            offset,
            bytes,
            raw_checksum: [1; 16],
            checksum: [1; 16],
        };
        let metadata = std::fs::metadata("/proc/self/exe").unwrap();
        Manifest {
            model: "pycoder".to_owned(),
            digest: [7; 32],
            generation: 3,
            files: vec![FileIdentity::of("/models/pycoder.gguf".into(), &metadata)],
            devices: vec![ManifestDevice::host()],
            layout: LAYOUT_GGML,
            one_per_tensor: false,
            allocations: vec![
                Allocation { device: 0, bytes: 2 << 20, inode: 11 },
                Allocation { device: 0, bytes: 4 << 20, inode: 12 },
            ],
            tensors: vec![
                tensor("token_embd.weight", 1, 0, 4 << 20),
                tensor("output_norm.weight", 0, 256, 512),
            ],
            gguf_metadata: Bytes::from_static(b"GGUF..."),
            created_unix_seconds: 1_700_000_000,
        }
    }

    fn decode_changed(change: impl FnOnce(&mut wire::Manifest)) -> Result<Manifest, DecodeManifestError> {
        let mut wire = to_wire(sample());
        change(&mut wire);
        decode_manifest(wire.encode_to_vec().into())
    }

    #[test]
    fn manifest_is_read_back_from_its_memfd() {
        let memfd = seal_manifest(&sample()).unwrap();
        assert_eq!(read_manifest(&memfd).unwrap(), sample());
    }

    #[test]
    fn unreadable_formats_are_refused_by_number() {
        for found in [0, MANIFEST_FORMAT + 1, u32::MAX] {
            let error = decode_changed(|wire| wire.format = found).unwrap_err();
            assert!(matches!(error, DecodeManifestError::Format { found: f } if f == found));
        }
        assert!(decode_changed(|wire| wire.format = OLDEST_MANIFEST_FORMAT).is_ok());
    }

    #[test]
    fn tensors_outside_their_allocation_are_refused_by_name() {
        for change in [
            (|tensor| tensor.offset = 1) as fn(&mut wire::Tensor),
            |tensor| tensor.offset = u64::MAX,
            |tensor| tensor.bytes = u64::MAX,
            |tensor| tensor.allocation = 2,
        ] {
            let error = decode_changed(|wire| change(&mut wire.tensors[0])).unwrap_err();
            assert!(
                matches!(
                    &error,
                    DecodeManifestError::Invalid(ManifestError::OutOfAllocation { tensor, .. })
                        if tensor == "token_embd.weight"
                ),
                "{error}"
            );
        }
    }

    #[test]
    fn invalid_fields_are_refused_by_name() {
        type Change = fn(&mut wire::Manifest);
        let cases: [(Change, &str); 7] = [
            (|wire| wire.model.clear(), "model"),
            (|wire| wire.digest = Bytes::from_static(b"short"), "digest"),
            (|wire| wire.checksum_kind = 0, "checksum_kind"),
            (|wire| wire.devices.clear(), "allocations.device"),
            (|wire| wire.devices[0].kind = 9, "devices.kind"),
            (|wire| wire.allocations[0].bytes = u64::MAX, "allocations.bytes"),
            (|wire| wire.tensors[0].checksum = Bytes::new(), "checksum"),
        ];
        for (change, field) in cases {
            let text = decode_changed(change).unwrap_err().to_string();
            assert!(text.contains(&format!("{field} ")), "{text} should name {field}");
        }
    }

    proptest! {
        #[test]
        fn reader_never_panics_on_damaged_bytes(bytes in prop::collection::vec(any::<u8>(), 0..200), cut in 0usize..400, flip in 0usize..400) {
            let _ = decode_manifest(bytes.into());
            let mut damaged = encode_manifest(&sample());
            let flip = flip % damaged.len();
            damaged[flip] ^= 0x55;
            damaged.truncate(cut);
            let _ = decode_manifest(damaged.into());
        }
    }
}
