// SPDX-License-Identifier: Apache-2.0

//! `ballast drain` and `ballast restart`: take workers out of service and start them again, without
//! losing a request.

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use proto::fleet::v1 as wire;
use proto::v1::ListModelsRequest;
use proto::v1::inference_client::InferenceClient;
use service::{Exit, RuntimeDir};
use tonic::transport::Channel;

use crate::cli_error::{CliError, CliResult};
use crate::fleet_choice::find_fleet;
use crate::ps;
use crate::running_fleet::block_on;
use crate::served_workers::served_workers;
use crate::terminal::print_stdout;

/// How long a restarted worker may take until the router uses it. Loading kernels and capturing
/// graphs of a large model takes seconds.
const READY_WAIT: Duration = Duration::from_secs(120);
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// How long a rolling restart waits for a successor of the supervisor. Workers wait 10 s for one;
/// the rest is for its start.
const SUCCESSOR_WAIT: Duration = Duration::from_secs(30);

#[derive(clap::Args)]
pub(crate) struct DrainArguments {
    /// The worker's name, as `ballast ps` shows it
    name: String,
    #[command(flatten)]
    common: LifecycleArguments,
}

#[derive(clap::Args)]
pub(crate) struct RestartArguments {
    /// The process's name, as `ballast ps` shows it
    #[arg(required_unless_present = "rolling", conflicts_with = "rolling")]
    name: Option<String>,
    /// Drain and restart all workers, one after the other. The router uses each before the next one
    /// drains
    #[arg(long)]
    rolling: bool,
    /// With --rolling: only the workers of this model
    #[arg(long, value_name = "NAME", requires = "rolling")]
    model: Option<String>,
    #[command(flatten)]
    common: LifecycleArguments,
}

#[derive(clap::Args)]
struct LifecycleArguments {
    /// How long running requests of a draining worker may go on; then other workers continue them
    #[arg(long, value_name = "DURATION", default_value = "10min", value_parser = service::duration::parse)]
    timeout: Duration,
    /// Runtime directory of the fleet [default: that of the only running fleet]
    #[arg(long, value_name = "DIR")]
    runtime_dir: Option<PathBuf>,
}

impl LifecycleArguments {
    fn grace_ms(&self) -> u64 {
        u64::try_from(self.timeout.as_millis()).unwrap_or(u64::MAX)
    }
}

type SupervisorClient = proto::fleet::v1::fleet_client::FleetClient<Channel>;

pub(crate) fn drain(arguments: DrainArguments) -> CliResult {
    let DrainArguments { name, common } = arguments;
    block_on(async {
        let mut client = ps::connect(&find_fleet(common.runtime_dir.as_deref()).await?).await?;
        let request = wire::DrainWorkerRequest { name: name.clone(), grace_ms: common.grace_ms() };
        let drained = client.drain_worker(request).await;
        drained.map(drop).map_err(|status| CliError::from_status(&format!("cannot drain {name}"), &status))
    })
}

pub(crate) fn restart(arguments: RestartArguments) -> CliResult {
    let RestartArguments { name, rolling: _, model, common } = arguments;
    block_on(async {
        let directory = find_fleet(common.runtime_dir.as_deref()).await?;
        let client = ps::connect(&directory).await?;
        let router = service::grpc::connect_lazy(&directory.router_socket())?;
        let mut fleet = RestartedFleet { client, router: InferenceClient::new(router), directory };
        match name {
            Some(name) => fleet.restart(&name, None).await,
            None => fleet.restart_all(model.as_deref(), common.grace_ms()).await,
        }
    })
}

struct RestartedFleet {
    client: SupervisorClient,
    router: InferenceClient<Channel>,
    directory: RuntimeDir,
}

impl RestartedFleet {
    async fn restart(&mut self, name: &str, drain_ms: Option<u64>) -> CliResult {
        let restarted = self.request_restart(name, drain_ms).await;
        restarted.map_err(|status| CliError::from_status(&format!("cannot restart {name}"), &status))
    }

    async fn request_restart(&mut self, name: &str, drain_ms: Option<u64>) -> Result<(), tonic::Status> {
        let request = wire::RestartChildRequest { name: name.to_owned(), drain_ms };
        self.client.restart_child(request).await.map(drop)
    }

    /// Restarts one of several workers. If the supervisor dies meanwhile, its successor goes on: it
    /// adopts the old process of the worker, or finds a new one.
    async fn restart_in_turn(&mut self, before: &wire::Child, drain_ms: u64) -> CliResult {
        loop {
            let Err(status) = self.request_restart(&before.name, Some(drain_ms)).await else { return Ok(()) };
            if !is_supervisor_gone(&status) {
                return Err(CliError::from_status(&format!("cannot restart {}", before.name), &status));
            }
            let now = self.children().await?.into_iter().find(|child| child.name == before.name);
            if now.is_some_and(|now| now.pid != before.pid && now.pid != 0) {
                return Ok(());
            }
        }
    }

    async fn restart_all(&mut self, model: Option<&str>, drain_ms: u64) -> CliResult {
        let workers: Vec<wire::Child> = self
            .children()
            .await?
            .into_iter()
            .filter(|child| {
                child.role() == wire::Role::Worker && model.is_none_or(|model| child.model == model)
            })
            .collect();
        if workers.is_empty() {
            let of = model.map_or_else(String::new, |model| format!(" of model {model:?}"));
            return Err(CliError::new(Exit::Usage, format!("the fleet has no worker{of}")));
        }
        let served = self.served().await.unwrap_or_default();
        let mut left: Vec<String> = workers.iter().map(|worker| worker.name.clone()).collect();
        for worker in workers {
            let expected = served.get(&worker.model).copied().unwrap_or_default();
            let restarted = match self.restart_in_turn(&worker, drain_ms).await {
                Ok(()) => self.wait_until_used(&worker, expected, drain_ms).await,
                failed => failed,
            };
            if let Err(failure) = restarted {
                let text = format!("{}; not restarted: {}", failure.message(), left[1..].join(", "));
                return Err(CliError::new(failure.exit, text));
            }
            left.remove(0);
            print_stdout(&format!("{} restarted\n", worker.name))?;
        }
        Ok(())
    }

    /// Waits until a new process of the worker runs, and the router uses as many workers of the
    /// model as before.
    async fn wait_until_used(&mut self, before: &wire::Child, expected: u32, drain_ms: u64) -> CliResult {
        let (name, started) = (&before.name, Instant::now());
        let wait = READY_WAIT.saturating_add(Duration::from_millis(drain_ms));
        loop {
            let children = self.children().await?;
            let Some(child) = children.into_iter().find(|child| child.name == *name) else {
                return Err(CliError::new(Exit::PeerLost, format!("{name} was removed")));
            };
            if child.state() == wire::ChildState::Failed {
                let text = format!("{name} does not start: {}", child.last_termination);
                return Err(CliError::new(Exit::PeerLost, text));
            }
            let is_new = child.pid != before.pid && child.state() == wire::ChildState::Running;
            let is_used = |served: HashMap<String, u32>| {
                served.get(&before.model).is_some_and(|&workers| workers >= expected.max(1))
            };
            if is_new && self.served().await.is_some_and(is_used) {
                return Ok(());
            }
            if started.elapsed() > wait {
                let text =
                    format!("the router does not use {name} within {wait:?}; `ballast ps` shows its state");
                return Err(CliError::new(Exit::PeerLost, text));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Waits for a successor if the supervisor is gone.
    async fn children(&mut self) -> CliResult<Vec<wire::Child>> {
        let began = Instant::now();
        loop {
            match self.client.get_status(wire::GetStatusRequest { memory: false, ledger: false }).await {
                Ok(status) => return Ok(status.into_inner().children),
                Err(status) if is_supervisor_gone(&status) && began.elapsed() < SUCCESSOR_WAIT => {
                    tokio::time::sleep(POLL_INTERVAL).await;
                }
                Err(status) => {
                    let what = format!("the supervisor in {}", self.directory.path().display());
                    return Err(CliError::from_status(&what, &status));
                }
            }
        }
    }

    /// The number of workers that the router uses, by model. `None` while the router does not
    /// answer.
    async fn served(&mut self) -> Option<HashMap<String, u32>> {
        let reply = self.router.list_models(ListModelsRequest {}).await.ok()?;
        Some(served_workers(reply.into_inner()))
    }
}

/// A status with a source comes from the connection.
fn is_supervisor_gone(status: &tonic::Status) -> bool {
    std::error::Error::source(status).is_some()
}
