// SPDX-License-Identifier: Apache-2.0

//! Tests with GPUs: budgets, models on several devices, verification and quarantine.

use super::*;
use service::ByteSize;

use crate::config::{DeviceBudget, DeviceConfig};
use crate::loader::{CONTEXT_BYTES, PINNED_BYTES};

fn planned_onto_gpu(generation: u64, bytes: u64, host_bytes: u64, available_bytes: u64) -> WeightServerEvent {
    let contents = GenerationContents { staging_bytes: CONTEXT_BYTES, host_bytes, ..contents(bytes) };
    WeightServerEvent::LoadPlanned { generation, contents, available_bytes }
}

/// A resident generation that was loaded, not adopted.
fn load_onto_gpu(state: &mut WeightServerState, model: &str, file: u64, bytes: u64) -> u64 {
    state.handle(on_gpu(load(1, model, file, bytes)), at(1));
    let id = state.generations().last().unwrap().id;
    state.handle(planned_onto_gpu(id, bytes, MIB, UNLIMITED), at(1));
    state.handle(WeightServerEvent::LoadHandedOver { generation: id, contents: contents(bytes) }, at(2));
    state.handle(WeightServerEvent::LoaderEnded { generation: id }, at(2));
    state.handle(WeightServerEvent::GenerationStored { generation: id }, at(3));
    assert_eq!(state.generation(id).unwrap().phase, GenerationPhase::Ready);
    id
}

fn attach_onto_gpu(state: &mut WeightServerState, connection: u64, model: &str) -> u64 {
    state.handle(on_gpu(attach(connection, model)), at(4));
    let lease = state.leases().last().unwrap().id;
    state.handle(WeightServerEvent::LeaseStored { lease }, at(4));
    state.handle(WeightServerEvent::Delivered { connection: ConnectionId(connection) }, at(4));
    lease
}

/// A state that adopted this generation on the GPU.
fn adopted(model: &str) -> WeightServerState {
    let key = LoadKey { device: GPU.to_owned(), layout: 1, ..key(1, MIB) };
    let contents = contents(400 * MIB);
    let generation = AdoptedGeneration { id: 4, model: model.to_owned(), key, contents, retired: false };
    let inherited = InheritedState { generations: vec![generation], ..InheritedState::default() };
    WeightServerState::new(limits(1000 * MIB, 1000), inherited, at(0))
}

fn reserved(state: &WeightServerState, device: &str) -> u64 {
    state.ledger().devices().find(|(id, ..)| *id == device).unwrap().2
}

fn verify_answers(actions: &[WeightServerAction]) -> Vec<(u64, bool)> {
    let answer = |action: &WeightServerAction| match action {
        WeightServerAction::ReplyVerify { call, result } => Some((call.0, result.is_ok())),
        _ => None,
    };
    actions.iter().filter_map(answer).collect()
}

fn verify(call: u64, model: &str) -> WeightServerEvent {
    WeightServerEvent::VerifyRequested { call: CallId(call), model: model.to_owned(), device: String::new() }
}

#[test]
fn loader_onto_a_gpu_reserves_its_context_and_gives_it_back() {
    let mut state = state();
    state.handle(on_gpu(load(1, "a", 1, 300 * MIB)), at(0));
    assert_eq!((reserved(&state, GPU), reserved(&state, HOST)), (300 * MIB + CONTEXT_BYTES, 0));
    state.handle(planned_onto_gpu(1, 400 * MIB, MIB, UNLIMITED), at(1));
    assert_eq!(reserved(&state, GPU), 400 * MIB + CONTEXT_BYTES);
    let contents = GenerationContents { manifest_bytes: 5, ..contents(400 * MIB) };
    state.handle(WeightServerEvent::LoadHandedOver { generation: 1, contents }, at(2));
    // The manifest is in host memory.
    assert_eq!(reserved(&state, GPU), 400 * MIB);
    check_integrity(&state);
}

#[test]
fn loader_onto_a_gpu_without_room_for_its_context_is_never_started() {
    let mut state = state();
    let actions = state.handle(on_gpu(load(1, "a", 1, GPU_BYTES - CONTEXT_BYTES + 1)), at(0));
    assert!(matches!(
        answers(&actions)[..],
        [(1, Err(LoadFailure::Reservation(ReservationError::InsufficientMemory { .. })))]
    ));
    assert!(!actions.iter().any(|action| matches!(action, WeightServerAction::StartLoader { .. })));
    assert_eq!(state.ledger().reservations().count(), 0);

    // A queued load has no context yet, and must reserve it when it starts.
    state.handle(on_gpu(load(1, "a", 1, 400 * MIB)), at(1));
    let id = state.generations().last().unwrap().id;
    state.handle(on_gpu(load(2, "b", 2, 400 * MIB)), at(1));
    assert_eq!(reserved(&state, GPU), 800 * MIB + CONTEXT_BYTES);
    let WeightServerEvent::AttachRequested { connection, peer, params } = on_gpu(attach(10, "a")) else {
        panic!()
    };
    let params = AttachParams { kv_bytes: GPU_BYTES - 800 * MIB - params.workspace_bytes, ..params };
    state.handle(WeightServerEvent::AttachRequested { connection, peer, params }, at(1));
    state.handle(planned_onto_gpu(id, 400 * MIB, MIB, UNLIMITED), at(1));
    state.handle(WeightServerEvent::LoadHandedOver { generation: id, contents: contents(400 * MIB) }, at(2));
    let mut actions = state.handle(WeightServerEvent::GenerationStored { generation: id }, at(3));
    actions.extend(state.handle(WeightServerEvent::LoaderEnded { generation: id }, at(3)));
    assert!(
        matches!(answers(&actions)[..], [(1, Ok(_)), (2, Err(LoadFailure::Reservation(_)))]),
        "{actions:?}"
    );
    assert_eq!(reserved(&state, GPU), GPU_BYTES - 400 * MIB, "weights and the lease of the one that waited");
    check_integrity(&state);
}

#[test]
fn worker_that_dies_before_it_has_mapped_anything_gives_its_row_back() {
    let mut state = state();
    load_onto_gpu(&mut state, "a", 1, 400 * MIB);
    for (connection, stored, taken) in [(10, false, false), (11, true, false), (12, true, true)] {
        let peer = peer(connection);
        let WeightServerEvent::AttachRequested { params, .. } = on_gpu(attach(connection as u64, "a")) else {
            panic!()
        };
        let connection = ConnectionId(connection as u64);
        let params = AttachParams { workspace_bytes: 600 * MIB, ..params };
        state.handle(WeightServerEvent::AttachRequested { connection, peer, params }, at(4));
        let lease = state.leases().last().unwrap().id;
        if stored {
            state.handle(WeightServerEvent::LeaseStored { lease }, at(4));
        }
        if taken {
            state.handle(WeightServerEvent::Delivered { connection }, at(4));
        }
        // The whole grant is reserved, even if the worker is still creating its context.
        assert_eq!(reserved(&state, GPU), 1010 * MIB);
        state.handle(WeightServerEvent::ConnectionEnded { connection }, at(5));
        assert_eq!(reserved(&state, GPU), 1010 * MIB, "until its process has ended");
        check_integrity(&state);
        assert!(
            state
                .handle(WeightServerEvent::ProcessEnded { lease }, at(5))
                .contains(&WeightServerAction::RemoveLease { lease }),
            "the row goes"
        );
        assert_eq!(reserved(&state, GPU), 400 * MIB);
        check_integrity(&state);
    }
}

#[test]
fn host_without_memory_for_pinned_buffers_refuses_a_load_onto_a_gpu() {
    let mut state = state();
    let asked = |available: u64| {
        let mut event = on_gpu(load(1, "a", 1, 300 * MIB));
        if let WeightServerEvent::LoadRequested { available_bytes, .. } = &mut event {
            *available_bytes = available;
        }
        event
    };
    // The file's size does not bound the host memory of a load onto a GPU.
    let actions = state.handle(asked(PINNED_BYTES - 1), at(0));
    let expected = LoadFailure::InsufficientMemory { needed: PINNED_BYTES, available: PINNED_BYTES - 1 };
    assert_eq!(answers(&actions), [(1, &Err(expected))]);
    assert!(
        state.handle(asked(PINNED_BYTES), at(0)).contains(&WeightServerAction::StartLoader { generation: 1 }),
        "it fits"
    );
    let actions = state.handle(planned_onto_gpu(1, 300 * MIB, 256 * MIB, 100 * MIB), at(1));
    let expected = LoadFailure::InsufficientMemory { needed: 256 * MIB, available: 100 * MIB };
    assert_eq!(answers(&actions), [(1, &Err(expected))]);
    assert_eq!(reserved(&state, GPU), 0);
}

#[test]
fn unconfigured_device_is_refused_with_the_configured_ones() {
    let mut state = state();
    let WeightServerEvent::LoadRequested { call, mut params, available_bytes } = load(1, "a", 1, MIB) else {
        panic!()
    };
    params.key = params.key.map(|key| LoadKey { device: "GPU-2".to_owned(), ..key });
    let actions = state.handle(WeightServerEvent::LoadRequested { call, params, available_bytes }, at(0));
    let [(1, Err(failure))] = answers(&actions)[..] else { panic!("{actions:?}") };
    let text = failure.to_string();
    assert!(text.contains("GPU-2") && text.contains(GPU) && text.contains(HOST), "{text}");
    assert_eq!(state.ledger().reservations().count(), 0);
}

#[test]
fn one_name_stands_for_a_model_on_several_devices() {
    let mut state = state();
    load_fully(&mut state, 1, "a", 1, 10 * MIB);
    load_onto_gpu(&mut state, "a", 1, 20 * MIB);
    assert_eq!(state.generations().filter(|g| g.phase == GenerationPhase::Ready).count(), 2);
    attach_fully(&mut state, 10, "a");
    let on_device = attach_onto_gpu(&mut state, 11, "a");
    assert_eq!(state.lease(on_device).unwrap().generation, 2);
    // Unloading affects the model on every device.
    state.handle(
        WeightServerEvent::UnloadRequested { call: CallId(5), model: "a".to_owned(), generation: None },
        at(5),
    );
    assert!(state.generations().all(|g| g.phase == GenerationPhase::Retiring));
    check_integrity(&state);
}

#[test]
fn model_on_another_device_is_refused_by_name_of_that_device() {
    let mut state = state();
    load_fully(&mut state, 1, "a", 1, 10 * MIB);
    let actions = state.handle(on_gpu(attach(10, "a")), at(4));
    let [AttachRefusal::Device { wanted, held, .. }] = refusals(&actions)[..] else { panic!("{actions:?}") };
    assert_eq!((wanted.as_str(), held.as_str()), (GPU, HOST));
    let WeightServerEvent::AttachRequested { connection, peer, params } = attach(11, "a") else { panic!() };
    let params = AttachParams { layout: 1, ..params };
    let actions = state.handle(WeightServerEvent::AttachRequested { connection, peer, params }, at(4));
    assert!(matches!(refusals(&actions)[..], [AttachRefusal::Layout { wanted: 1, held: 0, .. }]));
}

#[test]
fn lease_that_does_not_fit_is_told_what_would() {
    let mut state = state();
    load_onto_gpu(&mut state, "a", 1, 400 * MIB);
    let WeightServerEvent::AttachRequested { connection, peer, params } = on_gpu(attach(10, "a")) else {
        panic!()
    };
    let params = AttachParams { kv_bytes: 2000 * MIB, workspace_bytes: 600 * MIB, ..params };
    let actions = state.handle(WeightServerEvent::AttachRequested { connection, peer, params }, at(4));
    let [refusal @ AttachRefusal::LeaseTooLarge { kv_fits, .. }] = refusals(&actions)[..] else {
        panic!("{actions:?}")
    };
    assert_eq!(*kv_fits, GPU_BYTES - 1000 * MIB);
    assert!(refusal.to_string().contains("are missing"), "{refusal}");
}

#[test]
fn adopted_generation_serves_and_is_verified_by_itself() {
    let mut state = adopted("a");
    assert_eq!(state.generation(4).unwrap().integrity, GenerationIntegrity::Unverified);
    attach_onto_gpu(&mut state, 10, "a");
    let actions = state.handle(WeightServerEvent::Tick, at(5));
    assert!(actions.contains(&WeightServerAction::StartVerifier { generation: 4 }));
    assert_eq!(
        state.ledger().reservations().filter(|(key, _)| *key == ReservationKey::Verifying(4)).count(),
        1
    );
    assert!(state.handle(WeightServerEvent::Tick, at(6)).is_empty(), "one at a time");
    state.handle(verified(4, 0), at(7));
    assert_eq!(state.generation(4).unwrap().integrity, GenerationIntegrity::Verified);
    assert!(
        !state
            .handle(WeightServerEvent::Tick, at(1000))
            .contains(&WeightServerAction::StartVerifier { generation: 4 })
    );
    check_integrity(&state);
}

#[test]
fn verification_that_cannot_be_done_is_tried_again_and_a_caller_told() {
    let mut state = adopted("a");
    state.handle(WeightServerEvent::Tick, at(1));
    let failure = VerifyFailure::Lost { how: "killed".to_owned() };
    state.handle(WeightServerEvent::VerifyFailed { generation: 4, failure }, at(2));
    assert_eq!(state.generation(4).unwrap().integrity, GenerationIntegrity::Unverified);
    assert!(state.handle(WeightServerEvent::Tick, at(30)).is_empty());
    // A request does not wait for the retry interval.
    assert!(
        state.handle(verify(7, "a"), at(31)).contains(&WeightServerAction::StartVerifier { generation: 4 })
    );
    assert_eq!(verify_answers(&state.handle(verified(4, 0), at(32))), [(7, true)]);
    assert_eq!(verify_answers(&state.handle(verify(8, "b"), at(33))), [(8, false)]);
}

#[test]
fn verifier_without_room_for_its_context_is_refused() {
    let mut state = adopted("a");
    load_onto_gpu(&mut state, "b", 2, GPU_BYTES - 400 * MIB - CONTEXT_BYTES);
    let WeightServerEvent::AttachRequested { connection, peer, params } = on_gpu(attach(10, "b")) else {
        panic!()
    };
    state.handle(WeightServerEvent::AttachRequested { connection, peer, params }, at(4));
    assert_eq!(verify_answers(&state.handle(verify(7, "a"), at(5))), [(7, false)]);
    check_integrity(&state);
}

#[test]
fn damage_quarantines_the_generation_ends_its_leases_and_loads_it_anew() {
    let mut state = state();
    let damaged = load_onto_gpu(&mut state, "a", 1, 100 * MIB);
    let lease = attach_onto_gpu(&mut state, 10, "a");
    state.handle(verify(7, "a"), at(5));
    let actions = state.handle(verified(damaged, 2), at(6));
    assert_eq!(verify_answers(&actions), [(7, true)]);
    assert!(matches!(refusals(&actions)[..], [AttachRefusal::Quarantined { generation: 1, .. }]));
    assert!(actions.contains(&WeightServerAction::StartLoader { generation: 2 }));
    check_integrity(&state);

    // The worker may not reclaim; it waits for the new generation like any other.
    state.handle(WeightServerEvent::ConnectionEnded { connection: ConnectionId(10) }, at(6));
    let claim = WeightServerEvent::ReclaimRequested {
        connection: ConnectionId(11),
        peer: peer(10),
        claim: LeaseClaim { generation: damaged, lease, token: Bytes::new(), ..claim() },
    };
    let actions = state.handle(claim, at(7));
    assert!(matches!(refusals(&actions)[..], [AttachRefusal::Quarantined { .. }]));
    let actions = state.handle(on_gpu(attach(12, "a")), at(7));
    assert!(matches!(
        actions[..],
        [WeightServerAction::SendProgress { waiter: WaiterId::Worker(ConnectionId(12)), .. }]
    ));
    let actions = state.handle(WeightServerEvent::ProcessEnded { lease }, at(8));
    assert!(actions.contains(&WeightServerAction::RemoveGeneration { generation: damaged }));
    check_integrity(&state);
}

#[test]
fn damaged_model_without_room_beside_it_is_loaded_when_it_is_gone_unless_it_was_unloaded() {
    for unloaded in [false, true] {
        let mut state = state();
        let WeightServerEvent::LoadRequested { call, params, available_bytes } =
            on_gpu(load(1, "a", 1, 1000 * MIB))
        else {
            panic!()
        };
        state.handle(WeightServerEvent::LoadRequested { call, params, available_bytes }, at(0));
        state.handle(planned_onto_gpu(1, 1000 * MIB, 0, UNLIMITED), at(1));
        state.handle(
            WeightServerEvent::LoadHandedOver { generation: 1, contents: contents(1000 * MIB) },
            at(2),
        );
        state.handle(WeightServerEvent::LoaderEnded { generation: 1 }, at(2));
        state.handle(WeightServerEvent::GenerationStored { generation: 1 }, at(3));
        let lease = attach_onto_gpu(&mut state, 10, "a");
        state.handle(verify(7, "a"), at(5));
        let actions = state.handle(verified(1, 1), at(6));
        assert!(!actions.iter().any(|action| matches!(action, WeightServerAction::StartLoader { .. })));
        if unloaded {
            let actions = state.handle(
                WeightServerEvent::UnloadRequested {
                    call: CallId(9),
                    model: "a".to_owned(),
                    generation: None,
                },
                at(7),
            );
            assert!(
                matches!(actions[..], [WeightServerAction::ReplyUnload { result: Ok(1), .. }]),
                "{actions:?}"
            );
        }
        let actions = state.handle(WeightServerEvent::ProcessEnded { lease }, at(8));
        assert_eq!(
            actions.contains(&WeightServerAction::StartLoader { generation: 2 }),
            !unloaded,
            "{actions:?}"
        );
        check_integrity(&state);
    }
}

#[test]
fn unload_stops_a_running_verifier() {
    let mut state = adopted("a");
    state.handle(WeightServerEvent::Tick, at(1));
    state.handle(verify(7, "a"), at(2));
    let actions = state.handle(
        WeightServerEvent::UnloadRequested { call: CallId(8), model: "a".to_owned(), generation: None },
        at(3),
    );
    assert!(actions.contains(&WeightServerAction::StopVerifier { generation: 4 }));
    assert_eq!(verify_answers(&actions), [(7, false)]);
    assert_eq!(state.ledger().reservations().count(), 0);
}

#[test]
fn host_and_gpu_with_unified_memory_have_one_budget() {
    let mut state = state();
    let on_unified = |event| on_device(UNIFIED_GPU, event);
    state.handle(on_unified(load(1, "a", 1, 300 * MIB)), at(0));
    let staging = CONTEXT_BYTES;
    assert_eq!(reserved(&state, HOST), 300 * MIB + staging);
    state.handle(planned_onto_gpu(1, 300 * MIB, MIB, UNLIMITED), at(1));
    state.handle(WeightServerEvent::LoadHandedOver { generation: 1, contents: contents(300 * MIB) }, at(2));
    state.handle(WeightServerEvent::LoaderEnded { generation: 1 }, at(2));
    state.handle(WeightServerEvent::GenerationStored { generation: 1 }, at(3));
    assert_eq!(reserved(&state, HOST), 300 * MIB);
    // 700 of 1000 MiB are left, whichever of the two asks.
    for event in [load(2, "b", 2, 701 * MIB), on_unified(load(2, "b", 2, 701 * MIB))] {
        let actions = state.handle(event, at(4));
        let [(2, Err(LoadFailure::Reservation(ReservationError::InsufficientMemory { device, free, .. })))] =
            answers(&actions)[..]
        else {
            panic!("{actions:?}")
        };
        assert_eq!((device.as_str(), *free), (HOST, 700 * MIB));
    }
    state.handle(load(3, "c", 3, 700 * MIB), at(5));
    assert_eq!(reserved(&state, HOST), 1000 * MIB);
    assert_eq!(reserved(&state, GPU), 0, "a GPU with memory of its own");
    assert!(state.ledger().devices().all(|(device, ..)| device != UNIFIED_GPU));
    check_integrity(&state);
}

#[test]
fn load_onto_unified_memory_needs_the_whole_model_of_the_available_memory() {
    let needed = 100 * MIB + PINNED_BYTES + CONTEXT_BYTES;
    let asked = |available: u64| match on_device(UNIFIED_GPU, load(1, "a", 1, 100 * MIB)) {
        WeightServerEvent::LoadRequested { call, params, .. } => {
            WeightServerEvent::LoadRequested { call, params, available_bytes: available }
        }
        other => other,
    };
    let mut state = state();
    let actions = state.handle(asked(needed - 1), at(0));
    let expected = LoadFailure::InsufficientMemory { needed, available: needed - 1 };
    assert_eq!(answers(&actions), [(1, &Err(expected))]);
    let started = WeightServerAction::StartLoader { generation: 1 };
    assert!(state.handle(asked(needed), at(0)).contains(&started));
}

#[test]
fn a_gpu_that_is_added_later_has_its_own_budget_and_a_known_one_keeps_its_budget() {
    let later = "GPU-99999999-4455-6677-8899-aabbccddeeff";
    let mut state = state();
    let actions = state.handle(on_device(later, load(1, "a", 1, MIB)), at(0));
    let refused = |actions: &[WeightServerAction]| {
        matches!(
            answers(actions)[..],
            [(_, Err(LoadFailure::Reservation(ReservationError::UnknownDevice { .. })))]
        )
    };
    assert!(refused(&actions), "{actions:?}");
    let added = |id: &str, mib: u64| WeightServerEvent::DeviceAdded {
        device: DeviceConfig {
            id: id.to_owned(),
            budget: DeviceBudget::Own(ByteSize(mib * MIB)),
            numa_node: None,
        },
        node_bytes: 0,
    };
    assert!(state.handle(added(later, 5000), at(1)).is_empty(), "no loader, no context");
    assert_eq!(reserved(&state, later), 0);
    state.handle(added(later, 1), at(1));
    state.handle(added(UNIFIED_GPU, 1), at(1));
    state.handle(added(GPU, 1), at(1));
    let capacity = |id: &str| state.ledger().devices().find(|(known, ..)| *known == id).map(|row| row.1);
    assert_eq!(
        (capacity(later), capacity(GPU), capacity(UNIFIED_GPU)),
        (Some(5000 * MIB), Some(GPU_BYTES), None)
    );
    let started = WeightServerAction::StartLoader { generation: 1 };
    assert!(state.handle(on_device(later, load(2, "a", 1, MIB)), at(2)).contains(&started));
    check_integrity(&state);
}

#[test]
fn the_node_of_a_gpu_that_is_added_later_is_no_memory_of_the_host() {
    let mut limits = limits(1000 * MIB, 1000);
    limits.host_capacity_is_measured = true;
    let mut state = WeightServerState::new(limits, InheritedState::default(), at(0));
    let node = memory::numa::node_of_device(HOST_NODE);
    let device = DeviceConfig {
        id: "GPU-own-node".to_owned(),
        budget: DeviceBudget::Own(ByteSize(MIB)),
        numa_node: node,
    };
    let added = || WeightServerEvent::DeviceAdded { device: device.clone(), node_bytes: 300 * MIB };
    state.handle(added(), at(0));
    state.handle(added(), at(0));
    let devices: Vec<(&str, u64)> = state.ledger().devices().map(|(id, bytes, _)| (id, bytes)).collect();
    assert!(devices.contains(&(HOST, 700 * MIB)), "{devices:?}");
    assert!(devices.iter().all(|(id, _)| *id != HOST_NODE), "{devices:?}");
}
