//! Attach tokens: 256 random bits per worker start, told to the weight-server and left in a pipe for the worker.

use std::io::{self, Write};
use std::os::fd::OwnedFd;

pub(crate) const TOKEN_BYTES: usize = 32;

/// Not printable on purpose: it must not end up in a log.
#[derive(Clone)]
pub(crate) struct AttachToken([u8; TOKEN_BYTES]);

impl AttachToken {
    pub(crate) fn draw() -> io::Result<Self> {
        let mut bytes = [0u8; TOKEN_BYTES];
        io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, &mut bytes)?;
        Ok(Self(bytes))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// The reading end of a pipe that holds the token and nothing else.
    pub(crate) fn into_pipe(self) -> io::Result<OwnedFd> {
        let (reader, mut writer) = io::pipe()?;
        // 32 bytes never block: a pipe holds at least a page.
        writer.write_all(&self.0)?;
        Ok(reader.into())
    }
}
