// SPDX-License-Identifier: Apache-2.0

//! [`OpenDriverError`]: why a process has no CUDA driver.

use crate::checked::DriverError;

/// Why the driver cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenDriverError {
    #[error(
        "this executable was built without CUDA: build it with --features cuda, or use the host's memory"
    )]
    NotBuilt,
    #[error("no NVIDIA driver here: libcuda.so.1 cannot be loaded; install it, or use the host's memory")]
    NoDriver,
    #[error("the NVIDIA driver sees no GPU here; CUDA_VISIBLE_DEVICES may hide them")]
    NoDevice,
    #[error(
        "the NVIDIA driver{} is too old: it has no {symbol}; install one for CUDA 13 (580 or later)",
        for_cuda(*.version)
    )]
    TooOld {
        symbol: &'static str,
        /// The CUDA version that the driver is for, as 1000 * major + 10 * minor, if the driver
        /// reports it.
        version: Option<u32>,
    },
    #[error(
        "the NVIDIA driver cannot be initialized (nvidia-smi may say more; the host's memory can be used without it)"
    )]
    Init(#[source] DriverError),
}

fn for_cuda(version: Option<u32>) -> String {
    version
        .map_or_else(String::new, |version| format!(" for CUDA {}.{}", version / 1000, version % 1000 / 10))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_driver_is_reported_with_its_version_and_the_missing_function() {
        let text = |version| OpenDriverError::TooOld { symbol: "cuMemCreate", version }.to_string();
        assert!(
            text(Some(11_040))
                .starts_with("the NVIDIA driver for CUDA 11.4 is too old: it has no cuMemCreate; ")
        );
        assert!(text(None).starts_with("the NVIDIA driver is too old: "));
    }
}
