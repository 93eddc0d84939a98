// SPDX-License-Identifier: Apache-2.0

//! Mappings of a model on the host: one address reservation, one mapping for each allocation, 2 MiB
//! aligned.
//!
//! [`map_all`] returns read-only mappings as `bytes::Bytes`, which are cheap to clone and slice.
//! The address space is released when the last clone is dropped; [`MappingWatch`] tells whether
//! that has happened.

use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Weak};

use bytes::Bytes;
use cuda::AddressRange;
use nix::errno::Errno;
use nix::sys::mman::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use crate::memfd::{MemfdError, SealedMemfd};
use crate::pack::GRANULE_BYTES;

const ALIGNMENT: usize = GRANULE_BYTES as usize;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileAccess {
    Read,
    Write,
}

/// A range of addresses with files mapped into it, one behind the other, each on a 2 MiB boundary.
#[derive(Debug)]
pub(crate) struct AddressReservation {
    /// The whole range, for `munmap`.
    base: NonNull<libc::c_void>,
    length: usize,
    /// First byte and length of each mapped file.
    parts: Vec<(NonNull<u8>, usize)>,
}

// SAFETY: the reservation owns its addresses; shared access only reads `parts`, and bytes behind
// them are either immutable (sealed files) or reached through `&mut self` alone.
unsafe impl Send for AddressReservation {}
// SAFETY: as above.
unsafe impl Sync for AddressReservation {}

impl AddressReservation {
    pub(crate) fn new(files: &[(BorrowedFd<'_>, u64)], access: FileAccess) -> io::Result<Self> {
        let out_of_range = || io::Error::from(Errno::ENOMEM);
        let mut total = ALIGNMENT;
        let mut lengths = Vec::with_capacity(files.len());
        for (_, bytes) in files {
            let length = usize::try_from(*bytes).map_err(|_| out_of_range())?;
            lengths.push(length);
            let padded = length.checked_next_multiple_of(ALIGNMENT).ok_or_else(out_of_range)?;
            total = total.checked_add(padded).ok_or_else(out_of_range)?;
        }
        let length = NonZeroUsize::new(total).ok_or_else(out_of_range)?;
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
        // SAFETY: a fresh anonymous range at an address of the kernel's choice disturbs nothing.
        let base = unsafe { mmap_anonymous(None, length, ProtFlags::PROT_NONE, flags) }?;
        let mut reservation = Self { base, length: total, parts: Vec::with_capacity(files.len()) };
        let mut at = base.as_ptr() as usize;
        for ((fd, _), length) in files.iter().zip(lengths) {
            at = at.next_multiple_of(ALIGNMENT);
            let pointer = match NonZeroUsize::new(length) {
                // SAFETY: [at, at + length) lies inside the range reserved above, which nothing
                // else uses.
                Some(length) => unsafe { map_fixed(at, length, *fd, access) }?,
                None => NonNull::dangling(),
            };
            reservation.parts.push((pointer, length));
            at += length;
        }
        Ok(reservation)
    }

    /// The bytes of a reservation with one writable file, and their address.
    pub(crate) fn writable(&mut self) -> (&mut [u8], usize) {
        let (pointer, length) = self.parts[0];
        // SAFETY: mapped readable and writable for `length` bytes; `&mut self` makes this the only
        // view of it in this process, and the memfd behind it has not been handed to any other.
        let slice = unsafe { std::slice::from_raw_parts_mut(pointer.as_ptr(), length) };
        (slice, pointer.as_ptr() as usize)
    }
}

impl Drop for AddressReservation {
    fn drop(&mut self) {
        // SAFETY: the range is ours alone, and every view of it borrows or owns `self`.
        let unmapped = unsafe { munmap(self.base, self.length) };
        debug_assert!(unmapped.is_ok(), "a range that was mapped can be unmapped");
    }
}

/// Maps a file over part of a reservation, shared. Kernels before 6.7 refuse that for a
/// write-sealed file; they get a private mapping.
///
/// # Safety
/// `[at, at + length)` must belong to a reservation of the caller that holds nothing yet.
unsafe fn map_fixed(
    at: usize,
    length: NonZeroUsize,
    fd: BorrowedFd<'_>,
    access: FileAccess,
) -> io::Result<NonNull<u8>> {
    let protection = match access {
        FileAccess::Read => ProtFlags::PROT_READ,
        FileAccess::Write => ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
    };
    let map = |sharing| {
        // SAFETY: the caller vouches for the range.
        unsafe { mmap(NonZeroUsize::new(at), length, protection, sharing | MapFlags::MAP_FIXED, fd, 0) }
    };
    let mapped = match map(MapFlags::MAP_SHARED) {
        Err(Errno::EPERM) if access == FileAccess::Read => map(MapFlags::MAP_PRIVATE),
        result => result,
    };
    Ok(mapped?.cast())
}

/// The owner inside of `Bytes`: one mapped file, which keeps the whole reservation alive.
struct MappedFile {
    reservation: Arc<AddressReservation>,
    part: usize,
}

impl AsRef<[u8]> for MappedFile {
    fn as_ref(&self) -> &[u8] {
        let (pointer, length) = self.reservation.parts[self.part];
        // SAFETY: mapped readable for `length` bytes as long as the reservation lives, over a file
        // that is sealed against writing and shrinking; of a zero length any aligned pointer will
        // do.
        unsafe { std::slice::from_raw_parts(pointer.as_ptr(), length) }
    }
}

/// Tells whether a model is still mapped in this process, without keeping it mapped.
#[derive(Debug, Clone)]
pub struct MappingWatch(WatchedMapping);

#[derive(Debug, Clone)]
enum WatchedMapping {
    Host(Weak<AddressReservation>),
    Device(Weak<AddressRange>),
}

impl MappingWatch {
    pub(crate) fn of_device(range: Weak<AddressRange>) -> Self {
        Self(WatchedMapping::Device(range))
    }

    pub fn is_unmapped(&self) -> bool {
        match &self.0 {
            WatchedMapping::Host(range) => range.strong_count() == 0,
            WatchedMapping::Device(range) => range.strong_count() == 0,
        }
    }
}

/// Maps sealed memfds read-only, in order. The descriptors may be closed afterwards.
pub fn map_all(memfds: &[SealedMemfd]) -> Result<(Vec<Bytes>, MappingWatch), MemfdError> {
    let files: Vec<_> = memfds.iter().map(|memfd| (memfd.as_fd(), memfd.bytes())).collect();
    let total = memfds.iter().map(SealedMemfd::bytes).sum();
    let reservation = Arc::new(
        AddressReservation::new(&files, FileAccess::Read)
            .map_err(|error| MemfdError::of("map", total, error))?,
    );
    let views = (0..files.len())
        .map(|part| Bytes::from_owner(MappedFile { reservation: Arc::clone(&reservation), part }))
        .collect();
    Ok((views, MappingWatch(WatchedMapping::Host(Arc::downgrade(&reservation)))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_are_aligned_and_hold_the_sealed_bytes() {
        let memfds: Vec<_> =
            (1..6u8).map(|i| SealedMemfd::from_bytes("test", &vec![i; i as usize * 5000]).unwrap()).collect();
        let (views, watch) = map_all(&memfds).unwrap();
        drop(memfds);
        for (view, i) in views.iter().zip(1u8..) {
            assert_eq!(view.as_ptr() as usize % ALIGNMENT, 0);
            assert_eq!(view, &vec![i; i as usize * 5000]);
        }
        let tensor = views[2].slice(10..20);
        drop(views);
        assert!(!watch.is_unmapped());
        assert_eq!(tensor, &[3; 10][..]);
        drop(tensor);
        assert!(watch.is_unmapped());
    }

    #[test]
    fn empty_files_and_empty_lists_can_be_mapped() {
        let empty = SealedMemfd::from_bytes("test", b"").unwrap();
        assert_eq!(map_all(&[empty]).unwrap().0, [Bytes::new()]);
        assert!(map_all(&[]).unwrap().0.is_empty());
    }

    #[test]
    fn mappings_are_not_writable() {
        let (views, _) = map_all(&[SealedMemfd::from_bytes("test", &[1; 4096]).unwrap()]).unwrap();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let start = format!("{:x}-", views[0].as_ptr() as usize);
        let line = maps.lines().find(|line| line.starts_with(&start)).unwrap();
        assert!(line.contains(" r--s ") || line.contains(" r--p "), "{line}");
    }
}
