// SPDX-License-Identifier: Apache-2.0

//! Runs a closure whose panic ends its thread instead of the process.
//!
//! A release build aborts on panic, because a panic leaves shared state undefined. Compiling and
//! following grammars is different: that code is large, reads what clients write, and shares
//! nothing with the worker except its jobs. An abort there would also kill the next worker, because
//! the router retries the request.
//!
//! The panic hook runs before the abort. On a thread inside [`run_isolated`], the hook reports the
//! loss and parks the thread forever, so the abort never comes. Consequences:
//!
//! 1. Memory and locks of the parked thread are never freed. No other code may need them.
//! 2. The parked thread holds the lock of the panic hook: no code can set another hook afterwards.
//! 3. If `on_panic` returns false (too many threads are lost), the process aborts.
//! 4. In a build that unwinds (tests), the hook returns and the thread unwinds to its end. The test
//!    harness replaces the hook when its last test is done.

use std::cell::Cell;
use std::panic;
use std::sync::Once;
use std::thread;

type OnPanic = Box<dyn FnOnce() -> bool>;

thread_local! {
    /// Set while this thread is inside `run_isolated`.
    static ON_PANIC: Cell<Option<OnPanic>> = const { Cell::new(None) };
}

/// Runs `work`. If `work` panics, `on_panic` runs and returns whether the process goes on without
/// this thread. Calls must not nest.
pub(crate) fn run_isolated<T>(on_panic: impl FnOnce() -> bool + 'static, work: impl FnOnce() -> T) -> T {
    static INSTALL: Once = Once::new();
    INSTALL.call_once(install_hook);
    ON_PANIC.set(Some(Box::new(on_panic)));
    let result = work();
    ON_PANIC.set(None);
    result
}

fn install_hook() {
    // llguidance sets a hook when it is first used. Ours must come later, so that it runs first.
    grammar::install_panic_hook();
    let previous = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        let Some(on_panic) = ON_PANIC.take() else { return previous(info) };
        tracing::error!(%info, "a thread for grammars panicked");
        if !on_panic() {
            return previous(info);
        }
        while cfg!(panic = "abort") {
            thread::park();
        }
    }));
}
