//! Reads parts of a file into memory that a device copies from: out of the page cache what is there, around it what is not.
//!
//! A read around the page cache (O_DIRECT) spares the copy and the cache's other contents, but wants whole blocks at whole
//! blocks' addresses. So bytes land in the memory where they stand in their block, and up to a block before and after them is
//! read along. File systems without such reads (tmpfs) are read as usual.

use std::fs::{File, OpenOptions};
use std::io::{self, IoSliceMut};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use nix::libc;
use rustix::io::{Errno, ReadWriteFlags, preadv2};

use super::file_parts::FilePart;
use super::host_reader::{OpenModelFile, TensorReadError, TensorSource, read_exact};

/// Every drive's blocks are divisors of it, and so are pages.
pub(super) const EDGE_BYTES: usize = 4096;

/// The same open file with O_DIRECT; none where that cannot be had. Needs /proc, so before the sandbox.
pub(super) fn reopen_direct(file: &File) -> Option<File> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path).ok()
}

pub(super) struct FileReader {
    pub(super) open: OpenModelFile,
    pub(super) direct: Option<File>,
}

impl FileReader {
    /// Reads a part into `memory`, whose address is a multiple of `EDGE_BYTES` and which has room for an edge before and
    /// after it; returns where the part starts.
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
        // Also where a direct read was refused or ended early: this one says why.
        read_exact(&self.open, source, &mut memory[at..end], part.offset)?;
        Ok(at)
    }
}

/// Whether the file's byte can be had without the drive. Asked of a part's first byte, it is believed for all of it.
fn is_cached(file: &File, offset: u64) -> bool {
    let mut byte = [0];
    let read = preadv2(file, &mut [IoSliceMut::new(&mut byte)], offset, ReadWriteFlags::NOWAIT);
    !matches!(read, Err(Errno::AGAIN))
}

/// Reads whole blocks until `needed` bytes are there; false if that cannot be done.
fn read_blocks(direct: &File, memory: &mut [u8], offset: u64, needed: usize) -> bool {
    let mut done = 0;
    while done < needed {
        // A read that ends inside of a block has met the end of the file; the next one is refused as unaligned.
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

    /// Beside this executable: the system's temporary folder may be without direct reads.
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

    /// As a slot is: starts on a page, with room for both edges.
    fn memory() -> (Vec<u8>, usize) {
        let memory = vec![0; LENGTH + 3 * EDGE_BYTES];
        let skip = memory.as_ptr().align_offset(EDGE_BYTES);
        (memory, skip)
    }

    #[test]
    fn bytes_are_the_files_in_the_cache_and_out_of_it() {
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
    fn cut_off_file_names_the_tensor() {
        let file = on_disk();
        let reader = reader(&file);
        fadvise(&reader.open.file, 0, None, Advice::DontNeed).unwrap();
        let (mut memory, skip) = memory();
        let (source, part) = part(LENGTH - 10, 11);
        let error = reader.read(&source, &part, &mut memory[skip..]).unwrap_err();
        assert!(matches!(&error, TensorReadError::Truncated { tensor, .. } if tensor == "t"), "{error}");
    }
}
