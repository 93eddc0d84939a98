// SPDX-License-Identifier: Apache-2.0

//! Keeps the FD store of the supervisor's own parent like that of the supervisor. The parent is
//! systemd, if it is anything.
//!
//! A thread sends the messages, because a parent that does not read its socket makes the sender
//! wait. The event loop never waits: messages wait in [`FdOutbox`].

mod outbox;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use service::Notify;
use service::exit::one_line;
use service::notify::NotifyError;
use tokio::sync::oneshot;

use self::outbox::{FdMessage, FdOutbox};

/// How long systemd may take to handle the messages before a barrier.
const BARRIER_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(crate) struct ParentFdStore {
    /// Absent without a parent.
    shared: Option<Arc<SharedOutbox>>,
}

#[derive(Debug, Default)]
struct SharedOutbox {
    outbox: Mutex<FdOutbox>,
    /// Signalled when a message is added, and at the end.
    changed: Condvar,
}

impl ParentFdStore {
    /// Starts the thread. It ends after this value is dropped.
    pub(crate) fn start(parent: Notify) -> std::io::Result<Self> {
        if !parent.has_parent() {
            return Ok(Self { shared: None });
        }
        let shared = Arc::new(SharedOutbox::default());
        let sender = OutboxSender { parent, shared: Arc::clone(&shared) };
        std::thread::Builder::new().name("parent_fds".to_owned()).spawn(move || sender.run())?;
        Ok(Self { shared: Some(shared) })
    }

    pub(crate) fn store(&self, name: &str, fd: Arc<OwnedFd>) {
        self.add(FdMessage::Store { name: name.to_owned(), fd });
    }

    pub(crate) fn remove(&self, name: &str) {
        self.add(FdMessage::Remove { name: name.to_owned() });
    }

    /// Returns when the parent has handled all earlier messages, or when that takes too long.
    /// Returns `None` without a parent.
    pub(crate) fn barrier(&self) -> Option<impl Future<Output = ()> + Send + 'static> {
        self.shared.as_ref()?;
        let (reply, handled) = oneshot::channel();
        self.add(FdMessage::Barrier(reply));
        Some(wait_for(handled))
    }

    /// Returns when all earlier messages are sent, or when that takes too long.
    pub(crate) async fn flush(&self) {
        if self.shared.is_some() {
            let (reply, sent) = oneshot::channel();
            self.add(FdMessage::Flush(reply));
            wait_for(sent).await;
        }
    }

    fn add(&self, message: FdMessage) {
        let Some(shared) = &self.shared else { return };
        if let Err(full) = shared.lock().add(message) {
            tracing::error!(error = %full, "systemd's FD store differs from this fleet's");
        }
        shared.changed.notify_one();
    }
}

/// The thread drops the sender also if a message cannot be sent, and says why.
async fn wait_for(reply: oneshot::Receiver<()>) {
    if tokio::time::timeout(BARRIER_TIMEOUT, reply).await.is_err() {
        tracing::error!(waited = ?BARRIER_TIMEOUT, "systemd does not read the messages to its FD store");
    }
}

impl Drop for ParentFdStore {
    fn drop(&mut self) {
        if let Some(shared) = &self.shared {
            shared.lock().close();
            shared.changed.notify_one();
        }
    }
}

impl SharedOutbox {
    fn lock(&self) -> MutexGuard<'_, FdOutbox> {
        self.outbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the next message. Returns `None` at the end.
    fn next(&self) -> Option<FdMessage> {
        let idle = |outbox: &mut FdOutbox| outbox.is_empty() && !outbox.is_closed();
        let waited = self.changed.wait_while(self.lock(), idle);
        waited.unwrap_or_else(PoisonError::into_inner).take()
    }
}

struct OutboxSender {
    parent: Notify,
    shared: Arc<SharedOutbox>,
}

impl OutboxSender {
    fn run(self) {
        while let Some(message) = self.shared.next() {
            if let Err(error) = self.send(message) {
                tracing::error!(cause = one_line(&error), "cannot forward to systemd's FD store");
            }
        }
    }

    fn send(&self, message: FdMessage) -> Result<(), NotifyError> {
        match message {
            FdMessage::Store { name, fd } => self.repeat(|| self.parent.fdstore(&name, &[fd.as_fd()])),
            FdMessage::Remove { name } => self.repeat(|| self.parent.fdstore_remove(&name)),
            FdMessage::Barrier(reply) if reply.is_closed() => Ok(()),
            FdMessage::Barrier(reply) => {
                let handled = self.parent.barrier(BARRIER_TIMEOUT);
                drop(reply);
                handled
            }
            FdMessage::Flush(reply) => {
                drop(reply);
                Ok(())
            }
        }
    }

    /// Sends until the parent has room, or until the end.
    fn repeat(&self, send: impl Fn() -> Result<(), NotifyError>) -> Result<(), NotifyError> {
        loop {
            match send() {
                Err(NotifyError::FullQueue) if !self.shared.lock().is_closed() => {}
                sent => return sent,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;
    use std::time::Instant;

    use super::*;

    fn file() -> Arc<OwnedFd> {
        Arc::new(tempfile::tempfile().unwrap().into())
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_parent_that_does_not_read_gets_every_message_in_order_later() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("manager.sock");
        let manager = UnixDatagram::bind(&path).unwrap();
        manager.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let store = ParentFdStore::start(Notify::to_socket(path.to_str().unwrap()).unwrap()).unwrap();
        // More than the queue of a socket has room for (net.unix.max_dgram_qlen).
        let names: Vec<String> = (0..2000).map(|index| format!("a{index}")).collect();
        let (fd, started) = (file(), Instant::now());
        names.iter().for_each(|name| store.store(name, fd.clone()));
        store.remove("old");
        let barrier = tokio::spawn(store.barrier().unwrap());
        assert!(started.elapsed() < BARRIER_TIMEOUT, "a message waited for the parent");
        let next = || {
            let mut bytes = [0; 256];
            let length = manager.recv(&mut bytes).unwrap();
            String::from_utf8_lossy(&bytes[..length]).into_owned()
        };
        for name in &names {
            assert!(next().starts_with(&format!("FDSTORE=1\nFDNAME={name}\n")), "{name}");
        }
        assert_eq!(next(), "FDSTOREREMOVE=1\nFDNAME=old");
        // A plain receive closes the descriptor of the message, as systemd does.
        assert_eq!(next(), "BARRIER=1");
        barrier.await.unwrap();
    }

    #[tokio::test]
    async fn without_a_parent_nothing_waits() {
        let store = ParentFdStore::start(Notify::disabled()).unwrap();
        store.store("a", file());
        assert!(store.barrier().is_none());
    }
}
