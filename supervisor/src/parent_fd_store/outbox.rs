// SPDX-License-Identifier: Apache-2.0

//! [`FdOutbox`]: what the parent's FD store has not been told yet, in order and bounded.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use tokio::sync::oneshot;

/// All descriptors of a full FD store, and as many removals and barriers.
const MAX_WAITING: usize = 2 * crate::fd_store::MAX_STORED_FDS;

#[derive(Debug)]
pub(super) enum FdMessage {
    /// The descriptor is shared with the FD store of this process and costs no second one.
    Store {
        name: String,
        fd: Arc<OwnedFd>,
    },
    Remove {
        name: String,
    },
    /// Dropping the sender reports that earlier messages were handled, or that they cannot be.
    Barrier(oneshot::Sender<()>),
    /// Dropping the sender reports that earlier messages were sent.
    Flush(oneshot::Sender<()>),
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{MAX_WAITING} messages wait for systemd, which does not read: {dropped} were dropped so far")]
pub(super) struct FullOutbox {
    dropped: u64,
}

#[derive(Debug, Default)]
pub(super) struct FdOutbox {
    waiting: VecDeque<FdMessage>,
    dropped: u64,
    is_closed: bool,
}

impl FdOutbox {
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(super) fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// No message follows. Those that wait are sent as long as the parent reads.
    pub(super) fn close(&mut self) {
        self.is_closed = true;
    }

    /// Adds a message, or drops and counts it.
    pub(super) fn add(&mut self, message: FdMessage) -> Result<(), FullOutbox> {
        if self.waiting.len() >= MAX_WAITING {
            self.dropped += 1;
            return Err(FullOutbox { dropped: self.dropped });
        }
        self.waiting.push_back(message);
        Ok(())
    }

    pub(super) fn take(&mut self) -> Option<FdMessage> {
        self.waiting.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(name: &str) -> FdMessage {
        FdMessage::Store { name: name.to_owned(), fd: Arc::new(tempfile::tempfile().unwrap().into()) }
    }

    fn drain(outbox: &mut FdOutbox) -> Vec<String> {
        std::iter::from_fn(|| outbox.take())
            .map(|message| match message {
                FdMessage::Store { name, .. } => format!("+{name}"),
                FdMessage::Remove { name } => format!("-{name}"),
                FdMessage::Barrier(_) | FdMessage::Flush(_) => "reply".to_owned(),
            })
            .collect()
    }

    #[test]
    fn messages_keep_their_order() {
        let mut outbox = FdOutbox::default();
        let remove = FdMessage::Remove { name: "a".to_owned() };
        for message in [store("a"), store("b"), remove, FdMessage::Barrier(oneshot::channel().0), store("a")]
        {
            outbox.add(message).unwrap();
        }
        assert_eq!(drain(&mut outbox), ["+a", "+b", "-a", "reply", "+a"]);
        assert!(outbox.is_empty());
    }

    #[test]
    fn a_full_outbox_keeps_what_it_has_and_counts_the_others() {
        let mut outbox = FdOutbox::default();
        let fd: Arc<OwnedFd> = Arc::new(tempfile::tempfile().unwrap().into());
        let numbered = |index: usize| FdMessage::Store { name: format!("a{index}"), fd: fd.clone() };
        (0..MAX_WAITING).for_each(|index| outbox.add(numbered(index)).unwrap());
        assert_eq!(outbox.add(store("x")), Err(FullOutbox { dropped: 1 }));
        assert_eq!(outbox.add(store("y")), Err(FullOutbox { dropped: 2 }));
        let kept = drain(&mut outbox);
        assert_eq!((kept.len(), kept[0].as_str()), (MAX_WAITING, "+a0"));
        outbox.add(store("z")).unwrap();
    }
}
