//! The management library: what a device holds in all, without a context, and what of it this
//! process holds.
//!
//! Loaded at run time; it may be missing, and on boards that share memory with the host it has no
//! memory numbers. It loads libcuda into its process (seen with driver 580), without starting it:
//! the weight-server asks a child.

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

/// Processes on a device that there is room for at first, and beside the number that the library
/// then asks for.
const PROCESSES: usize = 64;

/// Lists of processes that were longer when the library came to write them; more are not believed.
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
    /// None before driver 510.
    processes: Option<ListProcesses>,
    /// What the functions above lie in.
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

    /// All memory that is taken on the device, by whomever; none where the board shares the host's.
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

    /// What the driver counts to this process: its context (but for what it keeps of that for
    /// itself) and what it has allocated, not what others have allocated and this process has
    /// mapped. None where it does not say: a process without a context, one in a container whose
    /// process numbers it does not translate, a client of MPS, some boards.
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

    /// Whether the driver stays up on the device when no process uses it: only then do weights
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

/// All that is listed for a process, if any of it is a number.
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
    fn a_process_has_what_is_listed_for_it_alone() {
        let process = |pid, used| RawProcess { pid, used, ..RawProcess::default() };
        let list = [process(7, 100), process(8, 20), process(9, NOT_AVAILABLE), process(8, 3)];
        assert_eq!(bytes_of(7, &list), Some(100));
        assert_eq!(bytes_of(8, &list), Some(23), "on two parts of a device");
        assert_eq!(bytes_of(9, &list), None);
        assert_eq!(bytes_of(10, &list), None);
    }
}
