// SPDX-License-Identifier: Apache-2.0

//! [`SizedModel`]: a model of a fleet with its devices and its memory, computed from the header of
//! its file.
//!
//! The figures go into the configuration of the processes and into `ballast plan`.

use std::path::{Path, PathBuf};

use engine::{EngineConfig, EngineConfigError, KvBudget};
use gguf::GgufModel;
use memory::numa::NumaNode;
use memory::pack::{PackPlan, Packing};
use models::ModelDescription;
use ops::{KvLayout, KvTypes};
use quant::DType;
use quant::layout::Tiles;
use service::exit::one_line;
use service::{ByteSize, Exit};
use supervisor::{CopyMemory, CopySpec, ModelSpec};
use worker::{ChatTemplateSetting, CheckedChatTemplate, DraftSource, MemoryPlan};

use crate::cli_error::{CliError, CliResult, IoContext};
use crate::device_choice::{DeviceChoice, without_kernel};
use crate::devices::{GpuInfo, GpuInventory};
use crate::gguf_file;
use crate::gpu_support;
use crate::model_config::{FleetModelConfig, to_toml_table};

/// Default size of the KV cache on the host: four sequences of full length, but at most this many
/// tokens (2.3 GiB for an 8B model with 8 KV heads).
const DEFAULT_KV_TOKENS_MAX: usize = 16 << 10;

/// The same limit on a GPU, where more sequences run at once (9.2 GiB for that model).
const DEFAULT_GPU_KV_TOKENS_MAX: usize = 64 << 10;

/// Estimated bytes of one tensor's entry in the manifest, without its name.
const MANIFEST_ENTRY_BYTES: u64 = 128;

pub(crate) struct SizedModel {
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    /// On each device.
    pub(crate) workers: u32,
    /// At least one, in the order of the configuration.
    pub(crate) copies: Vec<SizedCopy>,
    head: ModelFileSummary,
    pack: bool,
    /// Identifies the files and their versions.
    files: String,
    /// The settings of which this follows.
    settings: FleetModelConfig,
}

/// A model on one of its devices.
pub(crate) struct SizedCopy {
    pub(crate) choice: DeviceChoice,
    pub(crate) weights: WeightSizes,
    /// Memory of each worker.
    pub(crate) demand: MemoryPlan,
    worker: worker::WorkerConfig,
}

/// A model whose file and devices are known, and whose sizes are not.
struct ModelOnDevices {
    /// The fleet's processes have other working directories, so it is absolute.
    path: PathBuf,
    file: GgufModel,
    description: ModelDescription,
    choices: Vec<DeviceChoice>,
}

/// Properties of a model from the header of its file.
#[derive(Clone)]
struct ModelFileSummary {
    description: ModelDescription,
    /// The distinct types of its tensors.
    dtypes: Vec<DType>,
}

/// Sizes of the weights in the weight-server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WeightSizes {
    /// In the device's layout.
    pub(crate) tensor_bytes: u64,
    /// Including packing and padding.
    pub(crate) allocation_bytes: u64,
    /// The manifest is always in host memory.
    pub(crate) manifest_bytes: u64,
    pub(crate) allocations: usize,
    on_host: bool,
}

impl WeightSizes {
    fn of(path: &Path, model: &GgufModel, choice: &DeviceChoice, pack: bool) -> CliResult<Self> {
        let refused = |error: &dyn std::error::Error| {
            CliError::new(Exit::ModelRefused, format!("{}: {}", path.display(), one_line(error)))
        };
        let mut sizes = Vec::new();
        let mut manifest_bytes = model.metadata().bytes().len() as u64;
        for (_, tensor) in model.tensors() {
            manifest_bytes += tensor.name.len() as u64 + MANIFEST_ENTRY_BYTES;
            sizes.push(match choice.gpu {
                None => tensor.bytes,
                Some(_) => Tiles::new(tensor.dtype, tensor.row_values() as usize, tensor.rows() as usize)
                    .map_err(|error| refused(&error))?
                    .bytes() as u64,
            });
        }
        let packing = if pack { Packing::Slabs } else { Packing::OnePerTensor };
        let plan = PackPlan::new(&sizes, packing).map_err(|error| refused(&error))?;
        Ok(Self {
            tensor_bytes: plan.tensor_bytes,
            allocation_bytes: plan.allocation_bytes(),
            manifest_bytes,
            allocations: plan.allocations.len(),
            on_host: choice.gpu.is_none(),
        })
    }

    /// Bytes that the ledger reserves for the generation on its device.
    pub(crate) fn total(&self) -> u64 {
        self.allocation_bytes + if self.on_host { self.manifest_bytes } else { 0 }
    }
}

impl ModelOnDevices {
    /// Checks the header of the model file and chooses the devices.
    fn of(config: &FleetModelConfig, seen: &GpuInventory) -> CliResult<Self> {
        let path = std::path::absolute(&config.path)
            .with_context(|| format!("cannot find {}", config.path.display()))?;
        let file = gguf_file::open(&path)?;
        let description = gguf_file::describe(&path, &file)?;
        check_context(config, &description)?;
        let unfit = without_kernel(&file);
        let choices = config.device.choose(&config.name, seen, unfit.as_deref())?;
        choices.iter().try_for_each(|choice| check_node(&config.name, choice))?;
        Ok(Self { path, file, description, choices })
    }
}

impl SizedCopy {
    /// Computes the memory of the weights and of each worker on this device.
    fn of(
        config: &FleetModelConfig,
        model: &ModelOnDevices,
        choice: DeviceChoice,
        fleet_workers: u32,
    ) -> CliResult<Self> {
        let ModelOnDevices { path, file, description, .. } = model;
        let weights = WeightSizes::of(path, file, &choice, config.pack)?;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        // On a GPU these threads only serve; the GPU computes.
        let threads = match config.threads {
            Some(threads) => threads as usize,
            None => (cores / fleet_workers.max(1) as usize).max(1),
        };
        let kv_bytes = match config.kv_bytes {
            Some(bytes) => bytes,
            None => kv_bytes(config, description, choice.gpu.as_ref(), &weights)?,
        };
        let mut worker = worker_config(config, choice.device(), kv_bytes, threads);
        let too_many = config.check_running_max(worker.step_tokens());
        too_many.map_err(|why| CliError::new(Exit::Usage, why))?;
        let unfit = |error: EngineConfigError| {
            CliError::new(Exit::Usage, format!("{}: {}", path.display(), one_line(&error)))
        };
        let demand = MemoryPlan::of(&worker, description, &distinct_dtypes(file)).map_err(unfit)?;
        // The device allocates whole units; the budget covers them.
        worker.kv_bytes = worker.kv_bytes.max(ByteSize(demand.kv));
        worker.workspace_bytes = Some(ByteSize(demand.workspace.total()));
        Ok(Self { choice, weights, demand, worker })
    }
}

/// What the workers of a device have in common.
fn worker_config(
    config: &FleetModelConfig,
    device: worker::ComputeDevice,
    kv_bytes: ByteSize,
    threads: usize,
) -> worker::WorkerConfig {
    let places = || (String::new(), PathBuf::new());
    let ((name, listen), (model_name, weights_socket)) = (places(), places());
    let mut worker = worker::WorkerConfig::new(name, model_name, weights_socket, listen, kv_bytes, threads);
    worker.device = device;
    worker.aliases = config.aliases.clone();
    worker.sampling = config.sampling.clone();
    worker.kv_type = config.kv_type.clone();
    worker.context_tokens = config.ctx_size.map(|tokens| tokens as usize);
    worker.step_tokens = config.step_tokens.map(|tokens| tokens as usize);
    // Every running sequence needs at least one row in every step.
    worker.running_max = worker.running_max.min(worker.step_tokens());
    worker.running_max = config.running_max.map_or(worker.running_max, |sequences| sequences as usize);
    worker.queue_max = config.queue_max.map_or(worker.queue_max, |requests| requests as usize);
    worker.pooling = config.pooling;
    worker.step_timeout = config.step_timeout;
    worker.draft = config.draft.clone().map_or_else(DraftSource::default, DraftSource::from);
    worker.draft_depth = config.draft_depth.map_or(worker.draft_depth, |depth| depth as usize);
    worker
}

fn distinct_dtypes(file: &GgufModel) -> Vec<DType> {
    let mut dtypes: Vec<DType> = file.tensors().map(|(_, tensor)| tensor.dtype).collect();
    dtypes.sort_unstable();
    dtypes.dedup();
    dtypes
}

impl SizedModel {
    fn of(config: &FleetModelConfig, model: ModelOnDevices, fleet_workers: u32) -> CliResult<Self> {
        let chat_template = config.chat_template.as_deref().map(std::path::absolute).transpose();
        let chat_template = chat_template.with_context(|| "cannot find the chat template".to_owned())?;
        let copy = |choice: &DeviceChoice| SizedCopy::of(config, &model, choice.clone(), fleet_workers);
        let copies = model.choices.iter().map(copy).collect::<CliResult<Vec<SizedCopy>>>()?;
        let ModelOnDevices { path, file, description, .. } = model;
        Ok(Self {
            name: config.name.clone(),
            files: gguf_file::identity(&file)?,
            settings: FleetModelConfig { path: path.clone(), chat_template, ..config.clone() },
            path,
            workers: config.workers,
            copies,
            head: ModelFileSummary { description, dtypes: distinct_dtypes(&file) },
            pack: config.pack,
        })
    }

    /// Computes the sizes of all models of a fleet. They depend on each other, because some are
    /// draft models of others. `other_workers` is the number of workers of models that are not
    /// among these.
    pub(crate) fn all(
        models: &[FleetModelConfig],
        other_workers: u32,
        seen: &GpuInventory,
    ) -> CliResult<Vec<Self>> {
        let on_devices = models.iter().map(|config| ModelOnDevices::of(config, seen));
        let on_devices = on_devices.collect::<CliResult<Vec<ModelOnDevices>>>()?;
        let of_model = |config: &FleetModelConfig, model: &ModelOnDevices| {
            config.workers.saturating_mul(u32::try_from(model.choices.len()).unwrap_or(u32::MAX))
        };
        // Models that are loaded on demand are not all there at once: each shares the processors
        // with those that are there from the start.
        let at_start = models.iter().zip(&on_devices).filter(|(config, _)| !config.on_demand);
        let at_start =
            at_start.map(|(config, model)| of_model(config, model)).fold(other_workers, u32::saturating_add);
        let size = |(config, model): (&FleetModelConfig, ModelOnDevices)| {
            let own = if config.on_demand { of_model(config, &model) } else { 0 };
            Self::of(config, model, at_start.saturating_add(own))
        };
        let mut sized = models.iter().zip(on_devices).map(size).collect::<CliResult<Vec<Self>>>()?;
        for (index, config) in models.iter().enumerate() {
            let Some(name) = sized[index].drafted_by() else { continue };
            let Some(draft) = sized.iter().find(|model| model.name == name) else {
                let text = format!("model {:?}: its draft model {name:?} is not in this fleet", config.name);
                return Err(CliError::new(Exit::Usage, text));
            };
            check_draft_devices(&sized[index], draft)?;
            let draft = draft.head.clone();
            sized[index].make_room_for(&draft, config)?;
        }
        Ok(sized)
    }

    /// The chat template that the configuration names. Workers get its text with
    /// [`Self::set_chat_template`].
    pub(crate) fn chat_template_file(&self) -> Option<&Path> {
        self.settings.chat_template.as_deref()
    }

    pub(crate) fn set_chat_template(&mut self, template: CheckedChatTemplate) {
        for copy in &mut self.copies {
            copy.worker.chat_template = Some(ChatTemplateSetting::Checked(template.clone()));
        }
    }

    /// Whether the model may leave the memory for another one.
    pub(crate) fn may_be_idle(&self) -> bool {
        self.settings.idle_unload.is_some()
    }

    /// Identifies the files and their versions.
    pub(crate) fn files(&self) -> &str {
        &self.files
    }

    /// Name of this model's draft model.
    fn drafted_by(&self) -> Option<&str> {
        match self.copies.first().map(|copy| &copy.worker.draft) {
            Some(DraftSource::Model(name)) => Some(name),
            Some(DraftSource::Off | DraftSource::Lookup) | None => None,
        }
    }

    /// Adds what the draft model takes of each worker. Its KV cache has the same number of tokens
    /// and the same type. If the budget is given in bytes, both caches share it; else it grows.
    fn make_room_for(&mut self, draft: &ModelFileSummary, config: &FleetModelConfig) -> CliResult<()> {
        let layers = self.head.description.kv_layers(&config.kv_type);
        let drafts = draft.description.kv_layers(&config.kv_type.rest().into());
        engine::check_draft(&layers, &drafts)
            .map_err(|error| CliError::new(Exit::Usage, format!("{}: {error}", self.path.display())))?;
        for copy in &mut self.copies {
            copy.demand = copy.demand.with_draft(&copy.worker, &draft.description, &draft.dtypes);
            copy.worker.workspace_bytes = Some(ByteSize(copy.demand.workspace.total()));
            if config.kv_bytes.is_none() {
                // A block of the model and a block of the draft model together.
                let block_bytes =
                    |layers| KvLayout { block_tokens: 1, blocks: 1, layers }.block_bytes() as u64;
                let own = block_bytes(layers.clone());
                let both = own + block_bytes(drafts.clone());
                copy.demand.kv = copy.demand.kv.saturating_mul(both) / own.max(1);
                copy.worker.kv_bytes = ByteSize(copy.demand.kv);
            }
        }
        Ok(())
    }

    /// Whether one copy of the weights on a common device serves both models.
    pub(crate) fn has_same_copy(&self, other: &Self) -> bool {
        self.has_same_files(other) && self.pack == other.pack
    }

    /// Whether the models differ at most in the layout and the devices of their weights.
    pub(crate) fn has_same_files(&self, other: &Self) -> bool {
        self.files == other.files
    }

    pub(crate) fn plan(&self) -> CliResult<ModelSpec> {
        Ok(ModelSpec {
            name: self.name.clone(),
            path: self.path.clone(),
            workers: self.workers,
            copies: self.copies.iter().map(SizedCopy::plan).collect::<CliResult<_>>()?,
            pack: self.pack,
            files: self.files.clone(),
            configured_path: self.settings.configured_path.clone().unwrap_or(self.path.clone()),
            idle_unload: self.settings.idle_unload,
            on_demand: self.settings.on_demand,
            fallback: self.fallback(),
            settings: to_toml_table(&self.settings)?,
        })
    }
}

impl SizedModel {
    /// Why the model is on the host, if GPUs were to be tried first and this executable can use
    /// them.
    pub(crate) fn fallback(&self) -> Option<String> {
        let [copy] = &self.copies[..] else { return None };
        let is_open = self.settings.device.is_open() && gpu_support::IS_BUILT_IN;
        copy.choice.why.clone().filter(|_| is_open && copy.choice.gpu.is_none())
    }
}

impl SizedCopy {
    fn plan(&self) -> CliResult<CopySpec> {
        let device = self.choice.device().to_string();
        let memory = CopyMemory { weights_bytes: self.weights.total(), worker_bytes: self.demand.total() };
        // The supervisor names the weights.
        let weights = String::new();
        Ok(CopySpec { device, weights, worker_config: to_toml_table(&self.worker)?, memory })
    }
}

/// A draft model is on the one device of its model.
fn check_draft_devices(model: &SizedModel, draft: &SizedModel) -> CliResult {
    let (name, drafts) = (&model.name, &draft.name);
    let text = match (&model.copies[..], &draft.copies[..]) {
        ([_], [_]) => return Ok(()),
        ([_], _) => format!("`device` of {drafts:?} names several devices, and it drafts for {name:?}"),
        _ => format!("`device` of {name:?} names several devices, and its `draft` is the model {drafts:?}"),
    };
    let text = format!("{text}: a draft model works on one device; `draft = \"lookup\"` works on all");
    Err(CliError::new(Exit::Usage, text))
}

/// Refuses a NUMA node that this machine lacks.
fn check_node(model: &str, choice: &DeviceChoice) -> CliResult {
    let node = choice.node.map_or(Ok(()), |number| NumaNode::find(number).map(drop));
    node.map_err(|error| CliError::new(Exit::Usage, format!("`device` of model {model:?}: {error}")))
}

/// Refuses a context longer than the model's at the start, instead of at the first long prompt. A
/// draft model has no sequences of its own.
fn check_context(config: &FleetModelConfig, description: &ModelDescription) -> CliResult {
    let most = description.context_length;
    match config.ctx_size.filter(|&asked| config.workers > 0 && asked as usize > most) {
        None => Ok(()),
        Some(asked) => {
            let path = config.path.display();
            let message = format!("{path}: --ctx-size is {asked}, the model's context has {most} tokens");
            Err(CliError::new(Exit::Usage, message))
        }
    }
}

/// Default size of the KV cache: some long sequences or many short ones. The budget is always a
/// fixed number, never "what is free".
fn kv_bytes(
    config: &FleetModelConfig,
    description: &ModelDescription,
    gpu: Option<&GpuInfo>,
    weights: &WeightSizes,
) -> CliResult<ByteSize> {
    let context = config.ctx_size.map_or(description.context_length, |tokens| tokens as usize);
    let tokens = match config.kv_tokens {
        Some(tokens) => tokens as usize,
        None => default_kv_tokens(config, description, context, gpu, weights),
    };
    let engine = EngineConfig::new(KvBudget::Tokens(tokens));
    let layout = engine.kv_layout(description.kv_layers(&config.kv_type)).map_err(|error| {
        CliError::new(Exit::Usage, format!("--kv-tokens {tokens} and --ctx-size {context}: {error}"))
    })?;
    Ok(ByteSize(layout.blocks as u64 * layout.block_bytes() as u64))
}

fn kv_token_bytes(description: &ModelDescription, types: &KvTypes) -> u64 {
    description.kv_layers(types).iter().map(|layer| layer.token_bytes() as u64).sum()
}

fn default_kv_tokens(
    config: &FleetModelConfig,
    description: &ModelDescription,
    context: usize,
    gpu: Option<&GpuInfo>,
    weights: &WeightSizes,
) -> usize {
    let most = match gpu {
        None => DEFAULT_KV_TOKENS_MAX,
        Some(gpu) => {
            // GPU memory is scarce: all workers together use half of what the weights leave.
            let engine = EngineConfig::new(KvBudget::Tokens(1));
            let token_bytes = kv_token_bytes(description, &config.kv_type);
            let share =
                gpu.total_bytes.saturating_sub(weights.total()) / 2 / u64::from(config.workers.max(1));
            let fitting = usize::try_from(share / token_bytes.max(1)).unwrap_or(usize::MAX);
            DEFAULT_GPU_KV_TOKENS_MAX.min(fitting.max(engine.block_tokens))
        }
    };
    (4 * context).min(most).max(config.ctx_size.unwrap_or(0) as usize)
}
