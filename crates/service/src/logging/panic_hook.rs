// SPDX-License-Identifier: Apache-2.0

//! The panic hook: logs the panic and flushes the log, because a release build aborts next.
//!
//! The hook of the standard library would wait for a stalled stderr for ever. The thread would then
//! hang in the hook, and no supervisor would see the panic.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::panic::{self, PanicHookInfo};
use std::sync::Once;

use tracing::Level;

use super::{LOG, PREFIX, flush};

pub(super) fn install() {
    static INSTALL: Once = Once::new();
    INSTALL.call_once(|| {
        panic::set_hook(Box::new(|info| {
            LOG.push(describe(info).as_bytes());
            flush();
        }));
    });
}

/// Formats `worker-0 panicked thread=engine at=src/a.rs:3:5 message`, and the backtrace if
/// RUST_BACKTRACE asks for one.
fn describe(info: &PanicHookInfo<'_>) -> String {
    let mut text = String::new();
    if let Some(prefix) = PREFIX.get() {
        // A String takes every text.
        let _: std::fmt::Result = prefix.write(Level::ERROR, &mut text);
    }
    let payload = info.payload();
    let message =
        payload.downcast_ref::<&str>().copied().or(payload.downcast_ref::<String>().map(String::as_str));
    let message = message.unwrap_or("without a message").replace('\n', " ");
    let at = info.location().map(ToString::to_string).unwrap_or_default();
    let thread = std::thread::current();
    text += &format!("panicked thread={} at={at}: {message}\n", thread.name().unwrap_or("unnamed"));
    let backtrace = Backtrace::capture();
    if backtrace.status() == BacktraceStatus::Captured {
        text += &format!("{backtrace}\n");
    }
    text
}
