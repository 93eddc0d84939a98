// SPDX-License-Identifier: Apache-2.0

//! Allocating, handing over and importing a model over the fake driver, and all failures on the
//! way.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cuda::checked::{DriverCall, UNSUPPORTED_ATTEMPTS};
use cuda::fake::{FakeDriver, GRANULE};
use cuda::{Device, DeviceSelector, DriverApi, DriverError, ErrorCode, PhysicalMemory, format_mib};

mod copies;

use super::*;
use crate::manifest::{Allocation, DeviceKind, LAYOUT_GGML, Manifest, ManifestDevice, TensorEntry};

const NO_PATIENCE: Duration = Duration::ZERO;

/// Three allocations of 1, 3 and 2 granules.
const SIZES: [u64; 3] = [GRANULE, 3 * GRANULE, 2 * GRANULE];

const TOTAL: u64 = 6 * GRANULE;

/// The driver calls that build something up while a model is allocated, exported and imported.
const BUILDING: [DriverCall; 8] = [
    DriverCall::MemAddressReserve,
    DriverCall::MemCreate,
    DriverCall::MemMap,
    DriverCall::MemSetAccess,
    DriverCall::MemExportToShareableHandle,
    DriverCall::MemImportFromShareableHandle,
    DriverCall::DevicePrimaryCtxRetain,
    DriverCall::CtxSetCurrent,
];

fn fake(capacity: u64) -> (Arc<FakeDriver>, Device) {
    let fake = Arc::new(FakeDriver::new(capacity));
    let device = Device::open(fake.clone(), DeviceSelector::Ordinal(0)).unwrap();
    (fake, device)
}

/// One tensor in each allocation, 256 bytes behind its start.
fn manifest(device: &Device, sizes: &[u64]) -> Manifest {
    let tensor = |(allocation, bytes): (usize, &u64)| TensorEntry {
        name: format!("blk.{allocation}.weight"),
        dtype: 8,
        layout: LAYOUT_GGML,
        shape: vec![*bytes - 256],
        shard: None,
        allocation,
        offset: 256,
        bytes: *bytes - 256,
        raw_checksum: [0; 16],
        checksum: [0; 16],
    };
    Manifest {
        model: "m".to_owned(),
        digest: [1; 32],
        generation: 1,
        files: Vec::new(),
        devices: vec![ManifestDevice {
            kind: DeviceKind::Cuda,
            id: device.uuid().to_string(),
            compute_capability: device.info().compute_capability,
        }],
        layout: LAYOUT_GGML,
        one_per_tensor: false,
        allocations: sizes.iter().map(|&bytes| Allocation { device: 0, bytes, inode: 0 }).collect(),
        tensors: sizes.iter().enumerate().map(tensor).collect(),
        gguf_metadata: bytes::Bytes::new(),
        created_unix_seconds: 0,
    }
}

fn pattern(allocation: usize) -> Vec<u8> {
    (0..4096u32).map(|at| (at * 7 + allocation as u32 * 31 + 1) as u8).collect()
}

/// Any error between an empty device and an imported model.
#[derive(Debug, thiserror::Error)]
enum HandoffFailed {
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error(transparent)]
    Allocate(#[from] AllocateError),
    #[error(transparent)]
    Finish(#[from] FinishError),
    #[error(transparent)]
    Import(#[from] ImportModelError),
}

impl HandoffFailed {
    fn driver_error(&self) -> Option<DriverError> {
        std::iter::successors(Some(self as &dyn std::error::Error), |error| error.source())
            .find_map(|error| error.downcast_ref().copied())
            .or(match self {
                Self::Driver(driver_error) => Some(*driver_error),
                _ => None,
            })
    }
}

fn export(device: &Device, sizes: &[u64]) -> Result<Vec<OwnedFd>, HandoffFailed> {
    let context = device.context()?;
    let mut model = WritableModel::allocate(&context, sizes, NO_PATIENCE)?;
    for allocation in 0..sizes.len() {
        model.write(&context, allocation, 256, &pattern(allocation))?;
    }
    Ok(model.finish()?)
}

fn hand_over(device: &Device, sizes: &[u64]) -> Result<ImportedModel, HandoffFailed> {
    let fds = export(device, sizes)?;
    Ok(ImportedModel::import(device, &manifest(device, sizes), &fds)?)
}

fn assert_holds_pattern(device: &Device, tensors: &[DeviceTensor]) {
    let context = device.context().unwrap();
    for (allocation, tensor) in tensors.iter().enumerate() {
        let mut read = vec![0; 4096];
        tensor.read(&context, 0, &mut read).unwrap();
        assert_eq!(read, pattern(allocation), "{}", tensor.name);
    }
}

#[test]
fn importer_reads_what_the_loader_wrote_and_nothing_is_left() {
    let (exporter, device) = fake(TOTAL);
    let fds = export(&device, &SIZES).unwrap();
    exporter.assert_clean();
    drop((exporter, device));

    // A second fake driver stands for another process; the descriptors alone have kept the memory.
    let (importer, device) = fake(TOTAL);
    let model = ImportedModel::import(&device, &manifest(&device, &SIZES), &fds).unwrap();
    drop(fds);
    assert_eq!(importer.handles(), 0);
    assert_eq!(importer.used(), TOTAL);
    assert_eq!(importer.count(DriverCall::MemAddressReserve), 1);
    assert_eq!(importer.count(DriverCall::MemMap), SIZES.len());
    assert_eq!(importer.count(DriverCall::MemSetAccess), 1);
    assert_holds_pattern(&device, &model.tensors);

    let watch = model.watch();
    let tensor = model.tensors[1].clone();
    drop(model);
    assert!(!watch.is_unmapped());
    assert_eq!(importer.used(), TOTAL);
    drop(tensor);
    assert!(watch.is_unmapped());
    importer.assert_clean();
}

#[test]
fn imported_tensors_lie_where_the_manifest_says() {
    let (_, device) = fake(TOTAL);
    let model = hand_over(&device, &SIZES).unwrap();
    let base = model.tensors[0].address() - 256;
    let offsets: Vec<u64> = model.tensors.iter().map(|tensor| tensor.address() - base).collect();
    assert_eq!(offsets, [256, GRANULE + 256, 4 * GRANULE + 256]);
    assert_eq!(model.mapped_bytes(), TOTAL);
}

#[test]
fn imported_memory_is_read_only() {
    let (fake, device) = fake(TOTAL);
    let model = hand_over(&device, &SIZES).unwrap();
    let _context = device.context().unwrap();
    // SAFETY: of the fake, which checks every access.
    let driver_error = unsafe { fake.copy_to_device(model.tensors[0].address(), &[1]) }.unwrap_err();
    assert_eq!(driver_error.code, ErrorCode::ILLEGAL_ADDRESS);
    assert_holds_pattern(&device, &model.tensors);
}

#[test]
fn out_of_memory_at_any_allocation_leaves_nothing_and_reports_what_is_missing() {
    for room in [0, GRANULE, 4 * GRANULE, TOTAL - GRANULE] {
        let (fake, device) = fake(TOTAL);
        let held = (room < TOTAL).then(|| PhysicalMemory::create(&device, TOTAL - room).unwrap());
        let context = device.context().unwrap();
        let error = WritableModel::allocate(&context, &SIZES, NO_PATIENCE).unwrap_err();
        assert!(
            matches!(error, AllocateError::OutOfMemory { requested_bytes: TOTAL, free_bytes: Some(free) } if free == room),
            "{error}"
        );
        assert!(error.to_string().contains(&format_mib(TOTAL - room)), "{error}");
        drop((held, context));
        fake.assert_clean();
    }
}

#[test]
fn out_of_memory_despite_free_memory_leaves_nothing() {
    for k in 0..SIZES.len() {
        let (fake, device) = fake(TOTAL);
        let context = device.context().unwrap();
        fake.fail(DriverCall::MemCreate, k, 1, ErrorCode::OUT_OF_MEMORY);
        let error = WritableModel::allocate(&context, &SIZES, NO_PATIENCE).unwrap_err();
        assert!(error.to_string().contains("although"), "{error}");
        assert_eq!(fake.used(), 0);
        drop(context);
        fake.assert_clean();
    }
}

#[test]
fn allocation_waits_for_memory_of_an_ending_process() {
    let (fake, device) = fake(TOTAL);
    let held = PhysicalMemory::create(&device, GRANULE).unwrap();
    let context = device.context().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(120));
            drop(held);
        });
        let started = Instant::now();
        let model = WritableModel::allocate(&context, &SIZES, Duration::from_secs(20)).unwrap();
        assert!(started.elapsed() >= Duration::from_millis(100));
        assert_eq!(model.addresses().len(), SIZES.len());
    });
    drop(context);
    fake.assert_clean();
}

#[test]
fn failure_of_any_driver_call_is_named_and_leaves_nothing() {
    for call in BUILDING {
        let calls = {
            let (fake, device) = fake(TOTAL);
            hand_over(&device, &SIZES).unwrap();
            fake.count(call)
        };
        assert!(calls > 0, "{call}");
        for k in 0..calls {
            let (fake, device) = fake(TOTAL);
            fake.fail(call, k, 1, ErrorCode::OPERATING_SYSTEM);
            let error = hand_over(&device, &SIZES).unwrap_err();
            let expected = DriverError { call, code: ErrorCode::OPERATING_SYSTEM };
            assert_eq!(error.driver_error(), Some(expected), "{call} {k}: {error:?}");
            fake.assert_clean();
        }
    }
}

#[test]
fn failed_import_names_the_allocation() {
    let (fake, device) = fake(TOTAL);
    fake.fail(DriverCall::MemImportFromShareableHandle, 2, 1, ErrorCode::INVALID_DEVICE);
    let error = hand_over(&device, &SIZES).unwrap_err();
    let named = format!("allocation 2 of {} bytes cannot be imported", 2 * GRANULE);
    assert!(error.to_string().starts_with(&named), "{error}");
}

#[test]
fn temporary_not_supported_is_retried_at_any_call() {
    for call in BUILDING {
        if call == DriverCall::CtxSetCurrent {
            // It changes only the state of the thread, and has never been seen to fail like this.
            continue;
        }
        let (fake, device) = fake(TOTAL);
        fake.fail(call, 0, 3, ErrorCode::NOT_SUPPORTED);
        let model = hand_over(&device, &SIZES).unwrap();
        assert_holds_pattern(&device, &model.tensors);
        drop(model);
        fake.assert_clean();
    }
}

#[test]
fn permanent_not_supported_fails_after_a_bounded_number_of_attempts() {
    let (fake, device) = fake(TOTAL);
    fake.fail(DriverCall::MemMap, 0, usize::MAX >> 1, ErrorCode::NOT_SUPPORTED);
    let error = hand_over(&device, &SIZES).unwrap_err();
    assert_eq!(error.driver_error().unwrap().code, ErrorCode::NOT_SUPPORTED);
    assert_eq!(fake.count(DriverCall::MemMap), UNSUPPORTED_ATTEMPTS as usize);
    fake.assert_clean();
}

#[test]
fn model_of_another_device_or_with_other_descriptors_is_refused() {
    let (fake, device) = fake(TOTAL);
    let other = Device::open(fake.clone(), DeviceSelector::Ordinal(1)).unwrap();
    let manifest = manifest(&device, &SIZES);
    let fds = export(&device, &SIZES).unwrap();
    let error = ImportedModel::import(&other, &manifest, &fds).unwrap_err();
    drop(fds);
    assert!(matches!(error, ImportModelError::WrongDevice { .. }));
    assert!(error.to_string().contains(&device.uuid().to_string()));

    let mut fds = export(&device, &SIZES).unwrap();
    fds.pop();
    let error = ImportedModel::import(&device, &manifest, &fds).unwrap_err();
    drop(fds);
    assert!(matches!(error, ImportModelError::Count { expected: 3, found: 2 }));

    let mut fds = export(&device, &SIZES).unwrap();
    fds[1] = std::fs::File::open("/dev/null").unwrap().into();
    let error = ImportedModel::import(&device, &manifest, &fds).unwrap_err();
    drop(fds);
    assert!(matches!(error, ImportModelError::Allocation { index: 1, .. }));

    let mut fds = export(&device, &SIZES).unwrap();
    fds.swap(0, 1);
    let error = ImportedModel::import(&device, &manifest, &fds).unwrap_err();
    drop(fds);
    assert!(matches!(error, ImportModelError::Allocation { index: 0, .. }));
    fake.assert_clean();
}

#[test]
fn sizes_beyond_any_memory_are_refused_before_any_driver_call() {
    let (fake, device) = fake(TOTAL);
    let context = device.context().unwrap();
    for sizes in [&[u64::MAX][..], &[GRANULE, 1 << 63, 1 << 63]] {
        let error = WritableModel::allocate(&context, sizes, NO_PATIENCE).unwrap_err();
        assert!(matches!(error, AllocateError::TooLarge { .. }), "{error}");
    }
    let mut wrong = manifest(&device, &SIZES);
    wrong.allocations[0].bytes = 1 << 60;
    let fds = export(&device, &SIZES).unwrap();
    let reserved = fake.count(DriverCall::MemAddressReserve);
    let error = ImportedModel::import(&device, &wrong, &fds).unwrap_err();
    drop(fds);
    assert!(matches!(error, ImportModelError::TooLarge));
    assert_eq!(fake.count(DriverCall::MemAddressReserve), reserved);
}

#[test]
fn allocations_are_rounded_alike_on_both_sides() {
    let (fake, _) = fake(8 * TOTAL);
    fake.set_granularity(2 * GRANULE);
    let device = Device::open(fake.clone(), DeviceSelector::Ordinal(0)).unwrap();
    let model = hand_over(&device, &SIZES).unwrap();
    assert_eq!(model.mapped_bytes(), (2 + 4 + 2) * GRANULE);
    assert_holds_pattern(&device, &model.tensors);
    drop(model);
    fake.assert_clean();
}

#[test]
fn model_without_tensors_is_imported() {
    let (fake, device) = fake(TOTAL);
    assert!(hand_over(&device, &[]).unwrap().tensors.is_empty());
    fake.assert_clean();
}

/// In a process of its own, since the limit holds for the whole process.
#[test]
fn too_few_file_descriptors_are_an_error_before_memory_is_allocated() {
    const CHILD: &str = "BALLAST_TEST_DEVICE_FDS";
    if std::env::var_os(CHILD).is_none() {
        let name = "device::tests::too_few_file_descriptors_are_an_error_before_memory_is_allocated";
        let status = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name])
            .env(CHILD, "1")
            .status()
            .unwrap();
        assert!(status.success());
        return;
    }
    use nix::sys::resource::{Resource, setrlimit};
    let (fake, device) = fake(1 << 40);
    let context = device.context().unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, 64, 64).unwrap();
    let error = WritableModel::allocate(&context, &[GRANULE; 64], NO_PATIENCE).unwrap_err();
    assert!(matches!(error, AllocateError::OutOfFds { needed: 64, free } if free < 64), "{error}");
    assert_eq!(fake.count(DriverCall::MemCreate), 0);
}

#[test]
fn failed_unmap_at_the_end_of_writing_is_an_error_and_leaves_nothing() {
    for refused in 0..SIZES.len() {
        let (fake, device) = fake(TOTAL);
        let context = device.context().unwrap();
        let model = WritableModel::allocate(&context, &SIZES, NO_PATIENCE).unwrap();
        fake.fail(DriverCall::MemUnmap, refused, 1, ErrorCode::OPERATING_SYSTEM);
        let error = model.finish().unwrap_err();
        assert!(
            matches!(error, FinishError::Unmap(driver_error) if driver_error.call == DriverCall::MemUnmap),
            "{error:?}"
        );
        drop(context);
        fake.assert_clean();
    }
}
