// SPDX-License-Identifier: Apache-2.0

//! [`Outbox`]: messages for which the parent's queue had no room.
//!
//! At most one message of each variable (READY, STATUS, ...) waits before RELOADING and one after
//! it, so a parent that does not read costs no memory.

use std::collections::VecDeque;

const RELOADING: &str = "RELOADING=";
const READY: &str = "READY=";

#[derive(Debug, Default)]
pub(super) struct Outbox {
    waiting: VecDeque<String>,
    /// A thread sends the waiting messages.
    pub(super) has_sender: bool,
}

impl Outbox {
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Adds a message; a waiting one of the same variable is outdated, and replaced in its place.
    pub(super) fn add(&mut self, message: &str) {
        let variable = |message: &str| message.split('=').next().map(str::to_owned);
        let is_reload = |message: &String| message.starts_with(RELOADING);
        let reload = self.waiting.iter().position(is_reload);
        if message.starts_with(RELOADING) {
            // Both messages of an earlier reload are outdated.
            let since = self.waiting.split_off(reload.unwrap_or(self.waiting.len()));
            let is_of_reload = |message: &String| is_reload(message) || message.starts_with(READY);
            self.waiting.extend(since.into_iter().filter(|message| !is_of_reload(message)));
            return self.waiting.push_back(message.to_owned());
        }
        // READY=1 before RELOADING=1 says something else than after it.
        let mut since_reload = self.waiting.iter_mut().skip(reload.map_or(0, |at| at + 1));
        match since_reload.find(|waiting| variable(waiting) == variable(message)) {
            Some(outdated) => message.clone_into(outdated),
            None => self.waiting.push_back(message.to_owned()),
        }
    }

    /// The message to send next. It stays first until [`Outbox::remove`].
    pub(super) fn first(&self) -> Option<&String> {
        self.waiting.front()
    }

    /// Removes the first message after it was sent, unless a newer one has replaced it.
    pub(super) fn remove(&mut self, sent: &str) {
        if self.waiting.front().is_some_and(|first| first == sent) {
            self.waiting.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newer_messages_replace_older_ones_in_order() {
        let mut outbox = Outbox::default();
        for message in ["STATUS=one", "READY=1", "STATUS=two", "STOPPING=1"] {
            outbox.add(message);
        }
        let mut sent = Vec::new();
        while let Some(message) = outbox.first().cloned() {
            outbox.remove(&message);
            sent.push(message);
        }
        assert_eq!(sent, ["STATUS=two", "READY=1", "STOPPING=1"]);
        assert!(outbox.is_empty());
    }

    #[test]
    fn a_reload_stands_between_its_own_messages_and_those_before() {
        let mut outbox = Outbox::default();
        for message in ["READY=1", "RELOADING=1 a", "READY=1", "STATUS=one", "RELOADING=1 b", "READY=1"] {
            outbox.add(message);
        }
        outbox.add("STATUS=two");
        outbox.add("STATUS=three");
        assert_eq!(outbox.waiting, ["READY=1", "STATUS=one", "RELOADING=1 b", "READY=1", "STATUS=three"]);
    }

    #[test]
    fn a_message_that_was_replaced_while_it_was_sent_is_sent_again() {
        let mut outbox = Outbox::default();
        outbox.add("STATUS=one");
        outbox.add("STATUS=two");
        outbox.remove("STATUS=one");
        assert_eq!(outbox.first().map(String::as_str), Some("STATUS=two"));
    }
}
