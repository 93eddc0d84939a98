//! Configuration of one weight-server, as its supervisor or an administrator writes it.

use std::collections::BTreeSet;
use std::path::PathBuf;

use memory::manifest::HOST_DEVICE;
use serde::Deserialize;
use service::ByteSize;

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct WeightServerConfig {
    /// Where the sockets go; the registry of the fleet.
    pub runtime_dir: PathBuf,
    /// What weights, KV caches and workspaces may take of the host's memory together. Without it: what is available
    /// when the weight-server starts.
    pub host_budget: Option<ByteSize>,
    /// GPUs that models may be loaded onto.
    #[serde(default)]
    pub devices: Vec<DeviceConfig>,
    /// Users whose processes may attach. Without it: the weight-server's own.
    pub allow_uids: Option<BTreeSet<u32>>,
    /// Threads that read a model file. Without it: one per core, at most 8, onto a GPU at most 14.
    pub loader_threads: Option<usize>,
    /// Loaded at start, for fleets that no supervisor loads for.
    #[serde(default)]
    pub models: Vec<ModelLoadConfig>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ModelLoadConfig {
    /// The name that workers ask for.
    pub name: String,
    pub path: PathBuf,
    /// "host", or the UUID of one of `devices`.
    #[serde(default = "host")]
    pub device: String,
    /// False gives every tensor an allocation of its own.
    #[serde(default = "packed")]
    pub pack: bool,
}

/// A GPU, and how much of it the fleet may use.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct DeviceConfig {
    /// Its UUID, as nvidia-smi -L shows it.
    pub id: String,
    /// What weights, contexts, KV caches and workspaces may take of its memory together. The weight-server never loads the
    /// driver, so somebody who can ask has to tell it: `ballast serve` does.
    pub budget: ByteSize,
}

fn packed() -> bool {
    true
}

fn host() -> String {
    HOST_DEVICE.to_owned()
}

/// More readers than this wait for the same disk or memory bus.
const MAX_DEFAULT_THREADS: usize = 8;

/// A thread copies 3 to 6 GB/s out of the page cache (seen on one kind of guest on different days), a GPU takes 53. Where it
/// is 3, 12 threads bring 38 to 45 and 14 bring 47 to 52; where it is 6, 10 are enough and 14 do no harm.
const MAX_DEFAULT_GPU_THREADS: usize = 14;

/// Readers of one load, by where it goes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LoaderThreads {
    pub(crate) host: usize,
    pub(crate) gpu: usize,
}

impl LoaderThreads {
    pub(crate) fn onto(self, device: &str) -> usize {
        if device == HOST_DEVICE { self.host } else { self.gpu }
    }
}

impl WeightServerConfig {
    pub(crate) fn loader_threads(&self) -> LoaderThreads {
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        let threads = |most: usize| self.loader_threads.unwrap_or(cores.min(most)).max(1);
        LoaderThreads { host: threads(MAX_DEFAULT_THREADS), gpu: threads(MAX_DEFAULT_GPU_THREADS) }
    }
}
