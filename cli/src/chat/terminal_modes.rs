// SPDX-License-Identifier: Apache-2.0

//! [`TerminalModes`]: whether Ctrl-C is a signal or a key, and the terminal as it was before.

use std::io;

use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};

use crate::terminal::print_styled;

/// Ends the bracketed paste of xterm, which the prompt begins.
const BRACKETED_PASTE_OFF: &str = "\x1b[?2004l";

/// The modes of the terminal of standard input. Dropping this restores them.
pub(super) struct TerminalModes(Option<Termios>);

impl TerminalModes {
    pub(super) fn save() -> Self {
        Self(tcgetattr(io::stdin()).ok())
    }

    /// Makes Ctrl-C a signal, which interrupts an answer, or a key for the next prompt.
    ///
    /// The prompt has the terminal in raw mode, in which it is a key, but only while it reads.
    /// Between two prompts, the editor would lose the signal.
    pub(super) fn send_signals(&self, on: bool) {
        if self.0.is_some()
            && let Ok(mut modes) = tcgetattr(io::stdin())
        {
            modes.local_modes.set(LocalModes::ISIG, on);
            // The terminal may be gone. The next read says so.
            let _ = tcsetattr(io::stdin(), OptionalActions::Now, &modes);
        }
    }
}

impl Drop for TerminalModes {
    fn drop(&mut self) {
        let Some(modes) = &self.0 else { return };
        let is_same = tcgetattr(io::stdin()).is_ok_and(|present| present.local_modes == modes.local_modes);
        if !is_same {
            // The terminal may be gone.
            let _ = tcsetattr(io::stdin(), OptionalActions::Now, modes);
            let _ = print_styled(BRACKETED_PASTE_OFF);
        }
    }
}
