//! The store: descriptors that the weight-server leaves with its parent, by name, in the order in which they came.
//!
//! An exported descriptor alone keeps its memory alive, so what is in here survives `kill -9` of the weight-server. The
//! rules are those of systemd's store (FILE_DESCRIPTOR_STORE): many descriptors may share a name, the same open file under
//! the same name is kept once, removal is by name.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// More than the weights of the largest models in one allocation per tensor, twice.
pub(crate) const MAX_STORED_FDS: usize = 8192;
/// One environment string may have 128 KiB (MAX_ARG_STRLEN), and LISTEN_FDNAMES is one.
pub(crate) const MAX_NAME_BYTES: usize = 120 << 10;

#[derive(Debug)]
struct StoredFd {
    name: String,
    fd: OwnedFd,
    device: u64,
    inode: u64,
}

#[derive(Debug, Default)]
pub(crate) struct FdStore {
    entries: Vec<StoredFd>,
    name_bytes: usize,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum StoreFdError {
    #[error("the vault keeps {MAX_STORED_FDS} descriptors already")]
    Full,
    #[error("the names of stored descriptors take {MAX_NAME_BYTES} bytes already")]
    NamesTooLong,
    #[error("descriptor is not usable: {0}")]
    Stat(rustix::io::Errno),
}

impl FdStore {
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn store(&mut self, name: &str, fd: OwnedFd) -> Result<(), StoreFdError> {
        let stat = rustix::fs::fstat(&fd).map_err(StoreFdError::Stat)?;
        let (device, inode) = (stat.st_dev, stat.st_ino);
        if self.entries.iter().any(|e| e.name == name && e.device == device && e.inode == inode) {
            return Ok(());
        }
        if self.entries.len() >= MAX_STORED_FDS {
            return Err(StoreFdError::Full);
        }
        // Each name and the colon behind it.
        if self.name_bytes + name.len() + 1 > MAX_NAME_BYTES {
            return Err(StoreFdError::NamesTooLong);
        }
        self.name_bytes += name.len() + 1;
        self.entries.push(StoredFd { name: name.to_owned(), fd, device, inode });
        Ok(())
    }

    /// How many were removed.
    pub(crate) fn remove(&mut self, name: &str) -> usize {
        let before = self.entries.len();
        self.entries.retain(|e| e.name != name);
        let removed = before - self.entries.len();
        self.name_bytes -= removed * (name.len() + 1);
        removed
    }

    /// What a restarted weight-server is given.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (&str, BorrowedFd<'_>)> {
        self.entries.iter().map(|e| (e.name.as_str(), e.fd.as_fd()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> OwnedFd {
        tempfile::tempfile().unwrap().into()
    }

    #[test]
    fn names_are_removed_together_and_order_is_kept() {
        let mut store = FdStore::default();
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
        let mut store = FdStore::default();
        let fd = file();
        store.store("a", fd.try_clone().unwrap()).unwrap();
        store.store("a", fd.try_clone().unwrap()).unwrap();
        store.store("b", fd).unwrap();
        assert_eq!(store.len(), 2);
    }

    #[test]
    fn names_stay_below_what_an_environment_string_holds() {
        let mut store = FdStore::default();
        let long = "n".repeat(60 << 10);
        store.store(&long, file()).unwrap();
        assert_eq!(store.store(&"m".repeat(60 << 10), file()), Err(StoreFdError::NamesTooLong));
        store.remove(&long);
        store.store(&"m".repeat(60 << 10), file()).unwrap();
        let names: Vec<&str> = store.entries().map(|(name, _)| name).collect();
        assert!(names.join(":").len() < MAX_NAME_BYTES);
    }
}
