//! What every process of a fleet shares: configuration, logging, readiness, supervision, shutdown, exit codes,
//! metrics, memory facts, and gRPC over Unix sockets. Nothing in here knows what a weight or a token is.
//!
//! The life of a process, in the order in which it calls this crate:
//!
//! ```text
//! logging::init(role)                 one line per event on stderr, with the role's name in it
//! config::load(path)                  TOML; unknown keys are errors that name file, line and key
//! listen::inherited_fds()             what the vault kept from an earlier incarnation
//! Shutdown::install()                 SIGTERM and SIGINT start a drain, a deadline or a second signal ends it
//! supervision::watch_supervisor(&shutdown)       the supervisor's death starts a drain too, unless a successor adopts us
//! grpc::bind(path)                    sockets first ...
//! notify.ready()                      ... then READY=1
//! exit::Exit                          what the process says with its exit code
//! ```

#![forbid(unsafe_code)]

pub mod config;
pub mod duration;
pub mod env;
pub mod exit;
pub mod grpc;
mod inherited_fd;
pub mod listen;
pub mod logging;
pub mod meminfo;
pub mod metrics;
pub mod notify;
pub mod runtime_dir;
pub mod shutdown;
pub mod size;
pub mod smaps;
pub mod supervision;

pub use exit::{Exit, HasExit};
pub use notify::Notify;
pub use runtime_dir::RuntimeDir;
pub use shutdown::Shutdown;
pub use size::ByteSize;
