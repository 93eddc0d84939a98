//! Host memory that a device copies from at full speed: [`HostPages`], which are there, and [`PinnedPages`], which the
//! driver knows too.
//!
//! In two steps, since they cost different things. Clearing pages needs no driver, so it costs nothing beside the driver's
//! start: 20 ms for 96 MiB by one thread. Pinning pages that are there takes 2 ms. The driver's own allocation
//! (cuMemHostAlloc) does both at 0.5 ms a MiB, one thread at a time, while others wait for the driver's locks.
//! (Measured on a guest with an H200.)

use std::ffi::c_void;
use std::io;
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::Arc;

use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, munmap};
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};

use super::driver::Refusal;
use super::retry::retrying;
use super::{Context, Device, mib};

/// A huge page, and the smallest page there is.
const HUGE_BYTES: usize = 2 << 20;
const PAGE_BYTES: usize = 4096;

/// Memory of this process, of zeroes, with every page in its place.
#[derive(Debug)]
pub struct HostPages {
    /// What to unmap.
    mapping: NonNull<c_void>,
    mapped_bytes: usize,
    /// On a huge page's border in the mapping.
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for HostPages {}
// SAFETY: through a shared reference nothing of it is reached.
unsafe impl Sync for HostPages {}

/// Pages that stay where they are, known to the driver as such.
#[derive(Debug)]
pub struct PinnedPages {
    /// Pinning is the context's.
    context: Context,
    pages: HostPages,
}

/// A piece of pinned memory for itself. The pages are let go with their last piece.
#[derive(Debug)]
pub struct PinnedPart {
    _pages: Arc<PinnedPages>,
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: plain memory that no other part overlaps.
unsafe impl Send for PinnedPart {}
// SAFETY: through a shared reference it is only read.
unsafe impl Sync for PinnedPart {}

#[derive(Debug, thiserror::Error)]
pub enum PinError {
    #[error("the GPU gives no context to pin host memory in: its memory may be full, nvidia-smi says more")]
    Context(#[source] Refusal),
    #[error("{}", cannot_pin(*.bytes, *.limit_bytes))]
    Refused {
        bytes: u64,
        /// RLIMIT_MEMLOCK, unless there is none.
        limit_bytes: Option<u64>,
        source: Refusal,
    },
}

impl HostPages {
    /// At least `bytes`, on huge pages where the kernel has them.
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
        // A kernel without huge pages refuses, and small ones do.
        // SAFETY: inside of the mapping; contents and access stay as they are.
        let _ = unsafe { madvise(start.cast(), bytes, MmapAdvise::MADV_HUGEPAGE) };
        for at in (0..bytes).step_by(PAGE_BYTES) {
            // SAFETY: inside of the mapping, which nobody else has yet. Volatile: the write is what is wanted.
            unsafe { start.add(at).write_volatile(0) };
        }
        Ok(pages)
    }
}

impl Drop for HostPages {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and no reference into it outlives its owner. Of a range that was mapped as a whole this
        // cannot fail.
        let _ = unsafe { munmap(self.mapping, self.mapped_bytes) };
    }
}

impl PinnedPages {
    pub fn pin(device: &Device, pages: HostPages) -> Result<Self, PinError> {
        let context = device.context().map_err(PinError::Context)?;
        // SAFETY: mapped until `pages` goes, which is after the drop of what is returned.
        let registered =
            retrying(|| unsafe { device.driver().register_host(pages.start.as_ptr(), pages.bytes) });
        match registered {
            Ok(()) => Ok(Self { context, pages }),
            Err(source) => {
                let limit = getrlimit(Resource::RLIMIT_MEMLOCK).map_or(RLIM_INFINITY, |(soft, _)| soft);
                let limit_bytes = (limit != RLIM_INFINITY).then_some(limit);
                Err(PinError::Refused { bytes: pages.bytes as u64, limit_bytes, source })
            }
        }
    }

    /// As many pieces of `bytes` as there are, one behind the other.
    pub fn cut(self, bytes: usize) -> Vec<PinnedPart> {
        let (start, count) = (self.pages.start, self.pages.bytes / bytes.max(1));
        let pages = Arc::new(self);
        let part = |index: usize| {
            // SAFETY: inside of the pages.
            let start = unsafe { start.add(index * bytes) };
            PinnedPart { _pages: pages.clone(), start, bytes }
        };
        (0..count).map(part).collect()
    }
}

impl Drop for PinnedPages {
    fn drop(&mut self) {
        // A refusal has nobody to go to: the context is gone, and with it what it knew of the pages.
        let _ = self.context.bind().and_then(|()| {
            // SAFETY: registered by `pin`; whoever had a part has waited for copies out of it.
            unsafe { self.context.device().driver().unregister_host(self.pages.start.as_ptr()) }
        });
    }
}

/// Whoever has a part sees to it that no copy of the device uses it when it is written to, and when it is dropped.
impl PinnedPart {
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `bytes` initialised bytes of pages that live as long as self, and of no other part.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }

    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }
}

fn cannot_pin(bytes: u64, limit: Option<u64>) -> String {
    let asked = format!("{} of host memory cannot be pinned for copies to the GPU", mib(bytes));
    match limit {
        Some(limit) if limit < bytes => format!(
            "{asked}: this process may lock {} (RLIMIT_MEMLOCK), raise it with ulimit -l or, in a unit, LimitMEMLOCK=",
            mib(limit)
        ),
        _ => format!("{asked}, although RLIMIT_MEMLOCK allows it: the host may be short of memory"),
    }
}
