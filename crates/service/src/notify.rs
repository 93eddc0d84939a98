//! The child's side of systemd's notify protocol (sd_notify(3)). The same code talks to systemd and to our supervisor.
//!
//! Without `NOTIFY_SOCKET` every call does nothing and succeeds: a process runs the same by hand. Each message is one
//! datagram sent to the path, never over a connected socket, so a successor that binds the path again gets the next one.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::net::UnixDatagram;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::socket::{ControlMessage, MsgFlags, UnixAddr, sendmsg};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::env;
use crate::exit::{Exit, HasExit};

/// SCM_RIGHTS takes at most 253 descriptors in a message (unix(7)).
pub const FDS_PER_MESSAGE_MAX: usize = 253;
/// FDNAME is at most 255 ASCII characters without colon or control character (sd_notify(3)).
pub const FD_NAME_BYTES_MAX: usize = 255;
/// A parent that does not read its queue for this long is stuck; the child goes on without it.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum NotifyError {
    #[error("NOTIFY_SOCKET={path:?} is neither an absolute path nor an abstract name")]
    Address { path: String },
    #[error("cannot open a datagram socket for notifications")]
    Socket(#[source] io::Error),
    #[error("cannot send {message:?} to NOTIFY_SOCKET {path}")]
    Send { message: String, path: String, source: io::Error },
    #[error(
        "{name:?} cannot name a stored descriptor: 1 to {FD_NAME_BYTES_MAX} printable ASCII characters without ':'"
    )]
    FdName { name: String },
    #[error("{fds} descriptors in one message, more than {FDS_PER_MESSAGE_MAX}")]
    TooManyFds { fds: usize },
    #[error("the parent has not worked off earlier messages within {waited:?}")]
    BarrierTimeout { waited: Duration },
    #[error("cannot wait for the parent to work off earlier messages")]
    Barrier(#[source] io::Error),
}

impl HasExit for NotifyError {
    fn exit(&self) -> Exit {
        match self {
            NotifyError::Address { .. } | NotifyError::FdName { .. } => Exit::Usage,
            NotifyError::TooManyFds { .. } | NotifyError::Socket(_) => Exit::OutOfResources,
            _ => Exit::PeerLost,
        }
    }
}

/// Sends notifications to whoever started this process. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Notify {
    parent: Option<Arc<NotifyParent>>,
}

#[derive(Debug)]
struct NotifyParent {
    socket: UnixDatagram,
    address: UnixAddr,
    path: String,
    /// The last status text, for a successor that has not heard it.
    status: Mutex<Option<String>>,
}

impl Notify {
    /// Talks to the socket that `NOTIFY_SOCKET` names; to nobody if it is not set.
    pub fn from_env() -> Result<Self, NotifyError> {
        match std::env::var(env::NOTIFY_SOCKET) {
            Ok(path) if !path.is_empty() => Self::to_socket(&path),
            _ => Ok(Self::disabled()),
        }
    }

    /// Talks to nobody: every call succeeds.
    pub fn disabled() -> Self {
        Self { parent: None }
    }

    /// Talks to this socket: an absolute path, or `@name` for an abstract one.
    pub fn to_socket(path: &str) -> Result<Self, NotifyError> {
        let address = match path.as_bytes() {
            [b'/', ..] => UnixAddr::new(path),
            [b'@', name @ ..] => UnixAddr::new_abstract(name),
            _ => Err(nix::Error::EINVAL),
        };
        let address = address.map_err(|_| NotifyError::Address { path: path.to_owned() })?;
        let socket = UnixDatagram::unbound().map_err(NotifyError::Socket)?;
        socket.set_write_timeout(Some(SEND_TIMEOUT)).map_err(NotifyError::Socket)?;
        let path = path.to_owned();
        Ok(Self { parent: Some(Arc::new(NotifyParent { socket, address, path, status: Mutex::default() })) })
    }

    /// Whether anybody listens: without a parent there is no vault either.
    pub fn has_parent(&self) -> bool {
        self.parent.is_some()
    }

    /// The sockets are bound: clients may connect.
    pub fn ready(&self) -> Result<(), NotifyError> {
        self.send("READY=1", &[])
    }

    /// One line for `ballast ps` and `systemctl status`.
    pub fn status(&self, text: &str) -> Result<(), NotifyError> {
        let message = format!("STATUS={}", text.replace('\n', " "));
        if let Some(parent) = &self.parent {
            *parent.status.lock().unwrap_or_else(PoisonError::into_inner) = Some(message.clone());
        }
        self.send(&message, &[])
    }

    /// Says the last status once more, to a parent that is new.
    pub(crate) fn repeat_status(&self) -> Result<(), NotifyError> {
        let Some(parent) = &self.parent else { return Ok(()) };
        let message = parent.status.lock().unwrap_or_else(PoisonError::into_inner).clone();
        message.map_or(Ok(()), |message| self.send(&message, &[]))
    }

    /// The drain has begun. A parent that is gone need not be told: its death may be the reason.
    pub fn stopping(&self) -> Result<(), NotifyError> {
        match self.send("STOPPING=1", &[]) {
            Err(NotifyError::Send { source, .. })
                if matches!(source.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound) =>
            {
                Ok(())
            }
            sent => sent,
        }
    }

    /// A reload has begun; [`Notify::ready`] ends it. systemd wants the time with it since v253.
    pub fn reloading(&self) -> Result<(), NotifyError> {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let usec = now.tv_sec * 1_000_000 + now.tv_nsec / 1_000;
        self.send(&format!("RELOADING=1\nMONOTONIC_USEC={usec}"), &[])
    }

    pub fn watchdog(&self) -> Result<(), NotifyError> {
        self.send("WATCHDOG=1", &[])
    }

    /// Asks for this much more time from now to become ready or to stop.
    pub fn extend_timeout(&self, by: Duration) -> Result<(), NotifyError> {
        self.send(&format!("EXTEND_TIMEOUT_USEC={}", by.as_micros()), &[])
    }

    /// Puts descriptors into the vault under one name. Queued only: [`Notify::barrier`] says when they are safe.
    pub fn fdstore(&self, name: &str, fds: &[BorrowedFd<'_>]) -> Result<(), NotifyError> {
        check_fd_name(name)?;
        let numbers: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        // FDPOLL=0: a device file may report an error condition and is to be kept nevertheless.
        self.send(&format!("FDSTORE=1\nFDNAME={name}\nFDPOLL=0"), &numbers)
    }

    /// Removes everything that the vault keeps under this name.
    pub fn fdstore_remove(&self, name: &str) -> Result<(), NotifyError> {
        check_fd_name(name)?;
        self.send(&format!("FDSTOREREMOVE=1\nFDNAME={name}"), &[])
    }

    /// Returns once the parent has worked off everything sent before. Blocks: not for an async task.
    pub fn barrier(&self, timeout: Duration) -> Result<(), NotifyError> {
        if self.parent.is_none() {
            return Ok(());
        }
        let (ours, theirs) = io::pipe().map_err(NotifyError::Barrier)?;
        self.send("BARRIER=1", &[theirs.as_raw_fd()])?;
        drop(theirs);
        // The parent closes its copy when it comes to this message: end of file on ours.
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let timespec =
                Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
            let mut fds = [PollFd::from_borrowed_fd(ours.as_fd(), PollFlags::empty())];
            match poll(&mut fds, Some(&timespec)) {
                Ok(0) => return Err(NotifyError::BarrierTimeout { waited: timeout }),
                Ok(_) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(NotifyError::Barrier(errno.into())),
            }
        }
    }

    /// One datagram with descriptors; `supervision` sends its own kind through this.
    pub(crate) fn send(&self, message: &str, fds: &[RawFd]) -> Result<(), NotifyError> {
        let Some(parent) = &self.parent else { return Ok(()) };
        if fds.len() > FDS_PER_MESSAGE_MAX {
            return Err(NotifyError::TooManyFds { fds: fds.len() });
        }
        let rights = [ControlMessage::ScmRights(fds)];
        let control = if fds.is_empty() { &[][..] } else { &rights[..] };
        let payload = [IoSlice::new(message.as_bytes())];
        loop {
            match sendmsg(
                parent.socket.as_raw_fd(),
                &payload,
                control,
                MsgFlags::MSG_NOSIGNAL,
                Some(&parent.address),
            ) {
                Ok(_) => return Ok(()),
                Err(nix::Error::EINTR) => {}
                Err(errno) => {
                    return Err(NotifyError::Send {
                        message: message.replace('\n', " "),
                        path: parent.path.clone(),
                        source: errno.into(),
                    });
                }
            }
        }
    }
}

fn check_fd_name(name: &str) -> Result<(), NotifyError> {
    let allowed = |b: u8| (b.is_ascii_graphic() || b == b' ') && b != b':';
    if name.is_empty() || name.len() > FD_NAME_BYTES_MAX || !name.bytes().all(allowed) {
        return Err(NotifyError::FdName { name: name.to_owned() });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parent() -> (tempfile::TempDir, UnixDatagram, Notify) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify.sock");
        let socket = UnixDatagram::bind(&path).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let notify = Notify::to_socket(path.to_str().unwrap()).unwrap();
        (directory, socket, notify)
    }

    fn next(socket: &UnixDatagram) -> String {
        let mut buffer = [0u8; 4096];
        let bytes = socket.recv(&mut buffer).unwrap();
        String::from_utf8(buffer[..bytes].to_vec()).unwrap()
    }

    #[test]
    fn messages_are_those_of_sd_notify() {
        let (_directory, socket, notify) = parent();
        notify.ready().unwrap();
        notify.status("loading\n3 of 4").unwrap();
        notify.extend_timeout(Duration::from_millis(1500)).unwrap();
        notify.reloading().unwrap();
        notify.fdstore_remove("manifest").unwrap();
        assert_eq!(next(&socket), "READY=1");
        assert_eq!(next(&socket), "STATUS=loading 3 of 4");
        assert_eq!(next(&socket), "EXTEND_TIMEOUT_USEC=1500000");
        assert!(next(&socket).starts_with("RELOADING=1\nMONOTONIC_USEC="));
        assert_eq!(next(&socket), "FDSTOREREMOVE=1\nFDNAME=manifest");
    }

    #[test]
    fn without_a_parent_everything_succeeds() {
        let notify = Notify::disabled();
        notify.ready().unwrap();
        notify.barrier(Duration::ZERO).unwrap();
    }

    #[test]
    fn a_barrier_waits_until_the_parent_has_read_it() {
        let (_directory, socket, notify) = parent();
        let early = notify.barrier(Duration::from_millis(20));
        assert!(matches!(early, Err(NotifyError::BarrierTimeout { .. })), "{early:?}");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // A plain receive closes the descriptor that came along, as a parent does.
                assert_eq!(next(&socket), "BARRIER=1");
                assert_eq!(next(&socket), "BARRIER=1");
            });
            notify.barrier(Duration::from_secs(5)).unwrap();
        });
    }

    #[test]
    fn names_that_would_break_the_protocol_are_refused() {
        let (_directory, _socket, notify) = parent();
        for name in ["", "a:b", "a\nFDSTORE=1", &"x".repeat(256)] {
            assert!(matches!(notify.fdstore(name, &[]), Err(NotifyError::FdName { .. })), "{name:?}");
        }
    }

    #[test]
    fn a_dead_parent_is_an_error_and_not_a_signal() {
        let (directory, socket, notify) = parent();
        drop(socket);
        assert!(matches!(notify.ready(), Err(NotifyError::Send { .. })));
        notify.stopping().unwrap();
        drop(directory);
        notify.stopping().unwrap();
    }
}
