// SPDX-License-Identifier: Apache-2.0

//! The notify protocol's messages, as a child sends them to its parent (sd_notify(3)).

use std::os::fd::OwnedFd;
use std::time::Duration;

use crate::attach_token::AttachToken;

/// The content of one datagram.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct NotifyMessage {
    pub(crate) ready: bool,
    pub(crate) stopping: bool,
    pub(crate) watchdog_ping: bool,
    pub(crate) watchdog_trigger: bool,
    /// SERVING=1: the worker begins to serve.
    pub(crate) serving: bool,
    /// USED=1: requests have used the worker since its last such message.
    pub(crate) used: bool,
    pub(crate) status: Option<String>,
    pub(crate) extend_timeout: Option<Duration>,
    pub(crate) store_fds: bool,
    pub(crate) remove_fds: bool,
    pub(crate) fd_name: Option<String>,
    pub(crate) barrier: bool,
    /// ADOPT=1: an orphan offers itself for adoption.
    pub(crate) offers_adoption: bool,
    /// The attach token of the worker that offers itself.
    pub(crate) attach_token: Option<AttachToken>,
}

impl NotifyMessage {
    /// Skips unknown lines, as systemd does: newer children may send more.
    pub(crate) fn parse(text: &str) -> Self {
        let mut message = NotifyMessage::default();
        for (key, value) in text.lines().filter_map(|line| line.split_once('=')) {
            match (key, value) {
                ("READY", "1") => message.ready = true,
                ("STOPPING", "1") => message.stopping = true,
                ("WATCHDOG", "1") => message.watchdog_ping = true,
                ("WATCHDOG", "trigger") => message.watchdog_trigger = true,
                ("SERVING", "1") => message.serving = true,
                ("USED", "1") => message.used = true,
                ("STATUS", text) => message.status = Some(text.to_owned()),
                ("EXTEND_TIMEOUT_USEC", usec) => {
                    message.extend_timeout = usec.parse().ok().map(Duration::from_micros);
                }
                ("FDSTORE", "1") => message.store_fds = true,
                ("FDSTOREREMOVE", "1") => message.remove_fds = true,
                ("FDNAME", name) => message.fd_name = Some(name.to_owned()),
                ("BARRIER", "1") => message.barrier = true,
                ("ADOPT", "1") => message.offers_adoption = true,
                ("ATTACH_TOKEN", digits) => message.attach_token = AttachToken::from_hex(digits),
                _ => {}
            }
        }
        message
    }
}

/// One datagram with its sender and its descriptors.
#[derive(Debug)]
pub(crate) struct Notification {
    pub(crate) pid: u32,
    pub(crate) message: NotifyMessage,
    pub(crate) fds: Vec<OwnedFd>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_lines_are_parsed_and_unknown_ones_skipped() {
        let message = NotifyMessage::parse(
            "READY=1\nX_FUTURE=2\nSTATUS=a=b\nUSED=1\nSERVING=1\nEXTEND_TIMEOUT_USEC=5\nnonsense\nFDSTORE=0",
        );
        let expected = NotifyMessage {
            ready: true,
            used: true,
            serving: true,
            status: Some("a=b".to_owned()),
            extend_timeout: Some(Duration::from_micros(5)),
            ..NotifyMessage::default()
        };
        assert_eq!(message, expected);
    }
}
