// SPDX-License-Identifier: Apache-2.0

//! The safe layer over the fake driver: devices, contexts, buffers, pinned memory.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::checked::{DeviceAccess, DeviceUuid, DriverApi, DriverCall, ErrorCode};
use crate::fake::{FakeDriver, GRANULE};

pub(super) const CAPACITY: u64 = 6 * GRANULE;

pub(super) fn fake(capacity: u64) -> (Arc<FakeDriver>, Device) {
    let fake = Arc::new(FakeDriver::new(capacity));
    let device = Device::open(fake.clone(), DeviceSelector::Ordinal(0)).unwrap();
    (fake, device)
}

#[test]
fn devices_are_found_by_ordinal_and_uuid_and_an_absent_one_is_reported_with_those_present() {
    let (fake, first) = fake(CAPACITY);
    let second = Device::open(fake.clone(), "cuda:1".parse().unwrap()).unwrap();
    let again = Device::open(fake.clone(), second.uuid().to_string().parse().unwrap()).unwrap();
    assert_eq!(again.info().ordinal, 1);
    let error = Device::open(fake.clone(), "cuda:2".parse().unwrap()).unwrap_err();
    assert!(matches!(&error, DeviceError::Absent { present, .. } if present.len() == 2));
    assert!(error.to_string().contains("cuda:2"));
    assert!(error.to_string().contains(&first.uuid().to_string()), "{error}");
    for wrong in ["cuda", "cuda:", "cuda:-1", "gpu:0", "GPU-1234", "0", ""] {
        assert!(wrong.parse::<DeviceSelector>().is_err(), "{wrong}");
    }
}

#[test]
fn device_that_cannot_share_memory_is_refused_with_the_reason() {
    let (fake, _) = fake(CAPACITY);
    fake.change_device(0, |info| info.vmm = false);
    fake.change_device(1, |info| info.posix_fd = false);
    let open = |ordinal| Device::open(fake.clone(), DeviceSelector::Ordinal(ordinal)).unwrap_err();
    assert!(matches!(open(0), DeviceError::NoVmm { .. }));
    assert!(matches!(open(1), DeviceError::NoPosixFd { .. }));
}

#[test]
fn context_is_shared_and_released_with_the_last_object_in_it() {
    let (fake, device) = fake(CAPACITY);
    device.synchronize().unwrap();
    assert_eq!(fake.count(DriverCall::DevicePrimaryCtxRetain), 0, "opening a device takes no memory");
    let stream = Stream::new(&device).unwrap();
    let event = Event::new(&device.clone()).unwrap();
    event.record(&stream).unwrap();
    stream.wait(&event).unwrap();
    assert_eq!(fake.count(DriverCall::DevicePrimaryCtxRetain), 1);
    drop(stream);
    assert_eq!(fake.count(DriverCall::DevicePrimaryCtxRelease), 0);
    assert!(event.is_done().unwrap());
    drop(event);
    assert_eq!(fake.count(DriverCall::DevicePrimaryCtxRelease), 1);
    fake.assert_clean();
}

#[test]
fn buffer_holds_what_was_copied_and_waits_for_the_device_before_it_is_freed() {
    let (fake, device) = fake(CAPACITY);
    let stream = Stream::new(&device).unwrap();
    let source = Buffer::from_host(&stream, &[1u32, 2, 3, 4]).unwrap();
    let mut target = Buffer::<u32>::new(&device, 4).unwrap();
    target.view_mut().fill_bytes(&stream, 0xff).unwrap();
    let part = source.view().slice(1, 2).unwrap();
    target.view_mut().slice_mut(2, 2).unwrap().copy_from(&stream, part).unwrap();
    assert_eq!(target.to_host(&stream).unwrap(), [u32::MAX, u32::MAX, 2, 3]);
    assert!(source.view().slice(3, 2).is_none());
    let error = target.view_mut().copy_from_host(&stream, &[1]).unwrap_err();
    assert!(matches!(error, CudaError::Length { found: 4, expected: 16, .. }), "{error}");
    let waits = fake.count(DriverCall::CtxSynchronize);
    drop(source);
    assert_eq!(fake.count(DriverCall::CtxSynchronize), waits + 1);
    drop((target, stream));
    fake.assert_clean();
}

#[test]
fn buffer_without_memory_reports_what_is_free() {
    let (fake, device) = fake(CAPACITY);
    let error = Buffer::<u8>::new(&device, CAPACITY as usize + 1).err().unwrap();
    assert!(error.is_out_of_memory());
    let (bytes, free) = (CAPACITY as usize + 1, CAPACITY as usize);
    assert!(
        matches!(error, CudaError::OutOfMemory { bytes: b, free: f } if (b, f) == (bytes, free)),
        "{error}"
    );
    fake.assert_clean();
}

#[test]
fn fake_driver_records_misuse() {
    let fake = FakeDriver::new(CAPACITY);
    let handle = fake.create(0, GRANULE).unwrap();
    let address = fake.reserve(2 * GRANULE).unwrap();
    // SAFETY: of the fake, which survives what would break the real driver.
    unsafe {
        fake.map(address, GRANULE, handle).unwrap();
        fake.free_addresses(address, 2 * GRANULE).unwrap_err();
        fake.set_access(0, address, 2 * GRANULE, DeviceAccess::Read).unwrap_err();
        fake.unmap(address, 2 * GRANULE).unwrap_err();
        fake.unmap(address, GRANULE).unwrap();
        fake.unmap(address, GRANULE).unwrap_err();
        fake.release(handle).unwrap();
        fake.release(handle).unwrap_err();
    }
    assert_eq!(fake.violations().len(), 5, "{:?}", fake.violations());
}

proptest! {
    #[test]
    fn uuid_parses_what_it_displays(bytes in any::<[u8; 16]>(), cut in 0usize..40) {
        let text = DeviceUuid(bytes).to_string();
        prop_assert_eq!(DeviceUuid::parse(&text), Some(DeviceUuid(bytes)));
        prop_assert_eq!(DeviceUuid::parse(&text[..cut]), None);
    }
}

#[test]
fn pinned_pages_are_unpinned_with_their_last_part() {
    let (fake, device) = fake(CAPACITY);
    let pinned = PinnedBuffer::pin(&device, HostPages::new(5 << 20).unwrap()).unwrap();
    assert_eq!(fake.pinned(), 6 << 20, "whole huge pages");
    let mut parts = pinned.split(1_000_000);
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
fn unified_memory_is_neither_pinned_nor_measured_by_the_driver() {
    let (fake, discrete) = fake(CAPACITY);
    assert!(!discrete.info().reads_host_memory());
    fake.unify_memory(0);
    let unified = Device::open(fake.clone(), DeviceSelector::Ordinal(0)).unwrap();
    assert!(unified.info().reads_host_memory());
    let mut parts = PinnedBuffer::pin(&unified, HostPages::new(3 << 20).unwrap()).unwrap().split(1 << 20);
    assert_eq!((fake.pinned(), fake.count(DriverCall::MemHostRegister)), (0, 0));
    parts[0].as_mut_slice().fill(7);
    assert_eq!((parts.len(), parts[0].as_slice()[5], parts[1].as_slice()[5]), (4, 7, 0));
    let context = unified.context().unwrap();
    assert_eq!(unified.memory_info(), None);
    assert!(discrete.memory_info().is_some());
    drop((parts, context));
    // Without access to the host's page tables, pages are registered and read where they are.
    fake.change_device(0, |info| info.host_page_tables = false);
    let registers = Device::open(fake.clone(), DeviceSelector::Ordinal(0)).unwrap();
    assert!(registers.info().reads_host_memory());
    let pinned = PinnedBuffer::pin(&registers, HostPages::new(1).unwrap()).unwrap();
    assert_eq!(fake.pinned(), 2 << 20);
    drop(pinned);
    fake.change_device(0, |info| info.registered_pointers = false);
    let copies = Device::open(fake.clone(), DeviceSelector::Ordinal(0)).unwrap();
    assert!(!copies.info().reads_host_memory());
    fake.assert_clean();
}

#[test]
fn pinned_values_are_zero_and_freed_from_any_thread() {
    let (fake, device) = fake(CAPACITY);
    let mut values = PinnedBuffer::<u32>::new(&device, 1000).unwrap();
    assert_eq!(values.as_slice(), [0; 1000]);
    values.as_mut_slice()[999] = 7;
    std::thread::spawn(move || assert_eq!(values.as_slice()[999], 7)).join().unwrap();
    assert!(PinnedBuffer::<u32>::new(&device, 0).unwrap().as_slice().is_empty());
    let error = PinnedBuffer::<u32>::new(&device, usize::MAX).unwrap_err();
    assert!(matches!(error, PinError::TooLarge { .. }), "{error}");
    fake.assert_clean();
}

#[test]
fn failed_pin_names_the_limit_and_leaves_nothing() {
    let (fake, device) = fake(CAPACITY);
    let pages = || HostPages::new(1).unwrap();
    fake.fail(DriverCall::MemHostRegister, 0, 1, ErrorCode::OUT_OF_MEMORY);
    let error = PinnedBuffer::pin(&device, pages()).unwrap_err();
    assert!(error.to_string().contains("2.0 MiB of host memory"), "{error}");
    assert!(error.to_string().contains("RLIMIT_MEMLOCK"), "{error}");
    let PinError::Driver { bytes, limit_bytes: _, source } = error else { panic!("{error}") };
    let expected = (2 << 20, DriverCall::MemHostRegister, ErrorCode::OUT_OF_MEMORY);
    assert_eq!((bytes, source.call, source.code), expected);
    let failed = |limit_bytes| PinError::Driver { bytes: 2 << 20, limit_bytes, source };
    let low = failed(Some(64 << 10)).to_string();
    assert!(low.contains("may lock 0.1 MiB") && low.contains("ulimit -l"), "{low}");
    assert!(!failed(None).to_string().contains("ulimit"));
    fake.fail(DriverCall::DevicePrimaryCtxRetain, 0, 1, ErrorCode::OPERATING_SYSTEM);
    assert!(matches!(PinnedBuffer::pin(&device, pages()), Err(PinError::Context(_))));
    fake.assert_clean();
}
