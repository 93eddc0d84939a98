// SPDX-License-Identifier: Apache-2.0

//! `ballast plan`: computes how much memory a fleet will need on each device, from the headers of
//! its model files.
//!
//! The figures are those that the weight-server's ledger will reserve.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use memory::manifest::HOST_DEVICE;
use memory::numa::{NumaNode, node_of_device};
use serde_json::{Value, json};
use service::logging::print_line;
use service::printable::printable_lines;
use service::{ByteSize, Exit};

use crate::cli_error::{CliError, CliResult};
use crate::device_choice::DeviceChoice;
use crate::devices::GpuInfo;
use crate::fleet_arguments::FleetArguments;
use crate::fleet_config::FleetConfig;
use crate::fleet_models::sized_or_unusable;
use crate::models_directory::add_models;
use crate::resident_models::ResidentModels;
use crate::sized_model::{SizedCopy, SizedModel};
use crate::terminal::print_stdout;

#[derive(clap::Args)]
pub(crate) struct PlanArguments {
    /// Model file
    #[arg(value_name = "MODEL.gguf", required_unless_present = "config", conflicts_with = "config")]
    model: Option<PathBuf>,
    /// Fleet of several models, configured in TOML
    #[arg(long, value_name = "FILE.toml")]
    config: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    fleet: FleetArguments,
}

/// Memory that the fleet needs on one device.
#[derive(Clone, Debug, PartialEq, Eq)]
struct DeviceMemoryPlan {
    /// "host", or the UUID of a GPU with memory of its own.
    id: String,
    /// Name for the report.
    name: String,
    /// On the host: the UUIDs of the GPUs whose memory is the host's.
    unified: Vec<String>,
    /// Most bytes that the fleet may use.
    budget: u64,
    /// Free memory at the moment, if it is known.
    free: Option<u64>,
    weights: u64,
    workers: Vec<WorkerMemory>,
    /// On the host: what its NUMA nodes need, which are devices of their own too.
    of_nodes: u64,
    /// What each model with `idle-unload` releases when it leaves for another.
    releasable: Vec<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct WorkerMemory {
    bytes: u64,
    /// The KV cache's part of `bytes`, which the user can choose.
    kv: u64,
}

impl DeviceMemoryPlan {
    fn needed(&self) -> u64 {
        self.weights + self.workers.iter().map(|worker| worker.bytes).sum::<u64>() + self.of_nodes
    }

    /// What is needed if models with `idle-unload` leave for each other.
    fn needed_in_turn(&self) -> u64 {
        let all: u64 = self.releasable.iter().sum();
        let largest = self.releasable.iter().max().copied().unwrap_or_default();
        self.needed() - all + largest
    }

    /// Bytes that the fleet can allocate now.
    fn room(&self) -> u64 {
        self.free.map_or(self.budget, |free| free.min(self.budget))
    }

    fn missing(&self) -> u64 {
        self.needed_in_turn().saturating_sub(self.room())
    }

    /// If the fleet does not fit, says what would make it fit.
    fn advice(&self) -> Option<String> {
        if self.missing() == 0 {
            return None;
        }
        let weights = self.weights + self.of_nodes;
        let Some(mut left) = self.room().checked_sub(weights) else {
            let over = ByteSize(weights - self.room()).rounded();
            let percent = (self.room() as f64 / weights as f64 * 100.0).floor();
            return Some(format!(
                "the weights alone are {over} too large; a quantization with {percent}% of their size would fit"
            ));
        };
        let fitting = self.workers.iter().take_while(|worker| {
            let fits = worker.bytes <= left;
            left -= if fits { worker.bytes } else { 0 };
            fits
        });
        let mut advice = format!("{} of {} workers fit", fitting.count(), self.workers.len());
        let each = self.missing().div_ceil(self.workers.len().max(1) as u64);
        if self.workers.iter().all(|worker| each < worker.kv) {
            let each = ByteSize(each).rounded();
            // Writing to a string cannot fail.
            let _ = write!(advice, "; all fit with {each} less for each (--kv-bytes, --ctx-size)");
        }
        Some(advice)
    }
}

pub(crate) fn run(arguments: PlanArguments) -> CliResult {
    let mut config = match (&arguments.config, &arguments.model) {
        (Some(path), _) => FleetConfig::load(path, None)?,
        (None, Some(model)) => arguments.fleet.config(model, None),
        (None, None) => return Err(CliError::new(Exit::Usage, "name a model file or --config FILE.toml")),
    };
    // The plan is for the machine as it is now.
    config.gpu.wait = Duration::ZERO;
    add_models(&mut config)?;
    let resident = ResidentModels::default();
    let (models, unusable) = sized_or_unusable(&mut config, &resident, |model| model.is_from_directory)?;
    for model in unusable {
        print_line(&printable_lines(&format!("model {}: {}", model.name, model.failure.text)));
    }
    let copies: Vec<PlannedCopy<'_>> = models
        .iter()
        .flat_map(|model| model.copies.iter().map(move |copy| PlannedCopy { model, copy }))
        .collect();
    config.check_gpu_budget(gpus(&copies))?;
    let devices = devices(&config, &copies);
    print_stdout(&match arguments.json {
        true => format!("{}\n", report(&copies, &devices)),
        false => text(&copies, &devices),
    })?;
    let unfit = |device: &&DeviceMemoryPlan| device.missing() > 0;
    match devices.iter().find(unfit) {
        None => Ok(()),
        Some(device) => Err(CliError::new(
            Exit::OutOfResources,
            format!(
                "{} lacks {}: {}",
                device.name,
                ByteSize(device.missing()).rounded(),
                device.advice().unwrap_or_default()
            ),
        )),
    }
}

/// A model on one of its devices.
#[derive(Clone, Copy)]
struct PlannedCopy<'a> {
    model: &'a SizedModel,
    copy: &'a SizedCopy,
}

impl PlannedCopy<'_> {
    fn is_beside(&self, other: &PlannedCopy<'_>) -> bool {
        self.copy.choice.device() == other.copy.choice.device()
    }
}

/// The GPU of each copy that is on one.
fn gpus<'a>(copies: &[PlannedCopy<'a>]) -> impl Iterator<Item = &'a GpuInfo> {
    copies.iter().filter_map(|planned| planned.copy.choice.gpu.as_ref())
}

fn devices(config: &FleetConfig, copies: &[PlannedCopy<'_>]) -> Vec<DeviceMemoryPlan> {
    let host_bytes = config.host_bytes(gpus(copies));
    let mut devices: Vec<DeviceMemoryPlan> = Vec::new();
    for (index, planned) in copies.iter().enumerate() {
        let PlannedCopy { model, copy } = planned;
        let at = row_of(config, &copy.choice, host_bytes, &mut devices);
        if shared_with(&copies[..index], planned).is_none() {
            devices[at].weights += copy.weights.total();
        }
        let worker = WorkerMemory { bytes: copy.demand.total(), kv: copy.demand.kv };
        devices[at].workers.extend((0..model.workers).map(|_| worker));
        if model.may_be_idle() {
            let shares = |(other, at): (usize, &PlannedCopy<'_>)| {
                other != index && at.model.has_same_copy(model) && at.is_beside(planned)
            };
            let is_shared = copies.iter().enumerate().any(shares);
            let weights = if is_shared { 0 } else { copy.weights.total() };
            devices[at].releasable.push(weights + worker.bytes * u64::from(model.workers));
        }
    }
    add_nodes_to_host(config, host_bytes, &mut devices);
    devices
}

/// The position of the row that a device's memory counts on: the host's if the memory is unified.
fn row_of(
    config: &FleetConfig,
    choice: &DeviceChoice,
    host_bytes: u64,
    devices: &mut Vec<DeviceMemoryPlan>,
) -> usize {
    let unified = choice.gpu.as_ref().filter(|gpu| gpu.integrated);
    let id = unified.map_or_else(|| choice.device().to_string(), |_| HOST_DEVICE.to_owned());
    let at = devices.iter().position(|device| device.id == id).unwrap_or_else(|| {
        let host = DeviceChoice::host(None);
        devices.push(device_plan(config, if unified.is_some() { &host } else { choice }, host_bytes));
        devices.len() - 1
    });
    if let Some(gpu) = unified.filter(|gpu| !devices[at].unified.contains(&gpu.uuid)) {
        let row = &mut devices[at];
        row.unified.push(gpu.uuid.clone());
        row.free = gpu.free_bytes;
        // Writing to a string cannot fail.
        let _ = write!(row.name, " + cuda:{} {} (unified memory)", gpu.ordinal, gpu.name);
    }
    at
}

/// A device on which nothing is yet.
fn device_plan(config: &FleetConfig, choice: &DeviceChoice, host_bytes: u64) -> DeviceMemoryPlan {
    let id = choice.device().to_string();
    let (name, budget, free) = match (&choice.gpu, choice.node) {
        (Some(gpu), _) => {
            (format!("cuda:{} {}", gpu.ordinal, gpu.name), config.budget_of(gpu), gpu.free_bytes)
        }
        (None, Some(number)) => {
            let memory = NumaNode::find(number).map_or(u64::MAX, |node| node.memory_bytes);
            (id.clone(), memory, NumaNode::available_bytes(number).ok())
        }
        (None, None) => (id.clone(), host_bytes, None),
    };
    DeviceMemoryPlan {
        id,
        name,
        unified: Vec::new(),
        budget,
        free,
        weights: 0,
        workers: Vec::new(),
        of_nodes: 0,
        releasable: Vec::new(),
    }
}

/// The memory of a NUMA node counts on the host too.
fn add_nodes_to_host(config: &FleetConfig, host_bytes: u64, devices: &mut Vec<DeviceMemoryPlan>) {
    let nodes = devices.iter().filter(|device| node_of_device(&device.id).is_some());
    let of_nodes: u64 = nodes.map(DeviceMemoryPlan::needed).sum();
    if of_nodes == 0 {
        return;
    }
    match devices.iter_mut().find(|device| device.id == HOST_DEVICE) {
        Some(host) => host.of_nodes = of_nodes,
        None => {
            let host = device_plan(config, &DeviceChoice::host(None), host_bytes);
            devices.push(DeviceMemoryPlan { of_nodes, ..host });
        }
    }
}

/// The earlier model whose copy of the weights serves this one too.
fn shared_with<'a>(earlier: &[PlannedCopy<'a>], planned: &PlannedCopy<'_>) -> Option<&'a SizedModel> {
    let is_it =
        |other: &&PlannedCopy<'a>| other.model.has_same_copy(planned.model) && other.is_beside(planned);
    earlier.iter().find(is_it).map(|other| other.model)
}

/// What to say about the weights of a model whose file another model has too.
fn copy_text(earlier: &[PlannedCopy<'_>], planned: &PlannedCopy<'_>) -> Option<String> {
    if let Some(shared) = shared_with(earlier, planned) {
        return Some(format!("the copy of {}, counted there", shared.name));
    }
    let is_it =
        |other: &&PlannedCopy<'_>| other.model.has_same_files(planned.model) && other.is_beside(planned);
    let other = &earlier.iter().find(is_it)?.model.name;
    Some(format!("a copy of its own: `pack` differs from {other}, which has the same file"))
}

/// One entry of `models` for each copy.
fn report(copies: &[PlannedCopy<'_>], devices: &[DeviceMemoryPlan]) -> Value {
    let model = |(index, planned): (usize, &PlannedCopy<'_>)| {
        let SizedModel { name, path, workers, .. } = planned.model;
        let SizedCopy { choice, weights, demand, .. } = planned.copy;
        json!({
            "name": name,
            "path": path,
            "device": choice.device().to_string(),
            "why": choice.why,
            "weights": {
                "tensors": weights.tensor_bytes,
                "allocated": weights.allocation_bytes,
                "manifest": weights.manifest_bytes,
                "allocations": weights.allocations,
                "total": weights.total(),
                "shared_with": shared_with(&copies[..index], planned).map(|shared| &shared.name),
            },
            "workers": workers,
            "worker": {
                "context": demand.context,
                "kv": demand.kv,
                "activations": demand.workspace.activations,
                "scratch": demand.workspace.scratch,
                "graphs": demand.workspace.graphs,
                "modules": demand.workspace.modules,
                "process": demand.workspace.process,
                "total": demand.total(),
            },
        })
    };
    let device = |device: &DeviceMemoryPlan| {
        json!({
            "device": device.id,
            "name": device.name,
            "unified": device.unified,
            "budget": device.budget,
            "free": device.free,
            "needed": device.needed(),
            "needed_in_turn": device.needed_in_turn(),
            "missing": device.missing(),
            "advice": device.advice(),
        })
    };
    json!({
        "models": copies.iter().enumerate().map(model).collect::<Vec<_>>(),
        "devices": devices.iter().map(device).collect::<Vec<_>>(),
        "fits": devices.iter().all(|device| device.missing() == 0),
    })
}

fn text(copies: &[PlannedCopy<'_>], devices: &[DeviceMemoryPlan]) -> String {
    let rounded = |bytes: u64| ByteSize(bytes).rounded();
    let mut text = String::new();
    // Writing to a string cannot fail.
    for (index, planned) in copies.iter().enumerate() {
        let SizedModel { name, workers, .. } = planned.model;
        let SizedCopy { choice, weights, demand, .. } = planned.copy;
        let _ = writeln!(text, "model {name} on {choice}");
        let _ = writeln!(
            text,
            "  {:<12} {:>12}  {} of tensors in {} allocations",
            "weights",
            rounded(weights.total()),
            rounded(weights.tensor_bytes),
            weights.allocations
        );
        if let Some(copy) = copy_text(&copies[..index], planned) {
            let _ = writeln!(text, "  {:<12} {:>12}  {copy}", "", "");
        }
        let parts = [
            ("context", demand.context),
            ("KV cache", demand.kv),
            ("activations", demand.workspace.activations),
            ("scratch", demand.workspace.scratch),
            ("graphs", demand.workspace.graphs),
            ("modules", demand.workspace.modules),
            ("process", demand.workspace.process),
        ];
        let parts: Vec<String> = parts
            .iter()
            .filter(|(_, bytes)| *bytes > 0)
            .map(|(part, bytes)| format!("{part} {}", rounded(*bytes)))
            .collect();
        let _ = writeln!(
            text,
            "  {:<12} {:>12}  {} of {}: {}",
            "workers",
            rounded(demand.total() * u64::from(*workers)),
            workers,
            rounded(demand.total()),
            parts.join(", ")
        );
    }
    for device in devices {
        let verdict = match device.missing() {
            0 if device.needed() > device.room() => {
                let least = rounded(device.needed_in_turn());
                format!("fits in turn: models with idle-unload leave for each other, with {least} at most")
            }
            0 => "fits".to_owned(),
            missing => format!("{} too much", rounded(missing)),
        };
        let _ = writeln!(
            text,
            "device {}: {} of {}{}, {verdict}",
            device.name,
            rounded(device.needed()),
            rounded(device.room()),
            if device.room() < device.budget { " that are free" } else { "" },
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// Half of each worker's memory is KV cache.
    fn device(budget: u64, weights: u64, workers: &[u64]) -> DeviceMemoryPlan {
        let workers = workers.iter().map(|&bytes| WorkerMemory { bytes, kv: bytes / 2 }).collect();
        DeviceMemoryPlan {
            id: "host".to_owned(),
            name: "host".to_owned(),
            unified: Vec::new(),
            budget,
            free: None,
            weights,
            workers,
            of_nodes: 0,
            releasable: Vec::new(),
        }
    }

    #[test]
    fn host_and_gpu_with_unified_memory_are_planned_in_one_row() {
        let config: FleetConfig = toml::from_str("host-budget = \"90GiB\"\nmodels = []").unwrap();
        let (spark, mut devices) = (DeviceChoice::gpu(GpuInfo::gb10(), None), Vec::new());
        let discrete = DeviceChoice::gpu(GpuInfo::h200(1), None);
        for (choice, row) in [(&spark, 0), (&DeviceChoice::host(None), 0), (&discrete, 1), (&spark, 0)] {
            assert_eq!(row_of(&config, choice, config.host_bytes([].into_iter()), &mut devices), row);
        }
        let [host, other] = &devices[..] else { panic!("{devices:?}") };
        assert_eq!(host.name, "host + cuda:0 NVIDIA GB10 (unified memory)");
        assert_eq!((host.id.as_str(), host.budget, host.free), ("host", 90 * GIB, Some(100 * GIB)));
        assert_eq!((&host.unified[..], other.unified.len()), (&[GpuInfo::gb10().uuid][..], 0));
        let full = DeviceMemoryPlan { weights: 91 * GIB, ..host.clone() };
        assert!(text(&[], &[full]).contains("1.00 GiB too much"));
    }

    #[test]
    fn what_fits_needs_no_advice() {
        let device = device(10 * GIB, 4 * GIB, &[3 * GIB, 3 * GIB]);
        assert_eq!((device.needed(), device.missing(), device.advice()), (10 * GIB, 0, None));
    }

    #[test]
    fn advice_says_how_many_workers_fit_and_what_all_would_have_to_save() {
        let device = device(10 * GIB, 4 * GIB, &[4 * GIB, 4 * GIB]);
        assert_eq!(device.missing(), 2 * GIB);
        let advice = device.advice().unwrap();
        assert!(advice.starts_with("1 of 2 workers fit; all fit with 1.00 GiB less for each"), "{advice}");
    }

    #[test]
    fn advice_never_saves_more_than_the_kv_caches_hold() {
        let advice = device(10 * GIB, 4 * GIB, &[6 * GIB, 6 * GIB]).advice().unwrap();
        assert_eq!(advice, "1 of 2 workers fit");
    }

    #[test]
    fn what_others_hold_is_not_there() {
        let alone = device(10 * GIB, 4 * GIB, &[3 * GIB, 3 * GIB]);
        let beside = DeviceMemoryPlan { free: Some(7 * GIB), ..alone.clone() };
        assert_eq!((alone.missing(), beside.missing()), (0, 3 * GIB));
        assert!(beside.advice().unwrap().starts_with("1 of 2 workers fit"), "{beside:?}");
        assert!(text(&[], &[beside]).contains("10.0 GiB of 7.00 GiB that are free, 3.00 GiB too much"));
        let roomy = DeviceMemoryPlan { free: Some(70 * GIB), ..alone };
        assert!(text(&[], &[roomy]).contains("10.0 GiB of 10.0 GiB, fits"));
    }

    #[test]
    fn models_that_leave_for_each_other_need_the_memory_of_the_largest() {
        let mut in_turn = device(10 * GIB, 4 * GIB, &[3 * GIB, 5 * GIB]);
        assert_eq!(in_turn.missing(), 2 * GIB);
        in_turn.releasable = vec![5 * GIB, 6 * GIB];
        assert_eq!((in_turn.needed_in_turn(), in_turn.missing()), (7 * GIB, 0));
        assert!(text(&[], &[in_turn.clone()]).contains("12.0 GiB of 10.0 GiB, fits in turn"));
        let small = DeviceMemoryPlan { budget: 6 * GIB, ..in_turn };
        assert_eq!(small.missing(), GIB);
    }

    #[test]
    fn weights_that_are_too_large_are_said_to_be() {
        let advice = device(10 * GIB, 11 * GIB, &[GIB]).advice().unwrap();
        assert!(advice.starts_with("the weights alone are 1.00 GiB too large"), "{advice}");
        assert!(advice.contains("with 90% of their size"), "{advice}");
    }
}
