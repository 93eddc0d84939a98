// SPDX-License-Identifier: Apache-2.0

//! Reads parts of a file into memory that a device copies from: from the page cache if the part is
//! cached, around it otherwise.
//!
//! A direct read (O_DIRECT) saves the copy and leaves the page cache alone, but reads only whole
//! blocks at block-aligned addresses. Bytes are therefore placed at their offset within a block,
//! and up to a block before and after them is read too. File systems without direct reads (tmpfs)
//! are read as usual.

use std::fs::{File, OpenOptions};
use std::io::{self, IoSliceMut};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use nix::libc;
use rustix::io::{Errno, ReadWriteFlags, preadv2};

use super::file_parts::FilePart;
use crate::loader::host_reader::{OpenModelFile, TensorReadError, TensorSource, read_exact};

/// A multiple of every drive's block size, and of the page size.
pub(super) const EDGE_BYTES: usize = 4096;

/// Opens the same file with O_DIRECT; `None` if the file system does not support it. Needs /proc,
/// so it must be called before the sandbox.
pub(super) fn reopen_direct(file: &File) -> Option<File> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path).ok()
}

pub(super) struct FileReader {
    pub(super) open: OpenModelFile,
    pub(super) direct: Option<File>,
}

impl FileReader {
    /// Reads a part into `memory`, whose address must be a multiple of `EDGE_BYTES`, with room for
    /// `EDGE_BYTES` before and after the part. Returns the offset at which the part starts.
    pub(super) fn read(
        &self,
        source: &TensorSource,
        part: &FilePart,
        memory: &mut [u8],
    ) -> Result<usize, TensorReadError> {
        let at = part.offset as usize % EDGE_BYTES;
        let end = at + part.bytes;
        if let Some(direct) = &self.direct
            && !is_cached(&self.open.file, part.offset)
            && let Some(memory) = memory.get_mut(..end.next_multiple_of(EDGE_BYTES))
            && read_blocks(direct, memory, part.offset - at as u64, end)
        {
            return Ok(at);
        }
        // This read also reports why a direct read was refused or ended early.
        read_exact(&self.open, source, &mut memory[at..end], part.offset)?;
        Ok(at)
    }
}

/// Whether the byte at this offset is in the page cache. The answer for a part's first byte is used
/// for the whole part.
fn is_cached(file: &File, offset: u64) -> bool {
    let mut byte = [0];
    let read = preadv2(file, &mut [IoSliceMut::new(&mut byte)], offset, ReadWriteFlags::NOWAIT);
    !matches!(read, Err(Errno::AGAIN))
}

/// Reads whole blocks until `needed` bytes are read; false if that is not possible.
fn read_blocks(direct: &File, memory: &mut [u8], offset: u64, needed: usize) -> bool {
    let mut done = 0;
    while done < needed {
        // A read that ends within a block has reached the end of the file. The next read is refused
        // as unaligned.
        match direct.read_at(&mut memory[done..], offset + done as u64) {
            Ok(0) => return false,
            Ok(bytes) => done += bytes,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use rustix::fs::{Advice, fadvise};

    use super::*;

    const LENGTH: usize = 3 * EDGE_BYTES + 1234;

    fn contents() -> Vec<u8> {
        (0..LENGTH).map(|at| ((at * 31) >> 3) as u8).collect()
    }

    /// Next to this executable, because the temporary directory may not support direct reads.
    fn on_disk() -> tempfile::NamedTempFile {
        let here = std::env::current_exe().unwrap();
        let mut file = tempfile::NamedTempFile::new_in(here.parent().unwrap()).unwrap();
        file.write_all(&contents()).unwrap();
        file.as_file().sync_all().unwrap();
        file
    }

    fn reader(file: &tempfile::NamedTempFile) -> FileReader {
        let open = OpenModelFile { path: file.path().to_owned(), file: file.reopen().unwrap() };
        FileReader { direct: reopen_direct(&open.file), open }
    }

    fn part(offset: usize, bytes: usize) -> (TensorSource, FilePart) {
        let source =
            TensorSource { name: "t".to_owned(), file: 0, offset: offset as u64, bytes: bytes as u64 };
        (source, FilePart { tensor: 0, start: 0, bytes, file: 0, offset: offset as u64 })
    }

    /// Like a staging slot: starts on a page, with room for both edges.
    fn memory() -> (Vec<u8>, usize) {
        let memory = vec![0; LENGTH + 3 * EDGE_BYTES];
        let skip = memory.as_ptr().align_offset(EDGE_BYTES);
        (memory, skip)
    }

    #[test]
    fn cached_and_uncached_reads_equal_the_file() {
        let file = on_disk();
        let reader = reader(&file);
        if reader.direct.is_none() {
            println!("SKIPPED: this file system has no direct reads");
        }
        for (offset, bytes) in [(0, LENGTH), (100, 32), (4095, 2), (4096, 4096), (5000, LENGTH - 5000)] {
            for cached in [true, false] {
                if !cached {
                    fadvise(&reader.open.file, 0, None, Advice::DontNeed).unwrap();
                }
                let (mut memory, skip) = memory();
                let (source, part) = part(offset, bytes);
                let at = reader.read(&source, &part, &mut memory[skip..]).unwrap();
                let found = &memory[skip + at..skip + at + bytes];
                assert!(found == &contents()[offset..offset + bytes], "{bytes} at {offset}, cached {cached}");
            }
        }
    }

    #[test]
    fn truncated_file_names_the_tensor() {
        let file = on_disk();
        let reader = reader(&file);
        fadvise(&reader.open.file, 0, None, Advice::DontNeed).unwrap();
        let (mut memory, skip) = memory();
        let (source, part) = part(LENGTH - 10, 11);
        let error = reader.read(&source, &part, &mut memory[skip..]).unwrap_err();
        assert!(matches!(&error, TensorReadError::Truncated { tensor, .. } if tensor == "t"), "{error}");
    }
}
