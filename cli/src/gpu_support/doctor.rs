// SPDX-License-Identifier: Apache-2.0

//! The doctor's GPU checks: shareable memory, persistence mode, and copy speed.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cuda::nvml::Nvml;
use cuda::{Device, DeviceSelector, HostPages, OpenDriverError, PinnedBuffer, devices, open_driver};
use cuda::{DeviceInfo, DriverApi};
use handoff::manifest::split_handoff;
use kernels::cuda::{Buffer, Stream, loading};
use memory::device::{ImportedModel, WritableModel};
use memory::manifest::{DeviceKind, Manifest, ManifestDevice};

use crate::doctor::finding::{CheckResult, Finding, Verdict, format_rate};
use crate::doctor::hand_off::{HandOffTimes, receive_from_child};
use crate::doctor::test_model::{self, ALLOCATION_BYTES};

const DRIVER: &str = "driver";

/// Size of a copy on the device: its time is far above the latency of a copy, and it fits any GPU.
const COPY_BYTES: usize = 256 << 20;
/// Size of one copy from host memory. A slot of the loader is copied in 80 us.
const PART_BYTES: usize = 32 << 20;
const COPY_ROUNDS: u32 = 8;

pub(crate) fn doctor_findings() -> Vec<Finding> {
    let archs = kernels::cuda::compiled_archs();
    let kernels = Finding::new(DRIVER, "kernels", Verdict::Ok, format!("compiled for {archs}"));
    let mut findings = vec![kernels.with("archs", archs)];
    findings.extend(driver_findings());
    findings
}

fn driver_findings() -> Vec<Finding> {
    let driver = match open_driver() {
        Ok(driver) => driver,
        Err(error @ (OpenDriverError::NoDriver | OpenDriverError::NoDevice)) => {
            let text = format!("{error}: the host backend serves");
            return vec![Finding::new(DRIVER, "cuda", Verdict::Note, text)];
        }
        Err(error) => return vec![Finding::from_result(DRIVER, "cuda", Err(error.into()))],
    };
    let nvml = Nvml::open();
    let mut findings = vec![Finding::from_result(DRIVER, "cuda", version(&*driver, nvml.as_ref().ok()))];
    if let Err(error) = &nvml {
        let text = format!("{}: persistence mode is unknown", service::exit::one_line(error));
        findings.push(Finding::new(DRIVER, "nvml", Verdict::Note, text));
    }
    match devices(&*driver) {
        Ok(found) if found.is_empty() => {
            findings.push(Finding::new(DRIVER, "devices", Verdict::Note, "this process sees no GPU"));
        }
        Ok(found) => {
            for facts in &found {
                findings.extend(examine_device(&driver, nvml.as_ref().ok(), facts));
            }
        }
        Err(refusal) => findings.push(Finding::from_result(DRIVER, "devices", Err(refusal.into()))),
    }
    findings
}

fn version(driver: &dyn DriverApi, nvml: Option<&Nvml>) -> CheckResult<Finding> {
    let version = driver.version()?;
    let cuda = format!("{}.{}", version / 1000, version % 1000 / 10);
    let package = nvml.and_then(|nvml| nvml.driver_version().ok());
    let text = match &package {
        Some(package) => format!("CUDA {cuda}, driver {package}"),
        None => format!("CUDA {cuda}"),
    };
    Ok(Finding::new(DRIVER, "cuda", Verdict::Ok, text).with("cuda", cuda).with("driver", package))
}

fn examine_device(driver: &Arc<dyn DriverApi>, nvml: Option<&Nvml>, facts: &DeviceInfo) -> Vec<Finding> {
    let part = format!("cuda:{}", facts.ordinal);
    let mut findings = vec![identity(&part, facts), sharing(&part, facts)];
    if let Some(nvml) = nvml {
        findings.push(Finding::from_result(&part, "persistence", persistence(&part, nvml, facts)));
    }
    if facts.vmm && facts.posix_fd {
        findings.push(Finding::from_result(&part, "hand-off", hand_over(&part, driver, facts)));
    }
    findings.push(Finding::from_result(&part, "copy", copy(&part, driver, facts)));
    findings
}

fn identity(part: &str, facts: &DeviceInfo) -> Finding {
    let (major, minor) = (facts.compute_capability / 10, facts.compute_capability % 10);
    let shared = if facts.integrated { ", shared with the host" } else { "" };
    let text = format!(
        "{} ({}), compute capability {major}.{minor}, {:.1} GiB{shared}",
        facts.name,
        facts.uuid,
        facts.total_bytes as f64 / f64::from(1 << 30)
    );
    Finding::new(part, "device", Verdict::Ok, text)
        .with("name", facts.name.clone())
        .with("uuid", facts.uuid.to_string())
        .with("compute_capability", facts.compute_capability)
        .with("total_bytes", facts.total_bytes)
        .with("integrated", facts.integrated)
}

fn sharing(part: &str, facts: &DeviceInfo) -> Finding {
    let (verdict, text) = match (facts.vmm, facts.posix_fd) {
        (true, true) => (Verdict::Ok, "memory can be exported as file descriptors"),
        (false, _) => (Verdict::Failed, "no virtual memory management: weights cannot be shared on this GPU"),
        (true, false) => {
            (Verdict::Failed, "no POSIX descriptors for memory: weights cannot be shared on this GPU")
        }
    };
    Finding::new(part, "sharing", verdict, text).with("vmm", facts.vmm).with("posix_fd", facts.posix_fd)
}

fn persistence(part: &str, nvml: &Nvml, facts: &DeviceInfo) -> CheckResult<Finding> {
    let on = nvml.persistence_mode(facts.uuid)?;
    Ok(if on {
        Finding::new(part, "persistence", Verdict::Ok, "persistence mode is on")
    } else {
        let text =
            "persistence mode is off: weights may not outlive the death of all processes; nvidia-smi -pm 1";
        Finding::new(part, "persistence", Verdict::Note, text)
    }
    .with("on", on))
}

fn hand_over(part: &str, driver: &Arc<dyn DriverApi>, facts: &DeviceInfo) -> CheckResult<Finding> {
    let device = Device::open(Arc::clone(driver), DeviceSelector::Uuid(facts.uuid))?;
    let hand_off = over_device(&device)?;
    let text = format!(
        "{} MiB of a killed process are readable here; mapped in {:.2} ms",
        test_model::total_bytes() >> 20,
        hand_off.import.as_secs_f64() * 1e3
    );
    Ok(Finding::new(part, "hand-off", Verdict::Ok, text)
        .with("bytes", test_model::total_bytes())
        .with("loading_seconds", hand_off.loading.as_secs_f64())
        .with("import_seconds", hand_off.import.as_secs_f64())
        .with("granularity_bytes", device.granularity()))
}

fn over_device(device: &Device) -> CheckResult<HandOffTimes> {
    let context = device.context()?;
    let received = receive_from_child(&device.uuid().to_string())?;
    let started = Instant::now();
    let (manifest, fds) = split_handoff(received.fds)?;
    let model = ImportedModel::import(device, &manifest, &fds)?;
    let import = started.elapsed();
    for (index, tensor) in model.tensors.iter().enumerate() {
        let mut found = vec![0; ALLOCATION_BYTES[index] as usize];
        tensor.read(&context, 0, &mut found)?;
        test_model::check_contents(&tensor.name, &found, &test_model::contents(received.seed, index))?;
    }
    Ok(HandOffTimes { loading: received.loading, import })
}

/// Loads the test model onto a GPU. The peer process of the hand-off calls this.
pub(crate) fn load_test_model(device: &str, seed: u64) -> CheckResult<(Manifest, Vec<OwnedFd>)> {
    let device = Device::open(open_driver()?, device.parse()?)?;
    let context = device.context()?;
    let mut model = WritableModel::allocate(&context, &ALLOCATION_BYTES, Duration::ZERO)?;
    for index in 0..ALLOCATION_BYTES.len() {
        model.write(&context, index, 0, &test_model::contents(seed, index))?;
    }
    let device = ManifestDevice {
        kind: DeviceKind::Cuda,
        id: device.uuid().to_string(),
        compute_capability: device.info().compute_capability,
    };
    Ok((test_model::manifest(device, &[0; ALLOCATION_BYTES.len()]), model.finish()?))
}

/// Bytes of host memory that the loader pins for a large model.
pub(crate) fn pinned_bytes_per_load() -> u64 {
    loading::ring_bytes(u64::MAX) as u64
}

fn copy(part: &str, driver: &Arc<dyn DriverApi>, facts: &DeviceInfo) -> CheckResult<Finding> {
    let device = Device::open(Arc::clone(driver), DeviceSelector::Uuid(facts.uuid))?;
    let stream = Stream::new(&device)?;
    // Pins and copies as much as a load does, in the same way, so that this check fails where a
    // load would fail.
    let pinned =
        PinnedBuffer::pin(&device, HostPages::new(pinned_bytes_per_load() as usize)?)?.split(PART_BYTES);
    let mut part_of_target = Buffer::new(&device, PART_BYTES)?;
    let mut to_device = || -> CheckResult<f64> {
        let started = Instant::now();
        for _ in 0..COPY_ROUNDS {
            for host in &pinned {
                part_of_target.view_mut().copy_from_host(&stream, host.as_slice())?;
            }
        }
        Ok(per_second(PART_BYTES * pinned.len(), started))
    };
    // The first round wakes the device and does not count.
    to_device()?;
    let to_device = to_device()?;
    let mut source = Buffer::<u8>::new(&device, COPY_BYTES)?;
    source.view_mut().fill_bytes(&stream, 1)?;
    let mut target = Buffer::new(&device, COPY_BYTES)?;
    stream.synchronize()?;
    let started = Instant::now();
    for _ in 0..COPY_ROUNDS {
        target.view_mut().copy_from(&stream, source.view())?;
    }
    stream.synchronize()?;
    // Each byte is both read and written.
    let on_device = 2.0 * per_second(COPY_BYTES, started);
    let text = format!(
        "{} from pinned host memory, {} on the device (read + write)",
        format_rate(to_device),
        format_rate(on_device)
    );
    Ok(Finding::new(part, "copy", Verdict::Ok, text)
        .with("pinned_to_device_bytes_per_second", to_device)
        .with("on_device_bytes_per_second", on_device))
}

/// Bytes per second over all rounds; `bytes` is the size of one round.
fn per_second(bytes: usize, started: Instant) -> f64 {
    bytes as f64 * f64::from(COPY_ROUNDS) / started.elapsed().as_secs_f64()
}
