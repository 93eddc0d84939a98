// SPDX-License-Identifier: Apache-2.0

//! What every process of a fleet shares: configuration, logging, readiness, supervision, shutdown,
//! exit codes, metrics, memory figures, and gRPC over Unix sockets. This crate knows neither
//! weights nor tokens.
//!
//! A process calls this crate in the following order:
//!
//! ```text
//! logging::init(role)                 one line per event on stderr, with the role's name
//! config::load(path)                  TOML; unknown keys are errors that name file, line and key
//! listen::inherited_fds()             descriptors that the FD store kept from an earlier process
//! Shutdown::install()                 SIGTERM and SIGINT start a drain
//! supervision::watch_supervisor(..)   the supervisor's death starts one, except after an adoption
//! grpc::bind(path)                    binds the sockets first
//! notify.ready()                      then sends READY=1
//! exit::Exit                          the exit code says why the process ended
//! logging::flush()                    the last lines are written, if stderr takes them
//! ```

#![forbid(unsafe_code)]

pub mod accept_failures;
pub mod admin_audit;
pub mod config;
pub mod duration;
pub mod env;
pub mod exit;
pub mod grpc;
mod hangup;
mod inherited_fd;
pub mod listen;
pub mod logging;
pub mod meminfo;
pub mod metrics;
pub mod notify;
pub mod patience;
pub mod printable;
pub mod process_limits;
pub mod running_clock;
pub mod runtime_dir;
pub mod shutdown;
pub mod size;
pub mod smaps;
mod socket_probe;
pub mod supervision;
pub mod user;

pub use exit::{Exit, HasExit};
pub use notify::Notify;
pub use running_clock::RunningClock;
pub use runtime_dir::RuntimeDir;
pub use shutdown::Shutdown;
pub use size::ByteSize;
pub use user::UserId;
