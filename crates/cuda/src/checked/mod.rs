// SPDX-License-Identifier: Apache-2.0

//! The checked layer: the CUDA driver API as two traits whose every call says whether it succeeded.
//!
//! ```text
//! safe      Device, Context, Stream, Buffer, ...   owners: dropping one releases what it holds
//! checked   DriverApi + ExecutionApi               one method per driver call; handles are numbers
//! raw       function pointers of libcuda           cudarc's types
//! ```
//! The traits have two implementations: `libcuda`, the real driver, and in tests [`crate::fake`],
//! which fails calls on demand and records misuse. Handles and addresses mean something only to the
//! driver that returned them.

mod driver_api;
mod error;
mod execution_api;
mod retry;

pub use driver_api::{
    AllocationHandle, DeviceAccess, DeviceInfo, DeviceUuid, DriverApi, MemoryInfo, RawContext,
};
pub use error::{DriverCall, DriverError, ErrorCode};
pub use execution_api::{
    EncodedTensorMap, ExecutionApi, LaunchConfig, RawEvent, RawFunction, RawGraph, RawGraphExec, RawModule,
    RawStream, TensorBoxLayout,
};
pub(crate) use retry::retry_unsupported;
pub use retry::{UNSUPPORTED_ATTEMPTS, UNSUPPORTED_PAUSE};
