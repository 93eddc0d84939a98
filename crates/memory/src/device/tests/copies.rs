// SPDX-License-Identifier: Apache-2.0

//! Copies of a model from one GPU to another, over both routes.

use super::*;

const ROUTES: [CopyRoute; 2] = [CopyRoute::Peer, CopyRoute::Host];

/// Larger than a buffer of the host route, and no multiple of it.
const COPIED: [u64; 2] = [GRANULE, 11 * GRANULE];

/// The driver calls of a copy that may fail.
const COPYING: [DriverCall; 7] = [
    DriverCall::MemImportFromShareableHandle,
    DriverCall::MemSetAccess,
    DriverCall::MemHostAlloc,
    DriverCall::StreamCreate,
    DriverCall::MemcpyDtoDAsync,
    DriverCall::MemcpyDtoHAsync,
    DriverCall::MemcpyHtoDAsync,
];

fn second(fake: &Arc<FakeDriver>) -> Device {
    Device::open(fake.clone(), DeviceSelector::Ordinal(1)).unwrap()
}

fn places(sizes: &[u64]) -> Vec<TensorPlace> {
    (0..sizes.len()).map(|allocation| TensorPlace { allocation, offset: 256 }).collect()
}

/// A model on the first device of a fake, with a known last byte.
fn source(device: &Device) -> Vec<OwnedFd> {
    let context = device.context().unwrap();
    let mut model = WritableModel::allocate(&context, &COPIED, NO_PATIENCE).unwrap();
    for (allocation, bytes) in COPIED.iter().enumerate() {
        model.write(&context, allocation, 256, &pattern(allocation)).unwrap();
        model.write(&context, allocation, bytes - 1, &[7]).unwrap();
    }
    model.finish().unwrap()
}

#[derive(Debug, thiserror::Error)]
enum CopyFailed {
    #[error(transparent)]
    Allocate(#[from] AllocateError),
    #[error(transparent)]
    Copy(#[from] CopyModelError),
}

/// Copies the model to the second device, and returns the copy's descriptors.
fn copy(fake: &Arc<FakeDriver>, route: CopyRoute, fds: &[OwnedFd]) -> Result<Vec<OwnedFd>, CopyFailed> {
    let first = Device::open(fake.clone(), DeviceSelector::Ordinal(0)).unwrap();
    let target = second(fake);
    let context = target.context().unwrap();
    let mut model = WritableModel::allocate(&context, &COPIED, NO_PATIENCE)?;
    let source = CopySource::import(&first, &target, route, &manifest(&first, &COPIED), fds)?;
    source.copy_to(&context, &mut model, &places(&COPIED))?;
    drop(source);
    Ok(model.finish().unwrap())
}

#[test]
fn a_copy_has_every_byte_and_outlives_its_source() {
    for route in ROUTES {
        let (fake, device) = fake(8 * TOTAL);
        let fds = source(&device);
        let copied = copy(&fake, route, &fds).unwrap();
        drop(fds);
        let target = second(&fake);
        let model = ImportedModel::import(&target, &manifest(&target, &COPIED), &copied).unwrap();
        assert_holds_pattern(&target, &model.tensors);
        let context = target.context().unwrap();
        for tensor in &model.tensors {
            let mut last = [0];
            tensor.read(&context, tensor.bytes - 1, &mut last).unwrap();
            assert_eq!(last, [7], "{route:?} {}", tensor.name);
        }
        drop((model, context));
        fake.assert_clean();
    }
}

#[test]
fn only_the_host_route_makes_a_context_on_the_source() {
    for (route, contexts) in [(CopyRoute::Peer, 1), (CopyRoute::Host, 2)] {
        let (fake, device) = fake(8 * TOTAL);
        let fds = source(&device);
        let before = fake.count(DriverCall::DevicePrimaryCtxRetain);
        copy(&fake, route, &fds).unwrap();
        assert_eq!(fake.count(DriverCall::DevicePrimaryCtxRetain) - before, contexts, "{route:?}");
    }
}

#[test]
fn the_route_and_the_peers_are_what_the_driver_says() {
    let (fake, device) = fake(TOTAL);
    let other = second(&fake);
    assert_eq!(CopyRoute::between(&device, &other).unwrap(), CopyRoute::Peer);
    assert_eq!(device.peers().unwrap(), [other.uuid()]);
    fake.set_peer_access(false);
    assert_eq!(CopyRoute::between(&device, &other).unwrap(), CopyRoute::Host);
    assert_eq!(CopyRoute::between(&device, &device).unwrap(), CopyRoute::Peer, "a device maps its own");
    assert!(device.peers().unwrap().is_empty());
}

#[test]
fn a_source_mapped_for_a_peer_is_read_only_there_and_absent_elsewhere() {
    let (fake, device) = fake(8 * TOTAL);
    let fds = source(&device);
    let target = second(&fake);
    let listed = manifest(&device, &COPIED);
    let model = ImportedModel::import_for(&device, &target, &listed, &fds).unwrap();
    let address = model.tensors[0].address();
    let _context = target.context().unwrap();
    // SAFETY: of the fake, which checks every access.
    let error = unsafe { fake.copy_to_device(address, &[1]) }.unwrap_err();
    assert_eq!(error.code, ErrorCode::ILLEGAL_ADDRESS);
    assert_holds_pattern(&target, &model.tensors);
    let context = device.context().unwrap();
    model.tensors[0].read(&context, 0, &mut [0]).unwrap_err();
}

#[test]
fn a_failed_call_of_a_copy_leaves_nothing() {
    for route in ROUTES {
        for call in COPYING {
            let (fake, device) = fake(8 * TOTAL);
            let fds = source(&device);
            let calls = {
                let before = fake.count(call);
                copy(&fake, route, &fds).unwrap();
                fake.count(call) - before
            };
            for k in 0..calls {
                fake.fail(call, k, 1, ErrorCode::OPERATING_SYSTEM);
                copy(&fake, route, &fds).unwrap_err();
                fake.assert_clean();
            }
        }
    }
}

#[test]
fn places_outside_of_the_target_are_refused() {
    let (fake, device) = fake(8 * TOTAL);
    let fds = source(&device);
    let target = second(&fake);
    let context = target.context().unwrap();
    let mut model = WritableModel::allocate(&context, &COPIED, NO_PATIENCE).unwrap();
    let listed = manifest(&device, &COPIED);
    let source = CopySource::import(&device, &target, CopyRoute::Peer, &listed, &fds).unwrap();
    let error = source.copy_to(&context, &mut model, &places(&COPIED[..1])).unwrap_err();
    assert!(matches!(error, CopyModelError::Count { count: 1, tensors: 2 }), "{error}");
    for place in [
        TensorPlace { allocation: 1, offset: 512 },
        TensorPlace { allocation: 2, offset: 0 },
        TensorPlace { allocation: 1, offset: u64::MAX },
    ] {
        let mut wrong = places(&COPIED);
        wrong[1] = place;
        let error = source.copy_to(&context, &mut model, &wrong).unwrap_err();
        assert!(
            matches!(&error, CopyModelError::Place { tensor, .. } if tensor == "blk.1.weight"),
            "{error}"
        );
    }
}
