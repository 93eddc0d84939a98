//! How much memory the machine, and the cgroup of this process, can still give.

use std::io;
use std::path::{Path, PathBuf};

/// Host memory in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostMemory {
    pub total: u64,
    /// What can be had without swapping, page cache included (proc_meminfo(5)).
    pub available: u64,
}

/// A limit of the cgroup (v2) of this process, or of one above it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CgroupMemory {
    pub max: u64,
    pub current: u64,
}

impl CgroupMemory {
    pub fn available(self) -> u64 {
        self.max.saturating_sub(self.current)
    }
}

pub fn host() -> io::Result<HostMemory> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    parse_meminfo(&text).ok_or_else(|| io::Error::other("/proc/meminfo has no MemTotal or MemAvailable"))
}

fn parse_meminfo(text: &str) -> Option<HostMemory> {
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    };
    Some(HostMemory { total: field("MemTotal")?, available: field("MemAvailable")? })
}

/// The tightest memory limit on the way from this process' cgroup to the root; `None` where nothing is limited, or
/// where there is no cgroup v2.
pub fn cgroup() -> Option<CgroupMemory> {
    let membership = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = membership.lines().find_map(|line| line.strip_prefix("0::"))?;
    cgroup_at(Path::new("/sys/fs/cgroup"), Path::new(own.trim_start_matches('/')))
}

fn cgroup_at(root: &Path, own: &Path) -> Option<CgroupMemory> {
    let number = |path: PathBuf| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    own.ancestors()
        .filter_map(|group| {
            let directory = root.join(group);
            // "max" is no number: not limited here.
            Some(CgroupMemory {
                max: number(directory.join("memory.max"))?,
                current: number(directory.join("memory.current"))?,
            })
        })
        .min_by_key(|memory| memory.available())
}

/// What may be allocated now: the host's available memory or what the cgroup leaves, whichever is less.
pub fn available() -> io::Result<u64> {
    let host = host()?.available;
    Ok(cgroup().map_or(host, |cgroup| host.min(cgroup.available())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_read_in_bytes() {
        let text = "MemTotal:       24573896 kB\nMemFree:  1 kB\nMemAvailable:   23511040 kB\n";
        let memory = parse_meminfo(text).unwrap();
        assert_eq!((memory.total, memory.available), (24_573_896 << 10, 23_511_040 << 10));
        assert_eq!(parse_meminfo("MemTotal: 12 kB\n"), None);
        let here = host().unwrap();
        assert!(here.available <= here.total && here.available > 0);
    }

    #[test]
    fn the_tightest_cgroup_limit_counts() {
        let root = tempfile::tempdir().unwrap();
        let leaf = root.path().join("a/b");
        std::fs::create_dir_all(&leaf).unwrap();
        for (directory, max, current) in [(&leaf, "max", "10"), (&root.path().join("a"), "1000", "900")] {
            std::fs::write(directory.join("memory.max"), max).unwrap();
            std::fs::write(directory.join("memory.current"), current).unwrap();
        }
        let limit = cgroup_at(root.path(), Path::new("a/b")).unwrap();
        assert_eq!((limit.max, limit.available()), (1000, 100));
        assert_eq!(cgroup_at(root.path(), Path::new("c")), None);
    }
}
