//! Device memory that crosses processes: CUDA VMM allocations, exported as file descriptors.
//!
//! ```text
//! loader                                     worker
//! WritableModel::allocate                    ImportedModel::import  (read-only)
//!   fill it through its addresses              addresses of tensors, for kernels
//! WritableModel::finish -> descriptors ----> descriptors from the weight-server
//! ```
//! The weight-server between them holds descriptors and never loads the driver. `GrowingRange` is for memory that one
//! process adds to and takes away from (KV pools), `PinnedPages` for what it copies to the device.
//!
//! Layers: `driver` is the raw seam (`libcuda`; in tests `fake`), `Physical` and `AddressRange` own handles, addresses
//! and mappings, the models on top of them know manifests. All but `libcuda`
//! and `nvml` is compiled without the feature `cuda` too.

mod device;
pub mod driver;
#[cfg(test)]
mod fake;
mod growing;
mod imported;
#[cfg(feature = "cuda")]
mod libcuda;
#[cfg(feature = "cuda")]
pub mod nvml;
mod physical;
mod pinned;
mod range;
pub mod retry;
mod writable;

use std::sync::Arc;

pub use device::{Context, Device, DeviceError, DeviceSelector, DeviceUuid, SelectorError, devices};
pub use growing::{GrowError, GrowingRange};
pub use imported::{DeviceTensor, ImportModelError, ImportedModel};
pub use physical::Physical;
pub use pinned::{HostPages, PinError, PinnedPages, PinnedPart};
pub use range::AddressRange;
pub use writable::{AllocateError, FinishError, WritableModel};

use driver::{Driver, Refusal};

/// Why there is no driver to talk to.
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
        /// Of the CUDA that it is for, as 1000 * major + 10 * minor, where it says so.
        version: Option<u32>,
    },
    #[error(
        "the NVIDIA driver does not start (nvidia-smi may say more; the host's memory can be used without it)"
    )]
    Init(#[source] Refusal),
}

fn for_cuda(version: Option<u32>) -> String {
    version
        .map_or_else(String::new, |version| format!(" for CUDA {}.{}", version / 1000, version % 1000 / 10))
}

/// Loads and starts the driver (0.2 s); to be called once, and never in the weight-server.
pub fn open_driver() -> Result<Arc<dyn Driver>, OpenDriverError> {
    #[cfg(feature = "cuda")]
    return Ok(Arc::new(libcuda::LibCuda::open()?));
    #[cfg(not(feature = "cuda"))]
    return Err(OpenDriverError::NotBuilt);
}

/// Bytes for people, in errors.
pub(crate) fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

#[cfg(test)]
mod tests;
