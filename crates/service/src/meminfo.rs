// SPDX-License-Identifier: Apache-2.0

//! Available memory of the host, and of the cgroup of this process.
//!
//! `docs/decisions/0015-process-and-host-figures.md` says why this file reads /proc and /sys
//! itself.

use std::io;
use std::path::{Path, PathBuf};

/// Memory of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostMemory {
    pub total_bytes: u64,
    /// Memory that can be allocated without swapping; reclaimable page cache counts
    /// (proc_meminfo(5)).
    pub available_bytes: u64,
}

/// The memory limit of the cgroup of this process, or of one of its ancestors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CgroupMemoryLimit {
    pub limit_bytes: u64,
    pub usage_bytes: u64,
    /// The part of the usage that the kernel reclaims first: file pages that were not used
    /// recently.
    pub inactive_file_bytes: u64,
}

impl CgroupMemoryLimit {
    pub fn available_bytes(self) -> u64 {
        self.limit_bytes.saturating_sub(self.usage_bytes.saturating_sub(self.inactive_file_bytes))
    }
}

pub fn host_memory() -> io::Result<HostMemory> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    parse_meminfo(&text).ok_or_else(|| io::Error::other("/proc/meminfo has no MemTotal or MemAvailable"))
}

fn parse_meminfo(text: &str) -> Option<HostMemory> {
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    };
    Some(HostMemory { total_bytes: field("MemTotal")?, available_bytes: field("MemAvailable")? })
}

/// The files in which a cgroup version reports memory.
struct CgroupFiles {
    /// Prefix of the group's line in /proc/self/cgroup, after the number of the hierarchy.
    membership: &'static str,
    mount: &'static str,
    max: &'static str,
    current: &'static str,
    /// Name of a line of memory.stat.
    inactive_file: &'static str,
}

const V2: CgroupFiles = CgroupFiles {
    membership: ":",
    mount: "/sys/fs/cgroup",
    max: "memory.max",
    current: "memory.current",
    inactive_file: "inactive_file",
};
const V1: CgroupFiles = CgroupFiles {
    membership: "memory:",
    mount: "/sys/fs/cgroup/memory",
    max: "memory.limit_in_bytes",
    current: "memory.usage_in_bytes",
    inactive_file: "total_inactive_file",
};

/// Version 1 reports "no limit" as i64::MAX rounded down to a page. Pages have at most 64 KiB.
const V1_UNLIMITED: u64 = i64::MAX as u64 & !0xffff;

/// The tightest memory limit between the cgroup of this process and the root. `None` without a
/// limit.
pub fn tightest_cgroup_limit() -> Option<CgroupMemoryLimit> {
    let memberships = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let of = |files: &CgroupFiles| {
        let own =
            memberships.lines().find_map(|line| line.split_once(':')?.1.strip_prefix(files.membership))?;
        tightest_limit_at(files, Path::new(files.mount), Path::new(own.trim_start_matches('/')))
    };
    of(&V2).or_else(|| of(&V1))
}

fn tightest_limit_at(files: &CgroupFiles, root: &Path, own: &Path) -> Option<CgroupMemoryLimit> {
    let number = |path: PathBuf| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let inactive_file = |directory: &Path| {
        let stat = std::fs::read_to_string(directory.join("memory.stat")).ok()?;
        stat.lines().find_map(|line| line.strip_prefix(files.inactive_file)?.trim().parse().ok())
    };
    own.ancestors()
        .filter_map(|group| {
            let directory = root.join(group);
            // "max" is not a number and means no limit at this level.
            Some(CgroupMemoryLimit {
                limit_bytes: number(directory.join(files.max))?,
                usage_bytes: number(directory.join(files.current))?,
                inactive_file_bytes: inactive_file(&directory).unwrap_or(0),
            })
        })
        .filter(|memory| memory.limit_bytes < V1_UNLIMITED)
        .min_by_key(|memory| memory.available_bytes())
}

/// Bytes that this process can allocate now: the smaller of the host's available memory and the
/// cgroup's.
pub fn available_bytes() -> io::Result<u64> {
    let host = host_memory()?.available_bytes;
    Ok(tightest_cgroup_limit().map_or(host, |cgroup| host.min(cgroup.available_bytes())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_parsed_to_bytes() {
        let text = "MemTotal:       24573896 kB\nMemFree:  1 kB\nMemAvailable:   23511040 kB\n";
        let memory = parse_meminfo(text).unwrap();
        assert_eq!((memory.total_bytes, memory.available_bytes), (24_573_896 << 10, 23_511_040 << 10));
        assert_eq!(parse_meminfo("MemTotal: 12 kB\n"), None);
        let here = host_memory().unwrap();
        assert!(here.available_bytes <= here.total_bytes && here.available_bytes > 0);
    }

    #[test]
    fn the_tightest_cgroup_limit_is_found() {
        for files in [V1, V2] {
            let root = tempfile::tempdir().unwrap();
            let leaf = root.path().join("a/b");
            std::fs::create_dir_all(&leaf).unwrap();
            let (middle, unlimited) = (root.path().join("a"), "9223372036854771712");
            let groups = [
                (leaf.as_path(), "max", "10", 0),
                (middle.as_path(), "1000", "900", 40),
                (root.path(), unlimited, "2000", 0),
            ];
            for (directory, max, current, inactive) in groups {
                std::fs::write(directory.join(files.max), max).unwrap();
                std::fs::write(directory.join(files.current), current).unwrap();
                let stat = format!("file 77\n{} {inactive}\nunevictable 0\n", files.inactive_file);
                std::fs::write(directory.join("memory.stat"), stat).unwrap();
            }
            let limit = tightest_limit_at(&files, root.path(), Path::new("a/b")).unwrap();
            assert_eq!((limit.limit_bytes, limit.available_bytes()), (1000, 140));
            assert_eq!(tightest_limit_at(&files, root.path(), Path::new("c")), None);
        }
    }
}
