//! Work whose panic ends its thread and not the process.
//!
//! A release build aborts on panic, because nobody knows what state a panic leaves behind. What compiles and follows
//! grammars shares nothing with the rest of the worker but its jobs, is large, and reads what clients write: a panic there
//! would take the worker, and then, the request being tried again, the next one. So the panic hook, which runs before the
//! abort, does not return on a thread that is at such work. It says what is lost and parks: what the thread holds stays
//! allocated and locked for good, and nothing else may need it. That includes the hook: nobody can exchange it any more.
//! Where one more is one too many, the process aborts after all (`crew` counts). A build that unwinds lets the thread
//! unwind to its end: its test harness exchanges the hook when the last test is done.

use std::cell::Cell;
use std::panic;
use std::sync::Once;
use std::thread;

type OnLoss = Box<dyn FnOnce() -> bool>;

thread_local! {
    /// What to do when the work that this thread is at panics.
    static ON_LOSS: Cell<Option<OnLoss>> = const { Cell::new(None) };
}

/// Does `work`. Should it panic, `lost` runs and says whether the process goes on, without this thread. Not to be nested.
pub(crate) fn contained<T>(lost: impl FnOnce() -> bool + 'static, work: impl FnOnce() -> T) -> T {
    static INSTALL: Once = Once::new();
    INSTALL.call_once(install);
    ON_LOSS.set(Some(Box::new(lost)));
    let result = work();
    ON_LOSS.set(None);
    result
}

fn install() {
    // A hook that llguidance set later would come before ours.
    grammar::set_hooks();
    let others = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        let Some(lost) = ON_LOSS.take() else { return others(info) };
        tracing::error!(%info, "a thread of the grammars is lost");
        if !lost() {
            return others(info);
        }
        while cfg!(panic = "abort") {
            thread::park();
        }
    }));
}
