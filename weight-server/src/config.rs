//! Configuration of one weight-server, as its supervisor or an administrator writes it.

use std::collections::BTreeSet;
use std::path::PathBuf;

use serde::Deserialize;
use service::Bytes;

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Config {
    /// Where the sockets go; the registry of the fleet.
    pub runtime_dir: PathBuf,
    /// What weights, KV caches and workspaces may take of the host's memory together. Without it: what is available
    /// when the weight-server starts.
    pub host_budget: Option<Bytes>,
    /// Users whose processes may attach. Without it: the weight-server's own.
    pub allow_uids: Option<BTreeSet<u32>>,
    /// Threads that read a model file. Without it: one per core, at most 8.
    pub loader_threads: Option<usize>,
    /// Loaded at start, for fleets that no supervisor loads for.
    #[serde(default)]
    pub models: Vec<ModelConfig>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ModelConfig {
    /// The name that workers ask for.
    pub name: String,
    pub path: PathBuf,
    /// False gives every tensor an allocation of its own.
    #[serde(default = "packed")]
    pub pack: bool,
}

fn packed() -> bool {
    true
}

/// More readers than this wait for the same disk or memory bus.
const MAX_DEFAULT_THREADS: usize = 8;

impl Config {
    pub(crate) fn loader_threads(&self) -> usize {
        let cores = || std::thread::available_parallelism().map_or(1, |cores| cores.get());
        self.loader_threads.unwrap_or_else(|| cores().min(MAX_DEFAULT_THREADS)).max(1)
    }
}
