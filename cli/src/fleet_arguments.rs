// SPDX-License-Identifier: Apache-2.0

//! Arguments that all commands share which start a fleet for one model.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use ops::KvTypes;
use router::{RoutingConfig, RoutingMode};
use service::ByteSize;
use service::runtime_dir::WORKERS_MAX;

use crate::device_selection::DeviceSelection;
use crate::fleet_config::{FleetConfig, GpuSharingConfig};
use crate::model_config::{self, DEFAULT_WORKERS, FleetModelConfig};

/// Value of `--draft` that selects prompt lookup instead of a draft model.
const LOOKUP: &str = "lookup";

#[derive(Args, Clone, Debug)]
pub(crate) struct FleetArguments {
    /// Worker processes on each device; all of a device share one copy of the weights
    #[arg(long, value_name = "N", default_value_t = DEFAULT_WORKERS, value_parser = clap::value_parser!(u32).range(1..=i64::from(WORKERS_MAX)))]
    workers: u32,
    /// Directory of the fleet's sockets [default: a new one]
    #[arg(long, value_name = "DIR")]
    runtime_dir: Option<PathBuf>,
    /// How the router chooses the worker of a stream: "packed" fills one worker of a device before
    /// the next, "prefix-aware" prefers the one that has the prompt cached, "least-loaded" and
    /// "power-of-two" spread streams, "auto" packs on GPUs only and is prefix-aware
    #[arg(long, value_name = "MODE", default_value = RoutingMode::Auto.name(), value_parser = routing_mode())]
    routing: RoutingMode,
    #[command(flatten)]
    worker: WorkerArguments,
}

fn routing_mode() -> impl TypedValueParser<Value = RoutingMode> {
    PossibleValuesParser::new(RoutingMode::ALL.map(RoutingMode::name))
        .map(|name| RoutingMode::ALL.into_iter().find(|mode| mode.name() == name).unwrap_or_default())
}

/// Arguments of the workers of one model.
#[derive(Args, Clone, Debug)]
pub(crate) struct WorkerArguments {
    /// Device of the weights and the workers: auto, host, host:N for a NUMA node, cuda:N, or a
    /// GPU's UUID. Several with commas, or all for every GPU: then each has a copy and workers
    #[arg(long, default_value_t = DeviceSelection::default())]
    device: DeviceSelection,
    /// Threads of each worker [default: cores / workers]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: Option<u32>,
    /// Maximum sequence length in tokens [default: the model's context length]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    ctx_size: Option<u32>,
    /// Size of each worker's KV cache in bytes, such as 512MiB
    #[arg(long, value_name = "SIZE", conflicts_with = "kv_tokens")]
    kv_bytes: Option<ByteSize>,
    /// Size of each worker's KV cache in tokens
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    kv_tokens: Option<u32>,
    /// Type of the KV cache: f32, f16, bf16 or q8_0. Layers, counted from 0, may have another type:
    /// q8_0,0-1=f16
    #[arg(long, value_name = "TYPE", default_value_t = KvTypes::default())]
    kv_type: KvTypes,
    /// Token budget of one step of a worker. Default: 2048 on a GPU, 512 on the host
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    step_tokens: Option<u32>,
    /// Speculative decoding: source of draft tokens, either prompt lookup or a smaller model with
    /// the same vocabulary. It does not change the output
    #[arg(long, value_name = "lookup|MODEL.gguf")]
    draft: Option<PathBuf>,
    /// Allocate each tensor separately instead of packing small tensors together
    #[arg(long)]
    no_pack: bool,
}

/// The chat template of one model.
#[derive(Args, Clone, Debug)]
pub(crate) struct ChatTemplateArgument {
    /// Chat template (Jinja) that replaces the one in the model file
    #[arg(long, value_name = "FILE")]
    chat_template: Option<PathBuf>,
}

impl ChatTemplateArgument {
    pub(crate) fn file(&self) -> Option<PathBuf> {
        self.chat_template.clone()
    }
}

/// When a model leaves the memory.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct IdleUnloadArgument {
    /// Unload the model when no request has used it for this long, such as 10min, and load it again
    /// for the next request [default: never]
    #[arg(long, value_name = "DURATION", value_parser = model_config::parse_idle_unload)]
    idle_unload: Option<Duration>,
}

impl IdleUnloadArgument {
    /// Sets it for a model and the one that drafts for it.
    pub(crate) fn set(self, models: &mut [FleetModelConfig]) {
        models.iter_mut().for_each(|model| model.idle_unload = self.idle_unload);
    }
}

impl WorkerArguments {
    /// Configuration of the draft model, if there is one. The fleet loads its weights but starts no
    /// workers for it.
    pub(crate) fn draft_model(&self) -> Option<FleetModelConfig> {
        let path = self.draft.as_deref().filter(|path| *path != Path::new(LOOKUP))?;
        let model = self.model(path, 0);
        // A draft model has no worker, so its KV cache settings are unused.
        let kv_type = KvTypes::default();
        Some(FleetModelConfig { draft: None, kv_bytes: None, kv_tokens: None, kv_type, ..model })
    }

    pub(crate) fn model(&self, path: &Path, workers: u32) -> FleetModelConfig {
        FleetModelConfig {
            device: self.device.clone(),
            workers,
            threads: self.threads,
            ctx_size: self.ctx_size,
            kv_bytes: self.kv_bytes,
            kv_tokens: self.kv_tokens,
            kv_type: self.kv_type.clone(),
            step_tokens: self.step_tokens,
            draft: self.draft.as_deref().map(model_name),
            pack: !self.no_pack,
            ..FleetModelConfig::new(model_name(path), path.to_owned())
        }
    }
}

impl FleetArguments {
    /// Configuration of a fleet with this model only, and its draft model.
    pub(crate) fn config(self, model: &Path, listen: Option<SocketAddr>) -> FleetConfig {
        FleetConfig {
            listen,
            host_budget: None,
            gpu_budget: None,
            admission: router::AdmissionConfig::default(),
            routing: RoutingConfig { mode: self.routing },
            gpu: GpuSharingConfig::default(),
            router: router::RouterLimits::default(),
            access: router::AccessConfig::default(),
            tls: None,
            tracing: None,
            supervision: supervisor::SupervisionConfig::default(),
            models: std::iter::once(self.worker.model(model, self.workers))
                .chain(self.worker.draft_model())
                .collect(),
            runtime_dir: self.runtime_dir,
            models_directory: None,
            source: None,
        }
    }

    pub(crate) fn runtime_dir(&self) -> Option<&Path> {
        self.runtime_dir.as_deref()
    }

    pub(crate) fn with_one_worker(self) -> Self {
        Self { workers: 1, ..self }
    }
}

/// Default name of a model: its file name without directory and extension.
pub(crate) fn model_name(path: &Path) -> String {
    path.file_stem().map_or_else(|| "model".to_owned(), |stem| stem.to_string_lossy().into_owned())
}
