//! `ballast.toml`: what a fleet consists of, and how that becomes the configuration of each process.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use engine::{EngineConfig, KvBudget};
use models::ModelDescription;
use serde::{Deserialize, Serialize};
use service::{Bytes, Exit, RuntimeDir};
use supervisor::{ModelPlan, Plan, Role, WorkerSlot};
use toml::{Table, Value};

use crate::failure::{Failure, Outcome, Trying};
use crate::gguf_file;

/// Two show what the fleet is for: one copy of the weights, and a stream that survives the death of a worker.
pub(crate) const DEFAULT_WORKERS: u32 = 2;

/// Without a budget: four sequences of full length, or this many tokens (2.3 GiB for an 8B model with 8 KV heads).
const DEFAULT_KV_TOKENS_MAX: usize = 16 << 10;

/// The device whose memory is the host's.
pub(crate) const HOST: &str = "host";

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct FleetConfig {
    /// Absent: a fresh directory, removed at the end.
    pub(crate) runtime_dir: Option<PathBuf>,
    /// Where the router serves HTTP and gRPC. Absent: on its socket in the runtime directory only.
    pub(crate) listen: Option<SocketAddr>,
    /// Host memory for weights, KV caches and workspaces together. Absent: what is available at the start.
    pub(crate) host_budget: Option<Bytes>,
    #[serde(default)]
    pub(crate) models: Vec<ModelConfig>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct ModelConfig {
    /// What requests and workers call it.
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    #[serde(default = "host")]
    pub(crate) device: String,
    #[serde(default = "default_workers")]
    pub(crate) workers: u32,
    /// Of each worker. Absent: cores / workers of the fleet.
    pub(crate) threads: Option<u32>,
    pub(crate) ctx_size: Option<u32>,
    pub(crate) kv_bytes: Option<Bytes>,
    pub(crate) kv_tokens: Option<u32>,
    pub(crate) step_tokens: Option<u32>,
    #[serde(default = "packed")]
    pub(crate) pack: bool,
}

fn host() -> String {
    HOST.to_owned()
}

fn default_workers() -> u32 {
    DEFAULT_WORKERS
}

fn packed() -> bool {
    true
}

impl FleetConfig {
    /// Reads `ballast.toml`. Relative model paths are relative to it; a runtime directory from the command line comes first.
    pub(crate) fn load(path: &Path, runtime_dir: Option<&Path>) -> Outcome<Self> {
        let mut config: FleetConfig = service::config::load(path)?;
        let base = path.parent().unwrap_or(Path::new(""));
        for model in &mut config.models {
            model.path = base.join(&model.path);
        }
        let named = |model: &ModelConfig| config.models.iter().filter(|m| m.name == model.name).count();
        if let Some(twice) = config.models.iter().find(|m| named(m) > 1) {
            let text = format!("configuration {}: two models are called {:?}", path.display(), twice.name);
            return Err(Failure::new(Exit::Usage, text));
        }
        if let Some(runtime_dir) = runtime_dir {
            config.runtime_dir = Some(runtime_dir.to_owned());
        }
        Ok(config)
    }

    /// The plan for a supervisor that works in this directory. `socket` is a listening one from socket activation.
    pub(crate) fn plan(
        &self,
        directory: &RuntimeDir,
        socket: Option<OwnedFd>,
        log: tracing::Level,
    ) -> Outcome<Plan> {
        let workers = self.models.iter().map(|m| m.workers).sum();
        let models = self.models.iter().map(|m| m.plan(workers)).collect::<Outcome<Vec<ModelPlan>>>()?;
        let of_workers = directory.clone();
        let worker = move |slot: &WorkerSlot, table: &mut Table| {
            let mut set = |key: &str, value: String| table.insert(key.to_owned(), Value::String(value));
            set("name", slot.name());
            set("model", slot.model.clone());
            set("weights-socket", of_workers.weights_socket().to_string_lossy().into_owned());
            set("listen", of_workers.worker_socket(slot.index).to_string_lossy().into_owned());
        };
        let runtime_dir = directory.path().to_owned();
        let (listen, router_socket) = self.listen(directory, socket)?;
        Ok(Plan {
            weight_server: self.weight_server(directory),
            router: table(&router::Config::new(listen, runtime_dir))?,
            router_socket,
            http_address: listen.map(|address| address.to_string()).unwrap_or_default(),
            log,
            models,
            worker: Arc::new(worker),
        })
    }

    /// Binds the public socket. A router that is taken over has it already, and keeps its address.
    fn listen(
        &self,
        directory: &RuntimeDir,
        socket: Option<OwnedFd>,
    ) -> Outcome<(Option<SocketAddr>, Option<OwnedFd>)> {
        if let Some(socket) = socket {
            let listener = TcpListener::from(socket);
            let address = listener.local_addr().trying(|| "the socket of socket activation".to_owned())?;
            return Ok((Some(address), Some(listener.into())));
        }
        let Some(wanted) = self.listen else { return Ok((None, None)) };
        let living = directory.living_children().trying(|| "cannot read the runtime directory".to_owned())?;
        let router = Role::Router.subcommand();
        if living.iter().any(|(name, _)| name == router) {
            let present: router::Config = service::config::load(&directory.config(router))?;
            return Ok((present.listen, None));
        }
        let what = || format!("cannot listen on {wanted}; choose another address with --listen");
        let listener = TcpListener::bind(wanted).trying(what)?;
        let address = listener.local_addr().trying(what)?;
        Ok((Some(address), Some(listener.into())))
    }

    fn weight_server(&self, directory: &RuntimeDir) -> Table {
        let mut table = Table::new();
        let runtime_dir = directory.path().to_string_lossy().into_owned();
        table.insert("runtime-dir".to_owned(), Value::String(runtime_dir));
        if let Some(budget) = self.host_budget {
            table.insert("host-budget".to_owned(), Value::String(budget.to_string()));
        }
        table
    }
}

impl ModelConfig {
    /// Checks the head of the model file and sizes what its workers need. `workers` is the number in the whole fleet.
    pub(crate) fn plan(&self, workers: u32) -> Outcome<ModelPlan> {
        // Processes of the fleet have working directories of their own.
        let path =
            std::path::absolute(&self.path).trying(|| format!("cannot find {}", self.path.display()))?;
        let model = gguf_file::open(&path)?;
        let description = gguf_file::describe(&path, &model)?;
        let kv_bytes = match self.kv_bytes {
            Some(bytes) => bytes,
            None => self.kv_bytes_for_tokens(&description)?,
        };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads =
            self.threads.map_or((cores / workers.max(1) as usize).max(1), |threads| threads as usize);
        let places = || (String::new(), PathBuf::new());
        let ((name, listen), (model_name, weights_socket)) = (places(), places());
        let mut worker = worker::Config::new(name, model_name, weights_socket, listen, kv_bytes, threads);
        worker.context_tokens = self.ctx_size.map(|tokens| tokens as usize);
        if let Some(tokens) = self.step_tokens {
            worker.step_tokens = tokens as usize;
            // Every running sequence moves in every step.
            worker.running_max = worker.running_max.min(worker.step_tokens);
        }
        Ok(ModelPlan {
            name: self.name.clone(),
            path,
            workers: self.workers,
            device: self.device.clone(),
            pack: self.pack,
            worker_config: table(&worker)?,
        })
    }

    /// Room for some long sequences or many short ones: a budget is always a number, never "what is free".
    fn kv_bytes_for_tokens(&self, description: &ModelDescription) -> Outcome<Bytes> {
        let context = self.ctx_size.map_or(description.context_length, |tokens| tokens as usize);
        let default = (4 * context).min(DEFAULT_KV_TOKENS_MAX).max(self.ctx_size.unwrap_or(0) as usize);
        let tokens = self.kv_tokens.map_or(default, |tokens| tokens as usize);
        let engine = EngineConfig::new(KvBudget::Tokens(tokens));
        let layout = engine.kv_layout(description.kv_layers(engine.kv_type)).map_err(|error| {
            Failure::new(Exit::Usage, format!("--kv-tokens {tokens} and --ctx-size {context}: {error}"))
        })?;
        Ok(Bytes(layout.blocks as u64 * layout.block_bytes() as u64))
    }
}

fn table(config: &impl Serialize) -> Outcome<Table> {
    Table::try_from(config)
        .map_err(|error| Failure::new(Exit::Internal, format!("a configuration cannot be written: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fleet_of_two_models_reads_from_toml() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ballast.toml");
        let text = "listen = \"127.0.0.1:9000\"\n[[models]]\nname = \"a\"\npath = \"a.gguf\"\nkv-bytes = \"64MiB\"\n\
                    [[models]]\nname = \"b\"\npath = \"/b.gguf\"\nworkers = 1\n";
        std::fs::write(&path, text).unwrap();
        let config = FleetConfig::load(&path, Some(Path::new("/run/x"))).unwrap();
        assert_eq!(config.models[0].path, directory.path().join("a.gguf"));
        assert_eq!((config.models[0].workers, config.models[1].workers), (DEFAULT_WORKERS, 1));
        assert_eq!(config.models[1].path, Path::new("/b.gguf"));
        assert_eq!(config.runtime_dir.as_deref(), Some(Path::new("/run/x")));

        std::fs::write(&path, text.replace("\"b\"", "\"a\"")).unwrap();
        let failure = FleetConfig::load(&path, None).unwrap_err();
        assert_eq!(failure.exit, Exit::Usage);
        assert!(failure.message().contains("two models are called \"a\""), "{}", failure.message());
    }
}
