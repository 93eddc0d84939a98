// SPDX-License-Identifier: Apache-2.0

//! [`DriverError`]: which driver call failed, and with which code.

use std::fmt;

/// A `CUresult`. A number and no enum, since a driver that is newer than this program has more
/// codes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ErrorCode(pub u32);

/// Codes that this crate handles or that a user is likely to meet, with the name that cuda.h gives
/// them.
macro_rules! codes {
    ($($name:ident = $number:literal;)*) => {
        impl ErrorCode {
            $(pub const $name: Self = Self($number);)*

            fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($number => Some(concat!("CUDA_ERROR_", stringify!($name))),)*
                    _ => None,
                }
            }
        }
    };
}

codes! {
    INVALID_VALUE = 1;
    OUT_OF_MEMORY = 2;
    NOT_INITIALIZED = 3;
    DEINITIALIZED = 4;
    NO_DEVICE = 100;
    INVALID_DEVICE = 101;
    INVALID_IMAGE = 200;
    INVALID_CONTEXT = 201;
    NO_BINARY_FOR_GPU = 209;
    ECC_UNCORRECTABLE = 214;
    UNSUPPORTED_PTX_VERSION = 222;
    OPERATING_SYSTEM = 304;
    INVALID_HANDLE = 400;
    NOT_FOUND = 500;
    NOT_READY = 600;
    ILLEGAL_ADDRESS = 700;
    LAUNCH_OUT_OF_RESOURCES = 701;
    LAUNCH_TIMEOUT = 702;
    ASSERT = 710;
    ILLEGAL_INSTRUCTION = 715;
    MISALIGNED_ADDRESS = 716;
    LAUNCH_FAILED = 719;
    NOT_PERMITTED = 800;
    NOT_SUPPORTED = 801;
    SYSTEM_NOT_READY = 802;
    SYSTEM_DRIVER_MISMATCH = 803;
    STREAM_CAPTURE_UNSUPPORTED = 900;
    STREAM_CAPTURE_INVALIDATED = 901;
    INVALID_CLUSTER_SIZE = 912;
    UNKNOWN = 999;
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{name} ({})", self.0),
            None => write!(f, "CUDA error {}", self.0),
        }
    }
}

impl fmt::Debug for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A function of the driver. Variants have the names of the functions without `cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DriverCall {
    Init,
    DriverGetVersion,
    DeviceGetCount,
    DeviceGet,
    DeviceGetUuid,
    DeviceGetName,
    DeviceTotalMem,
    DeviceGetAttribute,
    DeviceCanAccessPeer,
    DevicePrimaryCtxRetain,
    DevicePrimaryCtxRelease,
    CtxSetCurrent,
    CtxGetDevice,
    CtxSynchronize,
    MemGetAllocationGranularity,
    MemGetInfo,
    MemCreate,
    MemExportToShareableHandle,
    MemImportFromShareableHandle,
    MemRelease,
    MemAddressReserve,
    MemAddressFree,
    MemMap,
    MemSetAccess,
    MemUnmap,
    MemAlloc,
    MemFree,
    MemHostAlloc,
    MemFreeHost,
    MemHostRegister,
    MemHostUnregister,
    MemcpyHtoD,
    MemcpyDtoH,
    MemcpyHtoDAsync,
    MemcpyDtoHAsync,
    MemcpyDtoDAsync,
    MemsetD8Async,
    StreamCreate,
    StreamDestroy,
    StreamSynchronize,
    StreamWaitEvent,
    StreamBeginCapture,
    StreamEndCapture,
    EventCreate,
    EventDestroy,
    EventRecord,
    EventSynchronize,
    EventQuery,
    EventElapsedTime,
    GraphInstantiateWithFlags,
    GraphDestroy,
    GraphUpload,
    GraphLaunch,
    GraphExecDestroy,
    ModuleLoadData,
    ModuleUnload,
    ModuleGetFunction,
    FuncGetAttribute,
    FuncSetAttribute,
    LaunchKernelEx,
    OccupancyMaxActiveBlocksPerMultiprocessor,
    OccupancyMaxActiveClusters,
    TensorMapEncodeTiled,
}

impl fmt::Display for DriverCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cu{self:?}")
    }
}

/// A driver call that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed with {code}")]
pub struct DriverError {
    pub call: DriverCall,
    pub code: ErrorCode,
}

impl DriverError {
    /// Whether the device has less free memory than the call needs.
    pub fn is_out_of_memory(&self) -> bool {
        self.code == ErrorCode::OUT_OF_MEMORY
    }
}
