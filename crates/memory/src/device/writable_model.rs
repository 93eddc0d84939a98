// SPDX-License-Identifier: Apache-2.0

//! [`WritableModel`]: the allocations of a model on a GPU, as the loader fills them.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use cuda::{
    AddressRange, Context, Device, DeviceAccess, DriverError, PhysicalMemory, describe_memory_shortage,
};
use nix::sys::resource::{Resource, getrlimit};

/// Pause between two attempts to allocate while a process that was killed still holds device
/// memory.
const MEMORY_PAUSE: Duration = Duration::from_millis(50);

/// All allocations of a model, mapped back to back; kernels of this process may read and write
/// them.
#[derive(Debug)]
pub struct WritableModel {
    range: AddressRange,
    /// Address of the first byte of each allocation.
    addresses: Vec<u64>,
    allocations: Vec<PhysicalMemory>,
}

#[derive(Debug, thiserror::Error)]
pub enum AllocateError {
    #[error("{}", describe_memory_shortage(*.requested_bytes, *.free_bytes))]
    OutOfMemory {
        requested_bytes: u64,
        /// Free bytes before anything was allocated; `None` if the driver does not report them.
        free_bytes: Option<u64>,
    },
    #[error(
        "the allocations of the model need {needed} file descriptors, {free} are free (RLIMIT_NOFILE): raise it with ulimit -n"
    )]
    OutOfFds { needed: usize, free: usize },
    #[error("allocation {index} of {bytes} bytes exceeds any memory")]
    TooLarge { index: usize, bytes: u64 },
    #[error("the model's memory cannot be allocated")]
    Driver(#[from] DriverError),
}

#[derive(Debug, thiserror::Error)]
pub enum FinishError {
    #[error("the writable mapping of the model cannot be removed")]
    Unmap(#[source] DriverError),
    #[error("allocation {index} cannot be exported")]
    Export { index: usize, source: DriverError },
}

impl WritableModel {
    /// Allocates and maps all allocations of a plan, or none.
    ///
    /// If the device has too little free memory, it tries again until `patience` has passed, and
    /// holds nothing meanwhile: the memory of a process that was killed becomes free late. The
    /// context makes the addresses usable, and lets the driver report how much memory is free.
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
            // A failed attempt has released what it had allocated, so the free bytes are those
            // before the attempt.
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

    /// The address of each allocation, in the order of the plan; writable until `finish`.
    pub fn addresses(&self) -> &[u64] {
        &self.addresses
    }

    /// The size of allocation `index`: the requested size, rounded up to whole granules.
    pub fn bytes(&self, index: usize) -> Option<u64> {
        self.allocations.get(index).map(PhysicalMemory::bytes)
    }

    pub fn device(&self) -> &Device {
        self.range.device()
    }

    /// Copies bytes into an allocation and returns when the copy is complete. For little data;
    /// kernels and streams write to `addresses`.
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

    /// Removes the writable mappings and exports one file descriptor for each allocation. All work
    /// on the device must have ended.
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

/// The sizes in whole granules of the device; their sum fits 64 bits.
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

/// How many file descriptors this process may still open. An unknown limit counts as unlimited.
fn free_descriptors() -> usize {
    let limit = getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft);
    let open = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    usize::try_from(limit).unwrap_or(usize::MAX).saturating_sub(open)
}
