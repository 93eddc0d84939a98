// SPDX-License-Identifier: Apache-2.0

//! The child's side of systemd's notify protocol (sd_notify(3)). The same code talks to systemd and
//! to our supervisor.
//!
//! Without `NOTIFY_SOCKET` every call succeeds and does nothing, so that a process also runs by
//! hand. Each message is one datagram to the path instead of a connected socket. A successor that
//! binds the path therefore gets the next message.
//!
//! The kernel queues some datagrams (net.unix.max_dgram_qlen, often 10). If the parent is stopped,
//! the queue becomes full. Messages then wait in an outbox, and the caller goes on; only messages
//! with descriptors, and barriers, wait for the parent.

mod outbox;

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::net::UnixDatagram;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::socket::{ControlMessage, MsgFlags, UnixAddr, sendmsg};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::env;
use crate::exit::{Exit, HasExit};
use outbox::Outbox;

/// SCM_RIGHTS takes at most 253 descriptors in a message (unix(7)).
pub const FDS_PER_MESSAGE_MAX: usize = 253;
/// FDNAME is at most 255 ASCII characters without colon or control character (sd_notify(3)).
pub const FD_NAME_BYTES_MAX: usize = 255;
/// A parent that does not read its queue for this long is stuck. The child continues without it.
/// Applies to messages with descriptors.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);
/// How often a barrier looks for room in the parent's queue.
const QUEUE_POLL_INTERVAL: Duration = Duration::from_millis(5);

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
    #[error("the parent does not read its notifications")]
    FullQueue,
    #[error("the parent has not handled earlier messages within {waited:?}")]
    BarrierTimeout { waited: Duration },
    #[error("cannot wait for the parent to handle earlier messages")]
    Barrier(#[source] io::Error),
}

impl NotifyError {
    fn is_full_queue(&self) -> bool {
        matches!(self, NotifyError::FullQueue)
    }
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

/// Sends notifications to the parent of this process. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Notify {
    parent: Option<Arc<NotifyParent>>,
}

#[derive(Debug)]
struct NotifyParent {
    socket: UnixDatagram,
    address: UnixAddr,
    path: String,
    /// The last status, which is repeated to a successor.
    status: Mutex<Option<String>>,
    outbox: Mutex<Outbox>,
}

impl Notify {
    /// Sends to the socket that `NOTIFY_SOCKET` names. Disabled if the variable is not set.
    pub fn from_env() -> Result<Self, NotifyError> {
        match std::env::var(env::NOTIFY_SOCKET) {
            Ok(path) if !path.is_empty() => Self::to_socket(&path),
            _ => Ok(Self::disabled()),
        }
    }

    /// Sends nothing: every call succeeds.
    pub fn disabled() -> Self {
        Self { parent: None }
    }

    /// Sends to this socket: an absolute path, or `@name` for an abstract socket.
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
        Ok(Self {
            parent: Some(Arc::new(NotifyParent {
                socket,
                address,
                path,
                status: Mutex::default(),
                outbox: Mutex::default(),
            })),
        })
    }

    /// Whether there is a parent, and with it an FD store.
    pub fn has_parent(&self) -> bool {
        self.parent.is_some()
    }

    /// The sockets are bound: clients may connect.
    pub fn ready(&self) -> Result<(), NotifyError> {
        self.post("READY=1")
    }

    /// Sends a line that `ballast ps` and `systemctl status` show.
    pub fn status(&self, text: &str) -> Result<(), NotifyError> {
        let message = format!("STATUS={}", text.replace('\n', " "));
        if let Some(parent) = &self.parent {
            *parent.status.lock().unwrap_or_else(PoisonError::into_inner) = Some(message.clone());
        }
        self.post(&message)
    }

    /// Repeats the last status to a new parent.
    pub(crate) fn repeat_status(&self) -> Result<(), NotifyError> {
        let Some(parent) = &self.parent else { return Ok(()) };
        let message = parent.status.lock().unwrap_or_else(PoisonError::into_inner).clone();
        message.map_or(Ok(()), |message| self.post(&message))
    }

    /// The drain has begun. Succeeds if the parent is gone: its death may be the reason for the
    /// drain.
    pub fn stopping(&self) -> Result<(), NotifyError> {
        match self.post("STOPPING=1") {
            Err(NotifyError::Send { source, .. })
                if matches!(source.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound) =>
            {
                Ok(())
            }
            sent => sent,
        }
    }

    /// A reload has begun. [`Notify::ready`] ends it. systemd requires the time since v253.
    pub fn reloading(&self) -> Result<(), NotifyError> {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let usec = now.tv_sec * 1_000_000 + now.tv_nsec / 1_000;
        self.post(&format!("RELOADING=1\nMONOTONIC_USEC={usec}"))
    }

    /// Without effect if the parent has not read earlier messages: they prove as much.
    pub fn watchdog(&self) -> Result<(), NotifyError> {
        self.send_if_room("WATCHDOG=1")
    }

    /// This worker begins to serve requests.
    pub fn serving(&self) -> Result<(), NotifyError> {
        self.post("SERVING=1")
    }

    /// Requests have used this worker since the last such message, or still do.
    pub fn used(&self) -> Result<(), NotifyError> {
        self.send_if_room("USED=1")
    }

    /// Requests this much more time, from now, to become ready or to stop.
    pub fn extend_timeout(&self, by: Duration) -> Result<(), NotifyError> {
        self.post(&format!("EXTEND_TIMEOUT_USEC={}", by.as_micros()))
    }

    /// Sends descriptors to the FD store under one name. They are stored when [`Notify::barrier`]
    /// returns.
    pub fn fdstore(&self, name: &str, fds: &[BorrowedFd<'_>]) -> Result<(), NotifyError> {
        let (message, numbers) = fdstore_message(name, fds)?;
        self.send(&message, &numbers)
    }

    /// The same for one descriptor. Fails at once if the parent's queue is full.
    pub fn try_fdstore(&self, name: &str, fd: BorrowedFd<'_>) -> Result<(), NotifyError> {
        let (message, numbers) = fdstore_message(name, &[fd])?;
        self.try_send(&message, &numbers)
    }

    /// Removes all descriptors under this name from the FD store.
    pub fn fdstore_remove(&self, name: &str) -> Result<(), NotifyError> {
        check_fd_name(name)?;
        self.send(&format!("FDSTOREREMOVE=1\nFDNAME={name}"), &[])
    }

    /// Returns once the parent has handled all earlier messages. Blocks, so do not call it in an
    /// async task.
    pub fn barrier(&self, timeout: Duration) -> Result<(), NotifyError> {
        if self.parent.is_none() {
            return Ok(());
        }
        let (ours, theirs) = io::pipe().map_err(NotifyError::Barrier)?;
        let deadline = Instant::now() + timeout;
        self.send_until(deadline, "BARRIER=1", &[theirs.as_raw_fd()]).map_err(|error| {
            if error.is_full_queue() { NotifyError::BarrierTimeout { waited: timeout } } else { error }
        })?;
        drop(theirs);
        // The parent closes its copy when it handles this message, which is end of file here.
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

    /// Sends a message without descriptors, or puts it into the outbox. Never waits.
    fn post(&self, message: &str) -> Result<(), NotifyError> {
        let Some(parent) = &self.parent else { return Ok(()) };
        let mut outbox = parent.outbox();
        if outbox.is_empty() {
            match parent.send(message, &[], MsgFlags::MSG_DONTWAIT) {
                Err(error) if error.is_full_queue() => {}
                sent => return sent,
            }
        }
        outbox.add(message);
        if !outbox.has_sender {
            let sender = Arc::clone(parent);
            let spawned =
                std::thread::Builder::new().name("notify".to_owned()).spawn(move || sender.send_outbox());
            // Without a thread the messages wait for the next one.
            outbox.has_sender = spawned.is_ok();
        }
        Ok(())
    }

    /// Sends a message that is repeated anyway.
    fn send_if_room(&self, message: &str) -> Result<(), NotifyError> {
        match self.try_send(message, &[]) {
            Err(error) if error.is_full_queue() => Ok(()),
            sent => sent,
        }
    }

    /// Sends one datagram, or fails at once if the parent's queue is full. `supervision` sends its
    /// offers with it.
    pub(crate) fn try_send(&self, message: &str, fds: &[RawFd]) -> Result<(), NotifyError> {
        self.parent.as_ref().map_or(Ok(()), |parent| parent.send(message, fds, MsgFlags::MSG_DONTWAIT))
    }

    /// Sends one datagram after all of the outbox.
    fn send_until(&self, deadline: Instant, message: &str, fds: &[RawFd]) -> Result<(), NotifyError> {
        loop {
            let is_next = self.parent.as_ref().is_none_or(|parent| parent.outbox().is_empty());
            let sent = if is_next { self.try_send(message, fds) } else { Err(NotifyError::FullQueue) };
            match sent {
                Err(error) if error.is_full_queue() && Instant::now() < deadline => {
                    std::thread::sleep(QUEUE_POLL_INTERVAL);
                }
                sent => return sent,
            }
        }
    }

    /// Sends one datagram with descriptors. Waits for room in the parent's queue.
    fn send(&self, message: &str, fds: &[RawFd]) -> Result<(), NotifyError> {
        self.parent.as_ref().map_or(Ok(()), |parent| parent.send(message, fds, MsgFlags::empty()))
    }
}

impl NotifyParent {
    fn outbox(&self) -> MutexGuard<'_, Outbox> {
        self.outbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends the outbox, however long the parent takes. The body of a thread.
    fn send_outbox(&self) {
        loop {
            let message = {
                let mut outbox = self.outbox();
                let Some(message) = outbox.first().cloned() else {
                    outbox.has_sender = false;
                    return;
                };
                message
            };
            match self.send(&message, &[], MsgFlags::empty()) {
                Err(error) if error.is_full_queue() => continue,
                Err(error) => {
                    tracing::debug!(cause = crate::exit::one_line(&error), "cannot send a notification")
                }
                Ok(()) => {}
            }
            self.outbox().remove(&message);
        }
    }

    fn send(&self, message: &str, fds: &[RawFd], flags: MsgFlags) -> Result<(), NotifyError> {
        if fds.len() > FDS_PER_MESSAGE_MAX {
            return Err(NotifyError::TooManyFds { fds: fds.len() });
        }
        let rights = [ControlMessage::ScmRights(fds)];
        let control = if fds.is_empty() { &[][..] } else { &rights[..] };
        let payload = [IoSlice::new(message.as_bytes())];
        loop {
            match sendmsg(
                self.socket.as_raw_fd(),
                &payload,
                control,
                MsgFlags::MSG_NOSIGNAL | flags,
                Some(&self.address),
            ) {
                Ok(_) => return Ok(()),
                Err(nix::Error::EINTR) => {}
                Err(nix::Error::EAGAIN) => return Err(NotifyError::FullQueue),
                Err(errno) => {
                    return Err(NotifyError::Send {
                        message: message.replace('\n', " "),
                        path: self.path.clone(),
                        source: errno.into(),
                    });
                }
            }
        }
    }
}

fn fdstore_message(name: &str, fds: &[BorrowedFd<'_>]) -> Result<(String, Vec<RawFd>), NotifyError> {
    check_fd_name(name)?;
    // FDPOLL=0: the store must keep a device file even if poll(2) reports an error condition on it.
    let message = format!("FDSTORE=1\nFDNAME={name}\nFDPOLL=0");
    Ok((message, fds.iter().map(AsRawFd::as_raw_fd).collect()))
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
    fn without_a_parent_every_call_succeeds() {
        let notify = Notify::disabled();
        notify.ready().unwrap();
        notify.barrier(Duration::ZERO).unwrap();
    }

    #[test]
    fn a_barrier_returns_when_the_parent_has_read_it() {
        let (_directory, socket, notify) = parent();
        let early = notify.barrier(Duration::from_millis(20));
        assert!(matches!(early, Err(NotifyError::BarrierTimeout { .. })), "{early:?}");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // A plain receive closes the descriptor of the message, as a parent does.
                assert_eq!(next(&socket), "BARRIER=1");
                assert_eq!(next(&socket), "BARRIER=1");
            });
            notify.barrier(Duration::from_secs(5)).unwrap();
        });
    }

    #[test]
    fn a_parent_that_does_not_read_gets_the_latest_messages_later() {
        let (_directory, socket, notify) = parent();
        let fillers = (0..).take_while(|_| notify.try_send("X=1", &[]).is_ok()).count();
        let started = Instant::now();
        notify.status("one").unwrap();
        notify.ready().unwrap();
        (0..100).for_each(|_| notify.watchdog().unwrap());
        notify.status("two").unwrap();
        let barrier = notify.barrier(Duration::from_millis(20));
        assert!(matches!(barrier, Err(NotifyError::BarrierTimeout { .. })), "{barrier:?}");
        assert!(started.elapsed() < SEND_TIMEOUT, "a message waited for the parent");
        (0..fillers).for_each(|_| assert_eq!(next(&socket), "X=1"));
        let first = next(&socket);
        // The sender may have had the first status in its hands already.
        let (second, third) = match first.as_str() {
            "STATUS=one" => ("STATUS=two", "READY=1"),
            _ => ("READY=1", ""),
        };
        assert!(first.starts_with("STATUS="), "{first}");
        assert_eq!(next(&socket), second);
        if !third.is_empty() {
            assert_eq!(next(&socket), third);
        }
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
