//! What a generation consists of: the record that turns a pile of descriptors into a model.
//!
//! One sealed memfd per generation. Whoever decodes one has a manifest whose every tensor lies inside its allocation
//! and whose every index exists, whoever wrote it. The wire form is `ballast.weights.v1.Manifest`; nothing outside this
//! file sees it.

use std::path::PathBuf;

use bytes::Bytes;
use prost::Message;
use proto::weights::v1 as wire;

use crate::memfd::{MemfdError, SealedMemfd};

/// The format that this crate writes.
pub const FORMAT: u32 = 1;

/// The oldest format that it reads: the one before its own.
pub const OLDEST_FORMAT: u32 = if FORMAT > 1 { FORMAT - 1 } else { 1 };

/// A vocabulary of 256k tokens with merges is below 32 MiB.
pub const MAX_MANIFEST_BYTES: u64 = 256 << 20;

/// Tensor bytes as they stand in the GGUF file.
pub const LAYOUT_GGML: u32 = 0;

const MAX_NAME_BYTES: usize = 1024;
const MAX_DIMENSIONS: usize = 8;
const DIGEST_BYTES: usize = 32;
const CHECKSUM_BYTES: usize = 16;

pub type Digest = [u8; DIGEST_BYTES];
pub type Checksum = [u8; CHECKSUM_BYTES];

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    pub model: String,
    /// Names the content: equal digests are equal models, wherever the file came from.
    pub digest: Digest,
    pub generation: u64,
    pub files: Vec<FileIdentity>,
    pub devices: Vec<Device>,
    pub layout: u32,
    pub allocations: Vec<Allocation>,
    pub tensors: Vec<TensorEntry>,
    /// The key-value section of the (first) GGUF file, as it stands there.
    pub gguf_metadata: Bytes,
    pub created_unix_seconds: u64,
}

/// Tells a file from another one, and from itself after a change.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileIdentity {
    pub path: PathBuf,
    pub device: u64,
    pub inode: u64,
    pub bytes: u64,
    pub modified_seconds: i64,
    pub modified_nanoseconds: i64,
}

impl FileIdentity {
    pub fn of(path: PathBuf, metadata: &std::fs::Metadata) -> Self {
        use std::os::unix::fs::MetadataExt;
        Self {
            path,
            device: metadata.dev(),
            inode: metadata.ino(),
            bytes: metadata.size(),
            modified_seconds: metadata.mtime(),
            modified_nanoseconds: metadata.mtime_nsec(),
        }
    }

    /// The same file with the same contents, under whichever path.
    pub fn is_same_file(&self, other: &Self) -> bool {
        let key = |f: &Self| (f.device, f.inode, f.bytes, f.modified_seconds, f.modified_nanoseconds);
        key(self) == key(other)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    pub kind: DeviceKind,
    /// "host", or the GPU's UUID.
    pub id: String,
    /// Major * 10 + minor; 0 on the host.
    pub compute_capability: u32,
}

impl Device {
    pub fn host() -> Self {
        Self { kind: DeviceKind::Host, id: HOST_DEVICE.to_owned(), compute_capability: 0 }
    }
}

/// The id of the host's own memory.
pub const HOST_DEVICE: &str = "host";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// Sealed memfds.
    Host,
    /// CUDA VMM allocations exported as POSIX descriptors.
    Cuda,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allocation {
    /// Index into `devices`.
    pub device: usize,
    pub bytes: u64,
    /// Of the memfd; 0 on other devices.
    pub inode: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorEntry {
    pub name: String,
    /// ggml type id.
    pub dtype: u32,
    pub layout: u32,
    /// Fastest dimension first.
    pub shape: Vec<u64>,
    /// The part of the tensor that lies here, where it is split over devices.
    pub shard: Option<Shard>,
    /// Index into `allocations`.
    pub allocation: usize,
    pub offset: u64,
    pub bytes: u64,
    pub raw_checksum: Checksum,
    pub checksum: Checksum,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    pub axis: u32,
    pub index: u32,
    pub count: u32,
}

#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    #[error(transparent)]
    Memfd(#[from] MemfdError),
    #[error("the manifest is no protobuf message")]
    Malformed(#[from] prost::DecodeError),
    #[error(
        "manifest format {found} is not readable here ({OLDEST_FORMAT} to {FORMAT} are): load the model anew"
    )]
    Format { found: u32 },
    #[error("manifest field {field} is invalid")]
    Field { field: &'static str },
    #[error("manifest tensor {tensor:?}: field {field} is invalid")]
    Tensor { tensor: String, field: &'static str },
    #[error("tensor {tensor:?} lies at {offset} with {bytes} bytes, outside of its allocation {allocation}")]
    OutOfAllocation { tensor: String, allocation: usize, offset: u64, bytes: u64 },
}

/// Only the first field: a later format may have changed all others.
#[derive(Clone, PartialEq, Message)]
struct FormatOnly {
    #[prost(uint32, tag = "1")]
    format: u32,
}

impl Manifest {
    /// Writes and seals it.
    pub fn to_memfd(&self) -> Result<SealedMemfd, MemfdError> {
        SealedMemfd::from_bytes("ballast-manifest", &self.encode())
    }

    /// Reads it from a descriptor that anybody may have sent. The header's bytes stay in the mapping.
    pub fn from_memfd(memfd: &SealedMemfd) -> Result<Self, ManifestError> {
        Self::decode(memfd.map("manifest", MAX_MANIFEST_BYTES)?)
    }

    pub fn encode(&self) -> Vec<u8> {
        wire::Manifest::from(self.clone()).encode_to_vec()
    }

    pub fn decode(bytes: Bytes) -> Result<Self, ManifestError> {
        let FormatOnly { format } = FormatOnly::decode(bytes.clone())?;
        if !(OLDEST_FORMAT..=FORMAT).contains(&format) {
            return Err(ManifestError::Format { found: format });
        }
        Self::try_from(wire::Manifest::decode(bytes)?)
    }

    pub fn tensor_bytes(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.bytes).sum()
    }

    pub fn allocation_bytes(&self) -> u64 {
        self.allocations.iter().map(|allocation| allocation.bytes).sum()
    }
}

impl From<Manifest> for wire::Manifest {
    fn from(manifest: Manifest) -> Self {
        Self {
            format: FORMAT,
            model: manifest.model,
            digest: Bytes::copy_from_slice(&manifest.digest),
            generation: manifest.generation,
            files: manifest.files.into_iter().map(Into::into).collect(),
            devices: manifest.devices.into_iter().map(Into::into).collect(),
            layout: manifest.layout,
            allocations: manifest
                .allocations
                .into_iter()
                .map(|a| wire::Allocation { device: a.device as u32, bytes: a.bytes, inode: a.inode })
                .collect(),
            tensors: manifest.tensors.into_iter().map(Into::into).collect(),
            gguf_metadata: manifest.gguf_metadata,
            checksum_kind: wire::ChecksumKind::Xxh3128OfMib.into(),
            created_unix_seconds: manifest.created_unix_seconds,
        }
    }
}

impl TryFrom<wire::Manifest> for Manifest {
    type Error = ManifestError;

    fn try_from(wire: wire::Manifest) -> Result<Self, ManifestError> {
        let invalid = |field| ManifestError::Field { field };
        if wire.model.is_empty() || wire.model.len() > MAX_NAME_BYTES {
            return Err(invalid("model"));
        }
        if wire.checksum_kind() != wire::ChecksumKind::Xxh3128OfMib {
            return Err(invalid("checksum_kind"));
        }
        let devices: Vec<Device> =
            wire.devices.into_iter().map(Device::try_from).collect::<Result<_, _>>()?;
        let allocations: Vec<Allocation> = wire
            .allocations
            .into_iter()
            .map(|a| Allocation { device: a.device as usize, bytes: a.bytes, inode: a.inode })
            .collect();
        if allocations.iter().any(|allocation| allocation.device >= devices.len()) {
            return Err(invalid("allocations.device"));
        }
        // Sums over allocations are taken without further care.
        if allocations.iter().try_fold(0u64, |sum, allocation| sum.checked_add(allocation.bytes)).is_none() {
            return Err(invalid("allocations.bytes"));
        }
        let tensors = wire
            .tensors
            .into_iter()
            .map(|tensor| tensor_entry(tensor, &allocations))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            model: wire.model,
            digest: wire.digest[..].try_into().map_err(|_| invalid("digest"))?,
            generation: wire.generation,
            files: wire.files.into_iter().map(Into::into).collect(),
            devices,
            layout: wire.layout,
            allocations,
            tensors,
            gguf_metadata: wire.gguf_metadata,
            created_unix_seconds: wire.created_unix_seconds,
        })
    }
}

fn tensor_entry(wire: wire::Tensor, allocations: &[Allocation]) -> Result<TensorEntry, ManifestError> {
    let allocation = wire.allocation as usize;
    let shard = wire.shard.map(|s| Shard { axis: s.axis, index: s.index, count: s.count });
    let fits = |allocation: &Allocation| {
        wire.offset.checked_add(wire.bytes).is_some_and(|end| end <= allocation.bytes)
    };
    let invalid = |field| ManifestError::Tensor { tensor: wire.name.clone(), field };
    if wire.name.is_empty() || wire.name.len() > MAX_NAME_BYTES {
        return Err(invalid("name"));
    }
    if wire.shape.len() > MAX_DIMENSIONS {
        return Err(invalid("shape"));
    }
    if shard.is_some_and(|shard| shard.index >= shard.count) {
        return Err(invalid("shard"));
    }
    if !allocations.get(allocation).is_some_and(fits) {
        return Err(ManifestError::OutOfAllocation {
            tensor: wire.name,
            allocation,
            offset: wire.offset,
            bytes: wire.bytes,
        });
    }
    Ok(TensorEntry {
        raw_checksum: wire.raw_checksum[..].try_into().map_err(|_| invalid("raw_checksum"))?,
        checksum: wire.checksum[..].try_into().map_err(|_| invalid("checksum"))?,
        name: wire.name,
        dtype: wire.dtype,
        layout: wire.layout,
        shape: wire.shape,
        shard,
        allocation,
        offset: wire.offset,
        bytes: wire.bytes,
    })
}

impl From<TensorEntry> for wire::Tensor {
    fn from(tensor: TensorEntry) -> Self {
        Self {
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
}

impl From<Device> for wire::Device {
    fn from(device: Device) -> Self {
        let kind = match device.kind {
            DeviceKind::Host => wire::DeviceKind::Host,
            DeviceKind::Cuda => wire::DeviceKind::Cuda,
        };
        Self { kind: kind.into(), id: device.id, compute_capability: device.compute_capability }
    }
}

impl TryFrom<wire::Device> for Device {
    type Error = ManifestError;

    fn try_from(wire: wire::Device) -> Result<Self, ManifestError> {
        let kind = match wire.kind() {
            wire::DeviceKind::Host => DeviceKind::Host,
            wire::DeviceKind::Cuda => DeviceKind::Cuda,
            wire::DeviceKind::Unspecified => return Err(ManifestError::Field { field: "devices.kind" }),
        };
        Ok(Self { kind, id: wire.id, compute_capability: wire.compute_capability })
    }
}

impl From<FileIdentity> for wire::FileIdentity {
    fn from(file: FileIdentity) -> Self {
        Self {
            path: file.path.to_string_lossy().into_owned(),
            device: file.device,
            inode: file.inode,
            bytes: file.bytes,
            modified_seconds: file.modified_seconds,
            modified_nanoseconds: file.modified_nanoseconds,
        }
    }
}

impl From<wire::FileIdentity> for FileIdentity {
    fn from(wire: wire::FileIdentity) -> Self {
        Self {
            path: wire.path.into(),
            device: wire.device,
            inode: wire.inode,
            bytes: wire.bytes,
            modified_seconds: wire.modified_seconds,
            modified_nanoseconds: wire.modified_nanoseconds,
        }
    }
}

#[cfg(test)]
mod tests {
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
            devices: vec![Device::host()],
            layout: LAYOUT_GGML,
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

    fn decode_changed(change: impl FnOnce(&mut wire::Manifest)) -> Result<Manifest, ManifestError> {
        let mut wire = wire::Manifest::from(sample());
        change(&mut wire);
        Manifest::decode(wire.encode_to_vec().into())
    }

    #[test]
    fn manifest_survives_its_memfd() {
        let memfd = sample().to_memfd().unwrap();
        assert_eq!(Manifest::from_memfd(&memfd).unwrap(), sample());
    }

    #[test]
    fn formats_other_than_ours_and_the_one_before_are_refused_by_number() {
        for found in [0, FORMAT + 1, u32::MAX] {
            let error = decode_changed(|wire| wire.format = found).unwrap_err();
            assert!(matches!(error, ManifestError::Format { found: f } if f == found));
        }
        assert!(decode_changed(|wire| wire.format = OLDEST_FORMAT).is_ok());
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
                matches!(&error, ManifestError::OutOfAllocation { tensor, .. } if tensor == "token_embd.weight"),
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

    #[test]
    fn touched_file_is_another_identity() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let identity = |path: &str| FileIdentity::of(path.into(), &file.as_file().metadata().unwrap());
        let before = identity("a");
        assert!(before.is_same_file(&identity("b")));
        file.as_file().set_modified(std::time::UNIX_EPOCH).unwrap();
        assert!(!before.is_same_file(&identity("a")));
    }

    proptest! {
        #[test]
        fn no_bytes_panic_the_reader(bytes in prop::collection::vec(any::<u8>(), 0..200), cut in 0usize..400, flip in 0usize..400) {
            let _ = Manifest::decode(bytes.into());
            let mut damaged = sample().encode();
            let flip = flip % damaged.len();
            damaged[flip] ^= 0x55;
            damaged.truncate(cut);
            let _ = Manifest::decode(damaged.into());
        }
    }
}
