// SPDX-License-Identifier: Apache-2.0

//! The claim of a supervisor on its runtime directory: a lock, held as long as it runs.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};

use super::{
    CREATED_MARKER, DIRECTORY_MODE, LOCK_FILE, RuntimeDir, RuntimeDirError, SOCKET_NAME_BYTES_MAX,
    SOCKET_PATH_BYTES_MAX, default_path, lock_holder,
};

/// How long a new supervisor waits for the lock. A supervisor that was killed holds it until the
/// kernel has closed its files, and the last child of a dead one while it removes the directory.
const LOCK_WAIT: Duration = Duration::from_secs(1);
/// The same if the process that has taken the lock is known to have ended. Its children wait for a
/// successor as long.
const DEAD_LOCK_WAIT: Duration = Duration::from_secs(10);
const LOCK_POLL: Duration = Duration::from_millis(20);
/// A runtime directory that this process has locked: no other supervisor can use it.
///
/// Dropping it releases the directory, and removes the fleet's files unless a child still runs.
#[derive(Debug)]
pub struct ClaimedRuntimeDir {
    directory: RuntimeDir,
    lock: File,
}

impl ClaimedRuntimeDir {
    /// Creates or takes over the directory. Without a path, creates one for this process. Blocks
    /// for at most [`LOCK_WAIT`], or [`DEAD_LOCK_WAIT`] after the death of the last supervisor.
    pub fn claim(path: Option<&Path>) -> Result<Self, RuntimeDirError> {
        let path = match path {
            Some(path) => std::path::absolute(path)
                .map_err(|source| RuntimeDirError::Create { path: path.to_owned(), source })?,
            None => default_path(),
        };
        let bytes = path.as_os_str().len() + 1 + SOCKET_NAME_BYTES_MAX;
        if bytes > SOCKET_PATH_BYTES_MAX {
            return Err(RuntimeDirError::TooLong { path, bytes });
        }
        let started = Instant::now();
        let mut has_holder_ended = false;
        loop {
            let error = match Self::claim_now(&path) {
                Ok(claimed) if claimed.is_in_place().unwrap_or(false) => return Ok(claimed),
                // The last child of a dead supervisor has removed the directory meanwhile.
                Ok(_) => RuntimeDirError::InUse { path: path.clone() },
                Err(error) => error,
            };
            if !error.may_pass() {
                return Err(error);
            }
            // What was seen last holds while nothing is seen.
            has_holder_ended = lock_holder::has_ended(&path.join(LOCK_FILE)).unwrap_or(has_holder_ended);
            if started.elapsed() > if has_holder_ended { DEAD_LOCK_WAIT } else { LOCK_WAIT } {
                return Err(error);
            }
            std::thread::sleep(LOCK_POLL);
        }
    }

    fn claim_now(path: &Path) -> Result<Self, RuntimeDirError> {
        let path = path.to_owned();
        let create = |source| RuntimeDirError::Create { path: path.clone(), source };
        let was_created = match DirBuilder::new().mode(DIRECTORY_MODE).create(&path) {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                let metadata = fs::metadata(&path).map_err(create)?;
                let owner = metadata.uid();
                if owner != rustix::process::geteuid().as_raw() {
                    return Err(RuntimeDirError::ForeignOwner { path, owner });
                }
                if metadata.permissions().mode() & 0o077 != 0 {
                    fs::set_permissions(&path, fs::Permissions::from_mode(DIRECTORY_MODE)).map_err(create)?;
                }
                false
            }
            Err(error) => return Err(create(error)),
        };
        let lock = take_lock(&path, was_created).inspect_err(|_| {
            if was_created {
                // Does nothing if another process has put files into it.
                let _: io::Result<()> = fs::remove_dir(&path);
            }
        })?;
        Ok(Self { lock, directory: RuntimeDir { path } })
    }

    /// Creates the directory and its lock again if they were deleted. Returns whether they were.
    /// [`RuntimeDirError::InUse`]: another supervisor has claimed the path meanwhile.
    pub fn restore(&mut self) -> Result<bool, RuntimeDirError> {
        let path = self.directory.path();
        match self.is_in_place() {
            Ok(true) => return Ok(false),
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(RuntimeDirError::Lock { path: path.join(LOCK_FILE), source: error });
            }
            Ok(false) | Err(_) => {}
        }
        let was_created = match DirBuilder::new().mode(DIRECTORY_MODE).create(path) {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
            Err(source) => return Err(RuntimeDirError::Create { path: path.to_owned(), source }),
        };
        self.lock = take_lock(path, was_created)?;
        Ok(true)
    }

    /// Whether the path still leads to the lock that this process holds.
    fn is_in_place(&self) -> io::Result<bool> {
        self.directory.has_lock(&self.lock)
    }

    pub fn directory(&self) -> &RuntimeDir {
        &self.directory
    }
}

impl Drop for ClaimedRuntimeDir {
    fn drop(&mut self) {
        // Children outlive a supervisor whose start failed. The last one removes the directory.
        let is_empty = || self.directory.living_children().is_ok_and(|living| living.is_empty());
        if self.is_in_place().is_ok_and(|in_place| in_place) && is_empty() {
            self.directory.remove_fleet_files();
        }
    }
}

fn take_lock(path: &Path, was_created: bool) -> Result<File, RuntimeDirError> {
    let lock_path = path.join(LOCK_FILE);
    let failed = |source| RuntimeDirError::Lock { path: lock_path.clone(), source };
    let mut lock = File::options().create(true).append(true).open(&lock_path).map_err(failed)?;
    match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => return Err(RuntimeDirError::InUse { path: path.to_owned() }),
        Err(errno) => return Err(failed(errno.into())),
    }
    if was_created && let Err(error) = lock.write_all(CREATED_MARKER.as_bytes()) {
        // Removed while it is locked. The error that is returned is the first one.
        let _: io::Result<()> = fs::remove_file(&lock_path);
        return Err(failed(error));
    }
    Ok(lock)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(path: &Path) -> Result<ClaimedRuntimeDir, RuntimeDirError> {
        ClaimedRuntimeDir::claim(Some(path))
    }

    #[test]
    fn two_supervisors_cannot_share_a_directory() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("fleet");
        let first = claim(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        assert!(matches!(claim(&path), Err(RuntimeDirError::InUse { .. })));
        drop(first);
        assert!(!path.exists());
        drop(claim(&path).unwrap());
    }

    #[test]
    fn a_new_supervisor_waits_for_one_that_is_about_to_end_and_for_a_directory_that_is_being_removed() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("fleet");
        for _ in 0..3 {
            let first = claim(&path).unwrap();
            let ending = std::thread::spawn(move || {
                std::thread::sleep(LOCK_WAIT / 4);
                // Removes the files while it holds the lock, like the last child.
                drop(first);
            });
            let next = claim(&path).unwrap();
            ending.join().unwrap();
            assert!(next.is_in_place().unwrap());
        }
    }

    /// The list of locks may leave one out.
    fn eventually_ended(lock: &Path) {
        let started = Instant::now();
        while lock_holder::has_ended(lock) != Some(true) {
            assert!(started.elapsed() < LOCK_WAIT, "the lock of {} has a holder", lock.display());
        }
    }

    #[test]
    fn a_new_supervisor_waits_for_the_children_that_a_dead_one_was_starting() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(LOCK_FILE);
        // `flock` ends at once. Its lock stays until the shell closes the descriptor.
        let held = "exec 9>>\"$1\"; flock --nonblock 9 && echo locked; exec sleep 3 >/dev/null";
        let mut command = std::process::Command::new("sh");
        command.args(["-c", held, "sh"]).arg(&path).stdout(std::process::Stdio::piped());
        let mut child = command.spawn().unwrap();
        let output = io::read_to_string(child.stdout.take().unwrap()).unwrap();
        assert_eq!(output, "locked\n");
        eventually_ended(&path);
        let claimed = claim(directory.path()).unwrap();
        assert_ne!(lock_holder::has_ended(&path), Some(true));
        drop(claimed);
        child.wait().unwrap();
    }

    #[test]
    fn a_deleted_directory_is_restored_unless_another_supervisor_has_claimed_it() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("fleet");
        let mut claimed = claim(&path).unwrap();
        assert!(!claimed.restore().unwrap());
        fs::remove_dir_all(&path).unwrap();
        assert!(claimed.restore().unwrap());
        assert!(matches!(claim(&path), Err(RuntimeDirError::InUse { .. })));
        fs::remove_dir_all(&path).unwrap();
        let other = claim(&path).unwrap();
        assert!(matches!(claimed.restore(), Err(RuntimeDirError::InUse { .. })));
        drop(claimed);
        assert!(path.exists(), "the directory belongs to the other supervisor");
        drop(other);
        assert!(!path.exists());
    }
}
