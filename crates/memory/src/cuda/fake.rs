//! A driver of memfds: two devices, as much memory as a test says, refusals at chosen calls.
//!
//! It keeps the real one's rules, and notes every breach of the contract of `Driver`: a handle released twice, addresses freed
//! under a mapping, access set over a gap. A descriptor is a memfd, so hand-offs between fakes carry real bytes.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs::File;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

use super::DeviceUuid;
use super::driver::{Access, Call, Code, DeviceFacts, Driver, Handle, MemoryInfo, RawContext, Refusal};

pub(crate) const GRANULE: u64 = 2 << 20;

/// Device addresses start here; nothing of the host's lies there.
const FIRST_ADDRESS: u64 = 0x7_0000_0000_0000;

/// Between reservations, so that an address beyond one is nobody's.
const GAP: u64 = 1 << 40;

#[derive(Debug)]
pub(crate) struct Fake(Mutex<State>);

#[derive(Debug)]
struct State {
    devices: Vec<DeviceFacts>,
    granularity: u64,
    capacity: u64,
    faults: Vec<Fault>,
    calls: Vec<Call>,
    next: u64,
    handles: BTreeMap<u64, Memory>,
    reserved: BTreeMap<u64, u64>,
    mapped: BTreeMap<u64, Mapping>,
    /// Host memory, by its start.
    pinned: BTreeMap<usize, usize>,
    contexts: u32,
    current: HashMap<ThreadId, u32>,
    breaches: Vec<String>,
}

#[derive(Debug)]
struct Memory(File);

#[derive(Debug)]
struct Mapping {
    memory: Memory,
    access: Option<Access>,
}

/// Calls number `first` to `last` of a kind, counted from 0, are refused.
#[derive(Debug)]
struct Fault {
    call: Call,
    first: usize,
    last: usize,
    code: Code,
}

impl Memory {
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

impl Fake {
    pub(crate) fn new(capacity: u64) -> Self {
        let device = |ordinal: u32| DeviceFacts {
            ordinal,
            uuid: DeviceUuid([ordinal as u8 + 1; 16]),
            name: format!("Fake {ordinal}"),
            compute_capability: 90,
            total_bytes: capacity,
            vmm: true,
            posix_fd: true,
            integrated: false,
        };
        Self(Mutex::new(State {
            devices: vec![device(0), device(1)],
            granularity: GRANULE,
            capacity,
            faults: Vec::new(),
            calls: Vec::new(),
            next: 1,
            handles: BTreeMap::new(),
            reserved: BTreeMap::new(),
            mapped: BTreeMap::new(),
            pinned: BTreeMap::new(),
            contexts: 0,
            current: HashMap::new(),
            breaches: Vec::new(),
        }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn change_device(&self, ordinal: usize, change: impl FnOnce(&mut DeviceFacts)) {
        change(&mut self.lock().devices[ordinal]);
    }

    pub(crate) fn set_granularity(&self, granularity: u64) {
        self.lock().granularity = granularity;
    }

    /// Refuses `times` calls of this kind, after `after` more of them.
    pub(crate) fn refuse(&self, call: Call, after: usize, times: usize, code: Code) {
        let mut state = self.lock();
        let first = state.calls.iter().filter(|made| **made == call).count() + after;
        state.faults.push(Fault { call, first, last: first + times - 1, code });
    }

    /// How many calls of this kind came so far, refused ones too.
    pub(crate) fn count(&self, call: Call) -> usize {
        self.lock().calls.iter().filter(|made| **made == call).count()
    }

    pub(crate) fn used(&self) -> u64 {
        self.lock().used()
    }

    /// Bytes of host memory.
    pub(crate) fn pinned(&self) -> usize {
        self.lock().pinned.values().sum()
    }

    pub(crate) fn handles(&self) -> usize {
        self.lock().handles.len()
    }

    pub(crate) fn breaches(&self) -> Vec<String> {
        self.lock().breaches.clone()
    }

    /// Nothing is held and the contract was kept.
    pub(crate) fn assert_clean(&self) {
        let state = self.lock();
        assert!(state.breaches.is_empty(), "{:?}", state.breaches);
        assert!(state.handles.is_empty(), "handles are left: {:?}", state.handles.keys());
        assert!(state.mapped.is_empty(), "mappings are left: {:?}", state.mapped.keys());
        assert!(state.reserved.is_empty(), "addresses are left: {:?}", state.reserved);
        assert!(state.pinned.is_empty(), "host memory is left pinned: {:?}", state.pinned);
        assert_eq!(state.contexts, 0, "contexts are left");
    }
}

impl State {
    fn enter(&mut self, call: Call) -> Result<(), Refusal> {
        let number = self.calls.iter().filter(|made| **made == call).count();
        self.calls.push(call);
        let hit = |fault: &&Fault| fault.call == call && (fault.first..=fault.last).contains(&number);
        self.faults.iter().find(hit).map_or(Ok(()), |fault| Err(Refusal { call, code: fault.code }))
    }

    fn breach(&mut self, call: Call, what: &str) -> Refusal {
        self.breaches.push(format!("{call}: {what}"));
        Refusal { call, code: Code::INVALID_VALUE }
    }

    fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// One allocation counts once, however many handles and mappings it has. Descriptors are not counted here: whoever
    /// holds one is out of sight.
    fn used(&self) -> u64 {
        let memories = self.handles.values().chain(self.mapped.values().map(|mapping| &mapping.memory));
        let sizes: BTreeSet<(u64, u64)> = memories.map(|memory| (memory.inode(), memory.bytes())).collect();
        sizes.iter().map(|(_, bytes)| bytes).sum()
    }

    fn device(&self, call: Call, ordinal: u32) -> Result<&DeviceFacts, Refusal> {
        self.devices.get(ordinal as usize).ok_or(Refusal { call, code: Code::INVALID_DEVICE })
    }

    /// The reservation that the range lies in.
    fn is_reserved(&self, address: u64, bytes: u64) -> bool {
        let before = self.reserved.range(..=address).next_back();
        before.is_some_and(|(start, size)| address + bytes <= start + size)
    }

    fn overlaps(&self, address: u64, bytes: u64) -> bool {
        let before = self.mapped.range(..address + bytes).next_back();
        before.is_some_and(|(start, mapping)| start + mapping.memory.bytes() > address)
    }

    /// Does something with each piece of a range of device memory, as a copy engine would.
    fn each_piece(
        &self,
        call: Call,
        (mut address, bytes): (u64, usize),
        needed: Access,
        mut action: impl FnMut(&File, u64, std::ops::Range<usize>),
    ) -> Result<(), Refusal> {
        if !self.current.contains_key(&std::thread::current().id()) {
            return Err(Refusal { call, code: Code::INVALID_CONTEXT });
        }
        let mut done = 0;
        while done < bytes {
            let illegal = Refusal { call, code: Code::ILLEGAL_ADDRESS };
            let (start, mapping) = self.mapped.range(..=address).next_back().ok_or(illegal)?;
            let left = (start + mapping.memory.bytes()).saturating_sub(address) as usize;
            let allowed = match needed {
                Access::Read => mapping.access.is_some(),
                Access::ReadWrite => mapping.access == Some(Access::ReadWrite),
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

impl Driver for Fake {
    fn version(&self) -> Result<u32, Refusal> {
        self.lock().enter(Call::DriverGetVersion).map(|()| 13_000)
    }

    fn device_count(&self) -> Result<u32, Refusal> {
        let mut state = self.lock();
        state.enter(Call::DeviceGetCount)?;
        Ok(state.devices.len() as u32)
    }

    fn device_facts(&self, ordinal: u32) -> Result<DeviceFacts, Refusal> {
        let mut state = self.lock();
        state.enter(Call::DeviceGet)?;
        state.device(Call::DeviceGet, ordinal).cloned()
    }

    fn granularity(&self, ordinal: u32) -> Result<u64, Refusal> {
        let mut state = self.lock();
        state.enter(Call::MemGetAllocationGranularity)?;
        state.device(Call::MemGetAllocationGranularity, ordinal)?;
        Ok(state.granularity)
    }

    fn memory_info(&self, ordinal: u32) -> Result<MemoryInfo, Refusal> {
        let mut state = self.lock();
        state.enter(Call::MemGetInfo)?;
        if state.current.get(&std::thread::current().id()) != Some(&ordinal) {
            return Err(Refusal { call: Call::MemGetInfo, code: Code::INVALID_CONTEXT });
        }
        let used = state.used();
        Ok(MemoryInfo { free_bytes: state.capacity - used, total_bytes: state.capacity })
    }

    fn create(&self, ordinal: u32, bytes: u64) -> Result<Handle, Refusal> {
        let mut state = self.lock();
        state.enter(Call::MemCreate)?;
        state.device(Call::MemCreate, ordinal)?;
        if bytes == 0 || !bytes.is_multiple_of(state.granularity) {
            return Err(state.breach(Call::MemCreate, "size is not whole granules"));
        }
        if state.capacity - state.used() < bytes {
            return Err(Refusal { call: Call::MemCreate, code: Code::OUT_OF_MEMORY });
        }
        let file = File::from(crate::memfd::create("fake-device").unwrap());
        file.set_len(bytes).unwrap();
        let handle = state.fresh();
        state.handles.insert(handle, Memory(file));
        Ok(Handle(handle))
    }

    fn export(&self, handle: Handle) -> Result<OwnedFd, Refusal> {
        let mut state = self.lock();
        state.enter(Call::MemExportToShareableHandle)?;
        match state.handles.get(&handle.0) {
            Some(memory) => Ok(memory.again().0.into()),
            None => Err(state.breach(Call::MemExportToShareableHandle, "no such handle")),
        }
    }

    fn import(&self, fd: BorrowedFd<'_>) -> Result<Handle, Refusal> {
        let mut state = self.lock();
        state.enter(Call::MemImportFromShareableHandle)?;
        let memory = Memory(fd.try_clone_to_owned().unwrap().into());
        if memory.bytes() == 0 || !memory.bytes().is_multiple_of(state.granularity) {
            // What the real one says to a descriptor that it did not make.
            return Err(Refusal { call: Call::MemImportFromShareableHandle, code: Code::UNKNOWN });
        }
        let handle = state.fresh();
        state.handles.insert(handle, memory);
        Ok(Handle(handle))
    }

    unsafe fn release(&self, handle: Handle) -> Result<(), Refusal> {
        let mut state = self.lock();
        state.enter(Call::MemRelease)?;
        match state.handles.remove(&handle.0) {
            Some(_) => Ok(()),
            None => Err(state.breach(Call::MemRelease, "no such handle")),
        }
    }

    fn reserve(&self, bytes: u64) -> Result<u64, Refusal> {
        let mut state = self.lock();
        state.enter(Call::MemAddressReserve)?;
        if bytes == 0 || !bytes.is_multiple_of(state.granularity) {
            return Err(state.breach(Call::MemAddressReserve, "size is not whole granules"));
        }
        let address = FIRST_ADDRESS + state.fresh() * GAP;
        state.reserved.insert(address, bytes);
        Ok(address)
    }

    unsafe fn free(&self, address: u64, bytes: u64) -> Result<(), Refusal> {
        let mut state = self.lock();
        state.enter(Call::MemAddressFree)?;
        if state.reserved.get(&address) != Some(&bytes) {
            return Err(state.breach(Call::MemAddressFree, "not reserved like this"));
        }
        if state.overlaps(address, bytes) {
            return Err(state.breach(Call::MemAddressFree, "something is mapped there"));
        }
        state.reserved.remove(&address);
        Ok(())
    }

    unsafe fn map(&self, address: u64, bytes: u64, handle: Handle) -> Result<(), Refusal> {
        let mut state = self.lock();
        state.enter(Call::MemMap)?;
        if !state.is_reserved(address, bytes) || state.overlaps(address, bytes) {
            return Err(state.breach(Call::MemMap, "the addresses are not reserved and free"));
        }
        let Some(memory) = state.handles.get(&handle.0).map(Memory::again) else {
            return Err(state.breach(Call::MemMap, "no such handle"));
        };
        if memory.bytes() != bytes {
            // Not the caller's breach: a manifest may say anything.
            return Err(Refusal { call: Call::MemMap, code: Code::INVALID_VALUE });
        }
        state.mapped.insert(address, Mapping { memory, access: None });
        Ok(())
    }

    unsafe fn set_access(
        &self,
        ordinal: u32,
        address: u64,
        bytes: u64,
        access: Access,
    ) -> Result<(), Refusal> {
        let mut state = self.lock();
        state.enter(Call::MemSetAccess)?;
        state.device(Call::MemSetAccess, ordinal)?;
        let mut end = address;
        let mut whole = HashSet::new();
        for (&start, mapping) in state.mapped.range(address..address + bytes) {
            if start == end {
                end += mapping.memory.bytes();
                whole.insert(start);
            }
        }
        if end != address + bytes {
            return Err(state.breach(Call::MemSetAccess, "the range is not mapped whole"));
        }
        for (start, mapping) in &mut state.mapped {
            if whole.contains(start) {
                mapping.access = Some(access);
            }
        }
        Ok(())
    }

    unsafe fn unmap(&self, address: u64, bytes: u64) -> Result<(), Refusal> {
        let mut state = self.lock();
        state.enter(Call::MemUnmap)?;
        if state.mapped.get(&address).map(|mapping| mapping.memory.bytes()) != Some(bytes) {
            return Err(state.breach(Call::MemUnmap, "not mapped like this"));
        }
        state.mapped.remove(&address);
        Ok(())
    }

    fn retain_context(&self, ordinal: u32) -> Result<RawContext, Refusal> {
        let mut state = self.lock();
        state.enter(Call::DevicePrimaryCtxRetain)?;
        state.device(Call::DevicePrimaryCtxRetain, ordinal)?;
        state.contexts += 1;
        Ok(RawContext(ordinal as usize + 1))
    }

    unsafe fn set_current(&self, context: RawContext) -> Result<(), Refusal> {
        let mut state = self.lock();
        state.enter(Call::CtxSetCurrent)?;
        state.current.insert(std::thread::current().id(), context.0 as u32 - 1);
        Ok(())
    }

    unsafe fn release_context(&self, ordinal: u32) -> Result<(), Refusal> {
        let mut state = self.lock();
        state.enter(Call::DevicePrimaryCtxRelease)?;
        state.device(Call::DevicePrimaryCtxRelease, ordinal)?;
        if state.contexts == 0 {
            return Err(state.breach(Call::DevicePrimaryCtxRelease, "not retained"));
        }
        state.contexts -= 1;
        if state.contexts == 0 {
            if !state.pinned.is_empty() {
                return Err(state.breach(Call::DevicePrimaryCtxRelease, "host memory is pinned in it"));
            }
            state.current.clear();
        }
        Ok(())
    }

    unsafe fn register_host(&self, start: *mut u8, bytes: usize) -> Result<(), Refusal> {
        let mut state = self.lock();
        state.enter(Call::MemHostRegister)?;
        if !state.current.contains_key(&std::thread::current().id()) {
            return Err(Refusal { call: Call::MemHostRegister, code: Code::INVALID_CONTEXT });
        }
        let before = state.pinned.range(..start.addr() + bytes).next_back();
        if bytes == 0 || before.is_some_and(|(first, length)| first + length > start.addr()) {
            return Err(state.breach(Call::MemHostRegister, "empty, or registered already"));
        }
        state.pinned.insert(start.addr(), bytes);
        Ok(())
    }

    unsafe fn unregister_host(&self, start: *mut u8) -> Result<(), Refusal> {
        let mut state = self.lock();
        state.enter(Call::MemHostUnregister)?;
        match state.pinned.remove(&start.addr()) {
            Some(_) => Ok(()),
            None => Err(state.breach(Call::MemHostUnregister, "not registered from there on")),
        }
    }

    unsafe fn copy_to_device(&self, address: u64, bytes: &[u8]) -> Result<(), Refusal> {
        let mut state = self.lock();
        state.enter(Call::MemcpyHtoD)?;
        state.each_piece(Call::MemcpyHtoD, (address, bytes.len()), Access::ReadWrite, |file, offset, part| {
            file.write_all_at(&bytes[part], offset).unwrap();
        })
    }

    unsafe fn copy_from_device(&self, bytes: &mut [u8], address: u64) -> Result<(), Refusal> {
        let mut state = self.lock();
        state.enter(Call::MemcpyDtoH)?;
        let range = (address, bytes.len());
        state.each_piece(Call::MemcpyDtoH, range, Access::Read, |file, offset, part| {
            file.read_exact_at(&mut bytes[part], offset).unwrap();
        })
    }
}
