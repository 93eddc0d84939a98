// SPDX-License-Identifier: Apache-2.0

//! The supervisor starts, monitors, restarts and stops the processes of a fleet. It also keeps the
//! FD store: file descriptors that outlive the weight-server.
//!
//! ```text
//!   grpc.rs (supervisor.sock)   notify_server.rs (one socket per child)   pidfds, model loads
//!            \ commands                    | notifications               / exits, progress
//!             `---------------> event_loop.rs: one task owns the fleet <'
//!                                 |               |                  |
//!                          state.rs (pure)   fd_store.rs   process.rs (fork, exec, signals)
//! ```
//!
//! `state.rs` holds the state machine of one child. After its first crash a child restarts at once;
//! later crashes add a growing backoff of at most a minute. No child is given up; `ballast ps`
//! shows a child in a crash loop as failed.
//!
//! A child notices the death of the supervisor as end of file on an inherited socket. A successor
//! that starts on the same runtime directory within ten seconds adopts the children that still run.
//! The module `service::supervision` describes that protocol.
//!
//! Children talk to their parent with systemd's notify protocol only. The same children therefore
//! run under systemd without a supervisor.

#![forbid(unsafe_code)]

mod attach_token;
mod commands;
mod config;
mod crash_reports;
pub mod deadlines;
mod device_health;
mod device_record;
mod event_loop;
mod events;
pub mod fd_store;
mod fleet;
mod fleet_devices;
mod grpc;
mod idle_models;
mod ledger_cache;
mod memory_room;
mod model_copies;
mod model_record;
mod model_swap;
mod model_use;
pub mod mps;
mod notification;
mod notify_server;
pub mod orphans;
mod parent_fd_store;
mod process;
pub mod resident_models;
mod rolling_restart;
mod router_join;
pub mod shared_weights;
pub mod shim;
mod spec;
mod spec_diff;
pub mod state;
mod status;
mod weight_server_admin;
mod worker_drain;

pub use commands::CommandError;
pub use config::{SupervisionConfig, SupervisionConfigError};
pub use device_health::{DeviceStatus, QuarantineStatus};
pub use event_loop::{FleetStartError, raise_descriptor_limit};
pub use fleet::FleetHandle;
pub use fleet_devices::{FleetDevices, GpuDevice};
pub use ledger_cache::device_rows;
pub use model_record::{RecordedModel, recorded_models};
pub use spec::{
    ChildRole, ChildSpec, CompleteWorkerConfig, ConfigReader, CopyMemory, CopySpec, FindGpu, FleetSpec,
    ModelSpec, ReloadScope, ReloadedSpec, UnusableModel, WorkerSlot,
};
pub use spec_diff::{SettingChange, SpecChange, diff_settings};
pub use state::{BackoffReason, ChildState, Termination};
pub use status::{
    ChildStatus, CopyStatus, CrashReportStatus, FleetEvent, FleetStatus, LastTermination, ModelFailure,
    ModelState, ModelStatus,
};
