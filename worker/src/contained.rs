//! Work whose panic ends its thread and not the process.
//!
//! A release build aborts on panic, because nobody knows what state a panic leaves behind. What compiles and follows
//! grammars shares nothing with the rest of the worker but its jobs, is large, and reads what clients write: a panic there
//! would take the worker, and then, the request being tried again, the next one. So the panic hook, which runs before the
//! abort, does not return on a thread that is at such work. It says what is lost and parks: what the thread holds stays
//! allocated and locked for good, and nothing else may need it. That includes the hook: nobody can exchange it any more.
//! After [`LOST_MAX`] of them the process aborts after all. A build that unwinds lets the thread unwind to its end: its
//! test harness exchanges the hook when the last test is done.

use std::cell::Cell;
use std::panic;
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Lost threads. Each may hold what a grammar takes, some 30 MB at most; a restart is the better cure for many.
const LOST_MAX: usize = 16;

static LOST: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// What to do when the work that this thread is at panics.
    static ON_LOSS: Cell<Option<Box<dyn FnOnce()>>> = const { Cell::new(None) };
}

/// Does `work`. Should it panic, `lost` runs, and this thread does not go on. Not to be nested.
pub(crate) fn contained<T>(lost: impl FnOnce() + 'static, work: impl FnOnce() -> T) -> T {
    static INSTALL: Once = Once::new();
    INSTALL.call_once(install);
    ON_LOSS.set(Some(Box::new(lost)));
    let result = work();
    ON_LOSS.set(None);
    result
}

/// Whether one more thread may be left to itself.
pub(crate) fn give_up_thread() -> bool {
    LOST.fetch_add(1, Ordering::Relaxed) < LOST_MAX
}

fn install() {
    // A hook that llguidance set later would come before ours.
    grammar::set_hooks();
    let others = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        let Some(lost) = ON_LOSS.take() else { return others(info) };
        let may_be_lost = give_up_thread();
        tracing::error!(%info, "a thread of the grammars is lost");
        if !may_be_lost {
            return others(info);
        }
        lost();
        while cfg!(panic = "abort") {
            thread::park();
        }
    }));
}
