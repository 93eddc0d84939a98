// SPDX-License-Identifier: Apache-2.0

//! Chooses the device for a model: compares what the user asks for with the machine's GPUs and the
//! available kernels.
//!
//! The choice is a pure function. Processes pass it on as "host" or as a GPU's UUID, because
//! ordinals differ between processes.

use std::fmt;
use std::str::FromStr;

use cuda::DeviceSelector;
use gguf::GgufModel;
use quant::layout::planes;
use service::Exit;
use worker::ComputeDevice;

use crate::cli_error::{CliError, CliResult};
use crate::devices::{GpuInfo, GpuInventory};

/// One device of `--device` and of the key `device`: auto, host, host:N for a NUMA node, cuda:N, or
/// a GPU's UUID.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum DeviceOption {
    /// The first GPU that can run the model; the host if there is none.
    #[default]
    Auto,
    Host,
    /// A NUMA node of the host.
    HostNode(u32),
    Gpu(DeviceSelector),
}

#[derive(Debug, thiserror::Error)]
#[error("{text:?} is not a device; use auto, host, host:0, cuda:0, or a UUID as nvidia-smi -L shows it")]
pub(crate) struct ParseDeviceError {
    text: String,
}

/// The device that was chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeviceChoice {
    /// The GPU; `None` is the host.
    pub(crate) gpu: Option<GpuInfo>,
    /// The NUMA node of the host, if only that is used.
    pub(crate) node: Option<u32>,
    /// The reason, if the user left the choice open.
    pub(crate) why: Option<String>,
}

impl DeviceChoice {
    pub(crate) fn host(why: Option<String>) -> Self {
        Self { gpu: None, node: None, why }
    }

    pub(crate) fn gpu(gpu: GpuInfo, why: Option<String>) -> Self {
        Self { gpu: Some(gpu), node: None, why }
    }

    /// The device's name in configurations and protocols.
    pub(crate) fn device(&self) -> ComputeDevice {
        match (&self.gpu, self.node) {
            // The UUID comes from the driver, so it always parses.
            (Some(gpu), _) => gpu.uuid.parse().unwrap_or_default(),
            (None, Some(node)) => ComputeDevice::HostNode(node),
            (None, None) => ComputeDevice::Host,
        }
    }
}

/// Writes "cuda:0 NVIDIA H200 (GPU-...)" or "host (reason)".
impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.gpu {
            Some(GpuInfo { ordinal, name, uuid, .. }) => write!(f, "cuda:{ordinal} {name} ({uuid})")?,
            None => self.device().fmt(f)?,
        }
        self.why.as_ref().map_or(Ok(()), |why| write!(f, " ({why})"))
    }
}

/// Says why GPU kernels cannot run the model: names its first tensor of an unsupported type.
pub(crate) fn without_kernel(model: &GgufModel) -> Option<String> {
    let (_, tensor) = model.tensors().find(|(_, tensor)| planes(tensor.dtype).is_none())?;
    Some(format!("no kernel for GPUs reads tensor {}, of type {}", tensor.name, tensor.dtype))
}

/// Chooses a device. `without_kernel` is the reason why the model cannot run on a GPU, if there is
/// one.
pub(crate) fn choose(
    wanted: DeviceOption,
    seen: &GpuInventory,
    without_kernel: Option<&str>,
) -> CliResult<DeviceChoice> {
    match wanted {
        DeviceOption::Host => Ok(DeviceChoice::host(None)),
        DeviceOption::HostNode(node) => Ok(DeviceChoice { node: Some(node), ..DeviceChoice::host(None) }),
        DeviceOption::Auto => Ok(automatic(seen, without_kernel)),
        DeviceOption::Gpu(selector) => {
            let refused = |exit, why: &str| {
                CliError::new(
                    exit,
                    format!("{selector} cannot be used: {why}; --device host runs without a GPU"),
                )
            };
            let gpu = usable_gpu(selector, seen, "this process").map_err(|why| refused(Exit::Usage, &why))?;
            match without_kernel {
                Some(why) => Err(refused(Exit::ModelRefused, why)),
                None => Ok(DeviceChoice::gpu(gpu.clone(), None)),
            }
        }
    }
}

/// The GPU that is meant, or why it cannot be used. `who` sees these GPUs.
pub(crate) fn usable_gpu<'a>(
    selector: DeviceSelector,
    seen: &'a GpuInventory,
    who: &str,
) -> Result<&'a GpuInfo, String> {
    if let Some(problem) = &seen.problem {
        return Err(problem.clone());
    }
    let Some(gpu) = seen.gpus.iter().find(|gpu| means(selector, gpu)) else {
        return Err(format!("there is no such GPU, {}", present(&seen.gpus, who)));
    };
    match &gpu.unusable {
        Some(why) => Err(format!("{}: {why}", gpu.name)),
        None => Ok(gpu),
    }
}

fn automatic(seen: &GpuInventory, without_kernel: Option<&str>) -> DeviceChoice {
    let first = seen.gpus.iter().find(|gpu| gpu.unusable.is_none());
    match (no_gpu_reason(seen, without_kernel), first) {
        (None, Some(gpu)) => DeviceChoice::gpu(gpu.clone(), Some("the first usable GPU".to_owned())),
        (reason, _) => DeviceChoice::host(reason),
    }
}

/// The reason why no GPU can run the model, if none can.
pub(crate) fn no_gpu_reason(seen: &GpuInventory, without_kernel: Option<&str>) -> Option<String> {
    let is_usable = seen.gpus.iter().any(|gpu| gpu.unusable.is_none());
    let first_unusable = || seen.gpus.iter().find_map(|gpu| gpu.unusable.as_deref());
    let without_gpu = || first_unusable().unwrap_or("this process sees no GPU");
    let reason = seen.problem.as_deref().or(without_kernel);
    reason.or_else(|| (!is_usable).then(without_gpu)).map(str::to_owned)
}

fn means(selector: DeviceSelector, gpu: &GpuInfo) -> bool {
    match selector {
        DeviceSelector::Ordinal(ordinal) => gpu.ordinal == ordinal,
        DeviceSelector::Uuid(uuid) => gpu.uuid == uuid.to_string(),
    }
}

fn present(gpus: &[GpuInfo], who: &str) -> String {
    let names: Vec<String> =
        gpus.iter().map(|gpu| format!("cuda:{} {} ({})", gpu.ordinal, gpu.name, gpu.uuid)).collect();
    match names.is_empty() {
        true => format!("{who} sees none"),
        false => format!("{who} sees {}", names.join(", ")),
    }
}

impl DeviceOption {
    pub(crate) fn is_on_host(self) -> bool {
        matches!(self, Self::Host | Self::HostNode(_))
    }
}

impl FromStr for DeviceOption {
    type Err = ParseDeviceError;

    fn from_str(text: &str) -> Result<Self, ParseDeviceError> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        match text.parse() {
            Ok(ComputeDevice::Host) => Ok(Self::Host),
            Ok(ComputeDevice::HostNode(node)) => Ok(Self::HostNode(node)),
            Ok(ComputeDevice::Gpu(selector)) => Ok(Self::Gpu(selector)),
            Err(_) => Err(ParseDeviceError { text: text.to_owned() }),
        }
    }
}

impl fmt::Display for DeviceOption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Host => ComputeDevice::Host.fmt(f),
            Self::HostNode(node) => ComputeDevice::HostNode(*node).fmt(f),
            Self::Gpu(selector) => selector.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(gpus: Vec<GpuInfo>) -> GpuInventory {
        GpuInventory { gpus, problem: None }
    }

    fn blind() -> GpuInventory {
        GpuInventory { gpus: Vec::new(), problem: Some("no driver".to_owned()) }
    }

    fn wanted(text: &str) -> DeviceOption {
        text.parse().unwrap()
    }

    #[test]
    fn auto_takes_the_first_gpu_that_works() {
        let choice = choose(
            DeviceOption::Auto,
            &seen(vec![GpuInfo::without_kernels(0), GpuInfo::h200(1), GpuInfo::h200(2)]),
            None,
        )
        .unwrap();
        assert_eq!(choice.device().to_string(), GpuInfo::h200(1).uuid);
        assert!(choice.to_string().starts_with("cuda:1 NVIDIA H200 (GPU-"), "{choice}");
    }

    #[test]
    fn auto_falls_back_to_the_host_and_says_why() {
        for (seen, without_kernel, why) in [
            (blind(), None, "host (no driver)"),
            (seen(vec![]), None, "host (this process sees no GPU)"),
            (seen(vec![GpuInfo::without_kernels(0)]), None, "host (it has no kernels)"),
            (seen(vec![GpuInfo::h200(0)]), Some("no kernel"), "host (no kernel)"),
        ] {
            let choice = choose(DeviceOption::Auto, &seen, without_kernel).unwrap();
            assert_eq!((choice.device(), choice.to_string().as_str()), (ComputeDevice::Host, why));
        }
    }

    #[test]
    fn a_gpu_that_was_named_is_taken_or_refused_never_replaced() {
        let two = seen(vec![GpuInfo::h200(0), GpuInfo::without_kernels(1)]);
        assert_eq!(choose(wanted("cuda:0"), &two, None).unwrap().gpu, Some(GpuInfo::h200(0)));
        assert_eq!(choose(wanted(&GpuInfo::h200(0).uuid), &two, None).unwrap().gpu, Some(GpuInfo::h200(0)));
        for (text, seen, without_kernel, exit, part) in [
            (
                "cuda:7",
                &two,
                None,
                Exit::Usage,
                "cuda:7 cannot be used: there is no such GPU, this process sees cuda:0",
            ),
            ("cuda:1", &two, None, Exit::Usage, "it has no kernels"),
            ("cuda:0", &blind(), None, Exit::Usage, "no driver"),
            ("cuda:0", &two, Some("no kernel"), Exit::ModelRefused, "no kernel"),
        ] {
            let failure = choose(wanted(text), seen, without_kernel).unwrap_err();
            assert_eq!(failure.exit, exit);
            assert!(failure.message().contains(part), "{}", failure.message());
            assert!(failure.message().ends_with("--device host runs without a GPU"), "{}", failure.message());
        }
    }

    #[test]
    fn the_host_needs_no_look_at_gpus() {
        assert_eq!(
            choose(DeviceOption::Host, &blind(), Some("no kernel")).unwrap(),
            DeviceChoice::host(None)
        );
    }

    #[test]
    fn devices_are_written_as_they_are_read() {
        for text in ["auto", "host", "host:2", "cuda:0", "GPU-00112233-4455-6677-8899-aabbccddeeff"] {
            assert_eq!(wanted(text).to_string(), text);
        }
        for text in ["", "cpu", "host:", "cuda", "cuda:", "cuda:-1", "gpu0", "GPU-00"] {
            let error = text.parse::<DeviceOption>().unwrap_err().to_string();
            assert!(
                error.ends_with(
                    "is not a device; use auto, host, host:0, cuda:0, or a UUID as nvidia-smi -L shows it"
                ),
                "{error}"
            );
        }
    }
}
