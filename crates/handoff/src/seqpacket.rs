// SPDX-License-Identifier: Apache-2.0

//! [`Connection`] and [`Listener`]: Unix SOCK_SEQPACKET sockets that carry one protobuf message in
//! each packet.
//!
//! Workers and loaders use blocking connections with timeouts. The weight-server uses non-blocking
//! ones, which return [`FrameError::NotReady`] when there is nothing to read or no room to write. A
//! receive returns the descriptors that came beside a frame; the caller decides whether the
//! protocol allows them there.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, accept4, bind, connect, getsockopt, listen, socket,
    socketpair, sockopt,
};
use prost::Message;

use crate::fd_passing::{ReceiveError, Sender, recv_with_fds, send_with_fds};

/// Largest frame: far above every frame in use, since the manifest travels as a descriptor, and far
/// below the socket buffer.
pub const MAX_FRAME_BYTES: usize = 64 * 1024;

/// `sun_path` has 108 bytes and ends with a zero.
pub const MAX_SOCKET_PATH_BYTES: usize = 107;

/// Connections that may wait to be accepted, as when many workers start at once.
const LISTEN_BACKLOG: i32 = 64;

#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    #[error(
        "socket path {path} has {} bytes, the system takes at most {MAX_SOCKET_PATH_BYTES}: choose a shorter runtime directory",
        path.as_os_str().len()
    )]
    PathTooLong { path: PathBuf },
    #[error("socket {path} is in use: another process serves it")]
    InUse { path: PathBuf },
    #[error("no process serves socket {path}")]
    NotServed { path: PathBuf, source: io::Error },
    #[error("cannot {action} socket {path}")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
}

#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    #[error("the peer closed the connection")]
    Closed,
    /// There is nothing to read or no room to write: the timeout has passed, or the socket is
    /// non-blocking.
    #[error("the peer did not answer in time")]
    NotReady,
    #[error("a frame is not a message of this protocol")]
    Malformed(#[from] prost::DecodeError),
    #[error("a frame of {bytes} bytes exceeds the limit of {MAX_FRAME_BYTES}")]
    TooLong { bytes: usize },
    #[error(transparent)]
    Receive(ReceiveError),
    #[error("sending a frame failed")]
    Send(#[source] io::Error),
}

/// One end of a connection.
#[derive(Debug)]
pub struct Connection {
    /// A seqpacket socket. std has no type for it; its datagram type makes the same system calls.
    socket: UnixDatagram,
}

impl Connection {
    pub fn connect(path: &Path) -> Result<Self, SocketError> {
        let address = address(path)?;
        let failed =
            |action| move |errno| SocketError::Io { action, path: path.to_owned(), source: io_error(errno) };
        let fd = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)
            .map_err(failed("create"))?;
        match connect(fd.as_raw_fd(), &address) {
            Ok(()) => Ok(Self::from(fd)),
            Err(errno @ (Errno::ECONNREFUSED | Errno::ENOENT)) => {
                Err(SocketError::NotServed { path: path.to_owned(), source: io_error(errno) })
            }
            Err(errno) => Err(failed("connect to")(errno)),
        }
    }

    pub fn pair() -> io::Result<(Self, Self)> {
        let (left, right) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
        Ok((Self::from(left), Self::from(right)))
    }

    /// Bounds every later wait. `None` removes a bound.
    pub fn set_timeouts(&self, receive: Option<Duration>, send: Option<Duration>) -> io::Result<()> {
        self.socket.set_read_timeout(receive)?;
        self.socket.set_write_timeout(send)
    }

    pub fn set_nonblocking(&self) -> io::Result<()> {
        self.socket.set_nonblocking(true)
    }

    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { socket: self.socket.try_clone()? })
    }

    /// Ends the connection in both directions. A thread that waits in `receive` returns.
    pub fn shutdown(&self) {
        // Only fails on a connection that is closed already.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
    }

    /// The process that connected, or that called listen, as of that time.
    pub fn peer(&self) -> io::Result<Sender> {
        let credentials = getsockopt(&self.socket, sockopt::PeerCredentials)?;
        Ok(Sender { pid: credentials.pid(), uid: credentials.uid(), gid: credentials.gid() })
    }

    pub fn send(&self, frame: &impl Message, fds: &[BorrowedFd<'_>]) -> Result<(), FrameError> {
        let bytes = frame.encode_to_vec();
        // An empty packet reads like the end of the connection.
        if bytes.is_empty() || bytes.len() > MAX_FRAME_BYTES {
            return Err(FrameError::TooLong { bytes: bytes.len() });
        }
        send_with_fds(&self.socket, &bytes, fds).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => FrameError::NotReady,
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::NotConnected => {
                FrameError::Closed
            }
            _ => FrameError::Send(error),
        })
    }

    pub fn receive<M: Message + Default>(&self) -> Result<(M, Vec<OwnedFd>), FrameError> {
        let mut buffer = vec![0; MAX_FRAME_BYTES];
        let received = loop {
            match recv_with_fds(&self.socket, &mut buffer) {
                Ok(received) => break received,
                Err(ReceiveError::Io(error)) => match error.kind() {
                    io::ErrorKind::Interrupted => {}
                    io::ErrorKind::WouldBlock => return Err(FrameError::NotReady),
                    io::ErrorKind::ConnectionReset => return Err(FrameError::Closed),
                    _ => return Err(FrameError::Receive(ReceiveError::Io(error))),
                },
                Err(error) => return Err(FrameError::Receive(error)),
            }
        };
        match received.bytes {
            0 => Err(FrameError::Closed),
            bytes => Ok((M::decode(&buffer[..bytes])?, received.fds)),
        }
    }
}

impl From<OwnedFd> for Connection {
    fn from(fd: OwnedFd) -> Self {
        Self { socket: UnixDatagram::from(fd) }
    }
}

impl From<Connection> for OwnedFd {
    fn from(connection: Connection) -> Self {
        connection.socket.into()
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl AsRawFd for Connection {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

/// A bound, non-blocking socket. Dropping it removes its path, unless a successor has bound the
/// path meanwhile.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
    path: PathBuf,
    inode: u64,
}

impl Listener {
    /// Binds `path`, and replaces the socket of a server that has died. The caller's lock on the
    /// runtime directory, not this function, keeps two processes apart that start at once.
    pub fn bind(path: &Path) -> Result<Self, SocketError> {
        let address = address(path)?;
        match Connection::connect(path) {
            Ok(_) => return Err(SocketError::InUse { path: path.to_owned() }),
            Err(SocketError::NotServed { .. }) => {}
            Err(error) => return Err(error),
        }
        let failed = |action| move |source| SocketError::Io { action, path: path.to_owned(), source };
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed("replace")(error)),
            _ => {}
        }
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let fd = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)
            .map_err(|errno| failed("create")(io_error(errno)))?;
        bind(fd.as_raw_fd(), &address).map_err(|errno| failed("bind")(io_error(errno)))?;
        let backlog = Backlog::new(LISTEN_BACKLOG).unwrap_or(Backlog::MAXALLOWABLE);
        listen(&fd, backlog).map_err(|errno| failed("listen on")(io_error(errno)))?;
        let inode = inode(path).map_err(failed("inspect"))?;
        Ok(Self { fd, path: path.to_owned(), inode })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn is_deleted(&self) -> bool {
        inode(&self.path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
    }

    /// Accepts the next connection, which is a blocking one. `accept` itself never blocks.
    pub fn accept(&self) -> io::Result<Connection> {
        let raw = accept4(self.fd.as_raw_fd(), SockFlag::SOCK_CLOEXEC)?;
        // SAFETY: accept4 has just returned this descriptor and nothing else knows its number.
        Ok(Connection::from(unsafe { <OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(raw) }))
    }
}

impl AsRawFd for Listener {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if inode(&self.path).is_ok_and(|inode| inode == self.inode) {
            // If the path stays, the next `bind` replaces it.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn inode(path: &Path) -> io::Result<u64> {
    std::fs::symlink_metadata(path).map(|metadata| metadata.ino())
}

fn address(path: &Path) -> Result<UnixAddr, SocketError> {
    let too_long = || SocketError::PathTooLong { path: path.to_owned() };
    if path.as_os_str().as_bytes().len() > MAX_SOCKET_PATH_BYTES {
        return Err(too_long());
    }
    UnixAddr::new(path).map_err(|errno| match errno {
        Errno::ENAMETOOLONG => too_long(),
        errno => SocketError::Io { action: "name", path: path.to_owned(), source: io_error(errno) },
    })
}

fn io_error(errno: Errno) -> io::Error {
    errno.into()
}

#[cfg(test)]
mod tests {
    use proto::weights::v1::{AttachRefused, FdBatch};

    use super::*;

    #[test]
    fn each_frame_arrives_with_its_own_descriptors() {
        let (left, right) = Connection::pair().unwrap();
        for batch in 1..4 {
            let frame = FdBatch { batch, first: 0, count: batch };
            left.send(&frame, &vec![left.as_fd(); batch as usize]).unwrap();
        }
        for batch in 1..4 {
            let (frame, fds) = right.receive::<FdBatch>().unwrap();
            assert_eq!((frame.batch, fds.len()), (batch, batch as usize));
        }
    }

    #[test]
    fn sender_refuses_oversized_and_empty_frames() {
        let (left, _right) = Connection::pair().unwrap();
        let text = "x".repeat(MAX_FRAME_BYTES);
        let error = left.send(&AttachRefused { reason: 1, text }, &[]).unwrap_err();
        assert!(matches!(error, FrameError::TooLong { .. }));
        assert!(left.send(&FdBatch::default(), &[]).is_err());
    }

    #[test]
    fn timeout_returns_not_ready_and_a_closed_peer_returns_closed() {
        let (left, right) = Connection::pair().unwrap();
        left.set_timeouts(Some(Duration::from_millis(20)), None).unwrap();
        assert!(matches!(left.receive::<FdBatch>(), Err(FrameError::NotReady)));
        drop(right);
        assert!(matches!(left.receive::<FdBatch>(), Err(FrameError::Closed)));
        let frame = FdBatch { batch: 1, first: 0, count: 1 };
        assert!(matches!(left.send(&frame, &[]), Err(FrameError::Closed)));
    }

    #[test]
    fn send_to_a_peer_that_stops_reading_returns_not_ready() {
        let (left, _right) = Connection::pair().unwrap();
        left.set_timeouts(None, Some(Duration::from_millis(20))).unwrap();
        let frame = AttachRefused { reason: 1, text: "x".repeat(MAX_FRAME_BYTES / 2) };
        let error = (0..1000).find_map(|_| left.send(&frame, &[]).err()).unwrap();
        assert!(matches!(error, FrameError::NotReady));
    }

    #[test]
    fn too_long_path_is_an_error_that_names_the_limit() {
        let path = PathBuf::from(format!("/tmp/{}", "x".repeat(MAX_SOCKET_PATH_BYTES)));
        for error in [Listener::bind(&path).unwrap_err(), Connection::connect(&path).unwrap_err()] {
            let text = error.to_string();
            assert!(text.contains("112 bytes") && text.contains("107"), "{text}");
        }
    }

    #[test]
    fn listener_replaces_a_dead_socket_but_not_a_served_one() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("weights.sock");
        std::fs::write(&path, "").unwrap();
        let listener = Listener::bind(&path).unwrap();
        assert!(matches!(Listener::bind(&path), Err(SocketError::InUse { .. })));
        let client = Connection::connect(&path).unwrap();
        assert_eq!(client.peer().unwrap().pid, std::process::id() as i32);
        drop(listener);
        assert!(!path.exists());
        assert!(matches!(Connection::connect(&path), Err(SocketError::NotServed { .. })));
    }
}
