//! The real driver: libcuda, loaded at run time.
//!
//! Types and the library come from cudarc. The functions are looked up here, all at once, so that an old driver is an
//! error that names what it lacks, and results are taken as numbers: cudarc's own bindings panic on the one and have no
//! defined behaviour for a result code that is newer than they are.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc,
    CUmemAllocationGranularity_flags, CUmemAllocationHandleType, CUmemAllocationProp, CUmemAllocationType,
    CUmemGenericAllocationHandle, CUmemLocation, CUmemLocationType, CUuuid,
};

use super::driver::{Access, Call, Code, DeviceFacts, Driver, Handle, MemoryInfo, RawContext, Refusal};
use super::retry::retrying;
use super::{DeviceUuid, OpenDriverError};

type Status = c_uint;

/// Longest name of a device, with its end.
const NAME_BYTES: usize = 256;

/// Function pointers under the names that the library exports: a later version of a function has a name of its own.
macro_rules! functions {
    ($($field:ident = $symbol:literal, ($($argument:ty),*);)*) => {
        struct Functions {
            $($field: unsafe extern "C" fn($($argument),*) -> Status,)*
        }

        impl Functions {
            fn load() -> Result<Self, OpenDriverError> {
                // SAFETY: looks for the library by its usual names; loading it starts nothing.
                if !unsafe { sys::is_culib_present() } {
                    return Err(OpenDriverError::NoDriver);
                }
                // SAFETY: it can be loaded, as just seen, so this does not panic; it stays loaded for ever.
                let library = unsafe { sys::culib() };
                Ok(Self {
                    $($field: {
                        // SAFETY: the type is that of the function in cuda.h, which never changes under its name.
                        let found = unsafe { library.get(concat!($symbol, "\0").as_bytes()) };
                        *found.map_err(|_| too_old(library, $symbol))?
                    },)*
                })
            }
        }
    };
}

/// Says of which version the driver is, which it knows before it is started.
fn too_old(library: &libloading::Library, symbol: &'static str) -> OpenDriverError {
    type Version = unsafe extern "C" fn(*mut c_int) -> Status;
    let mut version = 0;
    // SAFETY: the type is that of the function in cuda.h; it writes one number.
    let known =
        unsafe { library.get::<Version>(b"cuDriverGetVersion\0").is_ok_and(|get| get(&mut version) == 0) };
    OpenDriverError::TooOld { symbol, version: u32::try_from(version).ok().filter(|_| known) }
}

functions! {
    init = "cuInit", (c_uint);
    version = "cuDriverGetVersion", (*mut c_int);
    device_count = "cuDeviceGetCount", (*mut c_int);
    device = "cuDeviceGet", (*mut CUdevice, c_int);
    uuid = "cuDeviceGetUuid_v2", (*mut CUuuid, CUdevice);
    name = "cuDeviceGetName", (*mut c_char, c_int, CUdevice);
    total_memory = "cuDeviceTotalMem_v2", (*mut usize, CUdevice);
    attribute = "cuDeviceGetAttribute", (*mut c_int, CUdevice_attribute, CUdevice);
    granularity = "cuMemGetAllocationGranularity", (*mut usize, *const CUmemAllocationProp, CUmemAllocationGranularity_flags);
    current_device = "cuCtxGetDevice", (*mut CUdevice);
    memory_info = "cuMemGetInfo_v2", (*mut usize, *mut usize);
    create = "cuMemCreate", (*mut CUmemGenericAllocationHandle, usize, *const CUmemAllocationProp, c_ulonglong);
    export = "cuMemExportToShareableHandle", (*mut c_void, CUmemGenericAllocationHandle, CUmemAllocationHandleType, c_ulonglong);
    import = "cuMemImportFromShareableHandle", (*mut CUmemGenericAllocationHandle, *mut c_void, CUmemAllocationHandleType);
    release = "cuMemRelease", (CUmemGenericAllocationHandle);
    reserve = "cuMemAddressReserve", (*mut CUdeviceptr, usize, usize, CUdeviceptr, c_ulonglong);
    free = "cuMemAddressFree", (CUdeviceptr, usize);
    map = "cuMemMap", (CUdeviceptr, usize, usize, CUmemGenericAllocationHandle, c_ulonglong);
    set_access = "cuMemSetAccess", (CUdeviceptr, usize, *const CUmemAccessDesc, usize);
    unmap = "cuMemUnmap", (CUdeviceptr, usize);
    retain_context = "cuDevicePrimaryCtxRetain", (*mut CUcontext, CUdevice);
    release_context = "cuDevicePrimaryCtxRelease_v2", (CUdevice);
    set_current = "cuCtxSetCurrent", (CUcontext);
    register_host = "cuMemHostRegister_v2", (*mut c_void, usize, c_uint);
    unregister_host = "cuMemHostUnregister", (*mut c_void);
    copy_to_device = "cuMemcpyHtoD_v2", (CUdeviceptr, *const c_void, usize);
    copy_from_device = "cuMemcpyDtoH_v2", (*mut c_void, CUdeviceptr, usize);
}

pub(super) struct LibCuda {
    functions: Functions,
}

impl std::fmt::Debug for LibCuda {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("LibCuda")
    }
}

fn check(call: Call, status: Status) -> Result<(), Refusal> {
    if status == 0 { Ok(()) } else { Err(Refusal { call, code: Code(status) }) }
}

/// What all our allocations are: device memory that can leave the process as a descriptor. Granularity, creation and
/// import must mean the same.
fn properties(device: CUdevice) -> CUmemAllocationProp {
    // SAFETY: a struct of integers and a pointer that may be null, which the API wants to be zero where not used.
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
        // SAFETY: the first call of all; it may be repeated by others in this process.
        retrying(|| check(Call::Init, unsafe { (functions.init)(0) })).map_err(|refusal| {
            match refusal.code {
                Code::NO_DEVICE => OpenDriverError::NoDevice,
                _ => OpenDriverError::Init(refusal),
            }
        })?;
        Ok(Self { functions })
    }

    fn device(&self, ordinal: u32) -> Result<CUdevice, Refusal> {
        let mut device = 0;
        let ordinal = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        // SAFETY: the driver is initialised, as for all calls below, and writes one number.
        check(Call::DeviceGet, unsafe { (self.functions.device)(&mut device, ordinal) })?;
        Ok(device)
    }

    fn attribute(&self, device: CUdevice, attribute: CUdevice_attribute) -> Result<u32, Refusal> {
        let mut value = 0;
        // SAFETY: a device from cuDeviceGet; one number is written.
        let status = unsafe { (self.functions.attribute)(&mut value, attribute, device) };
        check(Call::DeviceGetAttribute, status)?;
        Ok(value.max(0).cast_unsigned())
    }
}

impl Driver for LibCuda {
    fn version(&self) -> Result<u32, Refusal> {
        let mut version = 0;
        // SAFETY: one number is written.
        check(Call::DriverGetVersion, unsafe { (self.functions.version)(&mut version) })?;
        Ok(version.max(0).cast_unsigned())
    }

    fn device_count(&self) -> Result<u32, Refusal> {
        let mut count = 0;
        // SAFETY: one number is written.
        check(Call::DeviceGetCount, unsafe { (self.functions.device_count)(&mut count) })?;
        Ok(count.max(0).cast_unsigned())
    }

    fn device_facts(&self, ordinal: u32) -> Result<DeviceFacts, Refusal> {
        use CUdevice_attribute as Attribute;
        let device = self.device(ordinal)?;
        let mut uuid = CUuuid { bytes: [0; 16] };
        // SAFETY: a device from cuDeviceGet; 16 bytes are written.
        check(Call::DeviceGetUuid, unsafe { (self.functions.uuid)(&mut uuid, device) })?;
        let mut name: [c_char; NAME_BYTES] = [0; NAME_BYTES];
        // SAFETY: the driver writes at most the length given, with an end of string.
        let status = unsafe { (self.functions.name)(name.as_mut_ptr(), NAME_BYTES as c_int, device) };
        check(Call::DeviceGetName, status)?;
        let name: [u8; NAME_BYTES] = name.map(|byte| byte as u8);
        let mut total_bytes = 0;
        // SAFETY: one number is written.
        check(Call::DeviceTotalMem, unsafe { (self.functions.total_memory)(&mut total_bytes, device) })?;
        let attribute = |attribute| self.attribute(device, attribute);
        Ok(DeviceFacts {
            ordinal,
            uuid: DeviceUuid(uuid.bytes.map(|byte| byte as u8)),
            name: CStr::from_bytes_until_nul(&name)
                .map(|text| text.to_string_lossy().into_owned())
                .unwrap_or_default(),
            compute_capability: 10 * attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?
                + attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            total_bytes: total_bytes as u64,
            vmm: attribute(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)? != 0,
            posix_fd: attribute(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)?
                != 0,
            integrated: attribute(Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED)? != 0,
        })
    }

    fn granularity(&self, ordinal: u32) -> Result<u64, Refusal> {
        let properties = properties(self.device(ordinal)?);
        let mut granularity = 0;
        let minimum = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: the properties are read, one number is written.
        let status = unsafe { (self.functions.granularity)(&mut granularity, &properties, minimum) };
        check(Call::MemGetAllocationGranularity, status)?;
        Ok(granularity as u64)
    }

    fn memory_info(&self, ordinal: u32) -> Result<MemoryInfo, Refusal> {
        let mut current = 0;
        // SAFETY: one number is written; without a current context the call is refused.
        check(Call::CtxGetDevice, unsafe { (self.functions.current_device)(&mut current) })?;
        if current != self.device(ordinal)? {
            return Err(Refusal { call: Call::CtxGetDevice, code: Code::INVALID_CONTEXT });
        }
        let (mut free, mut total) = (0, 0);
        // SAFETY: two numbers are written.
        check(Call::MemGetInfo, unsafe { (self.functions.memory_info)(&mut free, &mut total) })?;
        Ok(MemoryInfo { free_bytes: free as u64, total_bytes: total as u64 })
    }

    fn create(&self, ordinal: u32, bytes: u64) -> Result<Handle, Refusal> {
        let properties = properties(self.device(ordinal)?);
        let mut handle = 0;
        // SAFETY: the properties are read, the handle is written.
        let status = unsafe { (self.functions.create)(&mut handle, bytes as usize, &properties, 0) };
        check(Call::MemCreate, status)?;
        Ok(Handle(handle))
    }

    fn export(&self, handle: Handle) -> Result<OwnedFd, Refusal> {
        let mut fd: RawFd = -1;
        // SAFETY: for this type of handle the driver writes one descriptor, an int. A number that is no handle is
        // refused here, unlike in cuMemRelease.
        let status = unsafe { (self.functions.export)((&raw mut fd).cast(), handle.0, POSIX_FD, 0) };
        check(Call::MemExportToShareableHandle, status)?;
        // SAFETY: the driver has just opened it for us, close-on-exec.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    fn import(&self, fd: BorrowedFd<'_>) -> Result<Handle, Refusal> {
        let mut handle = 0;
        // The API takes the descriptor's number in place of a pointer.
        let number = std::ptr::without_provenance_mut(fd.as_raw_fd() as usize);
        // SAFETY: the descriptor is open; the driver keeps a reference of its own to what it finds behind it.
        let status = unsafe { (self.functions.import)(&mut handle, number, POSIX_FD) };
        check(Call::MemImportFromShareableHandle, status)?;
        Ok(Handle(handle))
    }

    unsafe fn release(&self, handle: Handle) -> Result<(), Refusal> {
        // SAFETY: the caller vouches for the handle.
        check(Call::MemRelease, unsafe { (self.functions.release)(handle.0) })
    }

    fn reserve(&self, bytes: u64) -> Result<u64, Refusal> {
        let mut address = 0;
        // SAFETY: any address will do; the default alignment is the granularity.
        let status = unsafe { (self.functions.reserve)(&mut address, bytes as usize, 0, 0, 0) };
        check(Call::MemAddressReserve, status)?;
        Ok(address)
    }

    unsafe fn free(&self, address: u64, bytes: u64) -> Result<(), Refusal> {
        // SAFETY: the caller vouches for the range.
        check(Call::MemAddressFree, unsafe { (self.functions.free)(address, bytes as usize) })
    }

    unsafe fn map(&self, address: u64, bytes: u64, handle: Handle) -> Result<(), Refusal> {
        // The offset into an allocation must be 0: the driver refuses to map parts.
        // SAFETY: the caller vouches for range and handle.
        check(Call::MemMap, unsafe { (self.functions.map)(address, bytes as usize, 0, handle.0, 0) })
    }

    unsafe fn set_access(
        &self,
        ordinal: u32,
        address: u64,
        bytes: u64,
        access: Access,
    ) -> Result<(), Refusal> {
        let flags = match access {
            Access::Read => CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ,
            Access::ReadWrite => CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let descriptor = CUmemAccessDesc { location: location(self.device(ordinal)?), flags };
        // SAFETY: the caller vouches for the range; one descriptor is read.
        let status = unsafe { (self.functions.set_access)(address, bytes as usize, &descriptor, 1) };
        check(Call::MemSetAccess, status)
    }

    unsafe fn unmap(&self, address: u64, bytes: u64) -> Result<(), Refusal> {
        // SAFETY: the caller vouches for the range.
        check(Call::MemUnmap, unsafe { (self.functions.unmap)(address, bytes as usize) })
    }

    fn retain_context(&self, ordinal: u32) -> Result<RawContext, Refusal> {
        let device = self.device(ordinal)?;
        let mut context: CUcontext = std::ptr::null_mut();
        // SAFETY: one pointer is written.
        let status = unsafe { (self.functions.retain_context)(&mut context, device) };
        check(Call::DevicePrimaryCtxRetain, status)?;
        Ok(RawContext(context.expose_provenance()))
    }

    unsafe fn set_current(&self, context: RawContext) -> Result<(), Refusal> {
        let context = std::ptr::with_exposed_provenance_mut(context.0);
        // SAFETY: the caller vouches for the context.
        check(Call::CtxSetCurrent, unsafe { (self.functions.set_current)(context) })
    }

    unsafe fn release_context(&self, ordinal: u32) -> Result<(), Refusal> {
        let device = self.device(ordinal)?;
        // SAFETY: the caller has retained it.
        check(Call::DevicePrimaryCtxRelease, unsafe { (self.functions.release_context)(device) })
    }

    unsafe fn register_host(&self, start: *mut u8, bytes: usize) -> Result<(), Refusal> {
        // SAFETY: the caller vouches for the range.
        let status = unsafe { (self.functions.register_host)(start.cast(), bytes, 0) };
        check(Call::MemHostRegister, status)
    }

    unsafe fn unregister_host(&self, start: *mut u8) -> Result<(), Refusal> {
        // SAFETY: the caller has registered it.
        check(Call::MemHostUnregister, unsafe { (self.functions.unregister_host)(start.cast()) })
    }

    unsafe fn copy_to_device(&self, address: u64, bytes: &[u8]) -> Result<(), Refusal> {
        // SAFETY: the caller vouches for the device's side; the host's side is a slice.
        let status = unsafe { (self.functions.copy_to_device)(address, bytes.as_ptr().cast(), bytes.len()) };
        check(Call::MemcpyHtoD, status)
    }

    unsafe fn copy_from_device(&self, bytes: &mut [u8], address: u64) -> Result<(), Refusal> {
        // SAFETY: the caller vouches for the device's side; the host's side is a slice.
        let status =
            unsafe { (self.functions.copy_from_device)(bytes.as_mut_ptr().cast(), address, bytes.len()) };
        check(Call::MemcpyDtoH, status)
    }
}
