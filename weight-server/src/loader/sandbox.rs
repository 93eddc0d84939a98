//! What a loader gives up before it looks at a file of unknown origin.

use nix::sys::prctl::set_no_new_privs;
use nix::sys::signal::{SigSet, Signal};

#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    #[error("cannot set no_new_privs")]
    NoNewPrivs(#[source] nix::Error),
    #[error("cannot block SIGXFSZ")]
    Signal(#[source] nix::Error),
}

/// Call before the first thread is started: threads inherit all of it.
pub(super) fn enter() -> Result<(), SandboxError> {
    set_no_new_privs().map_err(SandboxError::NoNewPrivs)?;
    // A memfd beyond RLIMIT_FSIZE then fails with an error that can be reported instead of killing the process.
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGXFSZ);
    signals.thread_block().map_err(SandboxError::Signal)
}
