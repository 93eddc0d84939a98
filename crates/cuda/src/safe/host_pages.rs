// SPDX-License-Identifier: Apache-2.0

//! [`HostPages`]: zeroed host memory whose pages all exist, ready to be pinned.

use std::ffi::c_void;
use std::io;
use std::num::NonZeroUsize;
use std::ptr::NonNull;

use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, munmap};

/// A huge page, and the smallest page there is.
const HUGE_BYTES: usize = 2 << 20;
const PAGE_BYTES: usize = 4096;

/// Memory of this process, filled with zeroes. Its size is a multiple of a huge page.
#[derive(Debug)]
pub struct HostPages {
    /// The whole mapping, for `munmap`.
    mapping: NonNull<c_void>,
    mapped_bytes: usize,
    /// Inside of the mapping, aligned to a huge page.
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for HostPages {}
// SAFETY: through a shared reference nothing of it is reached.
unsafe impl Sync for HostPages {}

impl HostPages {
    /// At least `bytes`, on huge pages if the kernel has them.
    pub fn new(bytes: usize) -> io::Result<Self> {
        let out_of_range = || io::Error::from(io::ErrorKind::OutOfMemory);
        let bytes = bytes.max(1).checked_next_multiple_of(HUGE_BYTES).ok_or_else(out_of_range)?;
        let mapped_bytes = bytes.checked_add(HUGE_BYTES).ok_or_else(out_of_range)?;
        let length = NonZeroUsize::new(mapped_bytes).ok_or_else(out_of_range)?;
        let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a fresh anonymous range at an address of the kernel's choice disturbs nothing.
        let mapping = unsafe { mmap_anonymous(None, length, access, MapFlags::MAP_PRIVATE) }?;
        let base = mapping.cast::<u8>();
        let skip = base.as_ptr().align_offset(HUGE_BYTES);
        // SAFETY: less than a huge page, of which the mapping has one more than it needs.
        let start = unsafe { base.add(skip) };
        let pages = Self { mapping, mapped_bytes, start, bytes };
        // A kernel without huge pages refuses; small pages serve as well.
        // SAFETY: inside of the mapping; contents and access stay as they are.
        let _ = unsafe { madvise(start.cast(), bytes, MmapAdvise::MADV_HUGEPAGE) };
        for at in (0..bytes).step_by(PAGE_BYTES) {
            // SAFETY: inside of the mapping, which no other code has yet. Volatile, since the write
            // itself is wanted.
            unsafe { start.add(at).write_volatile(0) };
        }
        Ok(pages)
    }

    pub(super) fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for HostPages {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and no reference into it outlives its owner. Of a range that was
        // mapped as a whole this cannot fail.
        let _ = unsafe { munmap(self.mapping, self.mapped_bytes) };
    }
}
