//! What stands between fork and the real child: `ballast exec-shim --oom-score-adj N ROLE ARGS...`.
//!
//! LISTEN_PID must hold the process id of the child, which only the child itself knows, and nothing but a plain exec can be
//! asked of a fork without `unsafe`. So the child first becomes this shim, which sets what belongs to its own process and
//! then becomes the role; the process id stays.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Subcommand that the executable must send to [`exec`].
pub const SUBCOMMAND: &str = "exec-shim";
pub(crate) const OOM_SCORE_ADJ: &str = "--oom-score-adj";

#[derive(Debug, thiserror::Error)]
pub enum ShimError {
    #[error("exec-shim is started by the supervisor only: it wants {OOM_SCORE_ADJ} N ROLE ARGS...")]
    Arguments,
    #[error("cannot become {role:?}")]
    Exec { role: OsString, source: io::Error },
}

/// Becomes the role; returns only if that failed. `arguments` are those after the subcommand.
pub fn exec(mut arguments: impl Iterator<Item = OsString>) -> ShimError {
    let adjustment = match (arguments.next(), arguments.next()) {
        (Some(option), Some(value)) if option == OOM_SCORE_ADJ => value,
        _ => return ShimError::Arguments,
    };
    let Some(role) = arguments.next() else { return ShimError::Arguments };
    // Both are wishes: a child with less of either still works, and says what it lacks when it does.
    let _: io::Result<()> = std::fs::write("/proc/self/oom_score_adj", adjustment.as_encoded_bytes());
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        let _: nix::Result<()> = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
    let error = Command::new("/proc/self/exe")
        .arg0("ballast")
        .arg(&role)
        .args(arguments)
        .env(service::env::LISTEN_PID, std::process::id().to_string())
        .exec();
    ShimError::Exec { role, source: error }
}
