// SPDX-License-Identifier: Apache-2.0

//! The program between fork and the role of a child: `ballast exec-shim --supervisor PID
//! --oom-score-adj N ROLE ARGS...`.
//!
//! LISTEN_PID must hold the process id of the child, which is known only after the fork. Running
//! code between fork and exec needs `unsafe`. So the child first executes this shim, which sets
//! LISTEN_PID, the OOM score and the descriptor limit, and then executes the role. The process id
//! stays the same.
//!
//! The shim also records the child in the runtime directory. A child whose supervisor has died
//! before that ends here: a successor may not know it, and starts another one.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::{CommandExt, parent_id};
use std::process::Command;

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// The subcommand for which the executable must call [`exec`].
pub const SUBCOMMAND: &str = "exec-shim";
pub(crate) const SUPERVISOR: &str = "--supervisor";
pub(crate) const OOM_SCORE_ADJ: &str = "--oom-score-adj";

#[derive(Debug, thiserror::Error)]
pub enum ShimError {
    #[error(
        "exec-shim is for the supervisor only: its arguments are {SUPERVISOR} PID {OOM_SCORE_ADJ} N ROLE ARGS..."
    )]
    Arguments,
    #[error("the supervisor ended before its child {role:?} started")]
    SupervisorGone { role: OsString },
    #[error("cannot execute the role {role:?}")]
    Exec { role: OsString, source: io::Error },
}

/// Executes the role; returns only on failure. `arguments` are those after the subcommand.
pub fn exec(mut arguments: impl Iterator<Item = OsString>) -> ShimError {
    let mut value_of = |option: &str| match (arguments.next(), arguments.next()) {
        (Some(found), Some(value)) if found == option => Some(value),
        _ => None,
    };
    let (Some(supervisor), Some(adjustment)) = (value_of(SUPERVISOR), value_of(OOM_SCORE_ADJ)) else {
        return ShimError::Arguments;
    };
    let Some(role) = arguments.next() else { return ShimError::Arguments };
    // The parent of an orphan is another process.
    let is_orphan = || supervisor != parent_id().to_string().as_str();
    // The record of this name may be that of a successor's child already.
    if is_orphan() {
        return ShimError::SupervisorGone { role };
    }
    // Failures are ignored. The supervisor writes the same record, and warns if it cannot. A child
    // with a worse OOM score or fewer descriptors still works, and reports a shortage when it has
    // one.
    let _: io::Result<()> = service::runtime_dir::record_this_child();
    // A successor that started before the record does not know this child.
    if is_orphan() {
        return ShimError::SupervisorGone { role };
    }
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
