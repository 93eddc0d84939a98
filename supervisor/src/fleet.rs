//! The handle on a running fleet, and what it tells: the vocabulary between the driver and everybody else.

use std::path::PathBuf;
use std::time::Duration;

use service::{Exit, RuntimeDir};
use tokio::sync::{broadcast, mpsc, oneshot};
use tokio::task::JoinHandle;
use tonic::{Code, Status};

use crate::driver::Event;
use crate::plan::{ModelPlan, Role};
use crate::state::{End, State};

/// A subscriber that is this many events behind is told that it missed some.
pub(crate) const EVENTS_KEPT: usize = 256;

#[derive(Clone, Debug)]
pub struct ChildStatus {
    pub name: String,
    pub role: Role,
    pub state: State,
    /// 0 while no process runs.
    pub pid: u32,
    pub crashes: u32,
    pub uptime: Duration,
    /// The child's own words.
    pub status_text: String,
    /// How the last process that ended by itself did so.
    pub last_end: Option<LastEnd>,
    /// Of workers.
    pub model: Option<String>,
}

/// An end that nobody had asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastEnd {
    pub end: End,
    /// The last status of that process: one that fails says why before it exits.
    pub words: String,
}

impl LastEnd {
    /// What the process meant with its exit code.
    pub fn exit(&self) -> Option<Exit> {
        match self.end {
            End::Code(code) => Exit::from_code(code),
            End::Signal(_) | End::Unknown | End::NotStarted(_) => None,
        }
    }
}

impl std::fmt::Display for LastEnd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.end {
            // A process that was killed in the middle of something has not said why.
            End::Code(_) if !self.words.is_empty() => write!(f, "{}: {}", self.end, self.words),
            end => write!(f, "{end}"),
        }
    }
}

/// Why a model could not be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelFailure {
    /// What a command that needed the model should exit with.
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

    /// The inverse of [`ModelFailure::from_status`], for whoever asked us.
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
    Loading { done_bytes: u64, total_bytes: u64 },
    Ready,
    Failed(ModelFailure),
}

#[derive(Clone, Debug)]
pub struct ModelStatus {
    pub name: String,
    pub path: PathBuf,
    pub state: ModelState,
}

#[derive(Clone, Debug)]
pub struct FleetStatus {
    pub children: Vec<ChildStatus>,
    pub models: Vec<ModelStatus>,
    pub vault_fds: usize,
    pub http_address: String,
}

#[derive(Clone, Debug)]
pub enum FleetEvent {
    Child(ChildStatus),
    ChildGone(String),
    Model(ModelStatus),
    ModelGone(String),
}

/// Why an order was not carried out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OrderError {
    #[error("no child is called {name:?}; `ballast ps` lists them")]
    UnknownChild { name: String },
    #[error("{name:?} is not a worker")]
    NotAWorker { name: String },
    #[error("no model is called {name:?}; `ballast ps` lists them")]
    UnknownModel { name: String },
    #[error("the fleet serves {models} models: name one of them")]
    AmbiguousModel { models: usize },
    #[error("a model called {name:?} is there already")]
    NameTaken { name: String },
    #[error("{name:?} cannot be started: {why}")]
    NotStarted { name: String, why: String },
    #[error("model {name:?} cannot be unloaded: {why}")]
    NotUnloaded { name: String, why: String },
    #[error("the fleet is stopping")]
    Stopping,
}

pub(crate) type Reply<T> = oneshot::Sender<Result<T, OrderError>>;

#[derive(Debug)]
pub(crate) enum Command {
    Status(oneshot::Sender<FleetStatus>),
    Restart {
        name: String,
        reply: Reply<()>,
    },
    AddWorker {
        model: String,
        reply: Reply<String>,
    },
    RemoveWorker {
        name: String,
        reply: Reply<()>,
    },
    LoadModel {
        model: ModelPlan,
        reply: Reply<()>,
    },
    UnloadModel {
        name: String,
        reply: Reply<()>,
    },
    /// Ask every child, role by role.
    Stop,
    /// Kill every child now.
    Kill,
}

/// Gives orders to the driver. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Orders {
    pub(crate) driver: mpsc::Sender<Event>,
    pub(crate) events: broadcast::Sender<FleetEvent>,
}

impl Orders {
    pub(crate) async fn give(&self, command: Command) {
        // A driver that is gone drops the reply channel, which the caller sees.
        let _: Result<(), _> = self.driver.send(Event::Command(command)).await;
    }

    pub(crate) async fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T, OrderError> {
        let (reply, answer) = oneshot::channel();
        self.give(command(reply)).await;
        answer.await.unwrap_or(Err(OrderError::Stopping))
    }

    pub(crate) async fn status(&self) -> Result<FleetStatus, OrderError> {
        let (reply, answer) = oneshot::channel();
        self.give(Command::Status(reply)).await;
        answer.await.map_err(|_| OrderError::Stopping)
    }
}

/// A running fleet. Dropping it leaves the fleet to itself, as the death of this process would: end it with
/// [`Fleet::stop`].
pub struct Fleet {
    pub(crate) orders: Orders,
    pub(crate) directory: RuntimeDir,
    pub(crate) tasks: Vec<JoinHandle<()>>,
}

impl Fleet {
    pub fn directory(&self) -> &RuntimeDir {
        &self.directory
    }

    /// What changes from now on.
    pub fn events(&self) -> broadcast::Receiver<FleetEvent> {
        self.orders.events.subscribe()
    }

    pub async fn status(&self) -> Result<FleetStatus, OrderError> {
        self.orders.status().await
    }

    /// Begins the stop: router, then workers, then weight-server, each with its grace.
    pub async fn stop(&self) {
        self.orders.give(Command::Stop).await;
    }

    /// Ends every child at once.
    pub async fn kill(&self) {
        self.orders.give(Command::Kill).await;
    }

    /// Returns when every child has ended and the runtime directory is gone.
    pub async fn stopped(&mut self) {
        for task in &mut self.tasks {
            if let Err(error) = task.await {
                tracing::error!(%error, "a task of the supervisor has failed");
            }
        }
        self.tasks.clear();
    }
}
