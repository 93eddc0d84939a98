// SPDX-License-Identifier: Apache-2.0

//! The configuration of one weight-server, as the supervisor or an administrator writes it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::str::FromStr;

use memory::manifest::HOST_DEVICE;
use memory::numa::is_host_device;
use serde::Deserialize;
use service::{ByteSize, UserId};

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct WeightServerConfig {
    /// The fleet's runtime directory, in which the sockets are created.
    pub runtime_dir: PathBuf,
    /// Host memory for weights, KV caches and workspaces together. Default: the memory that is
    /// available when the weight-server starts.
    pub host_budget: Option<ByteSize>,
    /// GPUs onto which models may be loaded.
    #[serde(default)]
    pub devices: Vec<DeviceConfig>,
    /// Users whose processes may attach, by name or number. Default: the weight-server's own user.
    pub allow_users: Option<BTreeSet<UserId>>,
    /// Threads that read a model file. Default: one per core, at most 8 for the host and 14 for a
    /// GPU.
    pub loader_threads: Option<usize>,
    /// Models to load at start, for a weight-server without a supervisor.
    #[serde(default)]
    pub models: Vec<ModelLoadConfig>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ModelLoadConfig {
    /// The name that workers use.
    pub name: String,
    pub path: PathBuf,
    /// "host", a NUMA node as "host:N", or the UUID of one of `devices`.
    #[serde(default = "host")]
    pub device: String,
    /// False gives every tensor its own allocation.
    #[serde(default = "packed")]
    pub pack: bool,
}

/// A GPU, and how much of its memory the fleet may use.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct DeviceConfig {
    /// The UUID, as `nvidia-smi -L` shows it.
    pub id: String,
    /// Device memory for weights, contexts, KV caches and workspaces together. The weight-server
    /// never loads the GPU driver, so it cannot query the device. `ballast serve` sets this value.
    pub budget: DeviceBudget,
    /// The NUMA node that is the GPU's own memory, as on Grace Hopper. It is no memory of the host.
    pub numa_node: Option<u32>,
}

/// The memory that a GPU's reservations count on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum DeviceBudget {
    /// Memory of the GPU.
    Own(ByteSize),
    /// "host": the GPU has unified memory, and the host's budget is its budget too.
    Host,
}

impl FromStr for DeviceBudget {
    type Err = <ByteSize as FromStr>::Err;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == HOST_DEVICE { Ok(Self::Host) } else { text.parse().map(Self::Own) }
    }
}

impl TryFrom<String> for DeviceBudget {
    type Error = <ByteSize as FromStr>::Err;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

fn packed() -> bool {
    true
}

fn host() -> String {
    HOST_DEVICE.to_owned()
}

/// More readers compete for the same disk or memory bus.
const MAX_DEFAULT_THREADS: usize = 8;

/// A thread copies 3 to 6 GB/s out of the page cache (measured on one kind of guest on different
/// days); a GPU takes 53 GB/s. At 3 GB/s a thread, 12 threads reach 38 to 45 and 14 reach 47 to 52.
/// At 6 GB/s, 10 are enough and 14 do no harm.
const MAX_DEFAULT_GPU_THREADS: usize = 14;

/// Reader threads of one load, by target.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LoaderThreads {
    pub(crate) host: usize,
    pub(crate) gpu: usize,
}

impl LoaderThreads {
    pub(crate) fn onto(self, device: &str) -> usize {
        if is_host_device(device) { self.host } else { self.gpu }
    }
}

impl WeightServerConfig {
    /// The NUMA nodes that are memory of GPUs.
    pub(crate) fn gpu_nodes(&self) -> BTreeSet<u32> {
        self.devices.iter().filter_map(|device| device.numa_node).collect()
    }

    /// The budgets of the GPUs with memory of their own, and the GPUs with unified memory.
    pub(crate) fn device_budgets(&self) -> (BTreeMap<String, u64>, BTreeSet<String>) {
        let (mut own, mut unified) = (BTreeMap::new(), BTreeSet::new());
        for DeviceConfig { id, budget, .. } in &self.devices {
            match budget {
                DeviceBudget::Own(bytes) => drop(own.insert(id.clone(), bytes.0)),
                DeviceBudget::Host => drop(unified.insert(id.clone())),
            }
        }
        (own, unified)
    }

    pub(crate) fn loader_threads(&self) -> LoaderThreads {
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        let threads = |most: usize| self.loader_threads.unwrap_or(cores.min(most)).max(1);
        LoaderThreads { host: threads(MAX_DEFAULT_THREADS), gpu: threads(MAX_DEFAULT_GPU_THREADS) }
    }
}
