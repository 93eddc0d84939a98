//! Hand-off, growth and their failures over the fake driver.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use crate::manifest::{self, Allocation, LAYOUT_GGML, Manifest, TensorEntry};

use super::driver::{Call, Code, Driver, Refusal};
use super::fake::{Fake, GRANULE};
use super::retry::UNSUPPORTED_ATTEMPTS;
use super::*;

const NO_PATIENCE: Duration = Duration::ZERO;

/// Three allocations of 1, 3 and 2 granules.
const SIZES: [u64; 3] = [GRANULE, 3 * GRANULE, 2 * GRANULE];

pub(super) const TOTAL: u64 = 6 * GRANULE;

/// Everything that allocating, handing over and importing calls before there is something to tear down.
const BUILDING: [Call; 8] = [
    Call::MemAddressReserve,
    Call::MemCreate,
    Call::MemMap,
    Call::MemSetAccess,
    Call::MemExportToShareableHandle,
    Call::MemImportFromShareableHandle,
    Call::DevicePrimaryCtxRetain,
    Call::CtxSetCurrent,
];

pub(super) fn fake(capacity: u64) -> (Arc<Fake>, Device) {
    let fake = Arc::new(Fake::new(capacity));
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
        devices: vec![manifest::Device {
            kind: manifest::DeviceKind::Cuda,
            id: device.uuid().to_string(),
            compute_capability: device.facts().compute_capability,
        }],
        layout: LAYOUT_GGML,
        allocations: sizes.iter().map(|&bytes| Allocation { device: 0, bytes, inode: 0 }).collect(),
        tensors: sizes.iter().enumerate().map(tensor).collect(),
        gguf_metadata: bytes::Bytes::new(),
        created_unix_seconds: 0,
    }
}

fn pattern(allocation: usize) -> Vec<u8> {
    (0..4096u32).map(|at| (at * 7 + allocation as u32 * 31 + 1) as u8).collect()
}

/// Any error of the whole way from nothing to an imported model.
#[derive(Debug, thiserror::Error)]
enum HandoffFailed {
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error(transparent)]
    Allocate(#[from] AllocateError),
    #[error(transparent)]
    Finish(#[from] FinishError),
    #[error(transparent)]
    Import(#[from] ImportModelError),
}

impl HandoffFailed {
    fn refusal(&self) -> Option<Refusal> {
        std::iter::successors(Some(self as &dyn std::error::Error), |error| error.source())
            .find_map(|error| error.downcast_ref().copied())
            .or(match self {
                Self::Refused(refusal) => Some(*refusal),
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
    Ok(ImportedModel::import(device, &manifest(device, sizes), fds)?)
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

    // Another driver, as another process has; descriptors alone have kept the memory.
    let (importer, device) = fake(TOTAL);
    let model = ImportedModel::import(&device, &manifest(&device, &SIZES), fds).unwrap();
    assert_eq!(importer.handles(), 0);
    assert_eq!(importer.used(), TOTAL);
    assert_eq!(importer.count(Call::MemAddressReserve), 1);
    assert_eq!(importer.count(Call::MemMap), SIZES.len());
    assert_eq!(importer.count(Call::MemSetAccess), 1);
    assert_holds_pattern(&device, &model.tensors);

    let watch = model.watch();
    let tensor = model.tensors[1].clone();
    drop(model);
    assert!(watch.upgrade().is_some());
    assert_eq!(importer.used(), TOTAL);
    drop(tensor);
    assert!(watch.upgrade().is_none());
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
    let refusal = unsafe { fake.copy_to_device(model.tensors[0].address(), &[1]) }.unwrap_err();
    assert_eq!(refusal.code, Code::ILLEGAL_ADDRESS);
    assert_holds_pattern(&device, &model.tensors);
}

#[test]
fn lack_of_memory_at_any_allocation_leaves_nothing_and_says_what_is_missing() {
    for room in [0, GRANULE, 4 * GRANULE, TOTAL - GRANULE] {
        let (fake, device) = fake(TOTAL);
        let held = (room < TOTAL).then(|| Physical::create(&device, TOTAL - room).unwrap());
        let context = device.context().unwrap();
        let error = WritableModel::allocate(&context, &SIZES, NO_PATIENCE).unwrap_err();
        assert!(
            matches!(error, AllocateError::OutOfMemory { asked_bytes: TOTAL, free_bytes: Some(free) } if free == room),
            "{error}"
        );
        assert!(error.to_string().contains(&mib(TOTAL - room)), "{error}");
        drop((held, context));
        fake.assert_clean();
    }
}

#[test]
fn lack_of_memory_that_the_driver_did_not_announce_leaves_nothing_either() {
    for k in 0..SIZES.len() {
        let (fake, device) = fake(TOTAL);
        let context = device.context().unwrap();
        fake.refuse(Call::MemCreate, k, 1, Code::OUT_OF_MEMORY);
        let error = WritableModel::allocate(&context, &SIZES, NO_PATIENCE).unwrap_err();
        assert!(error.to_string().contains("although"), "{error}");
        assert_eq!(fake.used(), 0);
        drop(context);
        fake.assert_clean();
    }
}

#[test]
fn memory_that_a_dying_process_gives_back_late_is_waited_for() {
    let (fake, device) = fake(TOTAL);
    let held = Physical::create(&device, GRANULE).unwrap();
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
fn refusal_of_any_call_is_named_and_leaves_nothing() {
    for call in BUILDING {
        let calls = {
            let (fake, device) = fake(TOTAL);
            hand_over(&device, &SIZES).unwrap();
            fake.count(call)
        };
        assert!(calls > 0, "{call}");
        for k in 0..calls {
            let (fake, device) = fake(TOTAL);
            fake.refuse(call, k, 1, Code::OPERATING_SYSTEM);
            let error = hand_over(&device, &SIZES).unwrap_err();
            let expected = Refusal { call, code: Code::OPERATING_SYSTEM };
            assert_eq!(error.refusal(), Some(expected), "{call} {k}: {error:?}");
            fake.assert_clean();
        }
    }
}

#[test]
fn refused_import_names_the_allocation() {
    let (fake, device) = fake(TOTAL);
    fake.refuse(Call::MemImportFromShareableHandle, 2, 1, Code::INVALID_DEVICE);
    let error = hand_over(&device, &SIZES).unwrap_err();
    let named = format!("allocation 2 of {} bytes cannot be imported", 2 * GRANULE);
    assert!(error.to_string().starts_with(&named), "{error}");
}

#[test]
fn not_supported_for_a_moment_is_outwaited_at_any_call() {
    for call in BUILDING {
        if call == Call::CtxSetCurrent {
            // Touches nothing but the thread: nobody has seen this answer from it.
            continue;
        }
        let (fake, device) = fake(TOTAL);
        fake.refuse(call, 0, 3, Code::NOT_SUPPORTED);
        let model = hand_over(&device, &SIZES).unwrap();
        assert_holds_pattern(&device, &model.tensors);
        drop(model);
        fake.assert_clean();
    }
}

#[test]
fn not_supported_for_ever_is_believed_after_a_bounded_number_of_attempts() {
    let (fake, device) = fake(TOTAL);
    fake.refuse(Call::MemMap, 0, usize::MAX >> 1, Code::NOT_SUPPORTED);
    let error = hand_over(&device, &SIZES).unwrap_err();
    assert_eq!(error.refusal().unwrap().code, Code::NOT_SUPPORTED);
    assert_eq!(fake.count(Call::MemMap), UNSUPPORTED_ATTEMPTS as usize);
    fake.assert_clean();
}

#[test]
fn model_of_another_device_or_with_other_descriptors_is_refused() {
    let (fake, device) = fake(TOTAL);
    let other = Device::open(fake.clone(), DeviceSelector::Ordinal(1)).unwrap();
    let manifest = manifest(&device, &SIZES);
    let fds = export(&device, &SIZES).unwrap();
    let error = ImportedModel::import(&other, &manifest, fds).unwrap_err();
    assert!(matches!(error, ImportModelError::WrongDevice { .. }));
    assert!(error.to_string().contains(&device.uuid().to_string()));

    let mut fds = export(&device, &SIZES).unwrap();
    fds.pop();
    let error = ImportedModel::import(&device, &manifest, fds).unwrap_err();
    assert!(matches!(error, ImportModelError::Count { expected: 3, found: 2 }));

    let mut fds = export(&device, &SIZES).unwrap();
    fds[1] = std::fs::File::open("/dev/null").unwrap().into();
    let error = ImportedModel::import(&device, &manifest, fds).unwrap_err();
    assert!(matches!(error, ImportModelError::Allocation { index: 1, .. }));

    let mut fds = export(&device, &SIZES).unwrap();
    fds.swap(0, 1);
    let error = ImportedModel::import(&device, &manifest, fds).unwrap_err();
    assert!(matches!(error, ImportModelError::Allocation { index: 0, .. }));
    fake.assert_clean();
}

#[test]
fn absurd_sizes_are_refused_before_anything_is_asked_of_the_device() {
    let (fake, device) = fake(TOTAL);
    let context = device.context().unwrap();
    for sizes in [&[u64::MAX][..], &[GRANULE, 1 << 63, 1 << 63]] {
        let error = WritableModel::allocate(&context, sizes, NO_PATIENCE).unwrap_err();
        assert!(matches!(error, AllocateError::TooLarge { .. }), "{error}");
    }
    let mut wrong = manifest(&device, &SIZES);
    wrong.allocations[0].bytes = 1 << 60;
    let fds = export(&device, &SIZES).unwrap();
    let reserved = fake.count(Call::MemAddressReserve);
    let error = ImportedModel::import(&device, &wrong, fds).unwrap_err();
    assert!(matches!(error, ImportModelError::TooLarge));
    assert_eq!(fake.count(Call::MemAddressReserve), reserved);
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
fn model_without_tensors_is_fine() {
    let (fake, device) = fake(TOTAL);
    assert!(hand_over(&device, &[]).unwrap().tensors.is_empty());
    fake.assert_clean();
}

/// In a process of its own: the limit holds for all of it.
#[test]
fn too_few_descriptors_are_noticed_before_memory_is_taken() {
    const CHILD: &str = "BALLAST_TEST_DEVICE_FDS";
    if std::env::var_os(CHILD).is_none() {
        let name = "cuda::tests::too_few_descriptors_are_noticed_before_memory_is_taken";
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
    assert_eq!(fake.count(Call::MemCreate), 0);
}

#[test]
fn devices_are_found_by_number_and_uuid_and_absent_ones_are_told_with_those_present() {
    let (fake, first) = fake(TOTAL);
    let second = Device::open(fake.clone(), "cuda:1".parse().unwrap()).unwrap();
    let again = Device::open(fake.clone(), second.uuid().to_string().parse().unwrap()).unwrap();
    assert_eq!(again.facts().ordinal, 1);
    let error = Device::open(fake.clone(), "cuda:2".parse().unwrap()).unwrap_err();
    assert!(matches!(&error, DeviceError::Absent { present, .. } if present.len() == 2));
    assert!(error.to_string().contains("cuda:2"));
    assert!(error.to_string().contains(&first.uuid().to_string()), "{error}");
    for wrong in ["cuda", "cuda:", "cuda:-1", "gpu:0", "GPU-1234", "0", ""] {
        assert!(wrong.parse::<DeviceSelector>().is_err(), "{wrong}");
    }
}

#[test]
fn driver_that_is_too_old_is_named_with_what_it_needs() {
    let text = |version| OpenDriverError::TooOld { symbol: "cuMemCreate", version }.to_string();
    assert!(
        text(Some(11_040)).starts_with("the NVIDIA driver for CUDA 11.4 is too old: it has no cuMemCreate; ")
    );
    assert!(text(None).starts_with("the NVIDIA driver is too old: "));
}

#[test]
fn device_that_cannot_share_is_refused_by_what_it_lacks() {
    let (fake, _) = fake(TOTAL);
    fake.change_device(0, |facts| facts.vmm = false);
    fake.change_device(1, |facts| facts.posix_fd = false);
    let open = |ordinal| Device::open(fake.clone(), DeviceSelector::Ordinal(ordinal)).unwrap_err();
    assert!(matches!(open(0), DeviceError::NoVmm { .. }));
    assert!(matches!(open(1), DeviceError::NoPosixFd { .. }));
}

#[test]
fn a_writable_view_that_stays_is_an_error_and_leaves_nothing() {
    for refused in 0..SIZES.len() {
        let (fake, device) = fake(TOTAL);
        let context = device.context().unwrap();
        let model = WritableModel::allocate(&context, &SIZES, NO_PATIENCE).unwrap();
        fake.refuse(Call::MemUnmap, refused, 1, Code::OPERATING_SYSTEM);
        let error = model.finish().unwrap_err();
        assert!(matches!(error, FinishError::Unmap(refusal) if refusal.call == Call::MemUnmap), "{error:?}");
        drop(context);
        fake.assert_clean();
    }
}

#[test]
fn fake_notices_misuse() {
    let fake = Fake::new(TOTAL);
    let handle = fake.create(0, GRANULE).unwrap();
    let address = fake.reserve(2 * GRANULE).unwrap();
    // SAFETY: of the fake, which survives what would break the real driver.
    unsafe {
        fake.map(address, GRANULE, handle).unwrap();
        fake.free(address, 2 * GRANULE).unwrap_err();
        fake.set_access(0, address, 2 * GRANULE, driver::Access::Read).unwrap_err();
        fake.unmap(address, 2 * GRANULE).unwrap_err();
        fake.unmap(address, GRANULE).unwrap();
        fake.unmap(address, GRANULE).unwrap_err();
        fake.release(handle).unwrap();
        fake.release(handle).unwrap_err();
    }
    assert_eq!(fake.breaches().len(), 5, "{:?}", fake.breaches());
}

proptest! {
    #[test]
    fn uuid_reads_what_it_writes(bytes in any::<[u8; 16]>(), cut in 0usize..40) {
        let text = DeviceUuid(bytes).to_string();
        prop_assert_eq!(DeviceUuid::parse(&text), Some(DeviceUuid(bytes)));
        prop_assert_eq!(DeviceUuid::parse(&text[..cut]), None);
    }
}

#[test]
fn pinned_pages_are_let_go_with_their_last_part() {
    let (fake, device) = fake(TOTAL);
    let pinned = PinnedPages::pin(&device, HostPages::new(5 << 20).unwrap()).unwrap();
    assert_eq!(fake.pinned(), 6 << 20, "whole huge pages");
    let mut parts = pinned.cut(1_000_000);
    assert_eq!(parts.len(), 6);
    assert!(parts.iter().all(|part| part.as_slice() == [0; 1_000_000]));
    for (index, part) in parts.iter_mut().enumerate() {
        part.as_mut_slice().fill(index as u8 + 1);
    }
    let last = parts.pop().unwrap();
    assert!(parts.iter().zip(1..).all(|(part, value)| part.as_slice() == [value; 1_000_000]));
    drop(parts);
    // From another thread, as readers do: the context need not be current there.
    std::thread::spawn(move || assert_eq!(last.as_slice(), [6; 1_000_000])).join().unwrap();
    fake.assert_clean();
}

#[test]
fn refused_pin_says_what_the_limit_is_and_leaves_nothing() {
    let (fake, device) = fake(TOTAL);
    let pages = || HostPages::new(1).unwrap();
    fake.refuse(Call::MemHostRegister, 0, 1, Code::OUT_OF_MEMORY);
    let error = PinnedPages::pin(&device, pages()).unwrap_err();
    assert!(error.to_string().contains("2.0 MiB of host memory"), "{error}");
    assert!(error.to_string().contains("RLIMIT_MEMLOCK"), "{error}");
    let PinError::Refused { bytes, limit_bytes: _, source } = error else { panic!("{error}") };
    assert_eq!((bytes, source.call, source.code), (2 << 20, Call::MemHostRegister, Code::OUT_OF_MEMORY));
    let refused = |limit_bytes| PinError::Refused { bytes: 2 << 20, limit_bytes, source };
    let low = refused(Some(64 << 10)).to_string();
    assert!(low.contains("may lock 0.1 MiB") && low.contains("ulimit -l"), "{low}");
    assert!(!refused(None).to_string().contains("ulimit"));
    fake.refuse(Call::DevicePrimaryCtxRetain, 0, 1, Code::OPERATING_SYSTEM);
    assert!(matches!(PinnedPages::pin(&device, pages()), Err(PinError::Context(_))));
    fake.assert_clean();
}
