// SPDX-License-Identifier: Apache-2.0

//! Turns a file descriptor number from an environment variable into an `OwnedFd` without `unsafe`.
//!
//! `OwnedFd::from_raw_fd` is unsafe because any number can be passed. Here the kernel checks the
//! number: this process sends it to itself as SCM_RIGHTS, which fails with EBADF if the number is
//! not open. The received descriptor is new, close-on-exec, and refers to the same open file. Then
//! the inherited number is closed.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixDatagram;

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

/// Takes the descriptor with this number and closes the number. Call once per number, before other
/// threads can open a file that gets the same number.
pub(crate) fn take_fd(number: RawFd) -> io::Result<OwnedFd> {
    let (ours, theirs) = UnixDatagram::pair()?;
    let payload = [IoSlice::new(b"f")];
    sendmsg::<()>(
        ours.as_raw_fd(),
        &payload,
        &[ControlMessage::ScmRights(&[number])],
        MsgFlags::empty(),
        None,
    )?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0u8; 1];
    recvmsg(&theirs, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let owned = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    // Without a descriptor in the message, this process's table is full: the kernel drops what it
    // cannot install.
    let owned = owned.ok_or(rustix::io::Errno::MFILE)?;
    nix::unistd::close(number)?;
    Ok(owned)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek, Write};
    use std::os::fd::IntoRawFd;

    use super::*;

    #[test]
    fn a_taken_descriptor_is_the_same_open_file() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"ballast").unwrap();
        let number = file.into_raw_fd();
        let mut taken = std::fs::File::from(take_fd(number).unwrap());
        // The shared offset shows that it is the same open file description.
        assert_eq!(taken.stream_position().unwrap(), 7);
        taken.rewind().unwrap();
        let mut text = String::new();
        taken.read_to_string(&mut text).unwrap();
        assert_eq!(text, "ballast");
    }

    #[test]
    fn a_number_that_is_not_open_is_refused() {
        let error = take_fd(1_000_000).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::BADF.raw_os_error()));
    }
}
