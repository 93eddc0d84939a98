//! [`Device`]: a GPU by its UUID, known to be able to share memory between processes.
//!
//! Ordinals are this process's own: CUDA_VISIBLE_DEVICES and containers renumber GPUs. Whatever travels names a UUID.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use super::driver::{DeviceFacts, Driver, MemoryInfo, RawContext, Refusal};
use super::retry::retrying;

/// Names a GPU in every process and container alike.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceUuid(pub [u8; 16]);

/// Which GPU a user or a manifest means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceSelector {
    /// "cuda:N", N counted in this process.
    Ordinal(u32),
    /// "GPU-...", as nvidia-smi and the manifest have it.
    Uuid(DeviceUuid),
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{text:?} names no GPU: write cuda:0, or the UUID that nvidia-smi -L shows")]
pub struct SelectorError {
    pub text: String,
}

/// Cheap to clone.
#[derive(Debug, Clone)]
pub struct Device(Arc<State>);

#[derive(Debug)]
struct State {
    driver: Arc<dyn Driver>,
    facts: DeviceFacts,
    granularity: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    #[error("there is no GPU {wanted}; {}", list(.present))]
    Absent { wanted: DeviceSelector, present: Vec<DeviceFacts> },
    #[error(
        "{name} ({uuid}) has no virtual memory management: its memory cannot be shared between processes"
    )]
    NoVmm { name: String, uuid: DeviceUuid },
    #[error(
        "{name} ({uuid}) cannot export memory as file descriptors: a Linux driver outside of WSL is needed"
    )]
    NoPosixFd { name: String, uuid: DeviceUuid },
    #[error("the GPU cannot be used (nvidia-smi may say more; the host's memory can be used without it)")]
    Refused(#[from] Refusal),
}

/// What the driver knows of every GPU that this process sees, in its order.
pub fn devices(driver: &dyn Driver) -> Result<Vec<DeviceFacts>, Refusal> {
    (0..driver.device_count()?).map(|ordinal| driver.device_facts(ordinal)).collect()
}

impl Device {
    pub fn open(driver: Arc<dyn Driver>, wanted: DeviceSelector) -> Result<Self, DeviceError> {
        let mut present = devices(&*driver)?;
        let Some(index) = present.iter().position(|facts| wanted.means(facts)) else {
            return Err(DeviceError::Absent { wanted, present });
        };
        let facts = present.swap_remove(index);
        let DeviceFacts { name, uuid, .. } = &facts;
        if !facts.vmm {
            return Err(DeviceError::NoVmm { name: name.clone(), uuid: *uuid });
        }
        if !facts.posix_fd {
            return Err(DeviceError::NoPosixFd { name: name.clone(), uuid: *uuid });
        }
        let granularity = retrying(|| driver.granularity(facts.ordinal))?;
        Ok(Self(Arc::new(State { driver, facts, granularity })))
    }

    pub fn facts(&self) -> &DeviceFacts {
        &self.0.facts
    }

    pub fn uuid(&self) -> DeviceUuid {
        self.0.facts.uuid
    }

    /// Allocations and their addresses are multiples of this.
    pub fn granularity(&self) -> u64 {
        self.0.granularity
    }

    /// What an allocation of so many bytes takes; exporter and importer must agree on it. None beyond all memory.
    pub fn allocated_bytes(&self, bytes: u64) -> Option<u64> {
        bytes.max(1).checked_next_multiple_of(self.0.granularity)
    }

    /// None where the driver does not say: no context of this device is current on this thread.
    pub fn memory_info(&self) -> Option<MemoryInfo> {
        self.driver().memory_info(self.0.facts.ordinal).ok()
    }

    /// Retains the device's primary context and makes it current on this thread.
    pub fn context(&self) -> Result<Context, Refusal> {
        let raw = retrying(|| self.driver().retain_context(self.0.facts.ordinal))?;
        let context = Context { device: self.clone(), raw };
        context.bind()?;
        Ok(context)
    }

    pub(super) fn driver(&self) -> &dyn Driver {
        &*self.0.driver
    }

    pub(super) fn ordinal(&self) -> u32 {
        self.0.facts.ordinal
    }
}

/// A hold on the primary context: half a GiB of device memory while anybody in this process has one.
#[derive(Debug)]
pub struct Context {
    device: Device,
    raw: RawContext,
}

impl Context {
    /// Makes it current on the calling thread too.
    pub fn bind(&self) -> Result<(), Refusal> {
        // SAFETY: retained as long as self. A thread that has it current after that can only get errors: every use of
        // device memory in this crate holds on to a context.
        unsafe { self.device.driver().set_current(self.raw) }
    }

    pub fn device(&self) -> &Device {
        &self.device
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once, by `Device::context`; nothing that this crate makes lives in a context.
        // A refusal has nobody to go to: the driver is broken or shutting down, and takes the context along.
        let _ = unsafe { self.device.driver().release_context(self.device.ordinal()) };
    }
}

impl DeviceSelector {
    fn means(self, facts: &DeviceFacts) -> bool {
        match self {
            Self::Ordinal(ordinal) => facts.ordinal == ordinal,
            Self::Uuid(uuid) => facts.uuid == uuid,
        }
    }
}

impl fmt::Display for DeviceSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ordinal(ordinal) => write!(f, "cuda:{ordinal}"),
            Self::Uuid(uuid) => uuid.fmt(f),
        }
    }
}

impl FromStr for DeviceSelector {
    type Err = SelectorError;

    fn from_str(text: &str) -> Result<Self, SelectorError> {
        let ordinal = text.strip_prefix("cuda:").and_then(|number| number.parse().ok()).map(Self::Ordinal);
        ordinal
            .or_else(|| DeviceUuid::parse(text).map(Self::Uuid))
            .ok_or_else(|| SelectorError { text: text.to_owned() })
    }
}

impl DeviceUuid {
    /// Reads what `Display` writes.
    pub fn parse(text: &str) -> Option<Self> {
        let digits: Vec<u8> =
            text.strip_prefix("GPU-")?.bytes().enumerate().filter_map(without_dash).collect();
        let (pairs, rest) = digits.as_chunks::<2>();
        let byte = |pair: &[u8; 2]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
        let bytes: Vec<u8> = pairs.iter().map(byte).collect::<Option<_>>()?;
        rest.is_empty().then_some(Self(bytes.try_into().ok()?))
    }
}

/// Dashes stand after 8, 12, 16 and 20 digits, and nowhere else.
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

fn list(devices: &[DeviceFacts]) -> String {
    if devices.is_empty() {
        return "this process sees none".to_owned();
    }
    let names: Vec<String> = devices
        .iter()
        .map(|facts| format!("cuda:{} {} ({})", facts.ordinal, facts.name, facts.uuid))
        .collect();
    format!("this process sees {}", names.join(", "))
}
