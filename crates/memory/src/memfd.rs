// SPDX-License-Identifier: Apache-2.0

//! [`SealedMemfd`]: a memory file whose bytes and size can never change again.
//!
//! # Invariants
//! 1. F_SEAL_WRITE, F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_SEAL are set, whichever process created
//!    the file.
//! 2. So a mapping of it never changes, and never raises SIGBUS.

use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use bytes::Bytes;
use memmap2::{Mmap, MmapOptions};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::stat::fstat;

/// The seals that every importer requires.
pub(crate) const SEALS: SealFlag = SealFlag::F_SEAL_WRITE
    .union(SealFlag::F_SEAL_SHRINK)
    .union(SealFlag::F_SEAL_GROW)
    .union(SealFlag::F_SEAL_SEAL);

#[derive(Debug, thiserror::Error)]
pub enum MemfdError {
    #[error("cannot {action} a memfd")]
    Io { action: &'static str, source: io::Error },
    #[error("no memory is left for {bytes} bytes")]
    OutOfMemory { bytes: u64, source: io::Error },
    #[error(
        "a memfd of {bytes} bytes exceeds this process's file size limit (RLIMIT_FSIZE): raise it with ulimit -f"
    )]
    FileSizeLimit { bytes: u64, source: io::Error },
    #[error("no file descriptor is left (RLIMIT_NOFILE): raise it with ulimit -n")]
    OutOfFds { source: io::Error },
    #[error("the descriptor is not a sealed memfd")]
    NotMemfd { source: io::Error },
    #[error("the memfd is not sealed: seals {found:#x}, needed {needed:#x}", found = found.bits(), needed = SEALS.bits())]
    Unsealed { found: SealFlag },
    #[error("the memfd has {found} bytes instead of {expected}")]
    WrongSize { expected: u64, found: u64 },
    #[error("the memfd has inode {found} instead of {expected}: the descriptors were mixed up")]
    WrongInode { expected: u64, found: u64 },
    #[error("{bytes} bytes exceed the limit of {limit} for a {what}")]
    TooLarge { what: &'static str, bytes: u64, limit: u64 },
}

impl MemfdError {
    /// Picks the variant that tells the user what to change. `bytes` is the requested size.
    pub(crate) fn of(action: &'static str, bytes: u64, source: io::Error) -> Self {
        match source.raw_os_error() {
            Some(libc::ENOMEM | libc::ENOSPC) => Self::OutOfMemory { bytes, source },
            Some(libc::EFBIG) => Self::FileSizeLimit { bytes, source },
            Some(libc::EMFILE | libc::ENFILE) => Self::OutOfFds { source },
            _ => Self::Io { action, source },
        }
    }
}

/// A new, empty memfd that can be sealed. /proc/PID/maps shows `name`.
pub(crate) fn create(name: &str) -> Result<OwnedFd, MemfdError> {
    memfd_create(Path::new(name), MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)
        .map_err(|errno| MemfdError::of("create", 0, errno.into()))
}

#[derive(Debug)]
pub struct SealedMemfd {
    fd: OwnedFd,
    bytes: u64,
    inode: u64,
}

impl SealedMemfd {
    /// Creates and seals a small file: a manifest, a lease record.
    pub fn from_bytes(name: &str, contents: &[u8]) -> Result<Self, MemfdError> {
        let mut file = std::fs::File::from(create(name)?);
        file.write_all(contents).map_err(|error| MemfdError::of("fill", contents.len() as u64, error))?;
        Self::seal(file.into())
    }

    /// Seals a file. It must have no writable mapping.
    pub(crate) fn seal(fd: OwnedFd) -> Result<Self, MemfdError> {
        fcntl(&fd, FcntlArg::F_ADD_SEALS(SEALS))
            .map_err(|errno| MemfdError::Io { action: "seal", source: errno.into() })?;
        Self::verify(fd)
    }

    /// Takes a descriptor of another process, and checks that it is sealed.
    pub fn verify(fd: OwnedFd) -> Result<Self, MemfdError> {
        let seals = fcntl(&fd, FcntlArg::F_GET_SEALS)
            .map_err(|errno| MemfdError::NotMemfd { source: errno.into() })?;
        let found = SealFlag::from_bits_retain(seals);
        if !found.contains(SEALS) {
            return Err(MemfdError::Unsealed { found });
        }
        let stat = fstat(&fd).map_err(|errno| MemfdError::Io { action: "inspect", source: errno.into() })?;
        let bytes = u64::try_from(stat.st_size).unwrap_or(0);
        Ok(Self { fd, bytes, inode: stat.st_ino })
    }

    /// Checks that this is the file that a manifest describes.
    pub fn expect(self, bytes: u64, inode: u64) -> Result<Self, MemfdError> {
        if self.bytes != bytes {
            return Err(MemfdError::WrongSize { expected: bytes, found: self.bytes });
        }
        if self.inode != inode {
            return Err(MemfdError::WrongInode { expected: inode, found: self.inode });
        }
        Ok(self)
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn inode(&self) -> u64 {
        self.inode
    }

    /// The contents, mapped read-only. `limit` bounds what an untrusted sender can make this
    /// process map; `what` names the contents in the error.
    pub fn map(&self, what: &'static str, limit: u64) -> Result<Bytes, MemfdError> {
        if self.bytes > limit {
            return Err(MemfdError::TooLarge { what, bytes: self.bytes, limit });
        }
        if self.bytes == 0 {
            return Ok(Bytes::new());
        }
        let map = map_shared(&self.fd).map_err(|error| MemfdError::of("map", self.bytes, error))?;
        Ok(Bytes::from_owner(map))
    }

    pub fn try_clone(&self) -> Result<Self, MemfdError> {
        let fd = self.fd.try_clone().map_err(|error| MemfdError::of("duplicate", 0, error))?;
        Ok(Self { fd, bytes: self.bytes, inode: self.inode })
    }
}

impl From<SealedMemfd> for OwnedFd {
    fn from(memfd: SealedMemfd) -> Self {
        memfd.fd
    }
}

impl AsFd for SealedMemfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Maps a sealed memfd shared. Kernels before 6.7 refuse that for a write-sealed file; they get a
/// private mapping.
fn map_shared(fd: &OwnedFd) -> io::Result<Mmap> {
    // SAFETY: the file is sealed against writing and resizing, so the mapped bytes never change and
    // never vanish.
    match unsafe { MmapOptions::new().map(fd) } {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            // SAFETY: as above.
            unsafe { MmapOptions::new().map_copy_read_only(fd) }
        }
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn i2_sealed_bytes_can_be_neither_written_nor_resized() {
        let sealed = SealedMemfd::from_bytes("test", b"ballast").unwrap();
        let file = File::from(sealed.fd.try_clone().unwrap());
        assert!(file.write_at(b"x", 0).is_err());
        assert!(file.set_len(3).is_err() && file.set_len(300).is_err());
        // SAFETY: the mapping is never created.
        assert!(unsafe { MmapOptions::new().map_mut(&file) }.is_err());
        assert_eq!(sealed.map("test", 7).unwrap(), &b"ballast"[..]);
        assert!(matches!(sealed.map("test", 6), Err(MemfdError::TooLarge { bytes: 7, .. })));
    }

    #[test]
    fn mapping_outlives_its_descriptor() {
        let bytes = SealedMemfd::from_bytes("test", &[9; 10_000]).unwrap().map("test", 1 << 20).unwrap();
        assert!(bytes.iter().all(|&byte| byte == 9));
    }

    #[test]
    fn unsealed_memfds_and_other_files_are_refused() {
        let unsealed = create("test").unwrap();
        assert!(matches!(SealedMemfd::verify(unsealed), Err(MemfdError::Unsealed { .. })));
        let partly = create("test").unwrap();
        fcntl(&partly, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_WRITE)).unwrap();
        assert!(matches!(SealedMemfd::verify(partly), Err(MemfdError::Unsealed { .. })));
        let file = File::open("/dev/null").unwrap();
        assert!(matches!(SealedMemfd::verify(file.into()), Err(MemfdError::NotMemfd { .. })));
    }

    #[test]
    fn exchanged_descriptors_are_noticed() {
        let first = SealedMemfd::from_bytes("test", b"same size").unwrap();
        let second = SealedMemfd::from_bytes("test", b"same size").unwrap();
        let (bytes, inode) = (first.bytes(), first.inode());
        assert!(matches!(second.expect(bytes, inode), Err(MemfdError::WrongInode { .. })));
        assert!(matches!(first.expect(bytes + 1, inode), Err(MemfdError::WrongSize { .. })));
    }
}
