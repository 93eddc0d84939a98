// SPDX-License-Identifier: Apache-2.0

//! [`DeviceSelector`]: the GPU that a user or a manifest names.

use std::fmt;
use std::str::FromStr;

use crate::checked::{DeviceInfo, DeviceUuid};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceSelector {
    /// "cuda:N": the position in this process.
    Ordinal(u32),
    /// "GPU-...", as nvidia-smi and the manifest have it.
    Uuid(DeviceUuid),
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{text:?} names no GPU: write cuda:0, or the UUID that nvidia-smi -L shows")]
pub struct DeviceSelectorError {
    pub text: String,
}

impl DeviceSelector {
    pub(super) fn matches(self, info: &DeviceInfo) -> bool {
        match self {
            Self::Ordinal(ordinal) => info.ordinal == ordinal,
            Self::Uuid(uuid) => info.uuid == uuid,
        }
    }
}

impl fmt::Display for DeviceSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ordinal(ordinal) => write!(f, "cuda:{ordinal}"),
            Self::Uuid(uuid) => uuid.fmt(f),
        }
    }
}

impl FromStr for DeviceSelector {
    type Err = DeviceSelectorError;

    fn from_str(text: &str) -> Result<Self, DeviceSelectorError> {
        let ordinal = text.strip_prefix("cuda:").and_then(|number| number.parse().ok()).map(Self::Ordinal);
        ordinal
            .or_else(|| DeviceUuid::parse(text).map(Self::Uuid))
            .ok_or_else(|| DeviceSelectorError { text: text.to_owned() })
    }
}
