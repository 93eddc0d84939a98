// SPDX-License-Identifier: Apache-2.0

//! Hand-off sockets and pidfds in tokio's event loop, for the weight-server. Workers and loaders
//! use blocking sockets.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use prost::Message;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::seqpacket::{Connection, FrameError, Listener};

/// A type that owns one descriptor and keeps it open, under one number, as long as it lives.
trait OwnsFd: AsRawFd {}

impl OwnsFd for Connection {}
impl OwnsFd for Listener {}
impl OwnsFd for Arc<OwnedFd> {}

fn register<T: OwnsFd>(inner: T, interest: Interest) -> io::Result<AsyncFd<T>> {
    // SAFETY: by `OwnsFd` the descriptor is open and stays the same one until `inner` is dropped,
    // which the AsyncFd does after it has left the event loop.
    unsafe { AsyncFd::register_with_interest(inner, interest) }.map_err(io::Error::from)
}

/// A connection that never blocks its thread. Must be made inside a tokio runtime.
#[derive(Debug)]
pub struct AsyncConnection {
    fd: AsyncFd<Connection>,
}

impl AsyncConnection {
    pub fn new(connection: Connection) -> io::Result<Self> {
        connection.set_nonblocking()?;
        Ok(Self { fd: register(connection, Interest::READABLE | Interest::WRITABLE)? })
    }

    /// Receives the next frame. Cancellation loses nothing.
    pub async fn receive<M: Message + Default>(&self) -> Result<(M, Vec<OwnedFd>), FrameError> {
        loop {
            let mut ready = self.fd.readable().await.map_err(|error| FrameError::Receive(error.into()))?;
            match self.fd.get_ref().receive() {
                Err(FrameError::NotReady) => ready.clear_ready(),
                result => return result,
            }
        }
    }

    /// Returns `NotReady` if no frame arrives in time.
    pub async fn receive_within<M: Message + Default>(
        &self,
        limit: Duration,
    ) -> Result<(M, Vec<OwnedFd>), FrameError> {
        tokio::time::timeout(limit, self.receive()).await.unwrap_or(Err(FrameError::NotReady))
    }

    /// Returns `NotReady` if the peer makes no room in time.
    pub async fn send_within(
        &self,
        limit: Duration,
        frame: &impl Message,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), FrameError> {
        let send = async {
            loop {
                let mut ready = self.fd.writable().await.map_err(FrameError::Send)?;
                match self.fd.get_ref().send(frame, fds) {
                    Err(FrameError::NotReady) => ready.clear_ready(),
                    result => return result,
                }
            }
        };
        tokio::time::timeout(limit, send).await.unwrap_or(Err(FrameError::NotReady))
    }
}

/// A listener that never blocks its thread. Must be made inside a tokio runtime.
#[derive(Debug)]
pub struct AsyncListener {
    fd: AsyncFd<Listener>,
}

impl AsyncListener {
    pub fn new(listener: Listener) -> io::Result<Self> {
        Ok(Self { fd: register(listener, Interest::READABLE)? })
    }

    /// Binds the path again if it was deleted, and returns whether it was. Open connections are not
    /// affected.
    pub fn restore_path(&mut self) -> io::Result<bool> {
        if !self.fd.get_ref().is_deleted() {
            return Ok(false);
        }
        let listener = Listener::bind(self.fd.get_ref().path()).map_err(io::Error::other)?;
        self.fd = register(listener, Interest::READABLE)?;
        Ok(true)
    }

    pub async fn accept(&self) -> io::Result<Connection> {
        loop {
            let mut ready = self.fd.readable().await?;
            match self.fd.get_ref().accept() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => ready.clear_ready(),
                result => return result,
            }
        }
    }

    /// Accepts the next connection and closes it, so that its client gets an error instead of
    /// waiting.
    pub fn reject_next(&self) {
        // An error means that no client waits, or that no descriptor is left: there is nothing more
        // to do.
        drop(self.fd.get_ref().accept());
    }
}

/// Waits until the process has ended. Must be called inside a tokio runtime.
pub async fn wait_for_process_end(pidfd: Arc<OwnedFd>) -> io::Result<()> {
    register(pidfd, Interest::READABLE)?.readable().await.map(drop)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use proto::weights::v1::{AttachRefused, FdBatch};

    use super::*;
    use crate::pidfd;

    const SHORT: Duration = Duration::from_millis(30);
    const LONG: Duration = Duration::from_secs(10);

    #[tokio::test]
    async fn receive_waits_without_blocking_and_times_out() {
        let (left, right) = Connection::pair().unwrap();
        let (left, right) = (AsyncConnection::new(left).unwrap(), AsyncConnection::new(right).unwrap());
        assert!(matches!(left.receive_within::<FdBatch>(SHORT).await, Err(FrameError::NotReady)));
        let frame = FdBatch { batch: 1, first: 0, count: 1 };
        let null = std::fs::File::open("/dev/null").unwrap();
        let fds = [null.as_fd()];
        let (sent, received) = tokio::join!(right.send_within(LONG, &frame, &fds), left.receive::<FdBatch>());
        sent.unwrap();
        let (received, fds) = received.unwrap();
        assert_eq!((received.batch, fds.len()), (1, 1));
    }

    #[tokio::test]
    async fn send_to_a_peer_that_stops_reading_times_out() {
        let (left, _right) = Connection::pair().unwrap();
        let left = AsyncConnection::new(left).unwrap();
        let frame = AttachRefused { reason: 1, text: "x".repeat(30_000) };
        for _ in 0..1000 {
            if let Err(error) = left.send_within(SHORT, &frame, &[]).await {
                assert!(matches!(error, FrameError::NotReady));
                return;
            }
        }
        panic!("the socket took everything");
    }

    #[tokio::test]
    async fn end_of_a_process_wakes_the_task_that_waits_for_it() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pidfd = Arc::new(pidfd::open(child.id() as i32).unwrap());
        let watch = tokio::spawn(wait_for_process_end(pidfd));
        tokio::time::sleep(SHORT).await;
        assert!(!watch.is_finished());
        child.kill().unwrap();
        tokio::time::timeout(LONG, watch).await.unwrap().unwrap().unwrap();
        child.wait().unwrap();
    }
}
