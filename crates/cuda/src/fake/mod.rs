// SPDX-License-Identifier: Apache-2.0

//! [`FakeDriver`]: a driver without a GPU, for tests. Two devices, as much memory as a test sets,
//! errors at chosen calls.
//!
//! The fake follows the real driver's rules and records each violation of the contract of
//! [`DriverApi`]: a handle that is released twice, addresses that are freed under a mapping, access
//! that is set over a gap. An allocation is a memfd, so a hand-over between two fakes carries real
//! bytes. Streams run their work at once; kernels and graphs are not supported.

#![expect(clippy::unwrap_used, reason = "test support: a test that cannot go on should say where")]

mod execution;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs::File;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::checked::{
    AllocationHandle, DeviceAccess, DeviceInfo, DeviceUuid, DriverApi, DriverCall, DriverError, ErrorCode,
    MemoryInfo, RawContext, RawEvent, RawStream,
};

pub const GRANULE: u64 = 2 << 20;

/// Device addresses start here, where the host maps nothing.
const FIRST_ADDRESS: u64 = 0x7_0000_0000_0000;

/// Distance between reservations, so that an address behind one belongs to no other.
const GAP: u64 = 1 << 40;

#[derive(Debug)]
pub struct FakeDriver(Mutex<FakeState>);

#[derive(Debug)]
struct FakeState {
    devices: Vec<DeviceInfo>,
    granularity: u64,
    capacity: u64,
    peer_access: bool,
    injected: Vec<InjectedError>,
    calls: Vec<DriverCall>,
    next: u64,
    handles: BTreeMap<u64, FakeMemory>,
    reserved: BTreeMap<u64, u64>,
    mapped: BTreeMap<u64, FakeMapping>,
    /// Host memory, by its start.
    pinned: BTreeMap<usize, usize>,
    contexts: u32,
    current: HashMap<ThreadId, u32>,
    /// Addresses that `allocate` returned; each is a mapping of its own.
    allocated: BTreeSet<u64>,
    /// Host memory that `allocate_host` returned, by its start.
    host_buffers: BTreeMap<usize, Box<[u128]>>,
    streams: BTreeSet<RawStream>,
    events: BTreeSet<RawEvent>,
    violations: Vec<String>,
}

#[derive(Debug)]
struct FakeMemory(File);

#[derive(Debug)]
struct FakeMapping {
    memory: FakeMemory,
    /// What each device may do, by its ordinal.
    access: BTreeMap<u32, DeviceAccess>,
}

/// The calls number `first` to `last` of one function, counted from 0, fail with `code`.
#[derive(Debug)]
struct InjectedError {
    call: DriverCall,
    first: usize,
    last: usize,
    code: ErrorCode,
}

impl FakeMemory {
    fn bytes(&self) -> u64 {
        self.0.metadata().map_or(0, |metadata| metadata.len())
    }

    fn inode(&self) -> u64 {
        self.0.metadata().map_or(0, |metadata| metadata.ino())
    }

    fn again(&self) -> Self {
        Self(self.0.try_clone().unwrap())
    }
}

impl FakeDriver {
    pub fn new(capacity: u64) -> Self {
        let device = |ordinal: u32| DeviceInfo {
            ordinal,
            uuid: DeviceUuid([ordinal as u8 + 1; 16]),
            name: format!("FakeDriver {ordinal}"),
            compute_capability: 90,
            total_bytes: capacity,
            multiprocessors: 132,
            max_shared_bytes_per_block: 227 << 10,
            vmm: true,
            posix_fd: true,
            integrated: false,
            host_page_tables: false,
            registered_pointers: true,
            numa_node: None,
            mps: false,
        };
        Self(Mutex::new(FakeState {
            devices: vec![device(0), device(1)],
            granularity: GRANULE,
            capacity,
            peer_access: true,
            injected: Vec::new(),
            calls: Vec::new(),
            next: 1,
            handles: BTreeMap::new(),
            reserved: BTreeMap::new(),
            mapped: BTreeMap::new(),
            pinned: BTreeMap::new(),
            contexts: 0,
            current: HashMap::new(),
            allocated: BTreeSet::new(),
            host_buffers: BTreeMap::new(),
            streams: BTreeSet::new(),
            events: BTreeSet::new(),
            violations: Vec::new(),
        }))
    }

    fn lock(&self) -> MutexGuard<'_, FakeState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn change_device(&self, ordinal: usize, change: impl FnOnce(&mut DeviceInfo)) {
        change(&mut self.lock().devices[ordinal]);
    }

    /// Makes a device one of a DGX Spark: it has no memory of its own and reads the host's pages.
    pub fn unify_memory(&self, ordinal: usize) {
        self.change_device(ordinal, |info| (info.integrated, info.host_page_tables) = (true, true));
    }

    pub fn set_granularity(&self, granularity: u64) {
        self.lock().granularity = granularity;
    }

    /// Whether the devices can map each other's memory.
    pub fn set_peer_access(&self, peer_access: bool) {
        self.lock().peer_access = peer_access;
    }

    /// Lets `times` calls of this function fail, after `after` further ones have succeeded.
    pub fn fail(&self, call: DriverCall, after: usize, times: usize, code: ErrorCode) {
        let mut state = self.lock();
        let first = state.calls.iter().filter(|made| **made == call).count() + after;
        state.injected.push(InjectedError { call, first, last: first + times - 1, code });
    }

    /// How many calls of this function were made so far, failed ones included.
    pub fn count(&self, call: DriverCall) -> usize {
        self.lock().calls.iter().filter(|made| **made == call).count()
    }

    pub fn used(&self) -> u64 {
        self.lock().used()
    }

    /// Bytes of registered host memory.
    pub fn pinned(&self) -> usize {
        self.lock().pinned.values().sum()
    }

    pub fn handles(&self) -> usize {
        self.lock().handles.len()
    }

    pub fn violations(&self) -> Vec<String> {
        self.lock().violations.clone()
    }

    /// Asserts that nothing is left and that the contract was never violated.
    pub fn assert_clean(&self) {
        let state = self.lock();
        assert!(state.violations.is_empty(), "{:?}", state.violations);
        assert!(state.handles.is_empty(), "handles are left: {:?}", state.handles.keys());
        assert!(state.mapped.is_empty(), "mappings are left: {:?}", state.mapped.keys());
        assert!(state.reserved.is_empty(), "addresses are left: {:?}", state.reserved);
        assert!(state.pinned.is_empty(), "host memory is left pinned: {:?}", state.pinned);
        assert!(state.allocated.is_empty(), "buffers are left: {:?}", state.allocated);
        assert!(state.host_buffers.is_empty(), "{} host buffers are left", state.host_buffers.len());
        assert!(state.streams.is_empty() && state.events.is_empty(), "streams or events are left");
        assert_eq!(state.contexts, 0, "contexts are left");
    }
}

impl FakeState {
    fn enter(&mut self, call: DriverCall) -> Result<(), DriverError> {
        let number = self.calls.iter().filter(|made| **made == call).count();
        self.calls.push(call);
        let hit = |error: &&InjectedError| error.call == call && (error.first..=error.last).contains(&number);
        self.injected.iter().find(hit).map_or(Ok(()), |error| Err(DriverError { call, code: error.code }))
    }

    fn violation(&mut self, call: DriverCall, what: &str) -> DriverError {
        self.violations.push(format!("{call}: {what}"));
        DriverError { call, code: ErrorCode::INVALID_VALUE }
    }

    fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Bytes of all allocations; each counts once, however many handles and mappings it has. File
    /// descriptors do not count: the fake cannot see who holds one.
    fn used(&self) -> u64 {
        let memories = self.handles.values().chain(self.mapped.values().map(|mapping| &mapping.memory));
        let sizes: BTreeSet<(u64, u64)> = memories.map(|memory| (memory.inode(), memory.bytes())).collect();
        sizes.iter().map(|(_, bytes)| bytes).sum()
    }

    fn device(&self, call: DriverCall, ordinal: u32) -> Result<&DeviceInfo, DriverError> {
        self.devices.get(ordinal as usize).ok_or(DriverError { call, code: ErrorCode::INVALID_DEVICE })
    }

    /// Whether the range lies inside of one reservation.
    fn is_reserved(&self, address: u64, bytes: u64) -> bool {
        let before = self.reserved.range(..=address).next_back();
        before.is_some_and(|(start, size)| address + bytes <= start + size)
    }

    fn overlaps(&self, address: u64, bytes: u64) -> bool {
        let before = self.mapped.range(..address + bytes).next_back();
        before.is_some_and(|(start, mapping)| start + mapping.memory.bytes() > address)
    }

    /// Calls `action` for each mapping that a range of device memory touches, as a copy engine
    /// would.
    fn for_each_mapping(
        &self,
        call: DriverCall,
        (mut address, bytes): (u64, usize),
        needed: DeviceAccess,
        mut action: impl FnMut(&File, u64, std::ops::Range<usize>),
    ) -> Result<(), DriverError> {
        let Some(ordinal) = self.current.get(&std::thread::current().id()) else {
            return Err(DriverError { call, code: ErrorCode::INVALID_CONTEXT });
        };
        let mut done = 0;
        while done < bytes {
            let illegal = DriverError { call, code: ErrorCode::ILLEGAL_ADDRESS };
            let (start, mapping) = self.mapped.range(..=address).next_back().ok_or(illegal)?;
            let left = (start + mapping.memory.bytes()).saturating_sub(address) as usize;
            let access = mapping.access.get(ordinal).copied();
            let allowed = match needed {
                DeviceAccess::Read => access.is_some(),
                DeviceAccess::ReadWrite => access == Some(DeviceAccess::ReadWrite),
            };
            if left == 0 || !allowed {
                return Err(illegal);
            }
            let length = left.min(bytes - done);
            action(&mapping.memory.0, address - start, done..done + length);
            done += length;
            address += length as u64;
        }
        Ok(())
    }
}

impl DriverApi for FakeDriver {
    fn version(&self) -> Result<u32, DriverError> {
        self.lock().enter(DriverCall::DriverGetVersion).map(|()| 13_000)
    }

    fn device_count(&self) -> Result<u32, DriverError> {
        let mut state = self.lock();
        state.enter(DriverCall::DeviceGetCount)?;
        Ok(state.devices.len() as u32)
    }

    fn device_info(&self, ordinal: u32) -> Result<DeviceInfo, DriverError> {
        let mut state = self.lock();
        state.enter(DriverCall::DeviceGet)?;
        state.device(DriverCall::DeviceGet, ordinal).cloned()
    }

    fn can_access_peer(&self, ordinal: u32, peer: u32) -> Result<bool, DriverError> {
        let call = DriverCall::DeviceCanAccessPeer;
        let mut state = self.lock();
        state.enter(call)?;
        state.device(call, ordinal)?;
        state.device(call, peer)?;
        Ok(state.peer_access && ordinal != peer)
    }

    fn granularity(&self, ordinal: u32) -> Result<u64, DriverError> {
        let mut state = self.lock();
        state.enter(DriverCall::MemGetAllocationGranularity)?;
        state.device(DriverCall::MemGetAllocationGranularity, ordinal)?;
        Ok(state.granularity)
    }

    fn memory_info(&self, ordinal: u32) -> Result<MemoryInfo, DriverError> {
        let mut state = self.lock();
        state.enter(DriverCall::MemGetInfo)?;
        if state.current.get(&std::thread::current().id()) != Some(&ordinal) {
            return Err(DriverError { call: DriverCall::MemGetInfo, code: ErrorCode::INVALID_CONTEXT });
        }
        let used = state.used();
        Ok(MemoryInfo { free_bytes: state.capacity - used, total_bytes: state.capacity })
    }

    fn create(&self, ordinal: u32, bytes: u64) -> Result<AllocationHandle, DriverError> {
        let mut state = self.lock();
        state.enter(DriverCall::MemCreate)?;
        state.device(DriverCall::MemCreate, ordinal)?;
        if bytes == 0 || !bytes.is_multiple_of(state.granularity) {
            return Err(state.violation(DriverCall::MemCreate, "size is not whole granules"));
        }
        if state.capacity - state.used() < bytes {
            return Err(DriverError { call: DriverCall::MemCreate, code: ErrorCode::OUT_OF_MEMORY });
        }
        let file = File::from(memfd_create("fake-device", MFdFlags::MFD_CLOEXEC).unwrap());
        file.set_len(bytes).unwrap();
        let handle = state.fresh();
        state.handles.insert(handle, FakeMemory(file));
        Ok(AllocationHandle(handle))
    }

    fn export(&self, handle: AllocationHandle) -> Result<OwnedFd, DriverError> {
        let mut state = self.lock();
        state.enter(DriverCall::MemExportToShareableHandle)?;
        match state.handles.get(&handle.0) {
            Some(memory) => Ok(memory.again().0.into()),
            None => Err(state.violation(DriverCall::MemExportToShareableHandle, "no such handle")),
        }
    }

    fn import(&self, fd: BorrowedFd<'_>) -> Result<AllocationHandle, DriverError> {
        let mut state = self.lock();
        state.enter(DriverCall::MemImportFromShareableHandle)?;
        let memory = FakeMemory(fd.try_clone_to_owned().unwrap().into());
        if memory.bytes() == 0 || !memory.bytes().is_multiple_of(state.granularity) {
            // The answer of the real driver to a descriptor that it did not export.
            return Err(DriverError {
                call: DriverCall::MemImportFromShareableHandle,
                code: ErrorCode::UNKNOWN,
            });
        }
        let handle = state.fresh();
        state.handles.insert(handle, memory);
        Ok(AllocationHandle(handle))
    }

    unsafe fn release(&self, handle: AllocationHandle) -> Result<(), DriverError> {
        let mut state = self.lock();
        state.enter(DriverCall::MemRelease)?;
        match state.handles.remove(&handle.0) {
            Some(_) => Ok(()),
            None => Err(state.violation(DriverCall::MemRelease, "no such handle")),
        }
    }

    fn reserve(&self, bytes: u64) -> Result<u64, DriverError> {
        let mut state = self.lock();
        state.enter(DriverCall::MemAddressReserve)?;
        if bytes == 0 || !bytes.is_multiple_of(state.granularity) {
            return Err(state.violation(DriverCall::MemAddressReserve, "size is not whole granules"));
        }
        let address = FIRST_ADDRESS + state.fresh() * GAP;
        state.reserved.insert(address, bytes);
        Ok(address)
    }

    unsafe fn free_addresses(&self, address: u64, bytes: u64) -> Result<(), DriverError> {
        let mut state = self.lock();
        state.enter(DriverCall::MemAddressFree)?;
        if state.reserved.get(&address) != Some(&bytes) {
            return Err(state.violation(DriverCall::MemAddressFree, "not reserved like this"));
        }
        if state.overlaps(address, bytes) {
            return Err(state.violation(DriverCall::MemAddressFree, "something is mapped there"));
        }
        state.reserved.remove(&address);
        Ok(())
    }

    unsafe fn map(&self, address: u64, bytes: u64, handle: AllocationHandle) -> Result<(), DriverError> {
        let mut state = self.lock();
        state.enter(DriverCall::MemMap)?;
        if !state.is_reserved(address, bytes) || state.overlaps(address, bytes) {
            return Err(state.violation(DriverCall::MemMap, "the addresses are not reserved and free"));
        }
        let Some(memory) = state.handles.get(&handle.0).map(FakeMemory::again) else {
            return Err(state.violation(DriverCall::MemMap, "no such handle"));
        };
        if memory.bytes() != bytes {
            // No violation of the contract: the size comes from a manifest, which may be wrong.
            return Err(DriverError { call: DriverCall::MemMap, code: ErrorCode::INVALID_VALUE });
        }
        state.mapped.insert(address, FakeMapping { memory, access: BTreeMap::new() });
        Ok(())
    }

    unsafe fn set_access(
        &self,
        ordinal: u32,
        address: u64,
        bytes: u64,
        access: DeviceAccess,
    ) -> Result<(), DriverError> {
        let mut state = self.lock();
        state.enter(DriverCall::MemSetAccess)?;
        state.device(DriverCall::MemSetAccess, ordinal)?;
        let mut end = address;
        let mut whole = HashSet::new();
        for (&start, mapping) in state.mapped.range(address..address + bytes) {
            if start == end {
                end += mapping.memory.bytes();
                whole.insert(start);
            }
        }
        if end != address + bytes {
            return Err(state.violation(DriverCall::MemSetAccess, "the range is not mapped whole"));
        }
        for (start, mapping) in &mut state.mapped {
            if whole.contains(start) {
                mapping.access.insert(ordinal, access);
            }
        }
        Ok(())
    }

    unsafe fn unmap(&self, address: u64, bytes: u64) -> Result<(), DriverError> {
        let mut state = self.lock();
        state.enter(DriverCall::MemUnmap)?;
        if state.mapped.get(&address).map(|mapping| mapping.memory.bytes()) != Some(bytes) {
            return Err(state.violation(DriverCall::MemUnmap, "not mapped like this"));
        }
        state.mapped.remove(&address);
        Ok(())
    }

    fn retain_context(&self, ordinal: u32) -> Result<RawContext, DriverError> {
        let mut state = self.lock();
        state.enter(DriverCall::DevicePrimaryCtxRetain)?;
        state.device(DriverCall::DevicePrimaryCtxRetain, ordinal)?;
        state.contexts += 1;
        Ok(RawContext(ordinal as usize + 1))
    }

    unsafe fn set_current(&self, context: RawContext) -> Result<(), DriverError> {
        let mut state = self.lock();
        state.enter(DriverCall::CtxSetCurrent)?;
        state.current.insert(std::thread::current().id(), context.0 as u32 - 1);
        Ok(())
    }

    unsafe fn release_context(&self, ordinal: u32) -> Result<(), DriverError> {
        let mut state = self.lock();
        state.enter(DriverCall::DevicePrimaryCtxRelease)?;
        state.device(DriverCall::DevicePrimaryCtxRelease, ordinal)?;
        if state.contexts == 0 {
            return Err(state.violation(DriverCall::DevicePrimaryCtxRelease, "not retained"));
        }
        state.contexts -= 1;
        if state.contexts == 0 {
            if !state.pinned.is_empty() || !state.host_buffers.is_empty() {
                return Err(
                    state.violation(DriverCall::DevicePrimaryCtxRelease, "host memory is pinned in it")
                );
            }
            if !(state.allocated.is_empty() && state.streams.is_empty() && state.events.is_empty()) {
                return Err(state.violation(DriverCall::DevicePrimaryCtxRelease, "something lives in it"));
            }
            state.current.clear();
        }
        Ok(())
    }

    unsafe fn register_host(&self, start: *mut u8, bytes: usize) -> Result<(), DriverError> {
        let mut state = self.lock();
        state.enter(DriverCall::MemHostRegister)?;
        if !state.current.contains_key(&std::thread::current().id()) {
            return Err(DriverError { call: DriverCall::MemHostRegister, code: ErrorCode::INVALID_CONTEXT });
        }
        let before = state.pinned.range(..start.addr() + bytes).next_back();
        if bytes == 0 || before.is_some_and(|(first, length)| first + length > start.addr()) {
            return Err(state.violation(DriverCall::MemHostRegister, "empty, or registered already"));
        }
        state.pinned.insert(start.addr(), bytes);
        Ok(())
    }

    unsafe fn unregister_host(&self, start: *mut u8) -> Result<(), DriverError> {
        let mut state = self.lock();
        state.enter(DriverCall::MemHostUnregister)?;
        match state.pinned.remove(&start.addr()) {
            Some(_) => Ok(()),
            None => Err(state.violation(DriverCall::MemHostUnregister, "not registered from there on")),
        }
    }

    unsafe fn copy_to_device(&self, address: u64, bytes: &[u8]) -> Result<(), DriverError> {
        let mut state = self.lock();
        state.enter(DriverCall::MemcpyHtoD)?;
        state.for_each_mapping(
            DriverCall::MemcpyHtoD,
            (address, bytes.len()),
            DeviceAccess::ReadWrite,
            |file, offset, part| {
                file.write_all_at(&bytes[part], offset).unwrap();
            },
        )
    }

    unsafe fn copy_to_host(&self, bytes: &mut [u8], address: u64) -> Result<(), DriverError> {
        let mut state = self.lock();
        state.enter(DriverCall::MemcpyDtoH)?;
        let range = (address, bytes.len());
        state.for_each_mapping(DriverCall::MemcpyDtoH, range, DeviceAccess::Read, |file, offset, part| {
            file.read_exact_at(&mut bytes[part], offset).unwrap();
        })
    }
}
