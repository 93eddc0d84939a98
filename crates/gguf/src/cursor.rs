// SPDX-License-Identifier: Apache-2.0

//! Reads bytes in order and checks every length first: from a file, or from a slice in memory.

use crate::limits::{MAX_HEADER_BYTES, READ_AHEAD_BYTES};
use std::io::{self, Read};

/// Why the next bytes of a header could not be read.
#[derive(Debug, thiserror::Error)]
pub enum HeaderReadError {
    #[error(
        "{needed} bytes are needed at byte {offset}, but only {remaining} are left: the file is cut off or damaged"
    )]
    Truncated { offset: u64, needed: u64, remaining: u64 },
    #[error("the header is longer than {MAX_HEADER_BYTES} bytes (still incomplete at byte {offset})")]
    HeaderTooLong { offset: u64 },
    #[error("cannot read at byte {offset}")]
    Io { offset: u64, source: io::Error },
}

/// A source of bytes that is read in order. `take` checks the length before it allocates anything.
pub(crate) trait Cursor {
    fn offset(&self) -> u64;
    fn remaining(&self) -> u64;
    fn take(&mut self, len: u64) -> Result<&[u8], HeaderReadError>;

    fn u32(&mut self) -> Result<u32, HeaderReadError> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, HeaderReadError> {
        self.array().map(u64::from_le_bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], HeaderReadError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64)?);
        Ok(array)
    }
}

/// A cursor over bytes in memory.
pub(crate) struct SliceCursor<'a> {
    bytes: &'a [u8],
    offset: usize,
}

impl<'a> SliceCursor<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, offset: 0 }
    }
}

impl Cursor for SliceCursor<'_> {
    fn offset(&self) -> u64 {
        self.offset as u64
    }

    fn remaining(&self) -> u64 {
        (self.bytes.len() - self.offset) as u64
    }

    fn take(&mut self, len: u64) -> Result<&[u8], HeaderReadError> {
        let remaining = self.remaining();
        if len > remaining {
            return Err(HeaderReadError::Truncated { offset: self.offset as u64, needed: len, remaining });
        }
        let start = self.offset;
        self.offset += len as usize;
        Ok(&self.bytes[start..self.offset])
    }
}

/// A cursor over a file. It keeps all bytes that it has read.
pub(crate) struct FileCursor<R> {
    source: R,
    file_len: u64,
    buffer: Vec<u8>,
    offset: usize,
}

impl<R: Read> FileCursor<R> {
    pub(crate) fn new(source: R, file_len: u64) -> Self {
        Self { source, file_len, buffer: Vec::new(), offset: 0 }
    }

    /// Returns all bytes up to the cursor's position.
    pub(crate) fn into_bytes(mut self) -> Vec<u8> {
        self.buffer.truncate(self.offset);
        self.buffer
    }

    /// Reads until `end` bytes are buffered. `end` is within the file and within
    /// [`MAX_HEADER_BYTES`].
    fn fill(&mut self, end: usize) -> Result<(), HeaderReadError> {
        let ahead = end.max(self.buffer.len() + READ_AHEAD_BYTES).min(self.file_len as usize);
        let start = self.buffer.len();
        let read = self.source.by_ref().take((ahead - start) as u64).read_to_end(&mut self.buffer);
        read.map_err(|source| HeaderReadError::Io { offset: start as u64, source })?;
        if self.buffer.len() < end {
            // The file has become shorter since its length was read.
            let remaining = (self.buffer.len() - self.offset) as u64;
            let needed = (end - self.offset) as u64;
            return Err(HeaderReadError::Truncated { offset: self.offset as u64, needed, remaining });
        }
        Ok(())
    }
}

impl<R: Read> Cursor for FileCursor<R> {
    fn offset(&self) -> u64 {
        self.offset as u64
    }

    fn remaining(&self) -> u64 {
        self.file_len - self.offset as u64
    }

    fn take(&mut self, len: u64) -> Result<&[u8], HeaderReadError> {
        let (offset, remaining) = (self.offset(), self.remaining());
        if len > remaining {
            return Err(HeaderReadError::Truncated { offset, needed: len, remaining });
        }
        // This cannot overflow: the sum is at most the file's length.
        if offset + len > MAX_HEADER_BYTES {
            return Err(HeaderReadError::HeaderTooLong { offset });
        }
        let start = self.offset;
        let end = start + len as usize;
        if end > self.buffer.len() {
            self.fill(end)?;
        }
        self.offset = end;
        Ok(&self.buffer[start..end])
    }
}
