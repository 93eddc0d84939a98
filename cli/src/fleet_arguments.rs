//! Arguments of every command that starts a fleet for one model.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use clap::Args;
use ops::KvTypes;
use service::ByteSize;

use crate::device_choice::DeviceOption;
use crate::fleet_config::FleetConfig;
use crate::model_config::{DEFAULT_WORKERS, FleetModelConfig};

/// In the place of a draft model: the text itself.
const LOOKUP: &str = "lookup";

#[derive(Args, Clone, Debug)]
pub(crate) struct FleetArguments {
    /// Processes that run the model; they share one copy of the weights
    #[arg(long, value_name = "N", default_value_t = DEFAULT_WORKERS, value_parser = clap::value_parser!(u32).range(1..=256))]
    workers: u32,
    /// Directory of the fleet's sockets [default: a new one]
    #[arg(long, value_name = "DIR")]
    runtime_dir: Option<PathBuf>,
    #[command(flatten)]
    worker: WorkerArguments,
}

/// What each worker of a model is given.
#[derive(Args, Clone, Debug)]
pub(crate) struct WorkerArguments {
    /// Where the weights lie and the model runs: auto, host, cuda:N, or a GPU's UUID
    #[arg(long, default_value_t = DeviceOption::Auto)]
    device: DeviceOption,
    /// Threads of each worker [default: cores / workers]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: Option<u32>,
    /// Longest sequence in tokens [default: the model's own]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    ctx_size: Option<u32>,
    /// Memory for keys and values of each worker, such as 512MiB
    #[arg(long, value_name = "SIZE", conflicts_with = "kv_tokens")]
    kv_bytes: Option<ByteSize>,
    /// The same as a number of tokens
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    kv_tokens: Option<u32>,
    /// What keys and values are stored as: f32, f16, bf16 or q8_0; another type for some layers, counted from 0, behind it, as
    /// in q8_0,0-1=f16
    #[arg(long, value_name = "TYPE", default_value_t = KvTypes::default())]
    kv_type: KvTypes,
    /// Most tokens that a worker computes in one step
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    step_tokens: Option<u32>,
    /// Guess next tokens and check several at once: from the text itself (lookup), or by a smaller MODEL.gguf with the same
    /// vocabulary. The output stays the same
    #[arg(long, value_name = "lookup|MODEL.gguf")]
    draft: Option<PathBuf>,
    /// Give every tensor memory of its own instead of packing small ones together
    #[arg(long)]
    no_pack: bool,
}

impl WorkerArguments {
    /// The model that drafts, if it is another one: its weights alone.
    pub(crate) fn draft_model(&self) -> Option<FleetModelConfig> {
        let path = self.draft.as_deref().filter(|path| *path != Path::new(LOOKUP))?;
        let model = self.model(path, 0);
        // Its own keys and values are never kept: it has no worker.
        let kv_type = KvTypes::default();
        Some(FleetModelConfig { draft: None, kv_bytes: None, kv_tokens: None, kv_type, ..model })
    }

    pub(crate) fn model(&self, path: &Path, workers: u32) -> FleetModelConfig {
        FleetModelConfig {
            name: model_name(path),
            path: path.to_owned(),
            device: self.device,
            workers,
            threads: self.threads,
            ctx_size: self.ctx_size,
            kv_bytes: self.kv_bytes,
            kv_tokens: self.kv_tokens,
            kv_type: self.kv_type.clone(),
            step_tokens: self.step_tokens,
            draft: self.draft.as_deref().map(model_name),
            draft_depth: None,
            pack: !self.no_pack,
        }
    }
}

impl FleetArguments {
    /// A fleet for this model and nothing else.
    pub(crate) fn config(self, model: &Path, listen: Option<SocketAddr>) -> FleetConfig {
        FleetConfig {
            listen,
            host_budget: None,
            gpu_budget: None,
            admission: router::AdmissionConfig::default(),
            models: std::iter::once(self.worker.model(model, self.workers))
                .chain(self.worker.draft_model())
                .collect(),
            runtime_dir: self.runtime_dir,
        }
    }

    pub(crate) fn runtime_dir(&self) -> Option<&Path> {
        self.runtime_dir.as_deref()
    }

    pub(crate) fn with_one_worker(self) -> Self {
        Self { workers: 1, ..self }
    }
}

/// A model is called as its file, without directory and extension.
pub(crate) fn model_name(path: &Path) -> String {
    path.file_stem().map_or_else(|| "model".to_owned(), |stem| stem.to_string_lossy().into_owned())
}
