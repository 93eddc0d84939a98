// SPDX-License-Identifier: Apache-2.0

//! The mode of routing: which rules choose a worker.

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RoutingMode {
    /// Packed on GPUs, and prefix-aware between them. Prefix-aware on the host, where each worker
    /// computes on cores of its own.
    #[default]
    Auto,
    /// Packed on every device, and prefix-aware between devices.
    Packed,
    /// Prefix-aware between all workers.
    PrefixAware,
    LeastLoaded,
    /// The less loaded of two random workers.
    PowerOfTwo,
}

impl RoutingMode {
    pub const ALL: [Self; 5] =
        [Self::Auto, Self::Packed, Self::PrefixAware, Self::LeastLoaded, Self::PowerOfTwo];

    /// The name in configuration and arguments.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Packed => "packed",
            Self::PrefixAware => "prefix-aware",
            Self::LeastLoaded => "least-loaded",
            Self::PowerOfTwo => "power-of-two",
        }
    }

    /// Whether the workers of the device are filled one after the other.
    pub(super) fn packs(self, device: &str) -> bool {
        match self {
            Self::Auto => !is_on_host(device),
            Self::Packed => true,
            Self::PrefixAware | Self::LeastLoaded | Self::PowerOfTwo => false,
        }
    }
}

/// Whether workers of the device compute on the host: "host", or a NUMA node of it as "host:N". A
/// worker that tells no device does too.
fn is_on_host(device: &str) -> bool {
    device.is_empty() || device.split(':').next() == Some("host")
}
