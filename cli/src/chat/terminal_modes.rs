// SPDX-License-Identifier: Apache-2.0

//! [`TerminalModes`]: gives the terminal back as it was.

use std::io;

use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};

use crate::terminal::print_styled;

/// Ends the bracketed paste of xterm, which the prompt begins.
const BRACKETED_PASTE_OFF: &str = "\x1b[?2004l";

/// The modes of the terminal of standard input. Dropping this restores them.
pub(super) struct TerminalModes(Option<Termios>);

impl TerminalModes {
    pub(super) fn save() -> Self {
        Self(tcgetattr(io::stdin()).ok())
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
