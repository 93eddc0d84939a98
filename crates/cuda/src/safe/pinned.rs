// SPDX-License-Identifier: Apache-2.0

//! [`PinnedBuffer`]: page-locked host memory that a device copies from and to at full speed.
//!
//! A device that reads through the host's page tables needs no page locked: for such a device,
//! [`PinnedBuffer::pin`] leaves pages as they are.
//!
//! Two ways to make one, since their costs differ (measured on a guest with an H200):
//! - [`PinnedBuffer::new`] lets the driver allocate (cuMemHostAlloc): 0.5 ms a MiB, one thread at a
//!   time, while others wait for the driver's locks. For small buffers.
//! - [`PinnedBuffer::pin`] pins [`HostPages`] that exist already: 2 ms for 96 MiB. Clearing those
//!   pages takes one thread 20 ms, needs no driver, and so can run beside the driver's start. For
//!   the loader.

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use bytemuck::Pod;
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};

use super::{Context, Device, HostPages, format_mib};
use crate::checked::{DriverError, retry_unsupported};

/// `len` values in pinned memory, or a part of a larger piece. The memory is released with its last
/// part.
///
/// The owner of a buffer ensures that no copy of the device uses it while it is written. A part of
/// pinned [`HostPages`] must also not be dropped during a copy; for memory that the driver
/// allocated, the driver waits.
#[derive(Debug)]
pub struct PinnedBuffer<T> {
    _memory: Arc<PinnedMemory>,
    start: NonNull<T>,
    len: usize,
}

// SAFETY: plain memory that no other part overlaps.
unsafe impl<T: Send> Send for PinnedBuffer<T> {}
// SAFETY: through a shared reference it is only read.
unsafe impl<T: Sync> Sync for PinnedBuffer<T> {}

#[derive(Debug)]
struct PinnedMemory {
    /// Pinned memory belongs to a context.
    context: Context,
    origin: PinnedOrigin,
}

#[derive(Debug)]
enum PinnedOrigin {
    Driver {
        start: NonNull<u8>,
    },
    Registered(HostPages),
    /// The device reads them without registration.
    Unlocked {
        _pages: HostPages,
    },
}

// SAFETY: plain memory with one owner, which frees it once.
unsafe impl Send for PinnedMemory {}
// SAFETY: through a shared reference nothing of it is reached.
unsafe impl Sync for PinnedMemory {}

#[derive(Debug, thiserror::Error)]
pub enum PinError {
    #[error("the GPU has no context to pin host memory in: its memory may be full, nvidia-smi says more")]
    Context(#[source] DriverError),
    #[error("{}", describe_pin_failure(*.bytes, *.limit_bytes))]
    Driver {
        bytes: u64,
        /// RLIMIT_MEMLOCK, unless it is unlimited.
        limit_bytes: Option<u64>,
        source: DriverError,
    },
    #[error("{} of pinned host memory exceed any memory", format_mib(*.bytes))]
    TooLarge { bytes: u64 },
    #[error("there is no host memory to pin")]
    Pages(#[source] io::Error),
}

impl<T: Pod> PinnedBuffer<T> {
    /// `len` values, zero until written, in memory that the driver allocates.
    pub fn new(device: &Device, len: usize) -> Result<Self, PinError> {
        let context = device.context().map_err(PinError::Context)?;
        let bytes = len.checked_mul(size_of::<T>()).ok_or(PinError::TooLarge { bytes: u64::MAX })?.max(1);
        let start = context.driver().allocate_host(bytes).map_err(|source| failed(bytes, source))?;
        let start = NonNull::new(start).ok_or(PinError::TooLarge { bytes: bytes as u64 })?;
        // SAFETY: `bytes` bytes, page-aligned, just allocated; all zeroes are a valid `T`.
        unsafe { start.write_bytes(0, bytes) };
        let memory = Arc::new(PinnedMemory { context, origin: PinnedOrigin::Driver { start } });
        Ok(Self { _memory: memory, start: start.cast(), len })
    }

    pub fn as_slice(&self) -> &[T] {
        // SAFETY: `len` initialized values that live as long as self, and of no other part.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    pub fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: as above, borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl PinnedBuffer<u8> {
    /// Pins pages that exist already, unless the device reads them without that.
    pub fn pin(device: &Device, pages: HostPages) -> Result<Self, PinError> {
        let context = device.context().map_err(PinError::Context)?;
        let (start, len) = (pages.start(), pages.bytes());
        if device.info().host_page_tables {
            let memory = Arc::new(PinnedMemory { context, origin: PinnedOrigin::Unlocked { _pages: pages } });
            return Ok(Self { _memory: memory, start, len });
        }
        // SAFETY: mapped until `pages` is dropped, which is after the drop of what is returned.
        let registered = retry_unsupported(|| unsafe { context.driver().register_host(start.as_ptr(), len) });
        registered.map_err(|source| failed(len, source))?;
        let memory = Arc::new(PinnedMemory { context, origin: PinnedOrigin::Registered(pages) });
        Ok(Self { _memory: memory, start, len })
    }

    /// Splits the buffer into as many parts of `bytes` bytes as fit, one behind the other.
    pub fn split(self, bytes: usize) -> Vec<Self> {
        let part = |index: usize| {
            // SAFETY: inside of the buffer, which is consumed, so that each part is reached through
            // one value only.
            let start = unsafe { self.start.add(index * bytes) };
            Self { _memory: self._memory.clone(), start, len: bytes }
        };
        (0..self.len / bytes.max(1)).map(part).collect()
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        // An error has no receiver: the context is gone, and with it what it knew of the memory.
        let _ = self.context.bind().and_then(|()| match &self.origin {
            // SAFETY: the owner. The driver waits for copies in flight before it frees.
            PinnedOrigin::Driver { start } => unsafe { self.context.driver().free_host(start.as_ptr()) },
            // SAFETY: registered by `pin`; the user of a part has waited for copies out of it.
            PinnedOrigin::Registered(pages) => unsafe {
                self.context.driver().unregister_host(pages.start().as_ptr())
            },
            PinnedOrigin::Unlocked { .. } => Ok(()),
        });
    }
}

fn failed(bytes: usize, source: DriverError) -> PinError {
    let limit = getrlimit(Resource::RLIMIT_MEMLOCK).map_or(RLIM_INFINITY, |(soft, _)| soft);
    let limit_bytes = (limit != RLIM_INFINITY).then_some(limit);
    PinError::Driver { bytes: bytes as u64, limit_bytes, source }
}

fn describe_pin_failure(bytes: u64, limit: Option<u64>) -> String {
    let requested = format!("{} of host memory cannot be pinned for copies to the GPU", format_mib(bytes));
    match limit {
        Some(limit) if limit < bytes => format!(
            "{requested}: this process may lock {} (RLIMIT_MEMLOCK), raise it with ulimit -l or, in a unit, LimitMEMLOCK=",
            format_mib(limit)
        ),
        _ => format!("{requested}, although RLIMIT_MEMLOCK allows it: the host may be short of memory"),
    }
}
