// SPDX-License-Identifier: Apache-2.0

//! [`Nvml`]: the NVIDIA management library, which reports the memory of a device and of a process
//! without a context.
//!
//! The library is loaded at run time and may be missing. cudarc has no bindings for it. On boards
//! that share memory with the host it reports no memory. It loads libcuda into its process without
//! initializing it (seen with driver 580), so the weight-server asks a child process.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};

use libloading::Library;

use crate::checked::{DeviceUuid, MemoryInfo};

const LIBRARY: &str = "libnvidia-ml.so.1";

/// NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE
const VERSION_BYTES: usize = 80;

const SUCCESS: c_int = 0;
const NOT_SUPPORTED: c_int = 3;
const INSUFFICIENT_SIZE: c_int = 7;

/// NVML_VALUE_NOT_AVAILABLE, of 64 bits.
const NOT_AVAILABLE: u64 = u64::MAX;

/// Room for processes in the first list, and spare room beyond the number that the library asks
/// for.
const PROCESSES: usize = 64;

/// How often the list may have grown before the library writes it, until the call is an error.
const LIST_ATTEMPTS: usize = 4;

/// `nvmlDevice_t`: valid from its look-up until shutdown.
type RawDevice = *mut c_void;

/// `nvmlMemory_t`
#[repr(C)]
#[derive(Default)]
struct RawMemory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlProcessInfo_t`
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RawProcess {
    pid: c_uint,
    used: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

type ListProcesses = unsafe extern "C" fn(RawDevice, *mut c_uint, *mut RawProcess) -> c_int;

#[derive(Debug, thiserror::Error)]
pub enum NvmlError {
    #[error("no NVIDIA management library here: {LIBRARY} cannot be loaded")]
    Missing(#[source] libloading::Error),
    #[error("the NVIDIA management library has no {function}")]
    TooOld { function: &'static str },
    #[error("{function} failed with NVML error {code}")]
    Refused { function: &'static str, code: i32 },
}

pub struct Nvml {
    shutdown: unsafe extern "C" fn() -> c_int,
    version: unsafe extern "C" fn(*mut c_char, c_uint) -> c_int,
    by_uuid: unsafe extern "C" fn(*const c_char, *mut RawDevice) -> c_int,
    memory: unsafe extern "C" fn(RawDevice, *mut RawMemory) -> c_int,
    persistence: unsafe extern "C" fn(RawDevice, *mut c_uint) -> c_int,
    /// `None` before driver 510.
    processes: Option<ListProcesses>,
    /// The library that holds the functions above.
    _library: Library,
}

impl Nvml {
    pub fn open() -> Result<Self, NvmlError> {
        // SAFETY: NVIDIA's library starts nothing when it is loaded.
        let library = unsafe { Library::new(LIBRARY) }.map_err(NvmlError::Missing)?;
        // SAFETY: here and in the struct: the types are those of the functions in nvml.h, which
        // never change under their names, and the pointers don't outlive the library, which the
        // struct holds.
        let init = unsafe { function::<unsafe extern "C" fn() -> c_int>(&library, "nvmlInit_v2") }?;
        // SAFETY: as above.
        let nvml = unsafe {
            Self {
                shutdown: function(&library, "nvmlShutdown")?,
                version: function(&library, "nvmlSystemGetDriverVersion")?,
                by_uuid: function(&library, "nvmlDeviceGetHandleByUUID")?,
                memory: function(&library, "nvmlDeviceGetMemoryInfo")?,
                persistence: function(&library, "nvmlDeviceGetPersistenceMode")?,
                processes: function(&library, "nvmlDeviceGetComputeRunningProcesses_v3").ok(),
                _library: library,
            }
        };
        // SAFETY: takes nothing; counted, and undone by drop, which also undoes nothing if this
        // fails.
        check("nvmlInit", unsafe { init() })?;
        Ok(nvml)
    }

    pub fn driver_version(&self) -> Result<String, NvmlError> {
        let mut text: [c_char; VERSION_BYTES] = [0; VERSION_BYTES];
        // SAFETY: at most the given length is written, with an end of string.
        check("nvmlSystemGetDriverVersion", unsafe {
            (self.version)(text.as_mut_ptr(), VERSION_BYTES as c_uint)
        })?;
        let text = text.map(|byte| byte as u8);
        Ok(CStr::from_bytes_until_nul(&text)
            .map(|text| text.to_string_lossy().into_owned())
            .unwrap_or_default())
    }

    /// Memory of the device, used by any process. `None` if the board shares memory with the host.
    pub fn memory(&self, device: DeviceUuid) -> Result<Option<MemoryInfo>, NvmlError> {
        let device = self.device(device)?;
        let mut memory = RawMemory::default();
        // SAFETY: a device from the look-up; one struct is written.
        match unsafe { (self.memory)(device, &mut memory) } {
            NOT_SUPPORTED => Ok(None),
            code => {
                check("nvmlDeviceGetMemoryInfo", code)?;
                Ok(Some(MemoryInfo { free_bytes: memory.free, total_bytes: memory.total }))
            }
        }
    }

    /// Device memory that the driver counts for this process: its context, except for a part that
    /// it counts to no process, and its allocations, but not imported allocations. `None` if the
    /// driver does not report it: for a process without a context, in a container whose process
    /// numbers the driver does not translate, for a client of MPS, and on some boards.
    pub fn process_bytes(&self, device: DeviceUuid) -> Result<Option<u64>, NvmlError> {
        const FUNCTION: &str = "nvmlDeviceGetComputeRunningProcesses";
        let (device, Some(processes)) = (self.device(device)?, self.processes) else { return Ok(None) };
        let mut list = vec![RawProcess::default(); PROCESSES];
        for _ in 0..LIST_ATTEMPTS {
            let mut count = list.len() as c_uint;
            // SAFETY: a device from the look-up; at most as many structs are written as the list
            // has, and their number.
            match unsafe { processes(device, &mut count, list.as_mut_ptr()) } {
                INSUFFICIENT_SIZE => list.resize(count as usize + PROCESSES, RawProcess::default()),
                NOT_SUPPORTED => return Ok(None),
                code => {
                    check(FUNCTION, code)?;
                    list.truncate(count as usize);
                    return Ok(bytes_of(std::process::id(), &list));
                }
            }
        }
        Err(NvmlError::Refused { function: FUNCTION, code: INSUFFICIENT_SIZE })
    }

    /// Whether the driver stays loaded on the device when no process uses it. Only then do weights
    /// outlive all processes.
    pub fn persistence_mode(&self, device: DeviceUuid) -> Result<bool, NvmlError> {
        let device = self.device(device)?;
        let mut mode = 0;
        // SAFETY: a device from the look-up; one number is written.
        check("nvmlDeviceGetPersistenceMode", unsafe { (self.persistence)(device, &mut mode) })?;
        Ok(mode != 0)
    }

    fn device(&self, uuid: DeviceUuid) -> Result<RawDevice, NvmlError> {
        let text = CString::new(uuid.to_string()).unwrap_or_default();
        let mut device = std::ptr::null_mut();
        // SAFETY: a string with its end is read, one pointer is written.
        check("nvmlDeviceGetHandleByUUID", unsafe { (self.by_uuid)(text.as_ptr(), &mut device) })?;
        Ok(device)
    }
}

/// The sum of the entries of a process, if any of them has a number.
fn bytes_of(pid: u32, list: &[RawProcess]) -> Option<u64> {
    let numbers = list.iter().filter(|process| process.pid == pid && process.used != NOT_AVAILABLE);
    numbers.map(|process| process.used).reduce(u64::saturating_add)
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: after all uses of the devices looked up, which never leave a method.
        let _ = unsafe { (self.shutdown)() };
    }
}

/// # Safety
/// `F` is the type of the library's function of this name, and is not used after the library.
unsafe fn function<F: Copy>(library: &Library, name: &'static str) -> Result<F, NvmlError> {
    // SAFETY: the caller vouches for the type.
    let symbol = unsafe { library.get::<F>(name) };
    Ok(*symbol.map_err(|_| NvmlError::TooOld { function: name })?)
}

fn check(function: &'static str, code: c_int) -> Result<(), NvmlError> {
    if code == SUCCESS { Ok(()) } else { Err(NvmlError::Refused { function, code }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_a_process_are_the_sum_of_its_own_entries() {
        let process = |pid, used| RawProcess { pid, used, ..RawProcess::default() };
        let list = [process(7, 100), process(8, 20), process(9, NOT_AVAILABLE), process(8, 3)];
        assert_eq!(bytes_of(7, &list), Some(100));
        assert_eq!(bytes_of(8, &list), Some(23), "two entries of one process");
        assert_eq!(bytes_of(9, &list), None);
        assert_eq!(bytes_of(10, &list), None);
    }
}
