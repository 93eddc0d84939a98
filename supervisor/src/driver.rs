//! The one task that owns the fleet: children, vault, models. Everything else sends it events.
//!
//! Its decisions about a single child are made in `state.rs`; here is what concerns several: who is started with what,
//! which messages a child may send, in which order a fleet stops, and how a successor takes over.

mod children;
mod messages;
mod orders;

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use service::exit::{Exit, HasExit, exit_for_io_error};
use service::grpc::{BindError, ConnectError};
use service::listen::{InheritedFd, ListenError};
use service::notify::NotifyError;
use service::runtime_dir::ClaimedRuntimeDir;
use service::{Notify, config};
use tokio::sync::{broadcast, mpsc};
use tokio::task::{AbortHandle, JoinHandle};

use crate::child::Process;
use crate::fleet::{
    ChildStatus, Command, EVENTS_KEPT, Fleet, FleetEvent, LastEnd, ModelState, ModelStatus, OrderError,
    Orders, Reply,
};
use crate::grpc;
use crate::models::WeightsAdmin;
use crate::notify_server::Notification;
use crate::plan::{ChildPlan, ModelPlan, Plan, WorkerSlot};
use crate::state::{self, Machine};
use crate::token::Token;
use crate::vault::Vault;

/// Notifications and orders in flight. Senders wait when it is full.
const EVENTS_QUEUED: usize = 256;

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Config(#[from] config::ConfigFileError),
    #[error(transparent)]
    Bind(#[from] BindError),
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("descriptors kept by systemd cannot be taken back")]
    Inherit(#[from] ListenError),
    #[error("systemd cannot be notified")]
    Notify(#[from] NotifyError),
    #[error("cannot bind the notify socket of {child}")]
    NotifySocket { child: String, source: io::Error },
    #[error("cannot read the runtime directory")]
    RuntimeDir(#[source] io::Error),
    #[error(
        "at most {limit} descriptors may be open (RLIMIT_NOFILE), a fleet needs {DESCRIPTORS_MIN}; raise it with `ulimit -n`"
    )]
    FewDescriptors { limit: u64 },
    #[error("cannot raise the limit of open descriptors (RLIMIT_NOFILE)")]
    DescriptorLimit(#[source] io::Error),
    #[error("cannot offer gRPC reflection")]
    Reflection(#[source] tonic::Status),
}

impl HasExit for StartError {
    fn exit(&self) -> Exit {
        match self {
            StartError::Config(error) => error.exit(),
            StartError::Bind(error) => error.exit(),
            StartError::Connect(error) => error.exit(),
            StartError::Inherit(error) => error.exit(),
            StartError::Notify(error) => error.exit(),
            StartError::FewDescriptors { .. } => Exit::OutOfResources,
            StartError::DescriptorLimit(source)
            | StartError::NotifySocket { source, .. }
            | StartError::RuntimeDir(source) => exit_for_io_error(source),
            StartError::Reflection(_) => Exit::Internal,
        }
    }
}

#[derive(Debug)]
pub(crate) enum Event {
    Notified {
        child: Arc<str>,
        notification: Notification,
    },
    /// The process of this start has ended.
    Ended {
        child: Arc<str>,
        start: u64,
    },
    /// The weight-server knows the token for this start, or refused it.
    TokenTold {
        child: Arc<str>,
        start: u64,
        refusal: Option<String>,
    },
    Model {
        name: String,
        state: ModelState,
    },
    Unloaded {
        name: String,
        refusal: Option<String>,
    },
    Command(Command),
}

struct Child {
    plan: ChildPlan,
    slot: Option<WorkerSlot>,
    machine: Machine,
    process: Option<Process>,
    /// Counts starts, so that a late report about an earlier process is recognised.
    start: u64,
    /// The token of the present start. Unknown for a worker that was taken over.
    token: Option<Token>,
    /// Set between the order to start and the weight-server's knowing the token.
    preparing: Option<AbortHandle>,
    forwarder: JoinHandle<()>,
    /// Tells the forwarder that the process of a start has ended.
    ends: mpsc::Sender<u64>,
    status_text: String,
    last_end: Option<LastEnd>,
    /// To be forgotten when it has stopped, and who wants to know.
    removed: Option<Option<Reply<()>>>,
}

struct Model {
    plan: ModelPlan,
    state: ModelState,
    task: Option<AbortHandle>,
    unloading: Option<Reply<()>>,
}

struct Driver {
    plan: Plan,
    directory: ClaimedRuntimeDir,
    children: BTreeMap<Arc<str>, Child>,
    models: BTreeMap<String, Model>,
    vault: Vault,
    admin: WeightsAdmin,
    /// systemd, if it started us: keeps a second copy of everything in the vault.
    parent: Notify,
    orders: Orders,
    stopping: bool,
}

impl Fleet {
    /// Starts the fleet in a claimed runtime directory, or takes over what a dead supervisor has left there.
    /// `kept` is what systemd's store has given back.
    pub async fn start(
        plan: Plan,
        directory: ClaimedRuntimeDir,
        parent: Notify,
        kept: Vec<InheritedFd>,
    ) -> Result<Fleet, StartError> {
        let names = directory.directory().clone();
        let (sender, receiver) = mpsc::channel(EVENTS_QUEUED);
        let orders = Orders { driver: sender, events: broadcast::channel(EVENTS_KEPT).0 };
        let api = service::grpc::bind(&names.supervisor_socket())?;
        let channel = service::grpc::connect_lazy(&names.weights_admin_socket())?;
        let mut driver = Driver {
            plan,
            directory,
            children: BTreeMap::new(),
            models: BTreeMap::new(),
            vault: Vault::default(),
            admin: WeightsAdmin::new(channel),
            parent,
            orders: orders.clone(),
            stopping: false,
        };
        for InheritedFd { name, fd } in kept {
            if let Err(error) = driver.vault.store(&name, fd) {
                tracing::warn!(name, %error, "a descriptor that systemd kept is lost");
            }
        }
        for model in driver.plan.models.clone() {
            driver.add_model(model);
        }
        let living: BTreeMap<String, u32> =
            names.living_children().map_err(StartError::RuntimeDir)?.into_iter().collect();
        for (plan, slot) in driver.plan.children() {
            driver.add_child(plan, slot)?;
        }
        driver.take_over(&living)?;
        let fixed: Vec<Arc<str>> = driver.children.keys().cloned().collect();
        for name in fixed {
            driver.feed(&name, state::Event::Start);
        }
        let served = grpc::serve(orders.clone(), names.clone(), api).map_err(StartError::Reflection)?;
        let task = tokio::spawn(driver.run(receiver));
        Ok(Fleet { orders, directory: names, tasks: vec![task, served] })
    }
}

impl Driver {
    async fn run(mut self, mut events: mpsc::Receiver<Event>) {
        while !(self.stopping && self.advance_stop()) {
            let deadline = self.children.values().filter_map(|c| c.machine.deadline()).min();
            let tick = async {
                match deadline {
                    Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                // The driver holds a sender itself: the channel does not close before the driver ends.
                Some(event) = events.recv() => self.handle(event),
                () = tick => self.tick(),
            }
        }
        for child in self.children.values() {
            child.forwarder.abort();
        }
        for model in self.models.values() {
            model.abort();
        }
        self.directory.remove();
    }

    fn tick(&mut self) {
        let now = Instant::now();
        let due: Vec<Arc<str>> = self
            .children
            .iter()
            .filter(|(_, child)| child.machine.deadline().is_some_and(|d| d <= now))
            .map(|(name, _)| name.clone())
            .collect();
        for name in due {
            self.feed(&name, state::Event::Tick);
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Notified { child, notification } => self.notified(&child, notification),
            Event::Ended { child, start } => self.ended(&child, start),
            Event::TokenTold { child, start, refusal } => self.token_told(&child, start, refusal),
            Event::Model { name, state } => self.model_changed(&name, state),
            Event::Unloaded { name, refusal } => self.unloaded(&name, refusal),
            Event::Command(command) => self.command(command),
        }
    }

    fn publish_child(&self, name: &Arc<str>) {
        if let Some(child) = self.children.get(name) {
            self.publish(FleetEvent::Child(child.status()));
        }
    }

    fn publish(&self, event: FleetEvent) {
        // Nobody may be listening.
        let _: Result<usize, _> = self.orders.events.send(event);
    }
}

impl Child {
    fn status(&self) -> ChildStatus {
        ChildStatus {
            name: self.plan.name.clone(),
            role: self.plan.role,
            state: self.machine.state(),
            pid: self.process.as_ref().map_or(0, |p| p.pid),
            crashes: self.machine.crashes(),
            uptime: self.process.as_ref().map(|p| p.since.elapsed()).unwrap_or_default(),
            status_text: self.status_text.clone(),
            last_end: self.last_end.clone(),
            model: self.slot.as_ref().map(|s| s.model.clone()),
        }
    }
}

impl Model {
    fn status(&self) -> ModelStatus {
        ModelStatus { name: self.plan.name.clone(), path: self.plan.path.clone(), state: self.state.clone() }
    }

    fn load(&mut self, admin: &WeightsAdmin, orders: &Orders) {
        self.abort();
        let task = tokio::spawn(admin.clone().load(self.plan.clone(), orders.driver.clone()));
        self.task = Some(task.abort_handle());
    }

    fn abort(&self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

/// Sockets and pipes of a fleet of some dozen workers, and of whatever uses it in the same process. The vault takes more.
const DESCRIPTORS_MIN: u64 = 256;

/// Raises the limit of open descriptors as far as it goes: the vault may hold thousands, and the usual soft limit of 1024 is
/// for programs that use select(2). To be called before anything else is opened.
pub fn raise_descriptor_limit() -> Result<(), StartError> {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let limit = |source: nix::Error| StartError::DescriptorLimit(source.into());
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).map_err(limit)?;
    if hard < DESCRIPTORS_MIN {
        return Err(StartError::FewDescriptors { limit: hard });
    }
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).map_err(limit)
}

/// Whoever gave the order may have gone away.
fn answer<T>(reply: Reply<T>, result: Result<T, OrderError>) {
    let _: Result<(), _> = reply.send(result);
}
