// SPDX-License-Identifier: Apache-2.0

//! [`Nvml`]: the NVIDIA management library, which reports memory, health and faults of a device
//! without a context.
//!
//! The library is loaded at run time and may be missing. On boards that share memory with the host
//! it reports no memory. It loads libcuda into its process without initializing it (seen with
//! driver 580), so the weight-server asks a child process.

use std::ffi::OsStr;
use std::time::Duration;

use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enum_wrappers::device::{EccCounter, MemoryError, TemperatureSensor};
use nvml_wrapper::enums::device::{SampleValue, UsedGpuMemory};
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError as LibraryError;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;
use nvml_wrapper::structs::device::FieldId;

use crate::checked::{DeviceUuid, MemoryInfo};

const LIBRARY: &str = "libnvidia-ml.so.1";

/// How often the list of processes may have grown before the library writes it, until the call is
/// an error.
const LIST_ATTEMPTS: usize = 4;

/// NVML_FI_DEV_GET_GPU_RECOVERY_ACTION of nvml.h.
const RECOVERY_ACTION_FIELD: FieldId = FieldId(230);

/// The Xid of a fault that the driver cannot name.
const UNKNOWN_XID: u64 = 999;

#[derive(Debug, thiserror::Error)]
pub enum NvmlError {
    #[error("no NVIDIA management library here: {LIBRARY} cannot be loaded")]
    Missing(#[source] LibraryError),
    #[error("{call} failed")]
    Refused { call: &'static str, source: LibraryError },
}

impl NvmlError {
    /// The device has fallen off the bus, or computes nothing before it is reset.
    pub fn is_device_lost(&self) -> bool {
        let Self::Refused { source, .. } = self else { return false };
        matches!(source, LibraryError::GpuLost | LibraryError::ResetRequired)
    }
}

/// How a device is. A figure is `None` if the board or the driver does not report it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NvmlFigures {
    pub temperature_celsius: Option<u32>,
    pub power_milliwatts: Option<u32>,
    /// Part of the last sample period in which a kernel ran.
    pub utilization_percent: Option<u32>,
    pub memory: Option<MemoryInfo>,
    /// Since the driver was loaded.
    pub corrected_ecc_errors: Option<u64>,
    pub uncorrected_ecc_errors: Option<u64>,
    /// What the driver asks for.
    pub recovery_action: RecoveryAction,
}

/// What has to be done before the device can be relied on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RecoveryAction {
    /// Nothing, or the driver does not say (before driver 570).
    #[default]
    None,
    ResetGpu,
    RebootNode,
    DrainPeers,
    DrainAndReset,
    /// Of a driver that is newer than this program.
    Other(u32),
}

impl RecoveryAction {
    /// Of NVML_GPU_RECOVERY_ACTION_*.
    fn from_code(code: u32) -> Self {
        match code {
            0 => Self::None,
            1 => Self::ResetGpu,
            2 => Self::RebootNode,
            3 => Self::DrainPeers,
            4 => Self::DrainAndReset,
            other => Self::Other(other),
        }
    }
}

/// A fault that the driver has reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceFault {
    /// The number of NVIDIA's catalog of Xid messages.
    Xid(u64),
    UncorrectedEcc,
}

pub struct Nvml {
    library: nvml_wrapper::Nvml,
}

impl Nvml {
    pub fn open() -> Result<Self, NvmlError> {
        match nvml_wrapper::Nvml::builder().lib_path(OsStr::new(LIBRARY)).init() {
            Ok(library) => Ok(Self { library }),
            Err(error @ LibraryError::LibloadingError(_)) => Err(NvmlError::Missing(error)),
            Err(source) => Err(NvmlError::Refused { call: "nvmlInit", source }),
        }
    }

    pub fn driver_version(&self) -> Result<String, NvmlError> {
        refused("nvmlSystemGetDriverVersion", self.library.sys_driver_version())
    }

    /// Memory of the device, used by any process. `None` if the board shares memory with the host.
    pub fn memory(&self, device: DeviceUuid) -> Result<Option<MemoryInfo>, NvmlError> {
        memory(&self.device(device)?)
    }

    /// Device memory that the driver counts for this process: its context, except for a part that
    /// it counts to no process, and its allocations, but not imported allocations. `None` if the
    /// driver does not report it: for a process without a context, in a container whose process
    /// numbers the driver does not translate, for a client of MPS, and on some boards.
    pub fn process_bytes(&self, device: DeviceUuid) -> Result<Option<u64>, NvmlError> {
        let device = self.device(device)?;
        let mut listed = device.running_compute_processes();
        for _ in 1..LIST_ATTEMPTS {
            if !matches!(listed, Err(LibraryError::InsufficientSize(_))) {
                break;
            }
            listed = device.running_compute_processes();
        }
        let listed = reported("nvmlDeviceGetComputeRunningProcesses", listed)?;
        Ok(listed.and_then(|list| bytes_of(std::process::id(), &list)))
    }

    /// Whether the driver stays loaded on the device when no process uses it. Only then do weights
    /// outlive all processes.
    pub fn persistence_mode(&self, device: DeviceUuid) -> Result<bool, NvmlError> {
        refused("nvmlDeviceGetPersistenceMode", self.device(device)?.is_in_persistent_mode())
    }

    /// Reads all figures of a device. A call may hang if the device does not answer.
    pub fn figures(&self, device: DeviceUuid) -> Result<NvmlFigures, NvmlError> {
        let device = self.device(device)?;
        let ecc = |kind| {
            reported("nvmlDeviceGetTotalEccErrors", device.total_ecc_errors(kind, EccCounter::Volatile))
        };
        let utilization = reported("nvmlDeviceGetUtilizationRates", device.utilization_rates())?;
        Ok(NvmlFigures {
            temperature_celsius: reported(
                "nvmlDeviceGetTemperature",
                device.temperature(TemperatureSensor::Gpu),
            )?,
            power_milliwatts: reported("nvmlDeviceGetPowerUsage", device.power_usage())?,
            utilization_percent: utilization.map(|rates| rates.gpu),
            memory: memory(&device)?,
            corrected_ecc_errors: ecc(MemoryError::Corrected)?,
            uncorrected_ecc_errors: ecc(MemoryError::Uncorrected)?,
            recovery_action: recovery_action(&device)?,
        })
    }

    /// Begins to collect the faults of these devices.
    pub fn watch_faults(&self, devices: &[DeviceUuid]) -> Result<FaultEvents<'_>, NvmlError> {
        let mut set = refused("nvmlEventSetCreate", self.library.create_event_set())?;
        for device in devices {
            let kinds = EventTypes::CRITICAL_XID_ERROR | EventTypes::DOUBLE_BIT_ECC_ERROR;
            let registered = self.device(*device)?.register_events(kinds, set);
            set = refused("nvmlDeviceRegisterEvents", registered.map_err(|error| error.error))?;
        }
        Ok(FaultEvents { set })
    }

    fn device(&self, uuid: DeviceUuid) -> Result<nvml_wrapper::Device<'_>, NvmlError> {
        refused("nvmlDeviceGetHandleByUUID", self.library.device_by_uuid(uuid.to_string()))
    }
}

/// Faults of devices since their registration.
pub struct FaultEvents<'nvml> {
    set: nvml_wrapper::EventSet<'nvml>,
}

impl FaultEvents<'_> {
    /// Waits for the next fault. `None` after `timeout`.
    pub fn wait(&self, timeout: Duration) -> Result<Option<(DeviceUuid, DeviceFault)>, NvmlError> {
        const CALL: &str = "nvmlEventSetWait";
        let timeout_ms = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
        let event = match self.set.wait(timeout_ms) {
            Err(LibraryError::Timeout) => return Ok(None),
            event => refused(CALL, event)?,
        };
        let uuid = refused("nvmlDeviceGetUUID", event.device.uuid())?;
        // Another device of the machine would be an error of the library.
        let Some(device) = DeviceUuid::parse(&uuid) else { return Ok(None) };
        let fault = match event.event_data {
            Some(XidError::Value(xid)) => DeviceFault::Xid(xid),
            Some(XidError::Unknown) => DeviceFault::Xid(UNKNOWN_XID),
            None => DeviceFault::UncorrectedEcc,
        };
        Ok(Some((device, fault)))
    }
}

fn memory(device: &nvml_wrapper::Device<'_>) -> Result<Option<MemoryInfo>, NvmlError> {
    let memory = reported("nvmlDeviceGetMemoryInfo", device.memory_info())?;
    Ok(memory.map(|memory| MemoryInfo { free_bytes: memory.free, total_bytes: memory.total }))
}

fn recovery_action(device: &nvml_wrapper::Device<'_>) -> Result<RecoveryAction, NvmlError> {
    const CALL: &str = "nvmlDeviceGetFieldValues";
    let values = reported(CALL, device.field_values_for(&[RECOVERY_ACTION_FIELD]))?;
    let Some(sample) = values.into_iter().flatten().next() else { return Ok(RecoveryAction::None) };
    let value = reported(CALL, sample.and_then(|sample| sample.value))?;
    Ok(match value {
        Some(SampleValue::U32(code)) => RecoveryAction::from_code(code),
        _ => RecoveryAction::None,
    })
}

/// The sum of the entries of a process, if any of them has a number.
fn bytes_of(pid: u32, list: &[ProcessInfo]) -> Option<u64> {
    let numbers = list.iter().filter(|process| process.pid == pid);
    let numbers = numbers.filter_map(|process| match process.used_gpu_memory {
        UsedGpuMemory::Used(bytes) => Some(bytes),
        UsedGpuMemory::Unavailable => None,
    });
    numbers.reduce(u64::saturating_add)
}

fn refused<T>(call: &'static str, result: Result<T, LibraryError>) -> Result<T, NvmlError> {
    result.map_err(|source| NvmlError::Refused { call, source })
}

/// `None` if this board, driver or user gets no answer to the call.
fn reported<T>(call: &'static str, result: Result<T, LibraryError>) -> Result<Option<T>, NvmlError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(
            LibraryError::NotSupported
            | LibraryError::NoPermission
            | LibraryError::NoData
            | LibraryError::InvalidArg
            | LibraryError::FailedToLoadSymbol(_)
            | LibraryError::UnexpectedVariant(_)
            | LibraryError::InsufficientSize(_),
        ) => Ok(None),
        Err(source) => Err(NvmlError::Refused { call, source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_a_process_are_the_sum_of_its_own_entries() {
        let process = |pid, used_gpu_memory| ProcessInfo {
            pid,
            used_gpu_memory,
            gpu_instance_id: None,
            compute_instance_id: None,
        };
        let list = [
            process(7, UsedGpuMemory::Used(100)),
            process(8, UsedGpuMemory::Used(20)),
            process(9, UsedGpuMemory::Unavailable),
            process(8, UsedGpuMemory::Used(3)),
        ];
        assert_eq!(bytes_of(7, &list), Some(100));
        assert_eq!(bytes_of(8, &list), Some(23), "two entries of one process");
        assert_eq!(bytes_of(9, &list), None);
        assert_eq!(bytes_of(10, &list), None);
    }
}
