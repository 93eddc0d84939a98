// SPDX-License-Identifier: Apache-2.0

//! The devices on which a model is to be: one, several, or every GPU. The model has one copy of its
//! weights on each.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use service::Exit;

use crate::cli_error::{CliError, CliResult};
use crate::device_choice::{DeviceChoice, DeviceOption, ParseDeviceError, choose, no_gpu_reason};
use crate::devices::{GpuInfo, GpuInventory};

/// The word for every usable GPU.
const ALL: &str = "all";

/// Value of `--device` (with commas) and of the key `device` (a string or an array).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "DeviceValue", into = "DeviceValue")]
pub(crate) enum DeviceSelection {
    One(DeviceOption),
    /// At least two, none of them twice, none of them `auto`.
    Several(Vec<DeviceOption>),
    /// Every usable GPU, at least one.
    AllGpus,
}

/// The value as TOML writes it.
#[derive(Serialize, Deserialize)]
#[serde(untagged, expecting = "`device` must be a string, or an array of strings")]
enum DeviceValue {
    One(String),
    Several(Vec<String>),
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum ParseSelectionError {
    #[error("`device`: {0}")]
    Device(#[from] ParseDeviceError),
    #[error("`device` is an empty list; name at least one device")]
    Empty,
    #[error("`device` names {device} twice")]
    Repeated { device: DeviceOption },
    #[error("`device`: {word:?} chooses devices itself and cannot stand in a list")]
    OpenInList { word: String },
}

impl Default for DeviceSelection {
    fn default() -> Self {
        Self::One(DeviceOption::Auto)
    }
}

impl DeviceSelection {
    fn of_list(names: &[String]) -> Result<Self, ParseSelectionError> {
        let mut devices = Vec::with_capacity(names.len());
        for name in names {
            let device: DeviceOption = match name.as_str() {
                ALL if names.len() == 1 => return Ok(Self::AllGpus),
                ALL => return Err(ParseSelectionError::OpenInList { word: name.clone() }),
                name => name.parse()?,
            };
            if device == DeviceOption::Auto && names.len() > 1 {
                return Err(ParseSelectionError::OpenInList { word: name.clone() });
            }
            if devices.contains(&device) {
                return Err(ParseSelectionError::Repeated { device });
            }
            devices.push(device);
        }
        match devices[..] {
            [] => Err(ParseSelectionError::Empty),
            [device] => Ok(Self::One(device)),
            _ => Ok(Self::Several(devices)),
        }
    }

    /// Whether no GPU has to be looked for.
    pub(crate) fn is_on_host(&self) -> bool {
        match self {
            Self::One(device) => device.is_on_host(),
            Self::Several(devices) => devices.iter().all(|device| device.is_on_host()),
            Self::AllGpus => false,
        }
    }

    /// Whether the machine decides.
    pub(crate) fn is_open(&self) -> bool {
        matches!(self, Self::One(DeviceOption::Auto) | Self::AllGpus)
    }

    /// The number of devices; on `all`, at least one.
    pub(crate) fn count_min(&self) -> u32 {
        match self {
            Self::One(_) | Self::AllGpus => 1,
            Self::Several(devices) => u32::try_from(devices.len()).unwrap_or(u32::MAX),
        }
    }

    /// Chooses the devices for a model, each once. `model` is for error texts.
    pub(crate) fn choose(
        &self,
        model: &str,
        seen: &GpuInventory,
        without_kernel: Option<&str>,
    ) -> CliResult<Vec<DeviceChoice>> {
        let devices = match self {
            Self::One(device) => return Ok(vec![choose(*device, seen, without_kernel)?]),
            Self::AllGpus => return all_gpus(model, seen, without_kernel),
            Self::Several(devices) => devices,
        };
        let in_list = |text: &str| format!("`device` of model {model:?}: {text}");
        let mut choices: Vec<DeviceChoice> = Vec::with_capacity(devices.len());
        for device in devices {
            let choice = choose(*device, seen, without_kernel)
                .map_err(|failure| CliError::new(failure.exit, in_list(failure.message())))?;
            if choices.iter().any(|other| other.device() == choice.device()) {
                let text = in_list(&format!("{device} names a GPU that stands in the list already"));
                return Err(CliError::new(Exit::Usage, text));
            }
            choices.push(choice);
        }
        Ok(choices)
    }
}

fn all_gpus(model: &str, seen: &GpuInventory, without_kernel: Option<&str>) -> CliResult<Vec<DeviceChoice>> {
    let usable: Vec<&GpuInfo> = seen.gpus.iter().filter(|gpu| gpu.unusable.is_none()).collect();
    if let Some(reason) = no_gpu_reason(seen, without_kernel) {
        let exit = if without_kernel.is_some() { Exit::ModelRefused } else { Exit::Usage };
        let text = format!(
            "`device` of model {model:?}: \"all\" means every GPU, and none can be used: {reason}; \
             `device = \"auto\"` uses the host then"
        );
        return Err(CliError::new(exit, text));
    }
    let why = match usable.len() == seen.gpus.len() {
        true => format!("one of {} GPUs", usable.len()),
        false => format!("one of {} usable GPUs among {}", usable.len(), seen.gpus.len()),
    };
    let choice = |gpu: &&GpuInfo| DeviceChoice::gpu((*gpu).clone(), Some(why.clone()));
    Ok(usable.iter().map(choice).collect())
}

impl FromStr for DeviceSelection {
    type Err = ParseSelectionError;

    fn from_str(text: &str) -> Result<Self, ParseSelectionError> {
        Self::of_list(&text.split(',').map(str::to_owned).collect::<Vec<_>>())
    }
}

impl TryFrom<DeviceValue> for DeviceSelection {
    type Error = ParseSelectionError;

    fn try_from(value: DeviceValue) -> Result<Self, ParseSelectionError> {
        match value {
            DeviceValue::One(name) => Self::of_list(&[name]),
            DeviceValue::Several(names) => Self::of_list(&names),
        }
    }
}

impl From<DeviceSelection> for DeviceValue {
    fn from(selection: DeviceSelection) -> Self {
        match selection {
            DeviceSelection::Several(devices) => {
                Self::Several(devices.iter().map(DeviceOption::to_string).collect())
            }
            one => Self::One(one.to_string()),
        }
    }
}

impl fmt::Display for DeviceSelection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One(device) => device.fmt(f),
            Self::AllGpus => f.write_str(ALL),
            Self::Several(devices) => {
                f.write_str(&devices.iter().map(DeviceOption::to_string).collect::<Vec<_>>().join(","))
            }
        }
    }
}

#[cfg(test)]
mod tests;
