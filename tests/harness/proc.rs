// SPDX-License-Identifier: Apache-2.0

//! Observes processes through /proc, and sends signals with kill(1).

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::process::Command;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// How /proc names memfds.
const MEMFD: &str = "/memfd:";

/// Unit of st_blocks.
const BLOCK_BYTES: u64 = 512;

#[track_caller]
pub(crate) fn send_signal(pid: u32, name: &str) {
    // Process id 0 is that of a child that does not run. kill(1) would signal the tests themselves.
    assert_ne!(pid, 0, "no process to send {name} to");
    let _ = Command::new("kill")
        .args([&format!("-{name}"), &pid.to_string()])
        .stderr(std::process::Stdio::null())
        .status();
}

/// Ends the process by the signal. Rust's handler takes a first SIGSEGV for a stack overflow that
/// did not happen, and restores the default action for the second.
#[track_caller]
pub(crate) fn end_by_signal(pid: u32, name: &str) {
    send_signal(pid, name);
    for _ in 0..100 {
        std::thread::sleep(Duration::from_millis(10));
        if !is_alive(pid) {
            return;
        }
        send_signal(pid, name);
    }
}

/// Whether the process exists and is not a zombie.
pub(crate) fn is_alive(pid: u32) -> bool {
    match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat.rsplit(')').next().is_some_and(|rest| !rest.trim_start().starts_with('Z')),
        Err(_) => false,
    }
}

/// One mapping of /proc/PID/smaps. All sizes are in bytes.
#[derive(Debug, Default, Clone)]
pub(crate) struct SmapsEntry {
    pub(crate) name: String,
    pub(crate) size: u64,
    pub(crate) pss: u64,
    pub(crate) anonymous: u64,
    pub(crate) swap: u64,
}

pub(crate) fn mappings(pid: u32) -> Vec<SmapsEntry> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap_or_default();
    let mut mappings: Vec<SmapsEntry> = Vec::new();
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let first = words.next().unwrap_or_default();
        if first.contains('-') && !first.ends_with(':') {
            // address perms offset device inode [name]
            let name = words.skip(4).collect::<Vec<_>>().join(" ");
            mappings.push(SmapsEntry { name, ..SmapsEntry::default() });
        } else if let Some(current) = mappings.last_mut() {
            let bytes = words.next().and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) * 1024;
            match first {
                "Size:" => current.size = bytes,
                "Pss:" => current.pss = bytes,
                "Anonymous:" => current.anonymous = bytes,
                "Swap:" => current.swap = bytes,
                _ => {}
            }
        }
    }
    mappings
}

/// Memory of a process that is not swapped out, in bytes.
pub(crate) fn resident_bytes(pid: u32) -> u64 {
    status_bytes(pid, "VmRSS:")
}

/// The most memory of a process so far that was not swapped out, in bytes.
pub(crate) fn peak_resident_bytes(pid: u32) -> u64 {
    status_bytes(pid, "VmHWM:")
}

fn status_bytes(pid: u32, name: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with(name)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

/// Time that a process spent on processors.
pub(crate) fn cpu_time(pid: u32) -> Option<Duration> {
    /// USER_HZ, the unit of /proc/PID/stat, on all supported machines.
    const TICKS_PER_SECOND: u64 = 100;
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the process may contain blanks. utime and stime are fields 14 and 15.
    let fields: Vec<&str> = stat.rsplit(')').next()?.split_whitespace().collect();
    let ticks = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
    Some(Duration::from_millis((ticks(14)? + ticks(15)?) * 1000 / TICKS_PER_SECOND))
}

/// Names of the files that a process has open.
pub(crate) fn open_files(pid: u32) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|entry| std::fs::read_link(entry.path()).ok())
        .map(|target| target.to_string_lossy().into_owned())
        .collect()
}

/// Bytes of all memfds that the processes have open or mapped, each memfd counted once.
pub(crate) fn memfd_bytes(pids: &[u32]) -> u64 {
    named_memfd_bytes(pids, MEMFD)
}

/// The same for memfds of weights only.
pub(crate) fn weight_memfd_bytes(pids: &[u32]) -> u64 {
    named_memfd_bytes(pids, "/memfd:ballast-weights")
}

fn named_memfd_bytes(pids: &[u32], prefix: &str) -> u64 {
    let mut bytes_by_inode = BTreeMap::new();
    for pid in pids {
        for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten() {
            let is_memfd = std::fs::read_link(entry.path())
                .is_ok_and(|target| target.to_string_lossy().starts_with(prefix));
            // Follows the link, also that of a memfd, which has no name in any folder.
            if let (true, Ok(file)) = (is_memfd, std::fs::metadata(entry.path())) {
                bytes_by_inode.insert(file.ino(), file.blocks() * BLOCK_BYTES);
            }
        }
        // A mapping keeps the memory of a memfd after its descriptor is closed.
        for line in std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default().lines() {
            // address perms offset device inode name
            let fields: Vec<&str> = line.split_whitespace().collect();
            let Some(name) = fields.get(5).filter(|name| name.starts_with(prefix)) else { continue };
            let inode = fields[4].parse().unwrap();
            let (start, end) = fields[0].split_once('-').unwrap_or_else(|| panic!("{name}: {line}"));
            let address = |text| u64::from_str_radix(text, 16).unwrap();
            bytes_by_inode.entry(inode).or_insert(address(end) - address(start));
        }
    }
    bytes_by_inode.values().sum()
}

/// Processes whose arguments contain `text`, apart from this one.
pub(crate) fn processes_with_argument(text: &str) -> Vec<u32> {
    let own = std::process::id();
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_string_lossy().parse::<u32>().ok())
        .filter(|pid| *pid != own && is_alive(*pid))
        .filter(|pid| {
            std::fs::read(format!("/proc/{pid}/cmdline"))
                .is_ok_and(|arguments| String::from_utf8_lossy(&arguments).contains(text))
        })
        .collect()
}

pub(crate) fn arguments(pid: u32) -> Vec<String> {
    let bytes = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    bytes.split(|b| *b == 0).map(|a| String::from_utf8_lossy(a).into_owned()).collect()
}

/// All descendants of a process.
pub(crate) fn descendants(root: u32) -> Vec<u32> {
    let mut found = vec![root];
    let mut next = 0;
    while next < found.len() {
        let pid = found[next];
        next += 1;
        for task in std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
            let children = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
            found.extend(children.split_whitespace().filter_map(|word| word.parse::<u32>().ok()));
        }
    }
    found.split_off(1)
}

/// Raises the limit of this process. Its children inherit it, or set theirs themselves. Returns
/// false if that is not allowed.
pub(crate) fn allow_descriptors(count: u64) -> bool {
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|current| current >= count) {
        return true;
    }
    limit.maximum.is_none_or(|maximum| maximum >= count)
        && setrlimit(Resource::Nofile, Rlimit { current: Some(count), maximum: limit.maximum }).is_ok()
}
