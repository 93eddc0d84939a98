// SPDX-License-Identifier: Apache-2.0

//! Memory of a process by mapping: a parser for /proc/PID/smaps and smaps_rollup
//! (proc_pid_smaps(5)).
//!
//! Two sums show that the weights exist once. The sum of `Pss` over all processes of a mapping is
//! the memory that the mapping takes. `Anonymous` plus `Swap` of a mapping is the memory that a
//! process has copied. `docs/decisions/0015-process-and-host-figures.md` says why this file reads
//! /proc itself.

use std::io;

/// One mapping, or the sum of several, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessMapping {
    /// Last column of the header line: a path, `[heap]`, or empty for anonymous memory.
    pub name: String,
    /// Length of the address range.
    pub size: u64,
    pub rss: u64,
    pub pss: u64,
    pub private_dirty: u64,
    pub anonymous: u64,
    pub swap: u64,
}

impl ProcessMapping {
    fn add(&mut self, other: &ProcessMapping) {
        self.size += other.size;
        self.rss += other.rss;
        self.pss += other.pss;
        self.private_dirty += other.private_dirty;
        self.anonymous += other.anonymous;
        self.swap += other.swap;
    }
}

/// Why a text is not an smaps file.
#[derive(Debug, thiserror::Error)]
#[error("line {line} of smaps is neither a mapping nor a field of one: {text:?}")]
pub struct SmapsError {
    line: usize,
    text: String,
}

/// Parses all mappings, in the order of their addresses.
pub fn parse(text: &str) -> Result<Vec<ProcessMapping>, SmapsError> {
    let mut mappings: Vec<ProcessMapping> = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let malformed = || SmapsError { line: index + 1, text: line.to_owned() };
        if let Some(mapping) = parse_header(line) {
            mappings.push(mapping);
            continue;
        }
        let (key, value) = line.split_once(':').ok_or_else(malformed)?;
        let current = mappings.last_mut().ok_or_else(malformed)?;
        let field = match key {
            "Rss" => &mut current.rss,
            "Pss" => &mut current.pss,
            "Private_Dirty" => &mut current.private_dirty,
            "Anonymous" => &mut current.anonymous,
            "Swap" => &mut current.swap,
            _ => continue,
        };
        let kib =
            value.trim().strip_suffix(" kB").and_then(|v| v.parse::<u64>().ok()).ok_or_else(malformed)?;
        *field = kib * 1024;
    }
    Ok(mappings)
}

/// Parses "start-end perms offset device inode [name]".
fn parse_header(line: &str) -> Option<ProcessMapping> {
    let (range, rest) = line.split_once(' ')?;
    let (start, end) = range.split_once('-')?;
    let size = u64::from_str_radix(end, 16).ok()?.checked_sub(u64::from_str_radix(start, 16).ok()?)?;
    // Four columns follow. The name is the rest of the line and may contain spaces.
    let mut name = rest;
    for _ in 0..4 {
        name = name.trim_start().split_once(' ').map_or("", |(_, after)| after);
    }
    Some(ProcessMapping { name: name.trim().to_owned(), size, ..ProcessMapping::default() })
}

/// Sums the mappings whose name `belongs` accepts. The name of the sum is empty.
pub fn sum_mappings(mappings: &[ProcessMapping], belongs: impl Fn(&str) -> bool) -> ProcessMapping {
    let mut sum = ProcessMapping::default();
    for mapping in mappings.iter().filter(|m| belongs(&m.name)) {
        sum.add(mapping);
    }
    sum
}

/// All mappings of a process. Slow for large processes, because the kernel walks the page tables.
pub fn mappings_of_process(pid: u32) -> io::Result<Vec<ProcessMapping>> {
    parse(&std::fs::read_to_string(format!("/proc/{pid}/smaps"))?).map_err(io::Error::other)
}

/// The sum over all mappings of a process, computed by the kernel.
pub fn rollup_of_process(pid: u32) -> io::Result<ProcessMapping> {
    let parsed = parse(&std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?);
    let mappings = parsed.map_err(io::Error::other)?;
    Ok(sum_mappings(&mappings, |_| true))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SAMPLE: &str = "\
7f2a00000000-7f2a00400000 r--s 00000000 00:01 1033   /memfd:ballast-weights 3 (deleted)
Size:               4096 kB
Rss:                2048 kB
Pss:                 512 kB
Private_Dirty:         0 kB
Anonymous:             0 kB
Swap:                  0 kB
VmFlags: rd mr mw me ms sd
7ffd1000-7ffd3000 rw-p 00000000 00:00 0
Rss:                   8 kB
Pss:                   8 kB
Private_Dirty:         8 kB
Anonymous:             8 kB
Swap:                  4 kB
";

    #[test]
    fn mappings_are_distinguished_by_name() {
        let mappings = parse(SAMPLE).unwrap();
        assert_eq!(mappings.len(), 2);
        assert_eq!(mappings[0].name, "/memfd:ballast-weights 3 (deleted)");
        assert_eq!(mappings[0].size, 4 << 20);
        let weights = sum_mappings(&mappings, |name| name.starts_with("/memfd:ballast-weights"));
        assert_eq!((weights.rss, weights.pss, weights.anonymous), (2 << 20, 512 << 10, 0));
        let rest = sum_mappings(&mappings, |name| name.is_empty());
        assert_eq!((rest.size, rest.anonymous, rest.swap, rest.private_dirty), (8192, 8192, 4096, 8192));
    }

    #[test]
    fn the_sum_of_this_process_agrees_with_its_rollup() {
        let pid = std::process::id();
        let block = vec![1u8; 8 << 20];
        let sum = sum_mappings(&mappings_of_process(pid).unwrap(), |_| true);
        let rollup = rollup_of_process(pid).unwrap();
        drop(block);
        assert!(sum.anonymous >= 8 << 20, "{sum:?}");
        // Other test threads allocate between the two reads.
        assert!(sum.anonymous.abs_diff(rollup.anonymous) < 64 << 20, "{sum:?} {rollup:?}");
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "([0-9a-f-]{0,18}[ :]|[A-Za-z]{1,6}:? |[0-9]{1,20}| kB|\\n|\\PC){0,40}") {
            let _: Result<_, _> = parse(&text);
        }
    }
}
