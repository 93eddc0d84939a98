// SPDX-License-Identifier: Apache-2.0

//! Whether a process listens on a Unix socket.

use std::io;
use std::path::Path;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// Connects and disconnects. Never waits: connect(2) on a blocking socket would, for as long as the
/// listener's queue is full, and a stopped process never empties its queue.
pub(crate) fn probe_listener(path: &Path) -> io::Result<()> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match connect(&socket, &address) {
        // EAGAIN: the queue is full, and its listener is there.
        Ok(()) | Err(Errno::AGAIN) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}
