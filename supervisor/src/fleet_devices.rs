// SPDX-License-Identifier: Apache-2.0

//! The GPUs that the fleet uses: those of its configuration, and those that loads have added. A
//! plain value; the supervisor's event loop owns it.
//!
//! A GPU that no model has named is not in it, and costs nothing. One that is in it stays until the
//! supervisor ends. The weight-server's configuration has all of them, so that its next process
//! knows them, and a successor of the supervisor reads there what its predecessor had.

use proto::weights::v1 as wire;
use serde::{Deserialize, Serialize};
use service::config::{self, ConfigFileError};
use service::{ByteSize, RuntimeDir};

use crate::spec::ChildRole;

/// The device that all NUMA nodes ("host:N") are parts of.
pub(crate) const HOST: &str = "host";

/// A GPU, as an entry of `devices` in the weight-server's configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct GpuDevice {
    /// The UUID.
    pub id: String,
    /// Most bytes that the fleet may use, as "100GiB"; "host" if the GPU has unified memory.
    pub budget: String,
    /// The NUMA node that is the GPU's own memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub numa_node: Option<u32>,
}

impl GpuDevice {
    pub fn new(id: String, budget: Option<ByteSize>, numa_node: Option<u32>) -> Self {
        let budget = budget.map_or_else(|| HOST.to_owned(), |bytes| bytes.to_string());
        Self { id, budget, numa_node }
    }

    /// The budget of a GPU with memory of its own.
    pub(crate) fn own_bytes(&self) -> Option<u64> {
        self.budget.parse().ok().map(|bytes: ByteSize| bytes.0)
    }

    /// For a weight-server that may not know the GPU.
    pub(crate) fn memory(&self) -> wire::DeviceMemory {
        use wire::device_memory::{Budget, Unified};
        let budget = self.own_bytes().map_or(Budget::Unified(Unified {}), Budget::Bytes);
        wire::DeviceMemory { budget: Some(budget), numa_node: self.numa_node }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FleetDevices {
    gpus: Vec<GpuDevice>,
}

impl FleetDevices {
    pub fn new(gpus: impl IntoIterator<Item = GpuDevice>) -> Self {
        let mut devices = Self::default();
        devices.add_all(gpus);
        devices
    }

    /// Returns whether one of them is new. A known GPU keeps its budget.
    pub(crate) fn add_all(&mut self, gpus: impl IntoIterator<Item = GpuDevice>) -> bool {
        let before = self.gpus.len();
        for gpu in gpus {
            if self.get(&gpu.id).is_none() {
                self.gpus.push(gpu);
            }
        }
        self.gpus.len() > before
    }

    pub fn get(&self, id: &str) -> Option<&GpuDevice> {
        self.gpus.iter().find(|gpu| gpu.id == id)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &GpuDevice> {
        self.gpus.iter()
    }

    pub fn is_empty(&self) -> bool {
        self.gpus.is_empty()
    }

    /// The weight-server's configuration with these GPUs.
    pub(crate) fn weight_server(&self, config: &toml::Table) -> toml::Table {
        let entry = |gpu: &GpuDevice| {
            let mut entry = toml::Table::new();
            entry.insert("id".to_owned(), gpu.id.clone().into());
            entry.insert("budget".to_owned(), gpu.budget.clone().into());
            entry.extend(gpu.numa_node.map(|node| ("numa-node".to_owned(), i64::from(node).into())));
            toml::Value::Table(entry)
        };
        let mut config = config.clone();
        if !self.is_empty() {
            config.insert("devices".to_owned(), self.gpus.iter().map(entry).collect::<Vec<_>>().into());
        }
        config
    }

    /// The device monitor's configuration with these GPUs.
    pub(crate) fn monitor(&self, config: &toml::Table) -> toml::Table {
        let ids: Vec<toml::Value> = self.gpus.iter().map(|gpu| gpu.id.clone().into()).collect();
        let mut config = config.clone();
        config.insert("devices".to_owned(), ids.into());
        config
    }
}

/// Whether a device is the host or a NUMA node of it ("host:N").
pub(crate) fn is_host_device(device: &str) -> bool {
    device == HOST || device.strip_prefix(HOST).is_some_and(|node| node.starts_with(':'))
}

/// The GPUs of the last supervisor in this directory, as its weight-server was configured. Empty
/// without one.
pub(crate) fn recorded_gpus(directory: &RuntimeDir) -> Vec<GpuDevice> {
    #[derive(Default, Deserialize)]
    struct WeightServerRecord {
        #[serde(default)]
        devices: Vec<GpuDevice>,
    }
    let path = directory.config(ChildRole::WeightServer.subcommand());
    match config::load::<WeightServerRecord>(&path) {
        Ok(record) => record.devices,
        Err(ConfigFileError::Read { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            Vec::new()
        }
        Err(error) => {
            let cause = service::exit::one_line(&error);
            tracing::error!(cause, "the record of the fleet's GPUs is lost");
            Vec::new()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(id: &str, budget: Option<u64>, numa_node: Option<u32>) -> GpuDevice {
        GpuDevice::new(id.to_owned(), budget.map(ByteSize), numa_node)
    }

    #[test]
    fn a_known_gpu_keeps_its_budget() {
        let mut devices = FleetDevices::new([gpu("GPU-a", Some(1 << 30), None)]);
        assert!(!devices.add_all([gpu("GPU-a", Some(5 << 30), None)]));
        assert!(devices.add_all([gpu("GPU-b", None, None), gpu("GPU-a", None, None)]));
        let budgets: Vec<Option<u64>> = devices.iter().map(GpuDevice::own_bytes).collect();
        assert_eq!(budgets, [Some(1 << 30), None]);
    }

    #[test]
    fn a_successor_reads_what_the_weight_server_was_configured_with() {
        let folder = tempfile::tempdir().unwrap();
        let directory = RuntimeDir::at(folder.path());
        assert_eq!(recorded_gpus(&directory), []);
        let base: toml::Table = "runtime-dir = \"/run/x\"\nhost-budget = \"1GiB\"".parse().unwrap();
        assert_eq!(FleetDevices::default().weight_server(&base), base, "a fleet on the host names none");
        let gpus = [gpu("GPU-a", Some(3 << 30), Some(1)), gpu("GPU-b", None, None)];
        let table = FleetDevices::new(gpus.clone()).weight_server(&base);
        config::store(&directory.config("weight-server"), &table).unwrap();
        assert_eq!(recorded_gpus(&directory), gpus);
        std::fs::write(directory.config("weight-server"), "devices = 3").unwrap();
        assert_eq!(recorded_gpus(&directory), []);
    }

    #[test]
    fn the_host_and_its_nodes_are_no_gpus() {
        assert!(["host", "host:0", "host:12"].into_iter().all(is_host_device));
        assert!(!["GPU-a", "hosts", "cuda:0"].into_iter().any(is_host_device));
    }
}
