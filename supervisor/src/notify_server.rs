// SPDX-License-Identifier: Apache-2.0

//! Receives the notify protocol: one datagram socket per child.
//!
//! The kernel vouches for the process id of the sender (SO_PASSCRED). This module only receives and
//! parses; the event loop decides what a sender may do.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::net::sockopt::set_socket_passcred;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};
use service::notify::FDS_PER_MESSAGE_MAX;
use tokio::io::Interest;
use tokio::net::UnixDatagram;
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;

use crate::events::SupervisorEvent;
use crate::notification::{Notification, NotifyMessage};

/// Longer messages are dropped. The longest regular message is a status line or an FDNAME of 255
/// bytes.
const MAX_MESSAGE_BYTES: usize = 4096;

/// How often the path of a socket is checked. Cleaners of /tmp delete old sockets.
const PATH_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The socket of a child.
#[derive(Debug)]
pub(crate) struct NotifySocket {
    socket: UnixDatagram,
    path: PathBuf,
}

/// Binds the socket of a child. Replaces a socket file that a dead supervisor left.
pub(crate) fn bind(path: &Path) -> io::Result<NotifySocket> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let socket = UnixDatagram::bind(path)?;
    set_socket_passcred(&socket, true)?;
    Ok(NotifySocket { socket, path: path.to_owned() })
}

impl NotifySocket {
    fn is_deleted(&self) -> bool {
        let found = std::fs::symlink_metadata(&self.path);
        found.is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
    }
}

/// What the event loop learns only after the messages that are in the socket already.
#[derive(Debug)]
pub(crate) enum Checkpoint {
    /// The process with this start number exited. Without its last messages, a descriptor that a
    /// dying weight-server stored would be missing from what its successor inherits.
    Exited { start_number: u64 },
    /// A deadline of the child passed. A supervisor that was stopped finds the child's messages of
    /// the meantime in the socket.
    DeadlinePassed,
}

/// Forwards every datagram of one child to the event loop, in order. The task ends when the event
/// loop is gone. If the event loop is busy, the child waits, and this process queues nothing.
pub(crate) async fn forward(
    socket: NotifySocket,
    mut checkpoints: mpsc::Receiver<Checkpoint>,
    child: Arc<str>,
    event_loop: mpsc::Sender<SupervisorEvent>,
) {
    let mut forwarder = NotificationForwarder { socket, child, event_loop };
    let mut check = tokio::time::interval(PATH_CHECK_INTERVAL);
    check.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let socket = &forwarder.socket.socket;
        let flow = tokio::select! {
            received = socket.async_io(Interest::READABLE, || receive(socket)) => {
                forwarder.forward_received(received).await
            }
            Some(checkpoint) = checkpoints.recv() => forwarder.pass(checkpoint).await,
            _ = check.tick() => forwarder.restore_path().await,
        };
        if flow.is_break() {
            return;
        }
    }
}

struct NotificationForwarder {
    socket: NotifySocket,
    child: Arc<str>,
    event_loop: mpsc::Sender<SupervisorEvent>,
}

impl NotificationForwarder {
    async fn forward_received(&self, received: io::Result<Option<Notification>>) -> ControlFlow<()> {
        let child = &self.child;
        match received {
            Ok(Some(notification)) => {
                return self
                    .send(SupervisorEvent::NotificationReceived { child: child.clone(), notification })
                    .await;
            }
            Ok(None) => {
                tracing::warn!(%child, "dropped a notification that was too long or lost descriptors")
            }
            Err(error) => {
                tracing::error!(%child, %error, "cannot receive notifications");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
        ControlFlow::Continue(())
    }

    /// Forwards the messages that are in the socket now.
    async fn drain(&self) -> ControlFlow<()> {
        loop {
            match receive(&self.socket.socket) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return ControlFlow::Continue(()),
                Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                    tracing::error!(child = %self.child, %error, "cannot receive the last notifications");
                    return ControlFlow::Continue(());
                }
                Err(_) => {}
                received => self.forward_received(received).await?,
            }
        }
    }

    /// Binds a deleted socket again. The child finds it with its next message.
    async fn restore_path(&mut self) -> ControlFlow<()> {
        if !self.socket.is_deleted() {
            return ControlFlow::Continue(());
        }
        self.drain().await?;
        // Fails while the directory is missing too. The event loop creates it again.
        if let Ok(socket) = bind(&self.socket.path) {
            tracing::warn!(child = %self.child, "the notify socket was deleted, it is bound again");
            self.socket = socket;
        }
        ControlFlow::Continue(())
    }

    /// Forwards the messages that are in the socket now, then reports the checkpoint.
    async fn pass(&self, checkpoint: Checkpoint) -> ControlFlow<()> {
        self.drain().await?;
        let child = self.child.clone();
        self.send(match checkpoint {
            Checkpoint::Exited { start_number } => SupervisorEvent::ProcessExited { child, start_number },
            Checkpoint::DeadlinePassed => SupervisorEvent::DeadlinePassed { child },
        })
        .await
    }

    async fn send(&self, event: SupervisorEvent) -> ControlFlow<()> {
        match self.event_loop.send(event).await {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        }
    }
}

/// Returns `None` if the datagram was truncated, had no sender, or lost descriptors because this
/// process has too many open.
fn receive(socket: &UnixDatagram) -> io::Result<Option<Notification>> {
    const SPACE: usize = rustix::cmsg_space!(ScmRights(FDS_PER_MESSAGE_MAX), ScmCredentials(1));
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0u8; MAX_MESSAGE_BYTES];
    let received = recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT,
    )?;
    let (mut pid, mut fds) = (None, Vec::new());
    for message in control.drain() {
        match message {
            RecvAncillaryMessage::ScmCredentials(sender) => {
                pid = Some(sender.pid.as_raw_nonzero().get().cast_unsigned());
            }
            RecvAncillaryMessage::ScmRights(rights) => fds.extend(rights),
            _ => {}
        }
    }
    if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Ok(None);
    }
    let text = String::from_utf8_lossy(&bytes[..received.bytes]);
    Ok(pid.map(|pid| Notification { pid, message: NotifyMessage::parse(&text), fds }))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use service::Notify;

    use super::*;

    #[tokio::test]
    async fn a_notification_carries_its_senders_process_id_and_descriptors() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify-x.sock");
        let socket = bind(&path).unwrap();
        let socket = match std::fs::symlink_metadata(&path) {
            // A successor binds over the existing socket file.
            Ok(_) => {
                drop(socket);
                bind(&path).unwrap()
            }
            Err(error) => panic!("{error}"),
        };
        let (sender, mut receiver) = mpsc::channel(4);
        let (_exit_sender, exits) = mpsc::channel(1);
        let task = tokio::spawn(forward(socket, exits, "x".into(), sender));
        let notify = Notify::to_socket(path.to_str().unwrap()).unwrap();
        let file = tempfile::tempfile().unwrap();
        notify.fdstore("weights", &[file.as_fd(), file.as_fd()]).unwrap();
        let Some(SupervisorEvent::NotificationReceived { child, notification }) = receiver.recv().await
        else {
            panic!()
        };
        assert_eq!((&*child, notification.pid, notification.fds.len()), ("x", std::process::id(), 2));
        assert!(notification.message.store_fds);
        assert_eq!(notification.message.fd_name.as_deref(), Some("weights"));
        notify.status(&"x".repeat(MAX_MESSAGE_BYTES)).unwrap();
        notify.ready().unwrap();
        let Some(SupervisorEvent::NotificationReceived { notification, .. }) = receiver.recv().await else {
            panic!()
        };
        assert!(notification.message.ready, "the overlong message is dropped, the next one arrives");
        drop(receiver);
        notify.ready().unwrap();
        task.await.unwrap();
    }

    #[tokio::test]
    async fn last_notifications_arrive_before_the_exit() {
        const WORDS: usize = 5;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify-x.sock");
        for _ in 0..100 {
            let socket = bind(&path).unwrap();
            let notify = Notify::to_socket(path.to_str().unwrap()).unwrap();
            for _ in 0..WORDS {
                notify.ready().unwrap();
            }
            let (exit_sender, exits) = mpsc::channel(1);
            exit_sender.send(Checkpoint::Exited { start_number: 7 }).await.unwrap();
            let (sender, mut receiver) = mpsc::channel(1);
            let task = tokio::spawn(forward(socket, exits, "x".into(), sender));
            for _ in 0..WORDS {
                assert!(matches!(receiver.recv().await, Some(SupervisorEvent::NotificationReceived { .. })));
            }
            assert!(matches!(
                receiver.recv().await,
                Some(SupervisorEvent::ProcessExited { start_number: 7, .. })
            ));
            task.abort();
        }
    }
}
