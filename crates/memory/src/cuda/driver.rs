//! The seam to the CUDA driver: the calls that memory between processes needs, one method each, nothing decided here.
//!
//! Two implementations: `libcuda`, the real one, and in tests `fake`, which refuses on demand and notices misuse. All
//! numbers are the driver's own. Addresses and handles mean something to the driver that gave them out, and only to it.

use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};

use super::DeviceUuid;

/// A physical allocation, known to this process alone: its number may not travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Handle(pub u64);

/// A device's primary context, retained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RawContext(pub usize);

/// What a mapping lets this process's kernels do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    Read,
    ReadWrite,
}

/// What the driver says about a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceFacts {
    pub ordinal: u32,
    pub uuid: DeviceUuid,
    pub name: String,
    /// Major * 10 + minor, as in the manifest.
    pub compute_capability: u32,
    pub total_bytes: u64,
    /// CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    pub vmm: bool,
    /// CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
    pub posix_fd: bool,
    /// Shares its memory with the host.
    pub integrated: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryInfo {
    pub free_bytes: u64,
    pub total_bytes: u64,
}

/// A `CUresult`: a number, since a driver that is newer than this program has more of them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Code(pub u32);

impl Code {
    pub const INVALID_VALUE: Self = Self(1);
    pub const OUT_OF_MEMORY: Self = Self(2);
    pub const NOT_INITIALIZED: Self = Self(3);
    pub const NO_DEVICE: Self = Self(100);
    pub const INVALID_DEVICE: Self = Self(101);
    pub const INVALID_CONTEXT: Self = Self(201);
    pub const OPERATING_SYSTEM: Self = Self(304);
    pub const INVALID_HANDLE: Self = Self(400);
    pub const ILLEGAL_ADDRESS: Self = Self(700);
    pub const NOT_PERMITTED: Self = Self(800);
    pub const NOT_SUPPORTED: Self = Self(801);
    pub const SYSTEM_NOT_READY: Self = Self(802);
    pub const SYSTEM_DRIVER_MISMATCH: Self = Self(803);
    pub const UNKNOWN: Self = Self(999);
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match *self {
            Self::INVALID_VALUE => "CUDA_ERROR_INVALID_VALUE",
            Self::OUT_OF_MEMORY => "CUDA_ERROR_OUT_OF_MEMORY",
            Self::NOT_INITIALIZED => "CUDA_ERROR_NOT_INITIALIZED",
            Self::NO_DEVICE => "CUDA_ERROR_NO_DEVICE",
            Self::INVALID_DEVICE => "CUDA_ERROR_INVALID_DEVICE",
            Self::INVALID_CONTEXT => "CUDA_ERROR_INVALID_CONTEXT",
            Self::OPERATING_SYSTEM => "CUDA_ERROR_OPERATING_SYSTEM",
            Self::INVALID_HANDLE => "CUDA_ERROR_INVALID_HANDLE",
            Self::ILLEGAL_ADDRESS => "CUDA_ERROR_ILLEGAL_ADDRESS",
            Self::NOT_PERMITTED => "CUDA_ERROR_NOT_PERMITTED",
            Self::NOT_SUPPORTED => "CUDA_ERROR_NOT_SUPPORTED",
            Self::SYSTEM_NOT_READY => "CUDA_ERROR_SYSTEM_NOT_READY",
            Self::SYSTEM_DRIVER_MISMATCH => "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
            Self::UNKNOWN => "CUDA_ERROR_UNKNOWN",
            Self(number) => return write!(f, "CUDA error {number}"),
        };
        write!(f, "{name} ({})", self.0)
    }
}

impl fmt::Debug for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The driver's functions, for errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    Init,
    DriverGetVersion,
    DeviceGetCount,
    DeviceGet,
    DeviceGetUuid,
    DeviceGetName,
    DeviceTotalMem,
    DeviceGetAttribute,
    MemGetAllocationGranularity,
    CtxGetDevice,
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
    DevicePrimaryCtxRetain,
    DevicePrimaryCtxRelease,
    CtxSetCurrent,
    MemHostRegister,
    MemHostUnregister,
    MemcpyHtoD,
    MemcpyDtoH,
}

impl fmt::Display for Call {
    /// Variants are named as the functions are.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cu{self:?}")
    }
}

/// A call that the driver did not carry out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed with {code}")]
pub struct Refusal {
    pub call: Call,
    pub code: Code,
}

/// The calls. What may be called freely is safe; what could pull memory away from under somebody is not.
pub trait Driver: fmt::Debug + Send + Sync {
    /// 1000 * major + 10 * minor of the newest CUDA that the driver serves.
    fn version(&self) -> Result<u32, Refusal>;

    fn device_count(&self) -> Result<u32, Refusal>;

    fn device_facts(&self, ordinal: u32) -> Result<DeviceFacts, Refusal>;

    /// Sizes and addresses of allocations that can be exported are multiples of this.
    fn granularity(&self, ordinal: u32) -> Result<u64, Refusal>;

    /// Needs a context of that device to be current on this thread.
    fn memory_info(&self, ordinal: u32) -> Result<MemoryInfo, Refusal>;

    /// Allocates device memory that can be exported; needs no context.
    fn create(&self, ordinal: u32, bytes: u64) -> Result<Handle, Refusal>;

    /// A new descriptor of an allocation. It keeps the memory alive by itself.
    fn export(&self, handle: Handle) -> Result<OwnedFd, Refusal>;

    /// The allocation behind a descriptor, which stays the caller's.
    fn import(&self, fd: BorrowedFd<'_>) -> Result<Handle, Refusal>;

    /// # Safety
    /// The handle came from `create` or `import` of this driver and is not used again.
    unsafe fn release(&self, handle: Handle) -> Result<(), Refusal>;

    /// Addresses without memory, aligned to the granularity.
    fn reserve(&self, bytes: u64) -> Result<u64, Refusal>;

    /// # Safety
    /// Exactly a range that `reserve` gave, with nothing mapped in it, and not used again.
    unsafe fn free(&self, address: u64, bytes: u64) -> Result<(), Refusal>;

    /// Puts a whole allocation at an address; nobody may access it yet.
    ///
    /// # Safety
    /// `[address, address + bytes)` is reserved by the caller and unmapped, the handle is alive.
    unsafe fn map(&self, address: u64, bytes: u64, handle: Handle) -> Result<(), Refusal>;

    /// # Safety
    /// The range is mapped without gaps by the caller and holds whole allocations.
    unsafe fn set_access(
        &self,
        ordinal: u32,
        address: u64,
        bytes: u64,
        access: Access,
    ) -> Result<(), Refusal>;

    /// # Safety
    /// Exactly a range that one `map` filled; no work on any stream touches it now or later.
    unsafe fn unmap(&self, address: u64, bytes: u64) -> Result<(), Refusal>;

    fn retain_context(&self, ordinal: u32) -> Result<RawContext, Refusal>;

    /// # Safety
    /// The context is retained as long as it is current on this thread.
    unsafe fn set_current(&self, context: RawContext) -> Result<(), Refusal>;

    /// # Safety
    /// Once for each `retain_context`; what was made in the context is gone, or others retain it too.
    unsafe fn release_context(&self, ordinal: u32) -> Result<(), Refusal>;

    /// Pins memory of this process, for the context that is current on this thread.
    ///
    /// # Safety
    /// The range is mapped, whole pages, and stays so until it is unregistered.
    unsafe fn register_host(&self, start: *mut u8, bytes: usize) -> Result<(), Refusal>;

    /// # Safety
    /// Registered from `start` on in the context that is current on this thread; no copy uses it.
    unsafe fn unregister_host(&self, start: *mut u8) -> Result<(), Refusal>;

    /// Complete on return.
    ///
    /// # Safety
    /// The range is device memory that the caller may write, and a context of its device is current.
    unsafe fn copy_to_device(&self, address: u64, bytes: &[u8]) -> Result<(), Refusal>;

    /// # Safety
    /// The range is device memory that the caller may read, and a context of its device is current.
    unsafe fn copy_from_device(&self, bytes: &mut [u8], address: u64) -> Result<(), Refusal>;
}
