// SPDX-License-Identifier: Apache-2.0

//! The private memory of this process: its anonymous resident memory, from the kernel's counter
//! RssAnon (proc_pid_status(5)). Weights are mapped from memfds, which the kernel counts as
//! RssShmem instead.

use std::io;

/// Anonymous resident memory of this process in bytes.
pub(crate) fn anonymous_rss_bytes() -> io::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    parse_rss_anon(&status).ok_or_else(|| io::Error::other("/proc/self/status has no RssAnon"))
}

fn parse_rss_anon(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anonymous_memory_is_counted() {
        assert_eq!(
            parse_rss_anon("VmRSS:\t 9 kB\nRssAnon:\t    1234 kB\nRssFile:\t 1 kB\n"),
            Some(1234 * 1024)
        );
        assert_eq!(parse_rss_anon("VmRSS:\t 9 kB\n"), None);
        // Other tests of this process free memory meanwhile, but less than this loop allocates.
        let (before, mut blocks) = (anonymous_rss_bytes().unwrap(), Vec::new());
        while anonymous_rss_bytes().unwrap() < before + (7 << 20) && blocks.len() < 64 {
            blocks.push(vec![1u8; 8 << 20]);
        }
        assert!(blocks.len() < 64, "{} blocks of 8 MiB are missing in RssAnon", blocks.len());
    }
}
