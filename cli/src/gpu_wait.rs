// SPDX-License-Identifier: Apache-2.0

//! Waits for GPUs that are not ready yet: at boot, the driver is loaded and the fabric is set up
//! after the first services start. A fleet that did not wait would fail, or would run on the host.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::cli_error::CliResult;
use crate::device_selection::DeviceSelection;
use crate::devices::{GpuInventory, discover_gpus};
use crate::gpu_support;

/// How often the driver is asked again.
const POLL: Duration = Duration::from_secs(1);

/// Lists the GPUs. Waits for those that are wanted, at most for `wait`, if this machine has a GPU
/// and this executable can use one.
pub(crate) fn discover_wanted(wanted: &[&DeviceSelection], wait: Duration) -> CliResult<GpuInventory> {
    let is_expected = gpu_support::IS_BUILT_IN && has_gpu(Path::new("/"));
    let began = Instant::now();
    let mut is_told = false;
    loop {
        let seen = discover_gpus()?;
        let Some(missing) = missing(wanted, &seen) else { return Ok(seen) };
        let left = wait.saturating_sub(began.elapsed());
        if !is_expected || left.is_zero() {
            return Ok(seen);
        }
        if !std::mem::replace(&mut is_told, true) {
            tracing::error!(missing, ?wait, "waiting for a GPU that is not ready");
        }
        std::thread::sleep(POLL.min(left));
    }
}

/// Why the driver has no GPU yet, if one is wanted.
fn missing(wanted: &[&DeviceSelection], seen: &GpuInventory) -> Option<String> {
    if let Some(problem) = &seen.problem {
        return Some(problem.clone());
    }
    // The driver finds all GPUs at once: one that is not among others does not come.
    let is_wanted = wanted.iter().any(|selection| !selection.is_on_host());
    (is_wanted && seen.gpus.is_empty()).then(|| "the driver sees no GPU".to_owned())
}

/// Whether the machine has a GPU of NVIDIA, whether or not its driver is loaded. `root` is "/".
fn has_gpu(root: &Path) -> bool {
    /// NVIDIA's number as a maker of PCI devices.
    const VENDOR: &str = "0x10de";
    /// Display controllers: VGA (0300) and 3D (0302).
    const CLASS: &str = "0x03";
    if root.join("dev/nvidiactl").exists() {
        return true;
    }
    let Ok(devices) = std::fs::read_dir(root.join("sys/bus/pci/devices")) else { return false };
    devices.flatten().any(|device| {
        let starts = |file: &str, with: &str| {
            std::fs::read_to_string(device.path().join(file)).is_ok_and(|text| text.starts_with(with))
        };
        starts("vendor", VENDOR) && starts("class", CLASS)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::GpuInfo;

    #[test]
    fn gpus_are_missing_if_one_is_wanted_and_the_driver_sees_none() {
        let seen = |gpus: Vec<GpuInfo>| GpuInventory { gpus, problem: None };
        let blind = GpuInventory { gpus: Vec::new(), problem: Some("no driver".to_owned()) };
        let one = seen(vec![GpuInfo::h200(0)]);
        for (device, seen, expected) in [
            ("cuda:0", &blind, Some("no driver")),
            ("auto", &blind, Some("no driver")),
            ("cuda:0", &one, None),
            ("cuda:1", &one, None),
            ("auto", &one, None),
            ("all", &one, None),
            ("auto", &seen(Vec::new()), Some("the driver sees no GPU")),
            ("all", &seen(Vec::new()), Some("the driver sees no GPU")),
            ("host,cuda:1", &seen(Vec::new()), Some("the driver sees no GPU")),
            ("host", &seen(Vec::new()), None),
        ] {
            let selection: DeviceSelection = device.parse().unwrap();
            assert_eq!(missing(&[&selection], seen).as_deref(), expected, "{device}");
        }
    }

    #[test]
    fn a_gpu_on_the_pci_bus_counts_before_its_driver_is_loaded() {
        let root = tempfile::tempdir().unwrap();
        assert!(!has_gpu(root.path()));
        let add = |name: &str, vendor: &str, class: &str| {
            let device = root.path().join("sys/bus/pci/devices").join(name);
            std::fs::create_dir_all(&device).unwrap();
            std::fs::write(device.join("vendor"), vendor).unwrap();
            std::fs::write(device.join("class"), class).unwrap();
        };
        add("0000:00:01.0", "0x8086\n", "0x030000\n");
        // NVIDIA's audio device and network card.
        add("0000:00:02.0", "0x10de\n", "0x040300\n");
        assert!(!has_gpu(root.path()));
        add("0000:00:03.0", "0x10de\n", "0x030200\n");
        assert!(has_gpu(root.path()));
    }
}
