// SPDX-License-Identifier: Apache-2.0

//! The program between fork and the role of a child: `ballast exec-shim --oom-score-adj N ROLE
//! ARGS...`.
//!
//! LISTEN_PID must hold the process id of the child, which is known only after the fork. Running
//! code between fork and exec needs `unsafe`. So the child first executes this shim, which sets
//! LISTEN_PID, the OOM score and the descriptor limit, and then executes the role. The process id
//! stays the same.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// The subcommand for which the executable must call [`exec`].
pub const SUBCOMMAND: &str = "exec-shim";
pub(crate) const OOM_SCORE_ADJ: &str = "--oom-score-adj";

#[derive(Debug, thiserror::Error)]
pub enum ShimError {
    #[error("exec-shim is for the supervisor only: its arguments are {OOM_SCORE_ADJ} N ROLE ARGS...")]
    Arguments,
    #[error("cannot execute the role {role:?}")]
    Exec { role: OsString, source: io::Error },
}

/// Executes the role; returns only on failure. `arguments` are those after the subcommand.
pub fn exec(mut arguments: impl Iterator<Item = OsString>) -> ShimError {
    let adjustment = match (arguments.next(), arguments.next()) {
        (Some(option), Some(value)) if option == OOM_SCORE_ADJ => value,
        _ => return ShimError::Arguments,
    };
    let Some(role) = arguments.next() else { return ShimError::Arguments };
    // Failures are ignored: a child with a worse OOM score or fewer descriptors still works, and
    // reports a shortage when it has one.
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
