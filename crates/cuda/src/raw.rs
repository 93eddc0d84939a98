// SPDX-License-Identifier: Apache-2.0

//! The raw layer: pointers to the functions of libcuda, all looked up when the driver is opened.
//!
//! Types and the library come from cudarc. The functions are looked up here, and not through
//! cudarc's own bindings, for two reasons:
//! 1. A driver that lacks a function is an error that names the function. cudarc panics at the
//!    first call.
//! 2. A result is a number. cudarc converts it to an enum, which is undefined behaviour for a
//!    result code that is newer than cudarc.

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};

use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction, CUfunction_attribute,
    CUgraph, CUgraphExec, CUlaunchConfig, CUmemAccessDesc, CUmemAllocationGranularity_flags,
    CUmemAllocationHandleType, CUmemAllocationProp, CUmemGenericAllocationHandle, CUmodule, CUstream,
    CUstreamCaptureMode, CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave,
    CUtensorMapL2promotion, CUtensorMapSwizzle, CUuuid,
};

use crate::OpenDriverError;

/// A `CUresult` as the number that it is.
pub(crate) type Status = c_uint;

/// Function pointers under the names that the library exports. A later version of a function has
/// another name.
macro_rules! functions {
    ($($field:ident = $symbol:literal, ($($argument:ty),*);)*) => {
        pub(crate) struct Functions {
            $(pub(crate) $field: unsafe extern "C" fn($($argument),*) -> Status,)*
        }

        impl Functions {
            pub(crate) fn load() -> Result<Self, OpenDriverError> {
                // SAFETY: looks for the library by its usual names; loading it starts nothing.
                if !unsafe { sys::is_culib_present() } {
                    return Err(OpenDriverError::NoDriver);
                }
                // SAFETY: it can be loaded, as just seen, so this does not panic; it stays loaded
                // for ever.
                let library = unsafe { sys::culib() };
                Ok(Self {
                    $($field: {
                        // SAFETY: the type is that of the function in cuda.h, which never changes
                        // under its name.
                        let found = unsafe { library.get(concat!($symbol, "\0").as_bytes()) };
                        *found.map_err(|_| too_old(library, $symbol))?
                    },)*
                })
            }
        }
    };
}

/// Adds the version of the driver, which the driver knows before it is initialized.
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
    can_access_peer = "cuDeviceCanAccessPeer", (*mut c_int, CUdevice, CUdevice);
    attribute = "cuDeviceGetAttribute", (*mut c_int, CUdevice_attribute, CUdevice);

    retain_context = "cuDevicePrimaryCtxRetain", (*mut CUcontext, CUdevice);
    release_context = "cuDevicePrimaryCtxRelease_v2", (CUdevice);
    set_current = "cuCtxSetCurrent", (CUcontext);
    current_device = "cuCtxGetDevice", (*mut CUdevice);
    synchronize = "cuCtxSynchronize", ();

    granularity = "cuMemGetAllocationGranularity", (*mut usize, *const CUmemAllocationProp, CUmemAllocationGranularity_flags);
    memory_info = "cuMemGetInfo_v2", (*mut usize, *mut usize);
    create = "cuMemCreate", (*mut CUmemGenericAllocationHandle, usize, *const CUmemAllocationProp, c_ulonglong);
    export = "cuMemExportToShareableHandle", (*mut c_void, CUmemGenericAllocationHandle, CUmemAllocationHandleType, c_ulonglong);
    import = "cuMemImportFromShareableHandle", (*mut CUmemGenericAllocationHandle, *mut c_void, CUmemAllocationHandleType);
    release = "cuMemRelease", (CUmemGenericAllocationHandle);
    reserve = "cuMemAddressReserve", (*mut CUdeviceptr, usize, usize, CUdeviceptr, c_ulonglong);
    free_addresses = "cuMemAddressFree", (CUdeviceptr, usize);
    map = "cuMemMap", (CUdeviceptr, usize, usize, CUmemGenericAllocationHandle, c_ulonglong);
    set_access = "cuMemSetAccess", (CUdeviceptr, usize, *const CUmemAccessDesc, usize);
    unmap = "cuMemUnmap", (CUdeviceptr, usize);
    allocate = "cuMemAlloc_v2", (*mut CUdeviceptr, usize);
    free = "cuMemFree_v2", (CUdeviceptr);
    allocate_host = "cuMemHostAlloc", (*mut *mut c_void, usize, c_uint);
    free_host = "cuMemFreeHost", (*mut c_void);
    register_host = "cuMemHostRegister_v2", (*mut c_void, usize, c_uint);
    unregister_host = "cuMemHostUnregister", (*mut c_void);

    copy_to_device = "cuMemcpyHtoD_v2", (CUdeviceptr, *const c_void, usize);
    copy_to_host = "cuMemcpyDtoH_v2", (*mut c_void, CUdeviceptr, usize);
    enqueue_copy_to_device = "cuMemcpyHtoDAsync_v2", (CUdeviceptr, *const c_void, usize, CUstream);
    enqueue_copy_to_host = "cuMemcpyDtoHAsync_v2", (*mut c_void, CUdeviceptr, usize, CUstream);
    enqueue_copy_on_device = "cuMemcpyDtoDAsync_v2", (CUdeviceptr, CUdeviceptr, usize, CUstream);
    enqueue_fill = "cuMemsetD8Async", (CUdeviceptr, c_uchar, usize, CUstream);

    create_stream = "cuStreamCreate", (*mut CUstream, c_uint);
    destroy_stream = "cuStreamDestroy_v2", (CUstream);
    synchronize_stream = "cuStreamSynchronize", (CUstream);
    wait_event = "cuStreamWaitEvent", (CUstream, CUevent, c_uint);
    begin_capture = "cuStreamBeginCapture_v2", (CUstream, CUstreamCaptureMode);
    end_capture = "cuStreamEndCapture", (CUstream, *mut CUgraph);
    create_event = "cuEventCreate", (*mut CUevent, c_uint);
    destroy_event = "cuEventDestroy_v2", (CUevent);
    record_event = "cuEventRecord", (CUevent, CUstream);
    synchronize_event = "cuEventSynchronize", (CUevent);
    query_event = "cuEventQuery", (CUevent);
    elapsed_time = "cuEventElapsedTime_v2", (*mut f32, CUevent, CUevent);

    instantiate_graph = "cuGraphInstantiateWithFlags", (*mut CUgraphExec, CUgraph, c_ulonglong);
    destroy_graph = "cuGraphDestroy", (CUgraph);
    upload_graph = "cuGraphUpload", (CUgraphExec, CUstream);
    launch_graph = "cuGraphLaunch", (CUgraphExec, CUstream);
    destroy_graph_exec = "cuGraphExecDestroy", (CUgraphExec);

    load_module = "cuModuleLoadData", (*mut CUmodule, *const c_void);
    unload_module = "cuModuleUnload", (CUmodule);
    module_function = "cuModuleGetFunction", (*mut CUfunction, CUmodule, *const c_char);
    function_attribute = "cuFuncGetAttribute", (*mut c_int, CUfunction_attribute, CUfunction);
    set_function_attribute = "cuFuncSetAttribute", (CUfunction, CUfunction_attribute, c_int);
    launch = "cuLaunchKernelEx", (*const CUlaunchConfig, CUfunction, *mut *mut c_void, *mut *mut c_void);
    occupancy = "cuOccupancyMaxActiveBlocksPerMultiprocessor", (*mut c_int, CUfunction, c_int, usize);
    active_clusters = "cuOccupancyMaxActiveClusters", (*mut c_int, CUfunction, *const CUlaunchConfig);
    encode_tensor_map = "cuTensorMapEncodeTiled", (*mut CUtensorMap, CUtensorMapDataType, c_uint, *mut c_void, *const u64, *const u64, *const c_uint, *const c_uint, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
}
