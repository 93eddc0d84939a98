// SPDX-License-Identifier: Apache-2.0

//! The status of a fleet, its children and its models, as commands and events report it.

use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use service::Exit;
use tonic::{Code, Status};

use crate::device_health::DeviceStatus;
use crate::spec::{ChildRole, UnusableModel};
use crate::state::{BackoffReason, ChildState, Termination};

#[derive(Clone, Debug)]
pub struct ChildStatus {
    pub name: String,
    pub role: ChildRole,
    pub state: ChildState,
    /// 0 while no process runs.
    pub pid: u32,
    pub crashes: u32,
    /// Crashes since the child was healthy.
    pub consecutive_crashes: u32,
    /// Until the next start of a child that backs off.
    pub next_start_in: Option<Duration>,
    pub uptime: Duration,
    /// The last STATUS= text of the child.
    pub status_text: String,
    /// How the last process terminated that was not asked to.
    pub last_termination: Option<LastTermination>,
    /// The model of a worker; absent for other roles.
    pub model: Option<String>,
    /// The device of a worker; absent for other roles.
    pub device: Option<String>,
}

/// A termination that no command asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastTermination {
    pub termination: Termination,
    /// The last STATUS= text of that process. A process that fails reports the reason there before
    /// it exits.
    pub status_text: String,
}

impl LastTermination {
    /// The meaning of the exit code.
    pub fn exit(&self) -> Option<Exit> {
        match self.termination {
            Termination::ExitCode(code) => Exit::from_code(code),
            Termination::SpawnFailed(_) => Some(Exit::OutOfResources),
            Termination::Signal(_) | Termination::Unknown => None,
        }
    }
}

impl std::fmt::Display for LastTermination {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.termination {
            // The status text explains an exit code, but not a signal: a killed process had no
            // chance to report a reason.
            Termination::ExitCode(_) if !self.status_text.is_empty() => {
                write!(f, "{}: {}", self.termination, self.status_text)
            }
            end => write!(f, "{end}"),
        }
    }
}

/// Why a model could not be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelFailure {
    /// The exit code for a command that needed the model.
    pub exit: Exit,
    pub text: String,
}

impl ModelFailure {
    pub(crate) fn from_status(status: &Status) -> Self {
        let exit = match status.code() {
            Code::ResourceExhausted => Exit::OutOfResources,
            Code::InvalidArgument
            | Code::NotFound
            | Code::FailedPrecondition
            | Code::DataLoss
            | Code::PermissionDenied
            | Code::Unimplemented => Exit::ModelRefused,
            Code::Aborted | Code::Unavailable | Code::Cancelled | Code::DeadlineExceeded => Exit::PeerLost,
            _ => Exit::Internal,
        };
        Self { exit, text: status.message().to_owned() }
    }

    /// The inverse of [`ModelFailure::from_status`], for clients of the supervisor.
    pub(crate) fn to_status(&self) -> Status {
        match self.exit {
            Exit::OutOfResources => Status::resource_exhausted(&self.text),
            Exit::ModelRefused => Status::failed_precondition(&self.text),
            Exit::PeerLost => Status::aborted(&self.text),
            _ => Status::internal(&self.text),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelState {
    Loading {
        done_bytes: u64,
        total_bytes: u64,
    },
    Ready,
    Failed(ModelFailure),
    /// The model has neither weights nor workers until it is woken. The failure is that of the last
    /// wake, until it may be tried again.
    Idle(Option<ModelFailure>),
}

/// One copy of a model's weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyStatus {
    pub device: String,
    /// The name of the weights at the weight-server.
    pub weights: String,
    pub state: ModelState,
}

#[derive(Clone, Debug)]
pub struct ModelStatus {
    pub name: String,
    /// Its further names in requests.
    pub aliases: Vec<String>,
    /// Identifies the files and their versions. Empty: unknown.
    pub files: String,
    pub path: PathBuf,
    /// Of all copies together: ready while one of them is.
    pub state: ModelState,
    pub copies: Vec<CopyStatus>,
    /// Of its resident weights; empty while none are known.
    pub digest: Bytes,
    pub settings: toml::Table,
    /// Its workers leave, and it is unloaded after them.
    pub is_unloading: bool,
    /// It becomes idle then.
    pub becomes_idle: bool,
    /// It was woken meanwhile, and is loaded again then.
    pub wakes_after: bool,
    /// Why it is on the host although GPUs were to be tried first.
    pub fallback: Option<String>,
}

impl UnusableModel {
    pub(crate) fn status(&self) -> ModelStatus {
        let UnusableModel { name, path, failure, .. } = self.clone();
        ModelStatus {
            name,
            aliases: Vec::new(),
            files: String::new(),
            path,
            state: ModelState::Failed(failure),
            copies: Vec::new(),
            digest: Bytes::new(),
            settings: toml::Table::new(),
            is_unloading: false,
            becomes_idle: false,
            wakes_after: false,
            fallback: None,
        }
    }
}

impl ModelStatus {
    /// The devices on which a model that serves elsewhere cannot be loaded.
    pub fn failed_copies(&self) -> impl Iterator<Item = (&str, &ModelFailure)> {
        let is_failed = matches!(self.state, ModelState::Failed(_));
        let copies = self.copies.iter().filter(move |_| !is_failed);
        copies.filter_map(|copy| match &copy.state {
            ModelState::Failed(failure) => Some((copy.device.as_str(), failure)),
            ModelState::Loading { .. } | ModelState::Ready | ModelState::Idle(_) => None,
        })
    }
}

#[derive(Clone, Debug)]
pub struct FleetStatus {
    pub children: Vec<ChildStatus>,
    pub models: Vec<ModelStatus>,
    pub stored_fds: usize,
    pub http_address: String,
    pub crash_reports: CrashReportStatus,
    /// Those of the models, and those that are quarantined.
    pub devices: Vec<DeviceStatus>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CrashReportStatus {
    /// The directory of the latest report.
    pub latest: Option<PathBuf>,
    /// Reports that were not written.
    pub lost: u64,
}

impl FleetStatus {
    /// One line for a service manager, without figures that change on their own.
    pub(crate) fn summary(&self) -> String {
        let running = self.children.iter().filter(|c| matches!(c.state, ChildState::Running { .. })).count();
        let mut line = format!("{running} of {} processes run", self.children.len());
        let failed = self.children.iter().filter_map(|child| match child.state {
            ChildState::BackingOff { reason: BackoffReason::Crash, .. } => None,
            ChildState::BackingOff { .. } => Some((&child.name, child.last_termination.as_ref()?)),
            _ => None,
        });
        for (name, end) in failed {
            line.push_str(&format!("; {name} failed ({end}) and starts again after a pause"));
        }
        for model in &self.models {
            line.push_str(&match &model.state {
                ModelState::Loading { .. } => format!("; {} loads", model.name),
                ModelState::Ready => format!("; {} is loaded", model.name),
                ModelState::Idle(None) => format!("; {} is idle", model.name),
                ModelState::Failed(failure) | ModelState::Idle(Some(failure)) => {
                    format!("; {} cannot be loaded: {}", model.name, failure.text)
                }
            });
            for (device, failure) in model.failed_copies() {
                line.push_str(&format!(" (not on {device}: {})", failure.text));
            }
        }
        line
    }
}

#[derive(Clone, Debug)]
pub enum FleetEvent {
    Child(ChildStatus),
    ChildRemoved(String),
    Model(ModelStatus),
    ModelRemoved(String),
}
