// SPDX-License-Identifier: Apache-2.0

//! The FD store: descriptors that the weight-server leaves with its parent, by name and in the
//! order of arrival.
//!
//! An exported descriptor keeps its memory alive, so stored weights survive `kill -9` of the
//! weight-server. The rules are those of systemd's FD store (FileDescriptorStoreMax=):
//! 1. Many descriptors may share a name.
//! 2. The same open file under the same name is stored once.
//! 3. Descriptors are removed by name.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Twice the descriptors of the largest models with one allocation per tensor.
pub(crate) const MAX_STORED_FDS: usize = 8192;
/// An environment string has at most 128 KiB (MAX_ARG_STRLEN), and LISTEN_FDNAMES is one string.
pub(crate) const MAX_NAME_BYTES: usize = 120 << 10;

#[derive(Debug)]
struct StoredFd<F> {
    name: String,
    fd: F,
    file: OpenFileId,
}

/// Device and inode of an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenFileId {
    pub device: u64,
    pub inode: u64,
}

/// `F` is a descriptor.
#[derive(Debug)]
pub struct FdStore<F = Arc<OwnedFd>> {
    entries: Vec<StoredFd<F>>,
    name_bytes: usize,
}

impl<F> Default for FdStore<F> {
    fn default() -> Self {
        Self { entries: Vec::new(), name_bytes: 0 }
    }
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreFdError {
    #[error("the FD store is full: it holds {MAX_STORED_FDS} descriptors")]
    Full,
    #[error("the FD store is full: the names of its descriptors may take {MAX_NAME_BYTES} bytes")]
    NamesTooLong,
    #[error("cannot stat the descriptor: {0}")]
    Stat(rustix::io::Errno),
}

impl FdStore {
    pub(crate) fn store(&mut self, name: &str, fd: Arc<OwnedFd>) -> Result<(), StoreFdError> {
        let stat = rustix::fs::fstat(&fd).map_err(StoreFdError::Stat)?;
        self.store_file(name, fd, OpenFileId { device: stat.st_dev, inode: stat.st_ino })
    }

    /// The descriptors that a restarted weight-server inherits.
    pub(crate) fn borrowed(&self) -> impl Iterator<Item = (&str, BorrowedFd<'_>)> {
        self.entries().map(|(name, fd)| (name, fd.as_fd()))
    }
}

impl<F> FdStore<F> {
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn store_file(&mut self, name: &str, fd: F, file: OpenFileId) -> Result<(), StoreFdError> {
        if self.entries.iter().any(|e| e.name == name && e.file == file) {
            return Ok(());
        }
        if self.entries.len() >= MAX_STORED_FDS {
            return Err(StoreFdError::Full);
        }
        // Each name is followed by a colon.
        if self.name_bytes + name.len() + 1 > MAX_NAME_BYTES {
            return Err(StoreFdError::NamesTooLong);
        }
        self.name_bytes += name.len() + 1;
        self.entries.push(StoredFd { name: name.to_owned(), fd, file });
        Ok(())
    }

    /// Returns how many descriptors were removed.
    pub fn remove(&mut self, name: &str) -> usize {
        let before = self.entries.len();
        self.entries.retain(|e| e.name != name);
        let removed = before - self.entries.len();
        self.name_bytes -= removed * (name.len() + 1);
        removed
    }

    /// In the order of arrival.
    pub fn entries(&self) -> impl Iterator<Item = (&str, &F)> {
        self.entries.iter().map(|e| (e.name.as_str(), &e.fd))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> Arc<OwnedFd> {
        Arc::new(tempfile::tempfile().unwrap().into())
    }

    #[test]
    fn remove_takes_all_of_a_name_and_keeps_the_order() {
        let mut store: FdStore = FdStore::default();
        for name in ["a", "lease", "b", "lease"] {
            store.store(name, file()).unwrap();
        }
        assert_eq!(store.remove("lease"), 2);
        assert_eq!(store.remove("lease"), 0);
        let names: Vec<&str> = store.entries().map(|(name, _)| name).collect();
        assert_eq!(names, ["a", "b"]);
    }

    #[test]
    fn the_same_file_under_the_same_name_is_kept_once() {
        let mut store: FdStore = FdStore::default();
        let fd = file();
        store.store("a", fd.clone()).unwrap();
        store.store("a", Arc::new(fd.try_clone().unwrap())).unwrap();
        store.store("b", fd).unwrap();
        assert_eq!(store.len(), 2);
    }

    #[test]
    fn names_fit_an_environment_string() {
        let mut store: FdStore = FdStore::default();
        let long = "n".repeat(60 << 10);
        store.store(&long, file()).unwrap();
        assert_eq!(store.store(&"m".repeat(60 << 10), file()), Err(StoreFdError::NamesTooLong));
        store.remove(&long);
        store.store(&"m".repeat(60 << 10), file()).unwrap();
        let names: Vec<&str> = store.entries().map(|(name, _)| name).collect();
        assert!(names.join(":").len() < MAX_NAME_BYTES);
    }
}
