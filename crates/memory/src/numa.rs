// SPDX-License-Identifier: Apache-2.0

//! NUMA nodes of the host, which are the devices `host:N`: which processors and how much memory a
//! node has, and how a thread keeps to it.
//!
//! A thread passes its binding on to the threads that it starts. Pages of a memfd come from the
//! node of the thread that first writes to them.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;

use crate::manifest::HOST_DEVICE;

const SYSFS_NODES: &str = "/sys/devices/system/node";

/// Bits of the mask of nodes that the kernel gets. Linux has at most 1,024 nodes.
const MASK_BITS: usize = 1024;
const WORD_BITS: usize = u64::BITS as usize;

/// A node as sysfs describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumaNode {
    pub number: u32,
    pub cpus: Vec<usize>,
    pub memory_bytes: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum NumaError {
    #[error("NUMA node {number} is not one of this machine, which has {present}")]
    Unknown { number: u32, present: String },
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot pin a thread to the processors of NUMA node {number}")]
    Pin { number: u32, source: Errno },
    #[error("cannot bind memory to NUMA node {number}")]
    Bind { number: u32, source: io::Error },
}

/// The node of the device `host:N`.
pub fn node_of_device(device: &str) -> Option<u32> {
    let number = device.strip_prefix(HOST_DEVICE)?.strip_prefix(':')?;
    // One name for one node: neither "+0" nor "00".
    number.parse().ok().filter(|node: &u32| node.to_string() == number)
}

/// The device of a node.
pub fn device_of_node(number: u32) -> String {
    format!("{HOST_DEVICE}:{number}")
}

/// Whether weights on this device are sealed memfds: "host" and every node of it.
pub fn is_host_device(device: &str) -> bool {
    device == HOST_DEVICE || node_of_device(device).is_some()
}

/// The nodes of this machine that have memory, by number. Empty on a kernel without NUMA.
pub fn nodes() -> Vec<u32> {
    let text = std::fs::read_to_string(Path::new(SYSFS_NODES).join("has_memory")).unwrap_or_default();
    parse_list(&text).into_iter().filter_map(|node| u32::try_from(node).ok()).collect()
}

/// Memory that can be allocated on these nodes now, each counted once. What a node does not tell is
/// not counted.
pub fn available_on(nodes: impl Iterator<Item = u32>) -> u64 {
    let nodes: BTreeSet<u32> = nodes.collect();
    nodes.into_iter().filter_map(|node| NumaNode::available_bytes(node).ok()).sum()
}

impl NumaNode {
    pub fn find(number: u32) -> Result<Self, NumaError> {
        let present = nodes();
        if !present.contains(&number) {
            let present = match present.is_empty() {
                true => "none".to_owned(),
                false => present.iter().map(|&node| device_of_node(node)).collect::<Vec<_>>().join(", "),
            };
            return Err(NumaError::Unknown { number, present });
        }
        let cpus = parse_list(&read(number, "cpulist")?);
        let memory_bytes = parse_meminfo(&read(number, "meminfo")?, "MemTotal").unwrap_or(u64::MAX);
        Ok(Self { number, cpus, memory_bytes })
    }

    /// Memory that can be allocated on the node now. Page cache counts, shared memory does not.
    pub fn available_bytes(number: u32) -> Result<u64, NumaError> {
        let text = read(number, "meminfo")?;
        let field = |name| parse_meminfo(&text, name).unwrap_or(0);
        Ok(field("MemFree") + field("FilePages").saturating_sub(field("Shmem")))
    }

    /// Memory that this thread allocates from now on is on this node.
    pub fn bind_memory(&self) -> Result<(), NumaError> {
        let number = self.number;
        let mut mask = [0u64; MASK_BITS / WORD_BITS];
        let failed = |source| NumaError::Bind { number, source };
        let word = mask.get_mut(number as usize / WORD_BITS);
        *word.ok_or_else(|| failed(Errno::EINVAL.into()))? |= 1 << (number as usize % WORD_BITS);
        // The kernel reads one bit less than it is told.
        let bits = MASK_BITS + 1;
        // SAFETY: the kernel reads MASK_BITS bits at the pointer, which the array has, and keeps
        // no reference to it.
        let result = unsafe { libc::syscall(libc::SYS_set_mempolicy, libc::MPOL_BIND, mask.as_ptr(), bits) };
        match result {
            0 => Ok(()),
            _ => Err(failed(io::Error::last_os_error())),
        }
    }

    /// This thread runs on the node's processors from now on. A node without processors pins
    /// nothing.
    pub fn pin_thread(&self) -> Result<(), NumaError> {
        let failed = |source| NumaError::Pin { number: self.number, source };
        let mut set = CpuSet::new();
        for &cpu in self.cpus.iter().filter(|&&cpu| cpu < CpuSet::count()) {
            set.set(cpu).map_err(failed)?;
        }
        match self.cpus.is_empty() {
            true => Ok(()),
            false => sched_setaffinity(Pid::from_raw(0), &set).map_err(failed),
        }
    }
}

fn read(number: u32, file: &str) -> Result<String, NumaError> {
    let path = Path::new(SYSFS_NODES).join(format!("node{number}")).join(file);
    std::fs::read_to_string(&path).map_err(|source| NumaError::Read { path, source })
}

/// Reads "0-3,8": numbers and ranges.
fn parse_list(text: &str) -> Vec<usize> {
    let range = |part: &str| -> Option<std::ops::RangeInclusive<usize>> {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse().ok()?..=last.parse().ok()?)
    };
    text.trim().split(',').filter_map(range).flatten().collect()
}

/// A field of the node's meminfo: "Node 0 MemTotal:  21194964 kB".
fn parse_meminfo(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| {
        let (head, value) = line.split_once(':')?;
        (head.split_whitespace().last()? == name).then_some(value)
    })?;
    value.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_of_the_host_are_told_from_others() {
        assert_eq!(node_of_device("host:12"), Some(12));
        for other in ["host", "host:", "host:-1", "host:00", "host:+1", "hosts:1", "cuda:0", "GPU-0"] {
            assert_eq!(node_of_device(other), None, "{other}");
        }
        assert!(is_host_device("host") && is_host_device(&device_of_node(3)));
        assert!(!is_host_device("GPU-00112233-4455-6677-8899-aabbccddeeff"));
    }

    #[test]
    fn lists_and_fields_of_sysfs_are_read() {
        assert_eq!(parse_list("0-2,8,10-11\n"), [0, 1, 2, 8, 10, 11]);
        assert_eq!(parse_list("\n"), [0; 0]);
        let text = "Node 1 MemTotal:       21194964 kB\nNode 1 MemFree:  8 kB\n";
        assert_eq!(parse_meminfo(text, "MemTotal"), Some(21_194_964 * 1024));
        assert_eq!(parse_meminfo(text, "MemFree"), Some(8192));
        assert_eq!(parse_meminfo(text, "Free"), None);
    }

    #[test]
    fn a_node_that_the_machine_lacks_is_refused_with_those_that_it_has() {
        let error = NumaNode::find(1023).unwrap_err().to_string();
        assert!(error.starts_with("NUMA node 1023 is not one of this machine"), "{error}");
    }

    #[test]
    fn a_thread_binds_to_a_node_and_its_children_inherit_it() {
        let Some(&number) = nodes().first() else {
            return eprintln!("SKIPPED: this kernel has no NUMA nodes");
        };
        let node = NumaNode::find(number).unwrap();
        std::thread::spawn(move || {
            node.bind_memory().unwrap();
            node.pin_thread().unwrap();
            let policy = std::thread::spawn(|| {
                let mut mode = -1i32;
                let nothing = std::ptr::null_mut::<u64>();
                // SAFETY: the kernel writes one int, and no mask.
                let result =
                    unsafe { libc::syscall(libc::SYS_get_mempolicy, &mut mode, nothing, 0, nothing, 0) };
                (result, mode)
            });
            assert_eq!(policy.join().unwrap(), (0, libc::MPOL_BIND));
        })
        .join()
        .unwrap();
    }
}
