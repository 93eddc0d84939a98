// SPDX-License-Identifier: Apache-2.0

//! Commands to a running fleet: load and unload models, add, remove and restart workers, reload the
//! configuration, empty prefix caches.

use std::path::PathBuf;
use std::time::Duration;

use proto::fleet::v1 as wire;
use proto::worker::v1::ResetPrefixCacheRequest;
use proto::worker::v1::worker_client::WorkerClient;
use service::Exit;
use service::logging::print_line;
use service::printable::printable_lines;
use service::runtime_dir::WORKERS_MAX;
use supervisor::{CopySpec, ModelSpec};

use crate::chat_templates::{UnusableTemplate, read_chat_templates};
use crate::cli_error::{CliError, CliResult, IoContext};
use crate::device_selection::DeviceSelection;
use crate::devices::GpuInventory;
use crate::fleet_arguments::{ChatTemplateArgument, IdleUnloadArgument, WorkerArguments, model_name};
use crate::fleet_choice::find_fleet;
use crate::fleet_config::{check_names, devices_for};
use crate::progress_bar::{ProgressBar, ProgressUnit, WorkProgress};
use crate::ps;
use crate::running_fleet::block_on;
use crate::sized_model::SizedModel;
use crate::terminal::print_stdout;

#[derive(clap::Args)]
pub(crate) struct LoadArguments {
    /// Model file
    #[arg(value_name = "MODEL.gguf")]
    model: PathBuf,
    /// Model name for requests [default: file name without extension]
    #[arg(long)]
    name: Option<String>,
    /// Further name for requests; may be given several times
    #[arg(long, value_name = "NAME")]
    alias: Vec<String>,
    #[command(flatten)]
    chat_template: ChatTemplateArgument,
    /// Number of workers
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(0..=i64::from(WORKERS_MAX)))]
    workers: u32,
    #[command(flatten)]
    idle: IdleUnloadArgument,
    #[command(flatten)]
    worker: WorkerArguments,
    #[command(flatten)]
    fleet: FleetSelector,
}

#[derive(clap::Args)]
pub(crate) struct UnloadArguments {
    /// The model's name, as `ballast ps` shows it
    name: String,
    /// Keep the name and the settings: the next request loads the model again, and so does `wake`
    #[arg(long)]
    idle: bool,
    #[command(flatten)]
    drain: DrainTimeout,
    #[command(flatten)]
    fleet: FleetSelector,
}

#[derive(clap::Args)]
pub(crate) struct WakeArguments {
    /// The model's name, as `ballast ps` shows it
    name: String,
    #[command(flatten)]
    fleet: FleetSelector,
}

#[derive(clap::Args)]
pub(crate) struct AddWorkerArguments {
    /// Model name; optional if the fleet has one model
    #[arg(default_value = "")]
    model: String,
    #[command(flatten)]
    fleet: FleetSelector,
}

#[derive(clap::Args)]
pub(crate) struct RemoveWorkerArguments {
    /// The worker's name, as `ballast ps` shows it
    name: String,
    #[command(flatten)]
    drain: DrainTimeout,
    #[command(flatten)]
    fleet: FleetSelector,
}

#[derive(clap::Args)]
pub(crate) struct DrainTimeout {
    /// How long running requests of a draining worker may go on; then other workers of the model
    /// continue them, if there are any
    #[arg(long, value_name = "DURATION", default_value = "10min", value_parser = service::duration::parse)]
    timeout: Duration,
}

impl DrainTimeout {
    pub(crate) fn milliseconds(&self) -> u64 {
        u64::try_from(self.timeout.as_millis()).unwrap_or(u64::MAX)
    }
}

#[derive(clap::Args)]
pub(crate) struct ReloadArguments {
    /// Only print what would change
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    fleet: FleetSelector,
}

#[derive(clap::Args)]
pub(crate) struct FleetSelector {
    /// Runtime directory of the fleet [default: that of the only running fleet]
    #[arg(long, value_name = "DIR")]
    runtime_dir: Option<PathBuf>,
}

type SupervisorClient = proto::fleet::v1::fleet_client::FleetClient<tonic::transport::Channel>;

/// Makes one call to the supervisor. `what` describes the call in error texts.
pub(crate) fn call_supervisor(
    place: &FleetSelector,
    what: &str,
    give: impl AsyncFnOnce(&mut SupervisorClient) -> Result<(), tonic::Status>,
) -> CliResult {
    block_on(async {
        let mut client = ps::connect(&find_fleet(place.runtime_dir.as_deref()).await?).await?;
        give(&mut client).await.map_err(|status| CliError::from_status(what, &status))
    })
}

pub(crate) fn load(arguments: LoadArguments) -> CliResult {
    let LoadArguments { model, name, alias, chat_template, workers, idle, worker, fleet } = arguments;
    let mut models = vec![worker.model(&model, workers)];
    models[0].name = name.unwrap_or(model_name(&model));
    models[0].aliases = alias;
    models[0].chat_template = chat_template.file();
    models.extend(worker.draft_model());
    idle.set(&mut models);
    check_names(&models).map_err(|text| CliError::new(Exit::Usage, text))?;
    let mut seen = devices_for(models.iter().map(|model| &model.device))?;
    // "all" keeps them: their copies come when the quarantine ends.
    if models[0].device == DeviceSelection::default() && !seen.gpus.is_empty() {
        seen = without_quarantined(seen, &fleet)?;
    }
    let mut sized = SizedModel::all(&models, 0, &seen)?;
    block_on(read_chat_templates(&mut sized, &[], UnusableTemplate::Refuse))?;
    // Loads the draft model first, unless the fleet has it already: the workers wait for it.
    sized[1..].iter().try_for_each(|draft| load_one(&fleet, draft, true))?;
    sized[..1].iter().try_for_each(|model| load_one(&fleet, model, false))
}

fn load_one(place: &FleetSelector, model: &SizedModel, may_be_there: bool) -> CliResult {
    let plan = model.plan()?;
    let what = format!("cannot load {}", plan.path.display());
    let request = load_request(plan);
    let (mut failed, mut progress) = (Vec::new(), ProgressBar::start());
    let loaded = call_supervisor(place, &what, async |client| {
        let mut events = match client.load_model(request).await {
            Err(status) if may_be_there && status.code() == tonic::Code::AlreadyExists => return Ok(()),
            answer => answer?.into_inner(),
        };
        while let Some(event) = events.message().await? {
            match event.kind {
                Some(wire::load_model_event::Kind::Progress(model)) => {
                    let (name, unit) = (model.name, ProgressUnit::Bytes);
                    progress.show(WorkProgress {
                        name,
                        unit,
                        done: model.done_bytes,
                        total: model.total_bytes,
                    });
                }
                Some(wire::load_model_event::Kind::Loaded(loaded)) => {
                    failed.extend(loaded.copies.into_iter().filter(|copy| !copy.failure.is_empty()));
                    return Ok(());
                }
                None => {}
            }
        }
        Err(tonic::Status::unavailable("the fleet stopped during the load"))
    });
    progress.clear();
    loaded?;
    for wire::ModelCopy { device, failure, .. } in failed {
        let text = format!("not on {device} yet, which is tried again: {failure}");
        print_line(&printable_lines(&text));
    }
    Ok(())
}

pub(crate) fn load_request(model: ModelSpec) -> wire::LoadModelRequest {
    let copy = |copy: CopySpec| wire::FurtherCopy {
        device: copy.device,
        worker_config: copy.worker_config.to_string(),
        weights_bytes: copy.memory.weights_bytes,
        worker_bytes: copy.memory.worker_bytes,
    };
    let mut copies = model.copies.into_iter().map(copy);
    let wire::FurtherCopy { device, worker_config, weights_bytes, worker_bytes } =
        copies.next().unwrap_or_default();
    wire::LoadModelRequest {
        name: model.name,
        path: model.path.to_string_lossy().into_owned(),
        workers: model.workers,
        worker_config,
        device,
        no_packing: !model.pack,
        files: model.files,
        settings: model.settings.to_string(),
        further_copies: copies.collect(),
        weights_bytes,
        worker_bytes,
        fallback: model.fallback.unwrap_or_default(),
        idle_unload_ms: model.idle_unload.map(|limit| u64::try_from(limit.as_millis()).unwrap_or(u64::MAX)),
    }
}

/// Marks the GPUs that are quarantined: a load that leaves the choice open takes another one.
fn without_quarantined(mut seen: GpuInventory, place: &FleetSelector) -> CliResult<GpuInventory> {
    let mut devices = Vec::new();
    call_supervisor(place, "cannot ask for the devices", async |client| {
        let status = client.get_status(wire::GetStatusRequest { memory: false, ledger: false }).await?;
        devices = status.into_inner().devices;
        Ok(())
    })?;
    for gpu in &mut seen.gpus {
        let of_fleet = devices.iter().find(|device| device.device == gpu.uuid);
        if let Some(quarantine) = of_fleet.and_then(|device| device.quarantine.as_ref()) {
            gpu.unusable = Some(format!("it is quarantined: {}", quarantine.reason));
        }
    }
    Ok(seen)
}

pub(crate) fn unload(arguments: UnloadArguments) -> CliResult {
    let (name, drain_ms) = (arguments.name, Some(arguments.drain.milliseconds()));
    let keep_idle = arguments.idle;
    call_supervisor(&arguments.fleet, &format!("cannot unload {name}"), async |client| {
        client
            .unload_model(wire::UnloadModelRequest { name: name.clone(), drain_ms, keep_idle })
            .await
            .map(drop)
    })
}

/// Returns when the load has begun.
pub(crate) fn wake(arguments: WakeArguments) -> CliResult {
    let name = arguments.name;
    call_supervisor(&arguments.fleet, &format!("cannot wake {name}"), async |client| {
        client.wake_model(wire::WakeModelRequest { name: name.clone(), on_demand: false }).await.map(drop)
    })
}

pub(crate) fn add_worker(arguments: AddWorkerArguments) -> CliResult {
    call_supervisor(&arguments.fleet, "cannot add a worker", async |client| {
        client.add_worker(wire::AddWorkerRequest { model: arguments.model.clone() }).await.map(drop)
    })
}

pub(crate) fn remove_worker(arguments: RemoveWorkerArguments) -> CliResult {
    let (name, drain_ms) = (arguments.name, Some(arguments.drain.milliseconds()));
    call_supervisor(&arguments.fleet, &format!("cannot remove {name}"), async |client| {
        client.remove_worker(wire::RemoveWorkerRequest { name: name.clone(), drain_ms }).await.map(drop)
    })
}

/// Prints the changes, one a line. They have begun when this returns.
pub(crate) fn reload(arguments: ReloadArguments) -> CliResult {
    let request = wire::ReloadRequest { dry_run: arguments.dry_run };
    let mut changes = Vec::new();
    call_supervisor(&arguments.fleet, "cannot reload", async |client| {
        changes = client.reload(request).await?.into_inner().changes;
        Ok(())
    })?;
    if changes.is_empty() {
        changes.push("the configuration has not changed".to_owned());
    }
    let lines: String = changes.iter().map(|change| format!("{change}\n")).collect();
    print_stdout(&lines)
}

/// Asks every worker, and says which of them did not.
pub(crate) fn reset_prefix_cache(place: FleetSelector) -> CliResult {
    let directory = block_on(find_fleet(place.runtime_dir.as_deref()))?;
    let sockets =
        directory.worker_sockets().with_context(|| format!("cannot list {}", directory.path().display()))?;
    block_on(async {
        let mut refusals = Vec::new();
        for (index, socket) in sockets {
            let channel = service::grpc::connect(&socket).await?;
            if let Err(status) =
                WorkerClient::new(channel).reset_prefix_cache(ResetPrefixCacheRequest {}).await
            {
                refusals.push(format!("worker-{index}: {}", status.message()));
            }
        }
        if refusals.is_empty() { Ok(()) } else { Err(CliError::new(Exit::PeerLost, refusals.join(", "))) }
    })
}
