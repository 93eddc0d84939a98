// SPDX-License-Identifier: Apache-2.0

//! The code that depends on the `cuda` feature. No other file of this package tests for the
//! feature.
//!
//! Without the feature there is no driver to ask, and fleets run on the host backend.

#[cfg(feature = "cuda")]
mod doctor;

/// Whether this executable was built with the `cuda` feature.
pub(crate) const IS_BUILT_IN: bool = cfg!(feature = "cuda");

#[cfg(feature = "cuda")]
pub(crate) use with_cuda::*;
#[cfg(not(feature = "cuda"))]
pub(crate) use without_cuda::*;

#[cfg(feature = "cuda")]
mod with_cuda {
    use cuda::DeviceInfo;
    use cuda::nvml::Nvml;

    pub(crate) use super::doctor::{doctor_findings, load_test_model, pinned_bytes_per_load};

    /// Asks NVML for the free memory of a GPU.
    pub(crate) fn free_memory() -> impl Fn(&DeviceInfo) -> Option<u64> {
        let nvml = Nvml::open().ok();
        move |facts| Some(nvml.as_ref()?.memory(facts.uuid).ok()??.free_bytes)
    }

    /// Why kernels cannot run on this GPU: the executable holds no code for its architecture.
    pub(crate) fn missing_kernels(compute_capability: u32) -> Option<String> {
        let (major, minor) = (compute_capability / 10, compute_capability % 10);
        (!kernels::cuda::runs_on(compute_capability)).then(|| {
            format!(
                "this executable has no kernels for compute capability {major}.{minor}; \
                 build it with BALLAST_CUDA_ARCHS=sm_{compute_capability}"
            )
        })
    }
}

#[cfg(not(feature = "cuda"))]
mod without_cuda {
    use std::os::fd::OwnedFd;

    use cuda::DeviceInfo;
    use memory::manifest::Manifest;

    use crate::doctor::finding::{CheckResult, Finding, Verdict};

    pub(crate) fn free_memory() -> impl Fn(&DeviceInfo) -> Option<u64> {
        |_| None
    }

    pub(crate) fn missing_kernels(_: u32) -> Option<String> {
        None
    }

    pub(crate) fn doctor_findings() -> Vec<Finding> {
        let text = "built without CUDA; fleets run on the host (build with --features cuda for GPUs)";
        vec![Finding::new("driver", "cuda", Verdict::Note, text)]
    }

    pub(crate) fn load_test_model(device: &str, _: u64) -> CheckResult<(Manifest, Vec<OwnedFd>)> {
        Err(format!("{device} needs an executable that is built with CUDA").into())
    }

    /// The host backend never locks memory.
    pub(crate) fn pinned_bytes_per_load() -> u64 {
        0
    }
}
