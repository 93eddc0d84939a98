// SPDX-License-Identifier: Apache-2.0

//! [`ReportStore`]: the directory of the crash reports.
//!
//! ```text
//! <crash-reports>/                                     mode 0700, if this process creates it
//!   20261123T112327.045Z-worker-0-4711/                0700
//!     report.json  log.txt  ledger.json                0600
//!   .partial-20261123T112401.310Z-router-4699/         being written
//! ```
//!
//! 1. A report appears whole: it is written under another name first.
//! 2. Number and bytes of the reports are bounded. The oldest go first, before a new one is
//!    written.
//! 3. Only directories whose names this module gives are ever removed.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};

/// A child in a crash loop writes one a minute: this is about an hour of it.
const REPORTS_MAX: usize = 64;
/// All reports together. A report takes up to 64 KiB of log and as much of ledger.
const REPORTS_BYTES_MAX: u64 = 16 << 20;
/// Access for the owner only: logs name models, users and paths.
const DIRECTORY_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;
const PARTIAL_PREFIX: &str = ".partial-";

#[derive(Debug, thiserror::Error)]
pub(super) enum ReportStoreError {
    #[error("cannot create the directory {}", path.display())]
    Create { path: PathBuf, source: io::Error },
    #[error("cannot read the directory {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot write {}", path.display())]
    Write { path: PathBuf, source: io::Error },
}

#[derive(Debug)]
pub(super) struct ReportStore {
    directory: PathBuf,
}

/// A report on the disk.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct StoredReport {
    name: String,
    bytes: u64,
}

impl ReportStore {
    pub(super) fn at(directory: &Path) -> Self {
        Self { directory: directory.to_owned() }
    }

    /// Creates the directory, removes what a dead supervisor left unfinished, and returns the
    /// latest report.
    pub(super) fn prepare(&self) -> Result<Option<PathBuf>, ReportStoreError> {
        self.create_directory()?;
        let failed = |source: rustix::io::Errno| ReportStoreError::Write {
            path: self.directory.clone(),
            source: source.into(),
        };
        access(&self.directory, Access::WRITE_OK | Access::EXEC_OK).map_err(failed)?;
        for partial in self.names(PARTIAL_PREFIX)? {
            self.remove(&partial);
        }
        Ok(self.names("")?.into_iter().max().map(|name| self.directory.join(name)))
    }

    /// Writes a report and returns its directory.
    pub(super) fn write(
        &self,
        name: &str,
        files: &[(&'static str, Vec<u8>)],
    ) -> Result<PathBuf, ReportStoreError> {
        self.create_directory()?;
        let bytes = files.iter().map(|(_, content)| content.len() as u64).sum();
        let stored = self.stored()?;
        for old in &stored[..excess(&stored, bytes)] {
            self.remove(&old.name);
        }
        let partial = self.directory.join(format!("{PARTIAL_PREFIX}{name}"));
        let written = write_directory(&partial, files).and_then(|()| {
            let path = self.directory.join(name);
            let renamed = fs::rename(&partial, &path);
            renamed.map(|()| path.clone()).map_err(|source| ReportStoreError::Write { path, source })
        });
        if written.is_err() {
            // Frees the disk. Nothing more can be done if this fails too.
            let _: io::Result<()> = fs::remove_dir_all(&partial);
        }
        written
    }

    fn create_directory(&self) -> Result<(), ReportStoreError> {
        let made = DirBuilder::new().recursive(true).mode(DIRECTORY_MODE).create(&self.directory);
        made.map_err(|source| ReportStoreError::Create { path: self.directory.clone(), source })
    }

    /// The names of all reports after this prefix, without order.
    fn names(&self, prefix: &str) -> Result<Vec<String>, ReportStoreError> {
        let failed = |source| ReportStoreError::Read { path: self.directory.clone(), source };
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.directory).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name().to_string_lossy().into_owned();
            if name.strip_prefix(prefix).is_some_and(is_report_name) {
                names.push(name);
            }
        }
        Ok(names)
    }

    /// All reports, the oldest first.
    fn stored(&self) -> Result<Vec<StoredReport>, ReportStoreError> {
        let with_bytes = |name: String| StoredReport { bytes: self.bytes_of(&name), name };
        let mut stored: Vec<StoredReport> = self.names("")?.into_iter().map(with_bytes).collect();
        stored.sort();
        Ok(stored)
    }

    /// A report that vanishes meanwhile has no bytes.
    fn bytes_of(&self, name: &str) -> u64 {
        let entries = fs::read_dir(self.directory.join(name)).into_iter().flatten().flatten();
        entries.filter_map(|entry| Some(entry.metadata().ok()?.len())).sum()
    }

    fn remove(&self, name: &str) {
        let path = self.directory.join(name);
        if let Err(error) = fs::remove_dir_all(&path) {
            tracing::debug!(report = %path.display(), %error, "cannot remove a crash report");
        }
    }
}

fn write_directory(path: &Path, files: &[(&'static str, Vec<u8>)]) -> Result<(), ReportStoreError> {
    let made = DirBuilder::new().mode(DIRECTORY_MODE).create(path);
    made.map_err(|source| ReportStoreError::Create { path: path.to_owned(), source })?;
    for (name, content) in files {
        let path = path.join(name);
        let opened = OpenOptions::new().write(true).create_new(true).mode(FILE_MODE).open(&path);
        let written = opened.and_then(|mut file| file.write_all(content));
        written.map_err(|source| ReportStoreError::Write { path, source })?;
    }
    Ok(())
}

/// How many of the stored reports go before one with so many bytes is written. `stored` begins with
/// the oldest.
fn excess(stored: &[StoredReport], new_bytes: u64) -> usize {
    let mut bytes = stored.iter().map(|report| report.bytes).sum::<u64>() + new_bytes;
    let mut removed = 0;
    while let Some(oldest) = stored.get(removed)
        && (stored.len() - removed >= REPORTS_MAX || bytes > REPORTS_BYTES_MAX)
    {
        bytes -= oldest.bytes;
        removed += 1;
    }
    removed
}

/// Whether a name begins as `20261123T112327.045Z-worker-0` does.
fn is_report_name(name: &str) -> bool {
    const FORM: &[u8] = b"00000000T000000.000Z-";
    let fits = |(form, byte): (&u8, &u8)| match form {
        b'0' => byte.is_ascii_digit(),
        fixed => byte == fixed,
    };
    name.len() > FORM.len() && FORM.iter().zip(name.as_bytes()).all(fits)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn stored(bytes: &[u64]) -> Vec<StoredReport> {
        let report = |(number, &bytes): (usize, &u64)| StoredReport { name: number.to_string(), bytes };
        bytes.iter().enumerate().map(report).collect()
    }

    fn name(second: usize) -> String {
        format!("20261123T1123{second:02}.045Z-worker-0-{second}")
    }

    #[test]
    fn the_oldest_reports_go_until_number_and_bytes_are_within_their_bounds() {
        assert_eq!(excess(&[], REPORTS_BYTES_MAX + 1), 0);
        assert_eq!(excess(&stored(&[1; REPORTS_MAX - 1]), 1), 0);
        assert_eq!(excess(&stored(&[1; REPORTS_MAX]), 1), 1);
        assert_eq!(excess(&stored(&[1; REPORTS_MAX + 5]), 1), 6);
        let half = REPORTS_BYTES_MAX / 2;
        assert_eq!(excess(&stored(&[half, half]), 0), 0);
        assert_eq!(excess(&stored(&[half, half]), 1), 1);
        assert_eq!(excess(&stored(&[1, half, half]), 1), 2);
    }

    #[test]
    fn a_full_store_keeps_the_newest_reports_and_everything_that_is_not_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let store = ReportStore::at(&folder.path().join("a/b"));
        assert_eq!(store.prepare().unwrap(), None);
        let foreign = store.directory.join("notes");
        fs::create_dir(&foreign).unwrap();
        for second in 0..60 {
            store.write(&name(second), &[("log.txt", vec![b'x'; REPORTS_BYTES_MAX as usize / 10])]).unwrap();
        }
        let mut left = store.names("").unwrap();
        left.sort();
        assert_eq!(left, (50..60).map(name).collect::<Vec<_>>());
        assert!(foreign.exists());
        assert_eq!(store.prepare().unwrap(), Some(store.directory.join(name(59))));
    }

    #[test]
    fn reports_are_for_their_owner_only() {
        let folder = tempfile::tempdir().unwrap();
        let store = ReportStore::at(&folder.path().join("reports"));
        let report = store.write(&name(1), &[("report.json", b"{}\n".to_vec())]).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&store.directory), DIRECTORY_MODE);
        assert_eq!((mode(&report), mode(&report.join("report.json"))), (DIRECTORY_MODE, FILE_MODE));
    }

    #[test]
    fn what_could_not_be_written_whole_is_not_a_report() {
        let folder = tempfile::tempdir().unwrap();
        let store = ReportStore::at(folder.path());
        // A second file of the same name is an error in the middle of a report.
        let error = store.write(&name(1), &[("log.txt", vec![]), ("log.txt", vec![])]).unwrap_err();
        assert!(matches!(error, ReportStoreError::Write { .. }), "{error}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        // A supervisor that was killed meanwhile leaves it to the next one.
        fs::create_dir(folder.path().join(format!("{PARTIAL_PREFIX}{}", name(2)))).unwrap();
        assert_eq!(store.prepare().unwrap(), None);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
