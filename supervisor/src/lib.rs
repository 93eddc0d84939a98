//! The supervisor: starts, watches, restarts and stops the processes of a fleet, and keeps the file descriptors of the
//! weight-server while that is dead.
//!
//! ```text
//!   grpc.rs (supervisor.sock)      notify_server.rs (one socket per child)      pidfds, model loads
//!            \ commands                    | notifications                     / ends, progress
//!             `----------------->  driver.rs: one task owns everything  <-----'
//!                                    |            |            |
//!                             state.rs (pure)   store.rs    child.rs (fork, exec, signals)
//! ```
//!
//! A child that crashes is started again at once the first time, then after growing pauses, and is given up (`Failed`,
//! visible in `ballast ps`) when it does not live: `state.rs` has the table. Children learn of the supervisor's own death by
//! end of file on an inherited socket; a successor that is started on the same runtime directory within ten seconds takes
//! the living ones over (`service::supervision` has the protocol). Everything that a child may ask of its parent is the
//! notify protocol of systemd, so that the same children run under systemd without a supervisor.

#![forbid(unsafe_code)]

mod attach_token;
mod commands;
mod event_loop;
mod events;
mod fd_store;
mod fleet;
mod grpc;
mod notification;
mod notify_server;
mod process;
pub mod shim;
mod spec;
mod state;
mod status;
mod weight_server_admin;

pub use commands::CommandError;
pub use event_loop::{FleetStartError, raise_descriptor_limit};
pub use fleet::FleetHandle;
pub use spec::{ChildRole, ChildSpec, CompleteWorkerConfig, FleetSpec, ModelSpec, WorkerSlot};
pub use state::{ChildState, FailureReason, Termination};
pub use status::{
    ChildStatus, FleetEvent, FleetStatus, LastTermination, ModelFailure, ModelState, ModelStatus,
};
