// SPDX-License-Identifier: Apache-2.0

//! The file of the history of prompts.

use std::fs::{DirBuilder, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Older prompts leave the file.
pub(super) const ENTRIES_MAX: usize = 1000;
/// Prompts are private.
const FILE_MODE: u32 = 0o600;
const DIRECTORY_MODE: u32 = 0o700;

/// Where the history is, by the XDG base directories. `None` without a home directory.
pub(super) fn default_path() -> Option<PathBuf> {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")))?;
    Some(state.join("ballast/chat_history"))
}

/// Makes the file if there is none, and takes it from other users.
pub(super) fn prepare(file: &Path) -> io::Result<()> {
    if let Some(directory) = file.parent() {
        DirBuilder::new().recursive(true).mode(DIRECTORY_MODE).create(directory)?;
    }
    let opened = OpenOptions::new().create(true).append(true).mode(FILE_MODE).open(file)?;
    opened.set_permissions(Permissions::from_mode(FILE_MODE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_is_the_user_s_alone() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a/b/history");
        prepare(&file).unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&file), mode(file.parent().unwrap())), (0o600, 0o700));
        std::fs::write(&file, "kept\n").unwrap();
        std::fs::set_permissions(&file, Permissions::from_mode(0o644)).unwrap();
        prepare(&file).unwrap();
        assert_eq!((mode(&file), std::fs::read_to_string(&file).unwrap().as_str()), (0o600, "kept\n"));
    }
}
