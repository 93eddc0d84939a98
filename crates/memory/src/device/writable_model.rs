//! The loader's side: a model's allocations, writable until they are handed over.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use cuda::{
    AddressRange, Context, Device, DeviceAccess, DriverError, PhysicalMemory, describe_memory_shortage,
};
use nix::sys::resource::{Resource, getrlimit};

/// Between two looks at a device whose memory is still held by a process that is ending.
const MEMORY_PAUSE: Duration = Duration::from_millis(50);

/// A model in the making: all its allocations back to back, readable and writable for this process's kernels.
#[derive(Debug)]
pub struct WritableModel {
    range: AddressRange,
    /// Address of each allocation's first byte.
    addresses: Vec<u64>,
    allocations: Vec<PhysicalMemory>,
}

#[derive(Debug, thiserror::Error)]
pub enum AllocateError {
    #[error("{}", describe_memory_shortage(*.requested_bytes, *.free_bytes))]
    OutOfMemory {
        requested_bytes: u64,
        /// Before anything of it was allocated; none where the driver does not say.
        free_bytes: Option<u64>,
    },
    #[error(
        "{needed} file descriptors are needed for the model's allocations, {free} are free (RLIMIT_NOFILE): raise it with ulimit -n"
    )]
    OutOfFds { needed: usize, free: usize },
    #[error("allocation {index} of {bytes} bytes is larger than any memory")]
    TooLarge { index: usize, bytes: u64 },
    #[error("the model's memory cannot be allocated")]
    Driver(#[from] DriverError),
}

#[derive(Debug, thiserror::Error)]
pub enum FinishError {
    #[error("the writable view of the model cannot be taken away")]
    Unmap(#[source] DriverError),
    #[error("allocation {index} cannot be exported")]
    Export { index: usize, source: DriverError },
}

impl WritableModel {
    /// Allocates memory for a plan's allocations, all or nothing.
    ///
    /// Where the device lacks memory it asks again for as long as `patience`, holding nothing meanwhile: a process that
    /// was killed gives its memory back late. The context is for the addresses to be of use, and for the driver to say how
    /// much is free.
    pub fn allocate(
        context: &Context,
        allocations: &[u64],
        patience: Duration,
    ) -> Result<Self, AllocateError> {
        let device = context.device();
        let sizes = sizes(device, allocations)?;
        let free = free_descriptors();
        if free < sizes.len() {
            return Err(AllocateError::OutOfFds { needed: sizes.len(), free });
        }
        context.bind()?;
        let requested_bytes = sizes.iter().sum();
        let deadline = Instant::now() + patience;
        loop {
            // What it had got so far went back with the failed attempt: the number is that of before.
            let attempt = if device.memory_info().is_some_and(|info| info.free_bytes < requested_bytes) {
                None
            } else {
                match Self::try_allocate(device, &sizes) {
                    Err(error) if error.is_out_of_memory() => None,
                    result => Some(result?),
                }
            };
            if let Some(model) = attempt {
                return Ok(model);
            }
            if Instant::now() >= deadline {
                let free_bytes = device.memory_info().map(|info| info.free_bytes);
                return Err(AllocateError::OutOfMemory { requested_bytes, free_bytes });
            }
            std::thread::sleep(MEMORY_PAUSE);
        }
    }

    fn try_allocate(device: &Device, sizes: &[u64]) -> Result<Self, DriverError> {
        let total = sizes.iter().sum::<u64>().max(device.granularity());
        let mut range = AddressRange::reserve(device, total)?;
        let mut addresses = Vec::with_capacity(sizes.len());
        let mut allocations = Vec::with_capacity(sizes.len());
        let mut offset = 0;
        for &bytes in sizes {
            let memory = PhysicalMemory::create(device, bytes)?;
            range.map(offset, &memory)?;
            addresses.push(range.address() + offset);
            allocations.push(memory);
            offset += bytes;
        }
        if offset > 0 {
            range.set_access(0, offset, DeviceAccess::ReadWrite)?;
        }
        Ok(Self { range, addresses, allocations })
    }

    /// Where each allocation starts, in the plan's order: writable until `finish`.
    pub fn addresses(&self) -> &[u64] {
        &self.addresses
    }

    /// What allocation `index` takes: what was asked for, in whole granules.
    pub fn bytes(&self, index: usize) -> Option<u64> {
        self.allocations.get(index).map(PhysicalMemory::bytes)
    }

    pub fn device(&self) -> &Device {
        self.range.device()
    }

    /// Copies bytes into an allocation, complete on return. For little data: kernels and streams write to `addresses`.
    ///
    /// # Panics
    /// Beyond the end of the allocation.
    pub fn write(
        &mut self,
        context: &Context,
        allocation: usize,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), DriverError> {
        let end = offset.checked_add(bytes.len() as u64);
        assert!(
            end.is_some_and(|end| end <= self.allocations[allocation].bytes()),
            "inside of the allocation"
        );
        let start = self.addresses[allocation] - self.range.address();
        self.range.write(context, start + offset, bytes)
    }

    /// Ends writing and gives out one descriptor for each allocation. All work on the device must have ended.
    pub fn finish(self) -> Result<Vec<OwnedFd>, FinishError> {
        let Self { mut range, addresses, allocations } = self;
        for address in addresses {
            let offset = address - range.address();
            range.unmap(offset).map_err(FinishError::Unmap)?;
        }
        drop(range);
        let export = |(index, memory): (usize, &PhysicalMemory)| {
            memory.export().map_err(|source| FinishError::Export { index, source })
        };
        allocations.iter().enumerate().map(export).collect()
    }
}

/// Whole granules of the device, whose sum is in range.
fn sizes(device: &Device, allocations: &[u64]) -> Result<Vec<u64>, AllocateError> {
    let mut total = 0u64;
    let mut sizes = Vec::with_capacity(allocations.len());
    for (index, &bytes) in allocations.iter().enumerate() {
        let size = device.allocated_bytes(bytes).ok_or(AllocateError::TooLarge { index, bytes })?;
        total = total.checked_add(size).ok_or(AllocateError::TooLarge { index, bytes })?;
        sizes.push(size);
    }
    Ok(sizes)
}

/// How many descriptors this process may still open; unknown counts as enough.
fn free_descriptors() -> usize {
    let limit = getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft);
    let open = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    usize::try_from(limit).unwrap_or(usize::MAX).saturating_sub(open)
}
