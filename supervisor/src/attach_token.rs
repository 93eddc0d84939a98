// SPDX-License-Identifier: Apache-2.0

//! Attach tokens: 256 random bits per worker start. The supervisor registers the token with the
//! weight-server and passes it to the worker in a pipe.

use std::io::{self, Write};
use std::os::fd::OwnedFd;

pub(crate) const TOKEN_BYTES: usize = 32;

/// Has no `Debug` or `Display`, so a token cannot reach a log.
#[derive(Clone)]
pub(crate) struct AttachToken([u8; TOKEN_BYTES]);

impl AttachToken {
    pub(crate) fn generate() -> io::Result<Self> {
        let mut bytes = [0u8; TOKEN_BYTES];
        io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, &mut bytes)?;
        Ok(Self(bytes))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// The read end of a pipe that holds the token and nothing else.
    pub(crate) fn into_pipe(self) -> io::Result<OwnedFd> {
        let (reader, mut writer) = io::pipe()?;
        // Writing 32 bytes never blocks: a pipe holds at least a page.
        writer.write_all(&self.0)?;
        Ok(reader.into())
    }
}
