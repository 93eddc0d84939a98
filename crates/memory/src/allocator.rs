// SPDX-License-Identifier: Apache-2.0

//! [`ReportingAllocator`]: the system's allocator. If the system refuses memory, the process ends
//! with a sentence that names the limit, and with an exit code.
//!
//! Rust's default is an abort that names no limit and whose signal looks like a bug. The system
//! refuses memory if the address space (RLIMIT_AS) or the private memory (RLIMIT_DATA) of the
//! process is limited, or if the machine does not overcommit.

use std::alloc::{GlobalAlloc, Layout, System};
use std::fmt::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};

use crate::process_end;

/// How long the sentence waits for a stderr that is not read.
const STDERR_WAIT_SECONDS: i64 = 1;

/// For `#[global_allocator]` of an executable.
#[derive(Debug)]
pub struct ReportingAllocator {
    exit_code: u8,
}

impl ReportingAllocator {
    pub const fn new(exit_code: u8) -> Self {
        Self { exit_code }
    }

    fn check(&self, memory: *mut u8, layout_bytes: usize) -> *mut u8 {
        if memory.is_null() {
            report_and_end(layout_bytes, self.exit_code);
        }
        memory
    }
}

// SAFETY: each call goes to the system's allocator with the caller's own arguments, and its result
// is returned unchanged. A refusal ends the process without unwinding.
unsafe impl GlobalAlloc for ReportingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps the rules of this same function.
        self.check(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as above; all memory comes from `System`.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        self.check(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, new_bytes: usize) -> *mut u8 {
        // SAFETY: as above; all memory comes from `System`.
        self.check(unsafe { System.realloc(memory, layout, new_bytes) }, new_bytes)
    }
}

/// Text on the stack. What does not fit is cut.
struct StackText {
    bytes: [u8; 512],
    len: usize,
}

impl Write for StackText {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let len = text.len().min(self.bytes.len() - self.len);
        self.bytes[self.len..][..len].copy_from_slice(&text.as_bytes()[..len]);
        self.len += len;
        Ok(())
    }
}

/// Allocates nothing and takes no lock, since any code may have asked for the memory.
#[cold]
fn report_and_end(bytes: usize, exit_code: u8) -> ! {
    static IS_ENDING: AtomicBool = AtomicBool::new(false);
    if !IS_ENDING.swap(true, Ordering::Relaxed) {
        let text = describe(bytes);
        write_to_stderr(&text.bytes[..text.len]);
    }
    process_end::end_process(exit_code)
}

fn describe(bytes: usize) -> StackText {
    let mut text = StackText { bytes: [0; 512], len: 0 };
    let limit = |resource| match getrlimit(resource) {
        Ok((soft, _)) if soft != RLIM_INFINITY => Some(soft >> 10),
        _ => None,
    };
    let process = std::process::id();
    let written = write!(text, "ballast: process {process} ends: {bytes} bytes of memory were refused")
        .and_then(|()| {
            let limits = [
                (limit(Resource::RLIMIT_AS), "address space", "RLIMIT_AS", "ulimit -v"),
                (limit(Resource::RLIMIT_DATA), "private memory", "RLIMIT_DATA", "ulimit -d"),
            ];
            for (kib, what, name, command) in limits {
                if let Some(kib) = kib {
                    write!(text, "; its {what} is limited to {kib} KiB ({name}): raise it with {command}")?;
                }
            }
            if limits.iter().all(|(kib, ..)| kib.is_none()) {
                text.write_str(
                    ": the machine, which does not overcommit, has no more (vm.overcommit_memory)",
                )?;
            }
            text.write_str("\n")
        });
    debug_assert!(written.is_ok(), "the text is cut instead");
    text
}

/// Writes once, because a pipe takes so short a text as a whole. Skips a stderr that is not read.
fn write_to_stderr(text: &[u8]) {
    let mut poll = libc::pollfd { fd: libc::STDERR_FILENO, events: libc::POLLOUT, revents: 0 };
    let wait = libc::timespec { tv_sec: STDERR_WAIT_SECONDS, tv_nsec: 0 };
    // SAFETY: one `pollfd`, a time and no signal mask, all of which outlive the call.
    let ready = unsafe { libc::ppoll(&raw mut poll, 1, &raw const wait, std::ptr::null()) };
    if ready == 1 {
        // SAFETY: the pointer and length are those of `text`. A failure has no one to hear of it.
        let _written = unsafe { libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_that_does_not_fit_is_cut() {
        let mut text = StackText { bytes: [0; 512], len: 0 };
        for _ in 0..100 {
            text.write_str("0123456789").unwrap();
        }
        assert_eq!(text.len, 512);
        assert!(text.bytes.ends_with(b"8901"));
    }

    #[test]
    fn the_sentence_names_the_bytes_and_ends_its_line() {
        let text = describe(123_456);
        let text = std::str::from_utf8(&text.bytes[..text.len]).unwrap();
        assert!(text.contains(" 123456 bytes of memory were refused") && text.ends_with('\n'), "{text}");
    }
}
