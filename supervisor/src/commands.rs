// SPDX-License-Identifier: Apache-2.0

//! The commands that the event loop accepts from outside, and the error that refuses one.

use std::path::PathBuf;
use std::time::Duration;

use service::runtime_dir::WORKERS_MAX;
use tokio::sync::oneshot;

use crate::spec::{ModelSpec, ReloadScope};
use crate::spec_diff::SpecChange;
use crate::status::{FleetStatus, ModelFailure};

/// How long the streams of a worker may go on that is removed or restarted, unless a command says
/// it. The default of `ballast drain` and `ballast restart --rolling`.
pub(crate) const DRAIN_GRACE: Duration = Duration::from_secs(600);

/// Why a command was not carried out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommandError {
    #[error("no child is called {name:?}; `ballast ps` lists them")]
    UnknownChild { name: String },
    #[error("{name:?} is not a worker")]
    NotAWorker { name: String },
    #[error("no model is called {name:?}; `ballast ps` lists them")]
    UnknownModel { name: String },
    #[error("the fleet serves {models} models: name one of them")]
    AmbiguousModel { models: usize },
    #[error("a model called {name:?} exists already: unload it or choose another name")]
    NameTaken { name: String },
    #[error("{name:?} cannot be started: {why}")]
    StartFailed { name: String, why: String },
    #[error(
        "{present} workers run, and {more} more would exceed the {WORKERS_MAX} that one fleet may have: remove some, or start a second fleet"
    )]
    TooManyWorkers { present: usize, more: u32 },
    #[error("model {name:?} cannot be unloaded: {why}")]
    UnloadFailed { name: String, why: String },
    #[error("model {name:?} is idle: `ballast wake {name}` loads it, and so does a request")]
    ModelIsIdle { name: String },
    #[error("model {name:?} could not be woken just now: {}", .failure.text)]
    WakeFailed { name: String, failure: ModelFailure },
    #[error(
        "this fleet has no configuration file: start it with `ballast serve --config FILE.toml` to reload it"
    )]
    NoConfiguration,
    #[error("nothing has changed: {why}")]
    Configuration { why: String },
    #[error("a swap of model {name:?} is in progress: try again when it is done")]
    SwapRuns { name: String },
    #[error("model {name:?} cannot be swapped: {why}")]
    SwapRefused { name: String, why: String },
    #[error("{}; {} goes on", .failure.text, .old.display())]
    SwapFailed { old: PathBuf, failure: ModelFailure },
    #[error("no model of this fleet uses the device {device:?}; `ballast ps` lists those in use")]
    UnknownDevice { device: String },
    #[error("`device` of model {model:?}: {device} cannot be used: {why}")]
    DeviceUnusable { model: String, device: String, why: String },
    #[error("{device} is not quarantined")]
    NotQuarantined { device: String },
    #[error("{device} is quarantined: {reason}; `ballast quarantine {device} --end` ends that")]
    DeviceQuarantined { device: String, reason: String },
    #[error("the fleet is stopping")]
    Stopping,
}

pub(crate) type CommandReply<T> = oneshot::Sender<Result<T, CommandError>>;

#[derive(Debug)]
pub(crate) enum FleetCommand {
    Status(oneshot::Sender<FleetStatus>),
    Restart {
        name: String,
        /// The time in which a worker may finish its streams before it stops.
        drain: Option<Duration>,
        reply: CommandReply<()>,
    },
    /// Lets a worker finish its streams, at most `grace`, and stops it. Replies after its exit.
    Drain {
        name: String,
        grace: Duration,
        reply: CommandReply<()>,
    },
    AddWorker {
        model: String,
        reply: CommandReply<String>,
    },
    RemoveWorker {
        name: String,
        /// How long its streams may go on.
        grace: Duration,
        reply: CommandReply<()>,
    },
    LoadModel {
        model: ModelSpec,
        reply: CommandReply<()>,
    },
    UnloadModel {
        name: String,
        /// How long its streams may go on.
        grace: Duration,
        /// The model stays in the fleet, idle.
        keep_idle: bool,
        reply: CommandReply<()>,
    },
    /// Loads an idle model again. Replies when the load has begun.
    WakeModel {
        name: String,
        /// For a request, not for a person.
        on_demand: bool,
        reply: CommandReply<()>,
    },
    /// Replaces the file of a model while it serves. Replies after the old file has gone, with the
    /// path that the configuration still names.
    SwapModel {
        model: ModelSpec,
        /// How long streams of the old file may go on.
        grace: Duration,
        reply: CommandReply<Option<PathBuf>>,
    },
    /// Reads the configuration again and applies what differs. A preview only compares.
    Reload {
        scope: ReloadScope,
        reply: CommandReply<Vec<SpecChange>>,
    },
    QuarantineDevice {
        device: String,
        reason: String,
        reply: CommandReply<()>,
    },
    EndQuarantine {
        device: String,
        reply: CommandReply<()>,
    },
    /// Stops every child, one role after the other.
    Stop,
    /// Kills every child at once.
    Kill,
}
