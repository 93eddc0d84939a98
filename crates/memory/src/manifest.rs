// SPDX-License-Identifier: Apache-2.0

//! [`Manifest`]: what the descriptors of one generation hold.
//!
//! A manifest is a plain value; `handoff::manifest` turns it into bytes and back.
//! [`Manifest::validate`] holds for every manifest that comes from another process:
//! 1. Every tensor lies inside of its allocation.
//! 2. Every index (device of an allocation, allocation of a tensor) exists.
//! 3. The sum of all allocations fits 64 bits.

use std::path::PathBuf;

use bytes::Bytes;

/// Tensor bytes as they stand in the GGUF file.
pub const LAYOUT_GGML: u32 = 0;

const MAX_NAME_BYTES: usize = 1024;
const MAX_DIMENSIONS: usize = 8;
const DIGEST_BYTES: usize = 32;
const CHECKSUM_BYTES: usize = 16;

pub type Digest = [u8; DIGEST_BYTES];
pub type Checksum = [u8; CHECKSUM_BYTES];

/// The parts of one generation. The order of `allocations` is the order of their descriptors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    pub model: String,
    /// Identifies the content: equal digests are equal models, whatever file they came from.
    pub digest: Digest,
    pub generation: u64,
    pub files: Vec<FileIdentity>,
    pub devices: Vec<ManifestDevice>,
    pub layout: u32,
    /// Every tensor has an allocation of its own.
    pub one_per_tensor: bool,
    pub allocations: Vec<Allocation>,
    pub tensors: Vec<TensorEntry>,
    /// The key-value section of the (first) GGUF file, byte for byte.
    pub gguf_metadata: Bytes,
    pub created_unix_seconds: u64,
}

/// Identifies a file and its version: a changed file has another identity.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileIdentity {
    pub path: PathBuf,
    pub device: u64,
    pub inode: u64,
    pub bytes: u64,
    pub modified_seconds: i64,
    pub modified_nanoseconds: i64,
    /// Digest of the file's first bytes. It tells files apart that were changed in place and got
    /// their old time back. `None` if the bytes were not read.
    pub head_digest: Option<Digest>,
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
            head_digest: None,
        }
    }

    /// Whether both are the same file with the same contents, under any path. Heads count only if
    /// both are known.
    pub fn is_same_file(&self, other: &Self) -> bool {
        let key = |f: &Self| (f.device, f.inode, f.bytes, f.modified_seconds, f.modified_nanoseconds);
        let same_head = self.head_digest.zip(other.head_digest).is_none_or(|(a, b)| a == b);
        key(self) == key(other) && same_head
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ManifestDevice {
    pub kind: DeviceKind,
    /// "host", "host:N" for a NUMA node of it, or the GPU's UUID.
    pub id: String,
    /// Major * 10 + minor; 0 on the host.
    pub compute_capability: u32,
}

impl ManifestDevice {
    pub fn host() -> Self {
        Self::host_memory(HOST_DEVICE)
    }

    /// The host, or one of its NUMA nodes.
    pub fn host_memory(id: &str) -> Self {
        Self { kind: DeviceKind::Host, id: id.to_owned(), compute_capability: 0 }
    }
}

/// The device id of host memory.
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
    /// The inode of the memfd; 0 on a GPU.
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
    /// Which part of the tensor this entry is, if the tensor is split over devices.
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

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ManifestError {
    #[error("manifest field {field} is invalid")]
    Field { field: &'static str },
    #[error("manifest tensor {tensor:?}: field {field} is invalid")]
    Tensor { tensor: String, field: &'static str },
    #[error("tensor {tensor:?} lies at {offset} with {bytes} bytes, outside of its allocation {allocation}")]
    OutOfAllocation { tensor: String, allocation: usize, offset: u64, bytes: u64 },
}

impl Manifest {
    /// Checks what everybody who uses a manifest relies on.
    pub fn validate(&self) -> Result<(), ManifestError> {
        let invalid = |field| ManifestError::Field { field };
        if self.model.is_empty() || self.model.len() > MAX_NAME_BYTES {
            return Err(invalid("model"));
        }
        if self.allocations.iter().any(|allocation| allocation.device >= self.devices.len()) {
            return Err(invalid("allocations.device"));
        }
        let mut sizes = self.allocations.iter().map(|allocation| allocation.bytes);
        if sizes.try_fold(0u64, u64::checked_add).is_none() {
            return Err(invalid("allocations.bytes"));
        }
        self.tensors.iter().try_for_each(|tensor| tensor.validate(&self.allocations))
    }

    pub fn tensor_bytes(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.bytes).sum()
    }

    pub fn allocation_bytes(&self) -> u64 {
        self.allocations.iter().map(|allocation| allocation.bytes).sum()
    }
}

impl TensorEntry {
    fn validate(&self, allocations: &[Allocation]) -> Result<(), ManifestError> {
        let invalid = |field| Err(ManifestError::Tensor { tensor: self.name.clone(), field });
        if self.name.is_empty() || self.name.len() > MAX_NAME_BYTES {
            return invalid("name");
        }
        if self.shape.len() > MAX_DIMENSIONS {
            return invalid("shape");
        }
        if self.shard.is_some_and(|shard| shard.index >= shard.count) {
            return invalid("shard");
        }
        let fits = |allocation: &Allocation| {
            self.offset.checked_add(self.bytes).is_some_and(|end| end <= allocation.bytes)
        };
        if !allocations.get(self.allocation).is_some_and(fits) {
            let Self { allocation, offset, bytes, .. } = *self;
            return Err(ManifestError::OutOfAllocation {
                tensor: self.name.clone(),
                allocation,
                offset,
                bytes,
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn touched_file_is_another_identity() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let identity = |path: &str| FileIdentity::of(path.into(), &file.as_file().metadata().unwrap());
        let before = identity("a");
        assert!(before.is_same_file(&identity("b")));
        let with_head = |digest| FileIdentity { head_digest: digest, ..before.clone() };
        assert!(before.is_same_file(&with_head(Some([1; 32]))));
        assert!(!with_head(Some([1; 32])).is_same_file(&with_head(Some([2; 32]))));
        file.as_file().set_modified(std::time::UNIX_EPOCH).unwrap();
        assert!(!before.is_same_file(&identity("a")));
    }
}
