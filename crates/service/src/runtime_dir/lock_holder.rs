// SPDX-License-Identifier: Apache-2.0

//! Who holds a lock of `flock`.
//!
//! The lock of a killed process stays until every copy of its descriptor is closed. A child that it
//! was starting has such a copy until it executes its program, which takes seconds on a busy
//! machine. The kernel tells which process has taken the lock.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::process_start_ticks;

/// Lines such as `1: FLOCK  ADVISORY  WRITE 12825 fe:00:10698755 0 EOF`.
const LOCKS: &str = "/proc/locks";

/// Whether the process that has locked the file has ended. `None` if the file is not among the
/// locks: the kernel prints them in parts, and while others come and go, it may leave one out. A
/// lock of a process in another PID namespace has process id 0, and counts as held.
pub(super) fn has_ended(lock: &Path) -> Option<bool> {
    let (metadata, locks) = (fs::metadata(lock).ok()?, fs::read_to_string(LOCKS).ok()?);
    let holders = holders(&locks, metadata.ino());
    let has_ended = |&pid: &u32| pid != 0 && process_start_ticks(pid).is_none();
    if holders.is_empty() { None } else { Some(holders.iter().all(has_ended)) }
}

/// Processes with a lock of `flock` on a file of this inode, on whatever device: the kernel and
/// `stat` do not name every file system's device in the same way.
fn holders(locks: &str, inode: u64) -> Vec<u32> {
    let holder = |line: &str| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let [_, "FLOCK", _, "WRITE", pid, file, ..] = fields[..] else { return None };
        let found: u64 = file.rsplit(':').next()?.parse().ok()?;
        if found == inode { pid.parse().ok() } else { None }
    };
    locks.lines().filter_map(holder).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holders_are_those_of_the_file_and_not_those_who_wait() {
        let locks = "1: FLOCK  ADVISORY  WRITE 12 fe:00:77 0 EOF\n\
                     1: -> FLOCK  ADVISORY  WRITE 13 fe:00:77 0 EOF\n\
                     2: POSIX  ADVISORY  WRITE 14 fe:00:77 0 EOF\n\
                     3: FLOCK  ADVISORY  WRITE 15 fe:00:78 0 EOF\n4: FLOCK\n";
        assert_eq!(holders(locks, 77), [12]);
        assert!(holders(locks, 79).is_empty());
    }
}
