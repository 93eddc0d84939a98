// SPDX-License-Identifier: Apache-2.0

//! The CUDA driver, in three layers.
//!
//! ```text
//! safe      Device, Context, Stream, Buffer, LazyModule, PhysicalMemory, PinnedBuffer, ...
//! checked   DriverApi + ExecutionApi: one method per driver call, errors as values
//!           two implementations: libcuda, and in tests the fake driver
//! raw       function pointers of libcuda, types of cudarc
//! ```
//! libcuda is loaded at run time ([`open_driver`]): building needs no CUDA toolkit, starting needs
//! no driver. Only `raw`, `libcuda` and `nvml` need the feature `cuda`, and with it cudarc.
//! docs/decisions/0016-one-cuda-driver-layer.md says what cudarc's own layers lack.
//!
//! # Invariants
//! 1. An object that lives in a context (stream, event, module, buffer, pinned memory) keeps the
//!    context retained.
//! 2. Memory that a launched kernel uses stays allocated until the kernel has ended. [`Buffer`]
//!    waits for the device before it frees. A caller that makes a [`DeviceView`] by hand, or unmaps
//!    from an [`AddressRange`], waits before.
//! 3. Two streams that touch one buffer need an [`Event`] between them. This crate does not check
//!    that.

pub mod checked;
#[cfg(any(test, feature = "testing"))]
pub mod fake;
#[cfg(feature = "cuda")]
mod libcuda;
#[cfg(feature = "nvml")]
pub mod nvml;
mod open;
#[cfg(feature = "cuda")]
mod raw;
mod safe;

use std::sync::Arc;

pub use checked::{
    DeviceAccess, DeviceInfo, DeviceUuid, DriverApi, DriverError, EncodedTensorMap, ErrorCode, LaunchConfig,
    MemoryInfo, TensorBoxLayout,
};
pub use open::OpenDriverError;
pub use safe::{
    AddressRange, Buffer, Context, CudaError, Device, DeviceError, DeviceSelector, DeviceSelectorError,
    DeviceView, DeviceViewMut, Event, Graph, HostPages, Kernel, LazyModule, PhysicalMemory, PinError,
    PinnedBuffer, ResizableMemory, ResizeError, Stream, describe_memory_shortage, devices, format_mib,
};

/// Loads and initializes the driver (0.2 s). Call it once per process, and never in the
/// weight-server.
pub fn open_driver() -> Result<Arc<dyn DriverApi>, OpenDriverError> {
    #[cfg(feature = "cuda")]
    return Ok(Arc::new(libcuda::LibCuda::open()?));
    #[cfg(not(feature = "cuda"))]
    return Err(OpenDriverError::NotBuilt);
}
