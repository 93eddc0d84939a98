//! What the machine has: memory that can be had now, descriptors that this process may open.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Kept back from the ledger: sockets, the runtime, libraries, one loader's socket and files, connections that only ask.
const RESERVED_FDS: u64 = 256;

/// Without this many the server cannot hold even one small model and its workers.
const MIN_FDS: u64 = 64;

/// Memory that a load may take now; the machine's or the cgroup's, whichever is less.
///
/// Where that cannot be told (no /proc), nothing is refused for it: backing memory fails with an error of its own.
pub(crate) fn available_bytes() -> u64 {
    service::meminfo::available_bytes().unwrap_or_else(|error| {
        tracing::debug!(%error, "cannot tell how much memory is available");
        u64::MAX
    })
}

#[derive(Debug, thiserror::Error)]
#[error(
    "RLIMIT_NOFILE allows {limit} file descriptors, at least {} are needed: raise it with ulimit -n",
    RESERVED_FDS + MIN_FDS
)]
pub struct FdLimitError {
    pub limit: u64,
}

/// Raises the limit as far as it goes; returns what the ledger may hand out.
pub(crate) fn fd_capacity() -> Result<u64, FdLimitError> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap_or((RESERVED_FDS, RESERVED_FDS));
    let limit = match setrlimit(Resource::RLIMIT_NOFILE, hard, hard) {
        Ok(()) => hard,
        Err(_) => soft,
    };
    match limit.checked_sub(RESERVED_FDS) {
        Some(capacity) if capacity >= MIN_FDS => Ok(capacity),
        _ => Err(FdLimitError { limit }),
    }
}
