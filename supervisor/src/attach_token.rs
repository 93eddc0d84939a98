// SPDX-License-Identifier: Apache-2.0

//! Attach tokens: 256 random bits per worker start. The supervisor registers the token with the
//! weight-server and passes it to the worker in a pipe.

use std::io::{self, Write};
use std::os::fd::OwnedFd;

pub(crate) const TOKEN_BYTES: usize = 32;

/// `Debug` hides the bytes, so a token cannot reach a log.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct AttachToken([u8; TOKEN_BYTES]);

impl std::fmt::Debug for AttachToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("AttachToken")
    }
}

impl AttachToken {
    pub(crate) fn generate() -> io::Result<Self> {
        let mut bytes = [0u8; TOKEN_BYTES];
        io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, &mut bytes)?;
        Ok(Self(bytes))
    }

    /// The token that an adopted worker shows, as hexadecimal digits.
    pub(crate) fn from_hex(text: &str) -> Option<Self> {
        let mut bytes = [0; TOKEN_BYTES];
        if text.len() != 2 * TOKEN_BYTES || !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return None;
        }
        for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
        }
        Some(Self(bytes))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_is_read_from_its_digits_only() {
        let digits = "0f".repeat(TOKEN_BYTES);
        assert!(AttachToken::from_hex(&digits) == Some(AttachToken([15; TOKEN_BYTES])));
        for wrong in
            ["", &digits[1..], &format!("{digits}00"), &digits.replace("0f", "+f"), &"\u{e9}".repeat(32)]
        {
            assert!(AttachToken::from_hex(wrong).is_none(), "{wrong}");
        }
        assert_eq!(format!("{:?}", AttachToken([7; TOKEN_BYTES])), "AttachToken");
    }
}
