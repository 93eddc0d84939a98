// SPDX-License-Identifier: Apache-2.0

//! The panic hook: logs the panic and flushes the log, because a release build aborts next.
//!
//! The hook of the standard library would wait for a stalled stderr for ever. The thread would then
//! hang in the hook, and no supervisor would see the panic.
//!
//! std and tokio panic if the system starts no thread. That is no bug, so the process then ends
//! with a sentence and the exit code for a lack of resources.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::panic::{self, PanicHookInfo};
use std::sync::Once;

use tracing::Level;

use super::{LOG, flush, print_line, time_in_tail, whole_line};
use crate::exit::HasExit;
use crate::process_limits::{thread_panic, with_limits};

pub(super) fn install() {
    static INSTALL: Once = Once::new();
    INSTALL.call_once(|| {
        panic::set_hook(Box::new(|info| {
            if let Some(error) = thread_panic(message(info)) {
                let text = with_limits(error.exit(), error.to_string());
                print_line(&format!("ballast: {text}"));
                flush();
                std::process::exit(error.exit().code().into());
            }
            LOG.push(describe(info).as_bytes(), time_in_tail());
            flush();
        }));
    });
}

fn message<'a>(info: &'a PanicHookInfo<'_>) -> &'a str {
    let payload = info.payload();
    let message =
        payload.downcast_ref::<&str>().copied().or(payload.downcast_ref::<String>().map(String::as_str));
    message.unwrap_or("without a message")
}

/// Formats `worker-0 panicked thread=engine at=src/a.rs:3:5 message`, and the backtrace if
/// RUST_BACKTRACE asks for one.
fn describe(info: &PanicHookInfo<'_>) -> String {
    let message = message(info).replace('\n', " ");
    let at = info.location().map(ToString::to_string).unwrap_or_default();
    let thread = std::thread::current();
    let mut text = format!("panicked thread={} at={at}: {message}", thread.name().unwrap_or("unnamed"));
    let backtrace = Backtrace::capture();
    if backtrace.status() == BacktraceStatus::Captured {
        text += &format!("\n{backtrace}");
    }
    whole_line(Level::ERROR, &text)
}
