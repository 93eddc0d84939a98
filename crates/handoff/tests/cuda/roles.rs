// SPDX-License-Identifier: Apache-2.0

//! The roles of the child processes. Each child talks to its parent over the socket that is its
//! standard input.

use std::ffi::CStr;
use std::os::fd::{AsFd, OwnedFd};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use bytes::Bytes;
use cuda::nvml::Nvml;
use cuda::{
    AddressRange, Context, CudaError, Device, DeviceAccess, DeviceSelector, DeviceUuid, DriverApi,
    LaunchConfig, LazyModule, OpenDriverError, PhysicalMemory, ResizableMemory, ResizeError, Stream,
    open_driver,
};
use handoff::fd_batches::{FdCollector, fd_batches};
use handoff::manifest::{seal_manifest, split_handoff};
use handoff::seqpacket::Connection;
use memory::device::{AllocateError, ImportedModel, WritableModel};
use memory::manifest::{self, Allocation, LAYOUT_GGML, Manifest, TensorEntry};
use proto::weights::v1::{BatchReceived, FdBatch};

pub(crate) const ROLE: &str = "BALLAST_TEST_CUDA_ROLE";
pub(crate) const NO_DRIVER: u8 = 77;
pub(crate) const MIB: u64 = 1 << 20;

/// Longest wait of parent or child.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Imports by one child; the first one is cold.
const REPETITIONS: usize = 7;

const CYCLES: usize = 100;

/// Bytes that are written and compared, at the start and at the end of each allocation.
pub(crate) const SAMPLE_BYTES: usize = 4096;

pub(crate) fn run(role: &str) -> ExitCode {
    if let Some(uuid) = role.strip_prefix("used ") {
        let memory = Nvml::open().unwrap().memory(DeviceUuid::parse(uuid).unwrap()).unwrap().unwrap();
        println!("{}", memory.total_bytes - memory.free_bytes);
        return ExitCode::SUCCESS;
    }
    let started = Instant::now();
    let driver = match open_driver() {
        Err(OpenDriverError::NoDriver | OpenDriverError::NoDevice) => return ExitCode::from(NO_DRIVER),
        driver => driver.unwrap(),
    };
    let driver_ms = started.elapsed().as_secs_f64() * 1e3;
    let device = Device::open(driver.clone(), DeviceSelector::Ordinal(0)).unwrap();
    let socket = Connection::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    socket.set_timeouts(Some(PATIENCE), Some(PATIENCE)).unwrap();
    let words: Vec<&str> = role.split(' ').collect();
    match words[..] {
        ["facts"] => facts(&device, driver.version().unwrap(), driver_ms),
        ["load", count, mib] => {
            load(&device, &socket, count.parse().unwrap(), mib.parse::<u64>().unwrap() * MIB)
        }
        ["import"] => import(&device, &socket),
        ["context"] => context(&device, &socket),
        ["stray-write"] => stray_write(&device, &socket),
        ["grow"] => grow(&device),
        ["too-little"] => too_little(&device),
        ["cycles"] => cycles(&device),
        ["copies"] => crate::copies::run(&device),
        _ => panic!("{role}"),
    }
    ExitCode::SUCCESS
}

fn facts(device: &Device, version: u32, driver_ms: f64) {
    let facts = device.info();
    let started = Instant::now();
    let _context = device.context().unwrap();
    let context_ms = started.elapsed().as_secs_f64() * 1e3;
    println!("uuid {}", facts.uuid);
    println!(
        "{}, compute capability {}, {} MiB, CUDA {}.{}, granularity {} bytes; driver {driver_ms:.0} ms, context {context_ms:.0} ms",
        facts.name,
        facts.compute_capability,
        facts.total_bytes / MIB,
        version / 1000,
        version % 1000 / 10,
        device.granularity(),
    );
}

fn pattern(allocation: usize, end: bool) -> Vec<u8> {
    let salt = allocation as u32 * 31 + u32::from(end) * 17 + 1;
    (0..SAMPLE_BYTES as u32).map(|at| (at.wrapping_mul(salt) >> 3) as u8).collect()
}

/// Both samples of each allocation, as tensors of it.
pub(crate) fn manifest(device: &Device, sizes: &[u64]) -> Manifest {
    let tensor = |allocation: usize, offset: u64| TensorEntry {
        name: format!("{allocation}.{offset}"),
        dtype: 24,
        layout: LAYOUT_GGML,
        shape: vec![SAMPLE_BYTES as u64],
        shard: None,
        allocation,
        offset,
        bytes: SAMPLE_BYTES as u64,
        raw_checksum: [0; 16],
        checksum: [0; 16],
    };
    let tensors = sizes
        .iter()
        .enumerate()
        .flat_map(|(index, bytes)| [tensor(index, 0), tensor(index, bytes - SAMPLE_BYTES as u64)]);
    Manifest {
        model: "m".to_owned(),
        digest: [1; 32],
        generation: 1,
        files: Vec::new(),
        devices: vec![manifest::ManifestDevice {
            kind: manifest::DeviceKind::Cuda,
            id: device.uuid().to_string(),
            compute_capability: device.info().compute_capability,
        }],
        layout: LAYOUT_GGML,
        one_per_tensor: false,
        allocations: sizes.iter().map(|&bytes| Allocation { device: 0, bytes, inode: 0 }).collect(),
        tensors: tensors.collect(),
        gguf_metadata: Bytes::new(),
        created_unix_seconds: 0,
    }
}

pub(crate) fn write_samples(model: &mut WritableModel, context: &Context, sizes: &[u64]) {
    for (allocation, bytes) in sizes.iter().enumerate() {
        model.write(context, allocation, 0, &pattern(allocation, false)).unwrap();
        let end = bytes - SAMPLE_BYTES as u64;
        model.write(context, allocation, end, &pattern(allocation, true)).unwrap();
    }
}

pub(crate) fn assert_samples(model: &ImportedModel, context: &Context) {
    for (index, tensor) in model.tensors.iter().enumerate() {
        let mut read = vec![0; SAMPLE_BYTES];
        tensor.read(context, 0, &mut read).unwrap();
        assert_eq!(read, pattern(index / 2, index % 2 == 1), "{}", tensor.name);
    }
}

/// The manifest and one descriptor for each allocation.
fn export(model: WritableModel, manifest: &Manifest) -> Vec<OwnedFd> {
    let memfd = seal_manifest(manifest).unwrap();
    let first = memfd.as_fd().try_clone_to_owned().unwrap();
    std::iter::once(first).chain(model.finish().unwrap()).collect()
}

pub(crate) fn send_fds(socket: &Connection, fds: &[OwnedFd]) {
    let count = fds.len() as u32;
    socket.send(&FdBatch { batch: 0, first: 0, count }, &[]).unwrap();
    for batch in fd_batches(count) {
        let part = &fds[batch.first as usize..][..batch.count as usize];
        let borrowed: Vec<_> = part.iter().map(AsFd::as_fd).collect();
        socket.send(&batch, &borrowed).unwrap();
        socket.receive::<BatchReceived>().unwrap();
    }
}

pub(crate) fn receive_fds(socket: &Connection) -> Vec<OwnedFd> {
    let (announced, _) = socket.receive::<FdBatch>().unwrap();
    let mut collector = FdCollector::new(announced.count).unwrap();
    while !collector.is_complete() {
        let (batch, fds) = socket.receive::<FdBatch>().unwrap();
        let receipt = collector.accept(&batch, fds).unwrap();
        socket.send(&BatchReceived { batch: receipt.batch + 1 }, &[]).unwrap();
    }
    collector.into_fds()
}

fn tell_ready(socket: &Connection) {
    socket.send(&BatchReceived { batch: 1 }, &[]).unwrap();
}

fn load(device: &Device, socket: &Connection, count: usize, bytes: u64) {
    let sizes = vec![bytes; count];
    let context = device.context().unwrap();
    let started = Instant::now();
    let mut model = WritableModel::allocate(&context, &sizes, Duration::ZERO).unwrap();
    let allocated = started.elapsed();
    write_samples(&mut model, &context, &sizes);
    let started = Instant::now();
    let fds = export(model, &manifest(device, &sizes));
    let exported = started.elapsed();
    send_fds(socket, &fds);
    println!(
        "{count} allocations of {} MiB: allocated in {:.1} ms, exported in {:.1} ms",
        bytes / MIB,
        allocated.as_secs_f64() * 1e3,
        exported.as_secs_f64() * 1e3
    );
    // Wait until the parent closes the socket or kills this process.
    let _ = socket.receive::<BatchReceived>();
}

fn import(device: &Device, socket: &Connection) {
    let fds = receive_fds(socket);
    // Import once without a context, to print whether that works.
    let copies = || fds.iter().map(|fd| fd.try_clone().unwrap()).collect();
    let (manifest, allocations) = split_handoff(copies()).unwrap();
    let early = ImportedModel::import(device, &manifest, &allocations).map(|_| "works".to_owned());
    drop(allocations);
    let early = early.unwrap_or_else(|error| format!("fails: {error:?}"));
    let context = device.context().unwrap();
    let mut times = Vec::new();
    let mut unmap_times = Vec::new();
    for _ in 0..REPETITIONS {
        let (manifest, allocations) = split_handoff(copies()).unwrap();
        let started = Instant::now();
        let model = ImportedModel::import(device, &manifest, &allocations).unwrap();
        drop(allocations);
        times.push(started.elapsed().as_micros());
        assert_samples(&model, &context);
        let started = Instant::now();
        drop(model);
        unmap_times.push(started.elapsed().as_micros());
    }
    parts_of_import(&*open_driver().unwrap(), &manifest, &fds[1..]);
    let (manifest, allocations) = split_handoff(fds).unwrap();
    let model = ImportedModel::import(device, &manifest, &allocations).unwrap();
    drop(allocations);
    assert_samples(&model, &context);
    let summary = |mut times: Vec<u128>| {
        let first = times[0];
        times.sort_unstable();
        format!("{first} {} {}", times[times.len() / 2], times[times.len() - 1])
    };
    println!("import without a context {early}");
    println!("import us {} (first, median, worst of {REPETITIONS})", summary(times));
    println!("unmap us {}", summary(unmap_times));
    tell_ready(socket);
    while socket.receive::<BatchReceived>().is_ok() {
        assert_samples(&model, &context);
        tell_ready(socket);
    }
}

/// Prints how long each driver call of an import takes, one call after the other for all
/// allocations.
fn parts_of_import(driver: &dyn DriverApi, manifest: &Manifest, fds: &[OwnedFd]) {
    let total: u64 = manifest.allocation_bytes();
    let copies: Vec<OwnedFd> = fds.iter().map(|fd| fd.try_clone().unwrap()).collect();
    let mut times = Vec::new();
    let mut started = Instant::now();
    let mut lap = |name: &'static str| {
        times.push((name, started.elapsed()));
        started = Instant::now();
    };
    let handles: Vec<_> = copies.iter().map(|fd| driver.import(fd.as_fd()).unwrap()).collect();
    lap("import");
    drop(copies);
    lap("close");
    let address = driver.reserve(total).unwrap();
    lap("reserve");
    let places = || {
        manifest.allocations.iter().scan(address, |next, allocation| {
            let at = *next;
            *next += allocation.bytes;
            Some((at, allocation.bytes))
        })
    };
    for ((at, bytes), handle) in places().zip(&handles) {
        // SAFETY: back to back inside of the range just reserved, which is torn down below in
        // order.
        unsafe { driver.map(at, bytes, *handle) }.unwrap();
    }
    lap("map");
    for handle in handles {
        // SAFETY: imported above and not used again.
        unsafe { driver.release(handle) }.unwrap();
    }
    lap("release");
    // SAFETY: the whole range is mapped.
    unsafe { driver.set_access(0, address, total, DeviceAccess::Read) }.unwrap();
    lap("access");
    for (at, bytes) in places() {
        // SAFETY: as mapped above, and nothing has used it.
        unsafe { driver.unmap(at, bytes) }.unwrap();
    }
    lap("unmap");
    // SAFETY: as reserved, and empty.
    unsafe { driver.free_addresses(address, total) }.unwrap();
    lap("free");
    let text: Vec<String> = times.iter().map(|(name, time)| format!("{name} {}", time.as_micros())).collect();
    println!("of which us: {}", text.join(", "));
}

/// Creates a context when the parent says so, and prints the bytes that the driver then counts for
/// this process.
fn context(device: &Device, socket: &Connection) {
    let nvml = Nvml::open().unwrap();
    let counted = || nvml.process_bytes(device.uuid()).unwrap();
    assert_eq!(counted(), None, "no context yet");
    tell_ready(socket);
    socket.receive::<BatchReceived>().unwrap();
    let context = device.context().unwrap();
    let counted = counted();
    tell_ready(socket);
    // Wait until the parent has queried the device.
    let _ = socket.receive::<BatchReceived>();
    drop(context);
    println!("{}", counted.map_or_else(|| "nothing".to_owned(), |bytes| bytes.to_string()));
}

/// A kernel that writes to the address that it gets.
const STRAY_PTX: &CStr = c".version 7.0
.target sm_70
.address_size 64
.visible .entry stray(.param .u64 where) {
    .reg .b64 %rd<2>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [where];
    mov.u32 %r1, 255;
    st.global.u32 [%rd1], %r1;
    ret;
}";

/// Runs the kernel on one address and waits for it.
fn write_by_kernel(device: &Device, address: u64) -> Result<(), CudaError> {
    let module = LazyModule::new(device, "stray", STRAY_PTX.to_bytes_with_nul());
    let stream = Stream::new(device)?;
    let config =
        LaunchConfig { grid: (1, 1, 1), block: 1, shared_bytes: 0, overlaps_predecessor: false, cluster: 1 };
    let mut argument = address;
    // SAFETY: the kernel takes one address. The test checks what happens when it writes there.
    unsafe { module.kernel(c"stray")?.launch(&stream, config, &mut [(&raw mut argument).cast()]) }?;
    device.synchronize()
}

/// Breaks its own context; nothing else may break.
fn stray_write(device: &Device, socket: &Connection) {
    let (manifest, allocations) = split_handoff(receive_fds(socket)).unwrap();
    let context = device.context().unwrap();
    let model = ImportedModel::import(device, &manifest, &allocations).unwrap();
    drop(allocations);
    assert_samples(&model, &context);
    let driver = open_driver().unwrap();
    let own = ResizableMemory::reserve(device, MIB, 1).map(|mut range| {
        range.grow_to(&context, 1).unwrap();
        range
    });
    write_by_kernel(device, own.unwrap().address()).unwrap();
    // SAFETY: a read-only mapping of this process; the driver must refuse the copy.
    let copied =
        unsafe { driver.copy_to_device(model.tensors[0].address(), &[0xff; SAMPLE_BYTES]) }.unwrap_err();
    assert_samples(&model, &context);
    let written = write_by_kernel(device, model.tensors[0].address()).unwrap_err();
    let mut read = vec![0; SAMPLE_BYTES];
    let after = model.tensors[0].read(&context, 0, &mut read).unwrap_err();
    println!("copy through PROT_READ: {copied}; a kernel's write: {written:?}; a read after it: {after}");
    tell_ready(socket);
}

fn grow(device: &Device) {
    const UNIT_BYTES: u64 = 32 * MIB;
    const UNITS: u64 = 256;
    let context = device.context().unwrap();
    let driver = open_driver().unwrap();
    let free = || device.memory_info().unwrap().free_bytes;
    let before = free();
    let mut range = ResizableMemory::reserve(device, UNIT_BYTES, UNITS).unwrap();
    let mut slowest = Duration::ZERO;
    let started = Instant::now();
    for unit in 0..UNITS {
        let step = Instant::now();
        range.grow_to(&context, unit + 1).unwrap();
        slowest = slowest.max(step.elapsed());
        let address = range.address() + unit * UNIT_BYTES;
        // SAFETY: the unit that was just mapped.
        unsafe { driver.copy_to_device(address, &unit.to_le_bytes()) }.unwrap();
    }
    let grown = started.elapsed();
    assert!(before - free() >= UNITS * UNIT_BYTES);
    let started = Instant::now();
    range.shrink_to(UNITS / 2, || Ok::<(), ResizeError>(())).unwrap();
    let shrunk = started.elapsed();
    range.grow_to(&context, UNITS).unwrap();
    for unit in 0..UNITS / 2 {
        let mut read = [0; 8];
        // SAFETY: a unit that has stayed mapped.
        unsafe { driver.copy_to_host(&mut read, range.address() + unit * UNIT_BYTES) }.unwrap();
        assert_eq!(u64::from_le_bytes(read), unit);
    }
    drop(range);
    assert!(free() + 8 * MIB >= before);
    println!(
        "a unit of {} MiB: grown in {:.0} us (slowest {:.0}), taken away in {:.0} us",
        UNIT_BYTES / MIB,
        grown.as_secs_f64() * 1e6 / UNITS as f64,
        slowest.as_secs_f64() * 1e6,
        shrunk.as_secs_f64() * 1e6 / (UNITS / 2) as f64
    );
}

fn too_little(device: &Device) {
    let context = device.context().unwrap();
    let before = device.memory_info().unwrap();
    let sizes = vec![1 << 30; (before.total_bytes >> 30) as usize + 8];
    let error = WritableModel::allocate(&context, &sizes, Duration::ZERO).unwrap_err();
    assert!(matches!(error, AllocateError::OutOfMemory { .. }), "{error:?}");
    println!("{error}");
    // With all free memory but 3 GiB taken, the driver itself fails, after the check of the free
    // memory.
    let take = (before.free_bytes >> 30) - 3;
    let taken: Vec<PhysicalMemory> =
        (0..take).map(|_| PhysicalMemory::create(device, 1 << 30).unwrap()).collect();
    let mut range = ResizableMemory::reserve(device, 1 << 30, 8).unwrap();
    let error = range.grow_to(&context, 8).unwrap_err();
    assert!(matches!(error, ResizeError::OutOfMemory { .. }), "{error:?}");
    assert_eq!(range.mapped_bytes(), 0);
    println!("{error}");
    drop((taken, range));
    let after = device.memory_info().unwrap();
    assert!(after.free_bytes + 8 * MIB >= before.free_bytes, "{before:?} {after:?}");
}

/// Allocates, hands over, imports and unmaps in one process, many times. The parent then queries
/// the device.
fn cycles(device: &Device) {
    let context = device.context().unwrap();
    let free = || device.memory_info().unwrap().free_bytes;
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let sizes = [2 * MIB, 64 * MIB, 30 * MIB, 512 * MIB];
    let mut baseline = None;
    let started = Instant::now();
    for cycle in 0..CYCLES {
        let mut model = WritableModel::allocate(&context, &sizes, Duration::ZERO).unwrap();
        write_samples(&mut model, &context, &sizes);
        let (manifest, allocations) = split_handoff(export(model, &manifest(device, &sizes))).unwrap();
        let imported = ImportedModel::import(device, &manifest, &allocations).unwrap();
        drop(allocations);
        assert_samples(&imported, &context);
        drop(imported);
        // In the first cycle the driver allocates what it needs itself.
        let (free_before, fds_before) = *baseline.get_or_insert_with(|| (free(), descriptors()));
        assert_eq!(descriptors(), fds_before, "cycle {cycle}");
        assert!(free() + MIB >= free_before, "cycle {cycle}: {} free, {free_before} before", free());
    }
    let each = started.elapsed().as_secs_f64() * 1e3 / CYCLES as f64;
    // The driver layer relies on two things: one access call covers several mappings, and mappings
    // may fill a part of a range.
    let physical = PhysicalMemory::create(device, 2 * MIB).unwrap();
    let mut range = AddressRange::reserve(device, 8 * MIB).unwrap();
    range.map(4 * MIB, &physical).unwrap();
    range.map(2 * MIB, &physical).unwrap();
    range.set_access(2 * MIB, 4 * MIB, DeviceAccess::ReadWrite).unwrap();
    range.unmap(2 * MIB).unwrap();
    println!("{CYCLES} cycles of load, hand-over, import and unmap of 608 MiB: {each:.2} ms each");
}
