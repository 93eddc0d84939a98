// SPDX-License-Identifier: Apache-2.0

//! The real driver: [`DriverApi`] and [`ExecutionApi`] over the functions of libcuda.

mod execution;

use std::ffi::{CStr, c_char, c_int};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute, CUmemAccess_flags, CUmemAccessDesc,
    CUmemAllocationGranularity_flags, CUmemAllocationHandleType, CUmemAllocationProp, CUmemAllocationType,
    CUmemLocation, CUmemLocationType, CUuuid,
};

use crate::OpenDriverError;
use crate::checked::{
    AllocationHandle, DeviceAccess, DeviceInfo, DeviceUuid, DriverApi, DriverCall, DriverError, ErrorCode,
    MemoryInfo, RawContext, retry_unsupported,
};
use crate::raw::{Functions, Status};

/// CU_DEVICE_NUMA_CONFIG_NUMA_NODE
const NUMA_NODE: u32 = 1;

/// Longest name of a device, including its terminating zero.
const NAME_BYTES: usize = 256;

pub(super) struct LibCuda {
    functions: Functions,
}

impl std::fmt::Debug for LibCuda {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("LibCuda")
    }
}

fn check(call: DriverCall, status: Status) -> Result<(), DriverError> {
    if status == 0 { Ok(()) } else { Err(DriverError { call, code: ErrorCode(status) }) }
}

/// The properties of all allocations: device memory that can leave the process as a file
/// descriptor. Granularity, creation and import have to use the same properties.
fn properties(device: CUdevice) -> CUmemAllocationProp {
    // SAFETY: a struct of integers and a pointer that may be null, which the API wants to be zero
    // where not used.
    let mut properties: CUmemAllocationProp = unsafe { std::mem::zeroed() };
    properties.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes = POSIX_FD;
    properties.location = location(device);
    properties
}

const POSIX_FD: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

fn location(device: CUdevice) -> CUmemLocation {
    CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device }
}

impl LibCuda {
    pub(super) fn open() -> Result<Self, OpenDriverError> {
        let functions = Functions::load()?;
        // SAFETY: the first call of all; others in this process may repeat it.
        retry_unsupported(|| check(DriverCall::Init, unsafe { (functions.init)(0) })).map_err(|error| {
            match error.code {
                ErrorCode::NO_DEVICE => OpenDriverError::NoDevice,
                _ => OpenDriverError::Init(error),
            }
        })?;
        Ok(Self { functions })
    }

    fn device(&self, ordinal: u32) -> Result<CUdevice, DriverError> {
        let mut device = 0;
        let ordinal = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        // SAFETY: the driver is initialized, as for all calls below, and writes one number.
        check(DriverCall::DeviceGet, unsafe { (self.functions.device)(&mut device, ordinal) })?;
        Ok(device)
    }

    fn attribute(&self, device: CUdevice, attribute: CUdevice_attribute) -> Result<u32, DriverError> {
        let mut value = 0;
        // SAFETY: a device from cuDeviceGet; one number is written.
        let status = unsafe { (self.functions.attribute)(&mut value, attribute, device) };
        check(DriverCall::DeviceGetAttribute, status)?;
        Ok(value.max(0).cast_unsigned())
    }
}

impl DriverApi for LibCuda {
    fn version(&self) -> Result<u32, DriverError> {
        let mut version = 0;
        // SAFETY: one number is written.
        check(DriverCall::DriverGetVersion, unsafe { (self.functions.version)(&mut version) })?;
        Ok(version.max(0).cast_unsigned())
    }

    fn device_count(&self) -> Result<u32, DriverError> {
        let mut count = 0;
        // SAFETY: one number is written.
        check(DriverCall::DeviceGetCount, unsafe { (self.functions.device_count)(&mut count) })?;
        Ok(count.max(0).cast_unsigned())
    }

    fn device_info(&self, ordinal: u32) -> Result<DeviceInfo, DriverError> {
        use CUdevice_attribute as Attribute;
        let device = self.device(ordinal)?;
        let mut uuid = CUuuid { bytes: [0; 16] };
        // SAFETY: a device from cuDeviceGet; 16 bytes are written.
        check(DriverCall::DeviceGetUuid, unsafe { (self.functions.uuid)(&mut uuid, device) })?;
        let mut name: [c_char; NAME_BYTES] = [0; NAME_BYTES];
        // SAFETY: the driver writes at most the length given, with an end of string.
        let status = unsafe { (self.functions.name)(name.as_mut_ptr(), NAME_BYTES as c_int, device) };
        check(DriverCall::DeviceGetName, status)?;
        let name: [u8; NAME_BYTES] = name.map(|byte| byte as u8);
        let mut total_bytes = 0;
        // SAFETY: one number is written.
        check(DriverCall::DeviceTotalMem, unsafe {
            (self.functions.total_memory)(&mut total_bytes, device)
        })?;
        let attribute = |attribute| self.attribute(device, attribute);
        Ok(DeviceInfo {
            ordinal,
            uuid: DeviceUuid(uuid.bytes.map(|byte| byte as u8)),
            name: CStr::from_bytes_until_nul(&name)
                .map(|text| text.to_string_lossy().into_owned())
                .unwrap_or_default(),
            compute_capability: 10 * attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?
                + attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            total_bytes: total_bytes as u64,
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            max_shared_bytes_per_block: attribute(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            )?,
            vmm: attribute(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)? != 0,
            posix_fd: attribute(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)?
                != 0,
            integrated: attribute(Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED)? != 0,
            host_page_tables: attribute(
                Attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES,
            )? != 0,
            registered_pointers: attribute(
                Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM,
            )? != 0,
            numa_node: match attribute(Attribute::CU_DEVICE_ATTRIBUTE_NUMA_CONFIG)? {
                NUMA_NODE => Some(attribute(Attribute::CU_DEVICE_ATTRIBUTE_NUMA_ID)?),
                _ => None,
            },
            // Drivers before CUDA 12.4 may not know the attribute.
            mps: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MPS_ENABLED) != Ok(0),
        })
    }

    fn can_access_peer(&self, ordinal: u32, peer: u32) -> Result<bool, DriverError> {
        let (device, peer) = (self.device(ordinal)?, self.device(peer)?);
        let mut can = 0;
        // SAFETY: two devices from cuDeviceGet; one number is written.
        let status = unsafe { (self.functions.can_access_peer)(&mut can, device, peer) };
        check(DriverCall::DeviceCanAccessPeer, status)?;
        Ok(can != 0)
    }

    fn granularity(&self, ordinal: u32) -> Result<u64, DriverError> {
        let properties = properties(self.device(ordinal)?);
        let mut granularity = 0;
        let minimum = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: the properties are read, one number is written.
        let status = unsafe { (self.functions.granularity)(&mut granularity, &properties, minimum) };
        check(DriverCall::MemGetAllocationGranularity, status)?;
        Ok(granularity as u64)
    }

    fn memory_info(&self, ordinal: u32) -> Result<MemoryInfo, DriverError> {
        let mut current = 0;
        // SAFETY: one number is written; without a current context the call is refused.
        check(DriverCall::CtxGetDevice, unsafe { (self.functions.current_device)(&mut current) })?;
        if current != self.device(ordinal)? {
            return Err(DriverError { call: DriverCall::CtxGetDevice, code: ErrorCode::INVALID_CONTEXT });
        }
        let (mut free, mut total) = (0, 0);
        // SAFETY: two numbers are written.
        check(DriverCall::MemGetInfo, unsafe { (self.functions.memory_info)(&mut free, &mut total) })?;
        Ok(MemoryInfo { free_bytes: free as u64, total_bytes: total as u64 })
    }

    fn create(&self, ordinal: u32, bytes: u64) -> Result<AllocationHandle, DriverError> {
        let properties = properties(self.device(ordinal)?);
        let mut handle = 0;
        // SAFETY: the properties are read, the handle is written.
        let status = unsafe { (self.functions.create)(&mut handle, bytes as usize, &properties, 0) };
        check(DriverCall::MemCreate, status)?;
        Ok(AllocationHandle(handle))
    }

    fn export(&self, handle: AllocationHandle) -> Result<OwnedFd, DriverError> {
        let mut fd: RawFd = -1;
        // SAFETY: for this type of handle the driver writes one descriptor, an int. A number that
        // is no handle is refused here, unlike in cuMemRelease.
        let status = unsafe { (self.functions.export)((&raw mut fd).cast(), handle.0, POSIX_FD, 0) };
        check(DriverCall::MemExportToShareableHandle, status)?;
        // SAFETY: the driver has just opened it for us, close-on-exec.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    fn import(&self, fd: BorrowedFd<'_>) -> Result<AllocationHandle, DriverError> {
        let mut handle = 0;
        // The API takes the descriptor's number in place of a pointer.
        let number = std::ptr::without_provenance_mut(fd.as_raw_fd() as usize);
        // SAFETY: the descriptor is open; the driver keeps a reference of its own to what it finds
        // behind it.
        let status = unsafe { (self.functions.import)(&mut handle, number, POSIX_FD) };
        check(DriverCall::MemImportFromShareableHandle, status)?;
        Ok(AllocationHandle(handle))
    }

    unsafe fn release(&self, handle: AllocationHandle) -> Result<(), DriverError> {
        // SAFETY: the caller vouches for the handle.
        check(DriverCall::MemRelease, unsafe { (self.functions.release)(handle.0) })
    }

    fn reserve(&self, bytes: u64) -> Result<u64, DriverError> {
        let mut address = 0;
        // SAFETY: any address will do; the default alignment is the granularity.
        let status = unsafe { (self.functions.reserve)(&mut address, bytes as usize, 0, 0, 0) };
        check(DriverCall::MemAddressReserve, status)?;
        Ok(address)
    }

    unsafe fn free_addresses(&self, address: u64, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: the caller vouches for the range.
        check(DriverCall::MemAddressFree, unsafe { (self.functions.free_addresses)(address, bytes as usize) })
    }

    unsafe fn map(&self, address: u64, bytes: u64, handle: AllocationHandle) -> Result<(), DriverError> {
        // The offset into an allocation must be 0: the driver refuses to map parts.
        // SAFETY: the caller vouches for range and handle.
        check(DriverCall::MemMap, unsafe { (self.functions.map)(address, bytes as usize, 0, handle.0, 0) })
    }

    unsafe fn set_access(
        &self,
        ordinal: u32,
        address: u64,
        bytes: u64,
        access: DeviceAccess,
    ) -> Result<(), DriverError> {
        let flags = match access {
            DeviceAccess::Read => CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ,
            DeviceAccess::ReadWrite => CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let descriptor = CUmemAccessDesc { location: location(self.device(ordinal)?), flags };
        // SAFETY: the caller vouches for the range; one descriptor is read.
        let status = unsafe { (self.functions.set_access)(address, bytes as usize, &descriptor, 1) };
        check(DriverCall::MemSetAccess, status)
    }

    unsafe fn unmap(&self, address: u64, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: the caller vouches for the range.
        check(DriverCall::MemUnmap, unsafe { (self.functions.unmap)(address, bytes as usize) })
    }

    fn retain_context(&self, ordinal: u32) -> Result<RawContext, DriverError> {
        let device = self.device(ordinal)?;
        let mut context: CUcontext = std::ptr::null_mut();
        // SAFETY: one pointer is written.
        let status = unsafe { (self.functions.retain_context)(&mut context, device) };
        check(DriverCall::DevicePrimaryCtxRetain, status)?;
        Ok(RawContext(context.expose_provenance()))
    }

    unsafe fn set_current(&self, context: RawContext) -> Result<(), DriverError> {
        let context = std::ptr::with_exposed_provenance_mut(context.0);
        // SAFETY: the caller vouches for the context.
        check(DriverCall::CtxSetCurrent, unsafe { (self.functions.set_current)(context) })
    }

    unsafe fn release_context(&self, ordinal: u32) -> Result<(), DriverError> {
        let device = self.device(ordinal)?;
        // SAFETY: the caller has retained it.
        check(DriverCall::DevicePrimaryCtxRelease, unsafe { (self.functions.release_context)(device) })
    }

    unsafe fn register_host(&self, start: *mut u8, bytes: usize) -> Result<(), DriverError> {
        // SAFETY: the caller vouches for the range.
        let status = unsafe { (self.functions.register_host)(start.cast(), bytes, 0) };
        check(DriverCall::MemHostRegister, status)
    }

    unsafe fn unregister_host(&self, start: *mut u8) -> Result<(), DriverError> {
        // SAFETY: the caller has registered it.
        check(DriverCall::MemHostUnregister, unsafe { (self.functions.unregister_host)(start.cast()) })
    }

    unsafe fn copy_to_device(&self, address: u64, bytes: &[u8]) -> Result<(), DriverError> {
        // SAFETY: the caller vouches for the device's side; the host's side is a slice.
        let status = unsafe { (self.functions.copy_to_device)(address, bytes.as_ptr().cast(), bytes.len()) };
        check(DriverCall::MemcpyHtoD, status)
    }

    unsafe fn copy_to_host(&self, bytes: &mut [u8], address: u64) -> Result<(), DriverError> {
        // SAFETY: the caller vouches for the device's side; the host's side is a slice.
        let status =
            unsafe { (self.functions.copy_to_host)(bytes.as_mut_ptr().cast(), address, bytes.len()) };
        check(DriverCall::MemcpyDtoH, status)
    }
}
