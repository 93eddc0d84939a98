// SPDX-License-Identifier: Apache-2.0

//! `ballast devices`: lists the GPUs that a fleet can use.
//!
//! Initializing the CUDA driver takes a quarter of a second and some memory, and binds the process
//! to the GPU. A child process therefore does it and ends. Neither the supervisor nor the
//! weight-server loads the driver.

use std::io::Read;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use cuda::open_driver;
use cuda::{DeviceInfo, DriverApi};
use serde::{Deserialize, Serialize};
use service::exit::one_line;
use service::{ByteSize, Exit};

use crate::cli_error::{CliError, CliResult};
use crate::gpu_support;
use crate::terminal::print_stdout;

/// A driver without persistence mode may take seconds to start, and longer with many GPUs.
const TIMEOUT: Duration = Duration::from_secs(60);

#[derive(clap::Args)]
pub(crate) struct DevicesArguments {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Properties of a GPU that are needed to choose one and to plan its memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GpuInfo {
    /// N of "cuda:N". CUDA_VISIBLE_DEVICES decides which GPUs are counted.
    pub(crate) ordinal: u32,
    pub(crate) uuid: String,
    pub(crate) name: String,
    /// Major * 10 + minor.
    pub(crate) compute_capability: u32,
    pub(crate) total_bytes: u64,
    /// Of unified memory, what the host has available; else known only if NVML reports it.
    pub(crate) free_bytes: Option<u64>,
    /// Whether the GPU shares its memory with the host.
    pub(crate) integrated: bool,
    /// The NUMA node that is the GPU's own memory, which the host's figures count too.
    pub(crate) numa_node: Option<u32>,
    /// The reason why no fleet can run on this GPU, if there is one.
    pub(crate) unusable: Option<String>,
}

/// The GPUs that a process of this executable and environment sees.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GpuInventory {
    pub(crate) gpus: Vec<GpuInfo>,
    /// The reason why no GPU is visible, if the driver could not be used.
    pub(crate) problem: Option<String>,
}

pub(crate) fn run(arguments: DevicesArguments) -> CliResult {
    let seen = probe_gpus();
    let text = match arguments.json {
        true => serde_json::to_string(&seen)
            .map_err(|error| CliError::new(Exit::Internal, format!("cannot write as JSON: {error}")))?,
        false => text(&seen),
    };
    print_stdout(&format!("{text}\n"))
}

fn text(seen: &GpuInventory) -> String {
    if let Some(problem) = &seen.problem {
        return format!("no GPU: {problem}");
    }
    let line = |gpu: &GpuInfo| {
        let (major, minor) = (gpu.compute_capability / 10, gpu.compute_capability % 10);
        let free =
            gpu.free_bytes.map(|free| format!(", {} free", ByteSize(free).rounded())).unwrap_or_default();
        let total = ByteSize(gpu.total_bytes).rounded();
        let shared = if gpu.integrated { " shared with the host" } else { "" };
        let verdict = gpu.unusable.as_ref().map(|why| format!("; unusable: {why}")).unwrap_or_default();
        format!(
            "cuda:{}  {}  {}, compute capability {major}.{minor}, {total}{shared}{free}{verdict}",
            gpu.ordinal, gpu.uuid, gpu.name
        )
    };
    seen.gpus.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// Lists the GPUs through a child process, which has ended when this returns.
pub(crate) fn discover_gpus() -> CliResult<GpuInventory> {
    if !gpu_support::IS_BUILT_IN {
        // Without CUDA there is no driver to load.
        return Ok(probe_gpus());
    }
    let failed = |text: String| CliError::new(Exit::Internal, format!("cannot list the GPUs: {text}"));
    let mut child = Command::new("/proc/self/exe")
        .args(["devices", "--json"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| failed(error.to_string()))?;
    let (sender, answer) = mpsc::channel();
    let stdout = child.stdout.take();
    std::thread::spawn(move || {
        let mut text = String::new();
        let read = stdout.map(|mut stdout| stdout.read_to_string(&mut text));
        // The receiver is gone after the timeout.
        let _ = sender.send(read.unwrap_or(Ok(0)).map(|_| text));
    });
    let answer = answer.recv_timeout(TIMEOUT);
    // The child has ended, or it does not respond.
    let _ = child.kill();
    let ended = child.wait().map_err(|error| failed(error.to_string()))?;
    match answer {
        Ok(Ok(text)) => {
            serde_json::from_str(&text).map_err(|_| failed(format!("the driver ended the process ({ended})")))
        }
        Ok(Err(error)) => Err(failed(error.to_string())),
        Err(_) => Err(failed(format!("the driver did not answer within {} s", TIMEOUT.as_secs()))),
    }
}

/// Lists the GPUs in this process. This loads the driver.
fn probe_gpus() -> GpuInventory {
    let blind =
        |error: &dyn std::error::Error| GpuInventory { gpus: Vec::new(), problem: Some(one_line(error)) };
    let driver = match open_driver() {
        Ok(driver) => driver,
        Err(error) => return blind(&error),
    };
    let free_bytes = gpu_support::free_memory();
    match cuda::devices(&*driver) {
        Ok(found) => {
            let free_bytes = |facts: &DeviceInfo| match facts.integrated {
                // The driver does not count the page cache, which the kernel would reclaim.
                true => service::meminfo::available_bytes().ok(),
                false => free_bytes(facts),
            };
            let gpus = found.iter().map(|facts| gpu(&*driver, facts, free_bytes(facts))).collect();
            GpuInventory { gpus, problem: None }
        }
        Err(refusal) => blind(&refusal),
    }
}

fn gpu(driver: &dyn DriverApi, facts: &DeviceInfo, free_bytes: Option<u64>) -> GpuInfo {
    let unusable = match (facts.vmm, facts.posix_fd) {
        (false, _) => Some("no virtual memory management, so weights cannot be shared".to_owned()),
        (true, false) => Some("no file descriptors for its memory, so weights cannot be shared".to_owned()),
        (true, true) => driver.granularity(facts.ordinal).err().map(|refusal| refusal.to_string()),
    };
    GpuInfo {
        ordinal: facts.ordinal,
        uuid: facts.uuid.to_string(),
        name: facts.name.clone(),
        compute_capability: facts.compute_capability,
        total_bytes: facts.total_bytes,
        free_bytes,
        integrated: facts.integrated,
        numa_node: facts.numa_node,
        unusable: unusable.or_else(|| gpu_support::missing_kernels(facts.compute_capability)),
    }
}

#[cfg(test)]
impl GpuInfo {
    pub(crate) fn h200(ordinal: u32) -> Self {
        Self {
            ordinal,
            uuid: format!("GPU-00112233-4455-6677-8899-aabbccddee{ordinal:02x}"),
            name: "NVIDIA H200".to_owned(),
            compute_capability: 90,
            total_bytes: 140 << 30,
            free_bytes: Some(139 << 30),
            integrated: false,
            numa_node: None,
            unusable: None,
        }
    }

    /// A DGX Spark's, whose memory is the host's.
    pub(crate) fn gb10() -> Self {
        Self {
            name: "NVIDIA GB10".to_owned(),
            compute_capability: 121,
            total_bytes: 119 << 30,
            free_bytes: Some(100 << 30),
            integrated: true,
            ..Self::h200(0)
        }
    }

    pub(crate) fn without_kernels(ordinal: u32) -> Self {
        Self { unusable: Some("it has no kernels".to_owned()), ..Self::h200(ordinal) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_seen_survives_its_line_of_json() {
        let unusable_gpu = GpuInfo { unusable: Some("no".to_owned()), free_bytes: None, ..GpuInfo::h200(1) };
        let seen = GpuInventory { gpus: vec![GpuInfo::h200(0), unusable_gpu], problem: None };
        let line = serde_json::to_string(&seen).unwrap();
        assert!(!line.contains('\n'), "{line}");
        assert_eq!(serde_json::from_str::<GpuInventory>(&line).unwrap(), seen);
        let text = text(&seen);
        assert!(text.contains("cuda:0  GPU-00112233-4455-6677-8899-aabbccddee00  NVIDIA H200"), "{text}");
        assert!(text.ends_with("unusable: no"), "{text}");
        let spark = super::text(&GpuInventory { gpus: vec![GpuInfo::gb10()], problem: None });
        assert!(spark.ends_with("119 GiB shared with the host, 100 GiB free"), "{spark}");
    }

    #[test]
    fn a_process_without_a_gpu_says_why() {
        let seen = probe_gpus();
        assert_eq!(seen.problem.is_some(), seen.gpus.is_empty());
    }
}
