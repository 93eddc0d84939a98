// SPDX-License-Identifier: Apache-2.0

//! [`DriverApi`]: devices, contexts and memory; one method per driver call, without any policy.

use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};

use super::{DriverError, ExecutionApi};

/// A physical allocation (`CUmemGenericAllocationHandle`). The number means nothing in another
/// process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct AllocationHandle(pub u64);

/// A retained primary context (`CUcontext`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RawContext(pub usize);

/// The UUID of a GPU: the same in every process and container, unlike its ordinal.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceUuid(pub [u8; 16]);

/// What kernels of this process may do with a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceAccess {
    Read,
    ReadWrite,
}

/// What the driver reports about a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Position in this process; CUDA_VISIBLE_DEVICES and containers renumber GPUs.
    pub ordinal: u32,
    pub uuid: DeviceUuid,
    pub name: String,
    /// Major * 10 + minor, as in the manifest.
    pub compute_capability: u32,
    pub total_bytes: u64,
    pub multiprocessors: u32,
    /// Dynamic shared memory that one block may have at most, after the kernel has opted in.
    pub max_shared_bytes_per_block: u32,
    /// CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    pub vmm: bool,
    /// CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
    pub posix_fd: bool,
    /// The GPU shares its memory with the host.
    pub integrated: bool,
    /// The GPU reads memory of the process that was never registered, through the host's page
    /// tables (CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES). Where it has page
    /// tables of its own, such a read moves the page first, which is slow: that does not count.
    pub host_page_tables: bool,
    /// Registered host memory has the same address on the GPU
    /// (CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM).
    pub registered_pointers: bool,
    /// The NUMA node of the host as which the kernel shows the GPU's own memory, as on Grace Hopper
    /// (CU_DEVICE_ATTRIBUTE_NUMA_ID). /proc/meminfo counts such a node too.
    pub numa_node: Option<u32>,
    /// Contexts share the multiprocessors with those of other processes, kernel by kernel
    /// (CU_DEVICE_ATTRIBUTE_MPS_ENABLED). Also true if the driver cannot tell.
    pub mps: bool,
}

impl DeviceInfo {
    /// Whether kernels may read host memory where it is, instead of a copy in device memory.
    pub fn reads_host_memory(&self) -> bool {
        self.host_page_tables || (self.integrated && self.registered_pointers)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryInfo {
    pub free_bytes: u64,
    pub total_bytes: u64,
}

/// Devices, contexts and memory. A call that could take memory away from its user is unsafe; every
/// other call is safe.
pub trait DriverApi: ExecutionApi + fmt::Debug + Send + Sync {
    /// 1000 * major + 10 * minor of the newest CUDA version that the driver supports.
    fn version(&self) -> Result<u32, DriverError>;

    fn device_count(&self) -> Result<u32, DriverError>;

    fn device_info(&self, ordinal: u32) -> Result<DeviceInfo, DriverError>;

    /// Whether `ordinal` can map memory of `peer`: over NVLink, or over PCIe.
    fn can_access_peer(&self, ordinal: u32, peer: u32) -> Result<bool, DriverError>;

    /// Sizes and addresses of exportable allocations are multiples of this.
    fn granularity(&self, ordinal: u32) -> Result<u64, DriverError>;

    /// Needs a context of that device to be current on this thread.
    fn memory_info(&self, ordinal: u32) -> Result<MemoryInfo, DriverError>;

    /// Allocates device memory that can be exported; needs no context.
    fn create(&self, ordinal: u32, bytes: u64) -> Result<AllocationHandle, DriverError>;

    /// A new file descriptor of an allocation. The descriptor alone keeps the memory alive.
    fn export(&self, handle: AllocationHandle) -> Result<OwnedFd, DriverError>;

    /// The allocation behind a descriptor. The caller keeps the descriptor.
    fn import(&self, fd: BorrowedFd<'_>) -> Result<AllocationHandle, DriverError>;

    /// # Safety
    /// The handle came from `create` or `import` of this driver and is not used again.
    unsafe fn release(&self, handle: AllocationHandle) -> Result<(), DriverError>;

    /// Reserves addresses without memory, aligned to the granularity.
    fn reserve(&self, bytes: u64) -> Result<u64, DriverError>;

    /// # Safety
    /// Exactly a range that `reserve` returned, with nothing mapped in it, and not used again.
    unsafe fn free_addresses(&self, address: u64, bytes: u64) -> Result<(), DriverError>;

    /// Maps a whole allocation at an address. Kernels may not access it before `set_access`.
    ///
    /// # Safety
    /// `[address, address + bytes)` is reserved by the caller and unmapped, the handle is alive.
    unsafe fn map(&self, address: u64, bytes: u64, handle: AllocationHandle) -> Result<(), DriverError>;

    /// Sets what the device `ordinal` may do with a range. The memory may lie on another device, if
    /// `ordinal` can access that as a peer.
    ///
    /// # Safety
    /// The range is mapped without gaps by the caller and holds whole allocations.
    unsafe fn set_access(
        &self,
        ordinal: u32,
        address: u64,
        bytes: u64,
        access: DeviceAccess,
    ) -> Result<(), DriverError>;

    /// # Safety
    /// Exactly a range that one `map` filled; no work on any stream touches it now or later.
    unsafe fn unmap(&self, address: u64, bytes: u64) -> Result<(), DriverError>;

    fn retain_context(&self, ordinal: u32) -> Result<RawContext, DriverError>;

    /// # Safety
    /// The context is retained as long as it is current on this thread.
    unsafe fn set_current(&self, context: RawContext) -> Result<(), DriverError>;

    /// # Safety
    /// Once for each `retain_context`; what was made in the context is gone, or others retain it
    /// too.
    unsafe fn release_context(&self, ordinal: u32) -> Result<(), DriverError>;

    /// Pins memory of this process, for the context that is current on this thread.
    ///
    /// # Safety
    /// The range is mapped, whole pages, and stays so until it is unregistered.
    unsafe fn register_host(&self, start: *mut u8, bytes: usize) -> Result<(), DriverError>;

    /// # Safety
    /// Registered from `start` on in the context that is current on this thread; no copy uses it.
    unsafe fn unregister_host(&self, start: *mut u8) -> Result<(), DriverError>;

    /// Copies to the device and returns when the copy is complete.
    ///
    /// # Safety
    /// The range is device memory that the caller may write, and a context of its device is
    /// current.
    unsafe fn copy_to_device(&self, address: u64, bytes: &[u8]) -> Result<(), DriverError>;

    /// Copies to the host and returns when the copy is complete.
    ///
    /// # Safety
    /// The range is device memory that the caller may read, and a context of its device is current.
    unsafe fn copy_to_host(&self, bytes: &mut [u8], address: u64) -> Result<(), DriverError>;
}

impl DeviceUuid {
    /// Reads what `Display` writes, and what nvidia-smi -L shows.
    pub fn parse(text: &str) -> Option<Self> {
        let digits: Vec<u8> =
            text.strip_prefix("GPU-")?.bytes().enumerate().filter_map(without_dash).collect();
        let (pairs, rest) = digits.as_chunks::<2>();
        let byte = |pair: &[u8; 2]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
        let bytes: Vec<u8> = pairs.iter().map(byte).collect::<Option<_>>()?;
        rest.is_empty().then_some(Self(bytes.try_into().ok()?))
    }
}

/// Drops the dashes after 8, 12, 16 and 20 digits; a dash elsewhere stays and is no digit.
fn without_dash((at, byte): (usize, u8)) -> Option<u8> {
    (!(matches!(at, 8 | 13 | 18 | 23) && byte == b'-')).then_some(byte)
}

impl fmt::Display for DeviceUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GPU-")?;
        for (at, byte) in self.0.iter().enumerate() {
            if matches!(at, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for DeviceUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
