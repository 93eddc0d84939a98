// SPDX-License-Identifier: Apache-2.0

//! Tests of copies from another device: which load waits, which one reads the file, and what stays
//! in memory meanwhile.

use super::*;
use crate::catalog::BytesSource;
use crate::loader::CONTEXT_BYTES;
use crate::refusal::LoaderErrorKind;

const PROCEED_2: WeightServerAction = WeightServerAction::Proceed { generation: 2 };
const COPY_1_TO_2: WeightServerAction = WeightServerAction::ProceedCopying { generation: 2, source: 1 };

fn on_node(call: u64) -> WeightServerEvent {
    on_device(HOST_NODE, load(call, "a", 1, 100 * MIB))
}

fn failed(generation: u64, kind: LoaderErrorKind) -> WeightServerEvent {
    let failure = LoadFailure::Loader { kind, text: "failed".to_owned() };
    WeightServerEvent::LoadFailed { generation, failure }
}

fn finish(state: &mut WeightServerState, generation: u64) -> Vec<WeightServerAction> {
    let contents = contents(100 * MIB);
    let mut actions = state.handle(WeightServerEvent::LoadHandedOver { generation, contents }, at(70));
    actions.extend(state.handle(WeightServerEvent::GenerationStored { generation }, at(70)));
    actions.extend(state.handle(WeightServerEvent::LoaderEnded { generation }, at(70)));
    check_integrity(state);
    actions
}

fn unload(generation: Option<u64>) -> WeightServerEvent {
    WeightServerEvent::UnloadRequested { call: CallId(90), model: "a".to_owned(), generation }
}

/// The host has the model, and its node copies it.
fn copying() -> WeightServerState {
    let mut state = state();
    load_fully(&mut state, 1, "a", 1, 100 * MIB);
    assert!(state.handle(on_node(2), at(4)).contains(&WeightServerAction::StartLoader { generation: 2 }));
    assert!(state.handle(planned(2, 100 * MIB), at(5)).contains(&COPY_1_TO_2));
    check_integrity(&state);
    state
}

fn phase(state: &WeightServerState, generation: u64) -> Option<GenerationPhase> {
    state.generation(generation).map(|generation| generation.phase)
}

#[test]
fn a_further_copy_comes_from_the_resident_one() {
    let mut state = copying();
    let actions = finish(&mut state, 2);
    let [(2, Ok(outcome))] = answers(&actions)[..] else { panic!("{actions:?}") };
    assert!(!outcome.read_from_file);
    let source = BytesSource::Copy { generation: 1, device: HOST.to_owned() };
    assert_eq!(state.generation(2).unwrap().source, source);
    assert_eq!(state.ledger().reservations().count(), 2, "only the weights are left");
}

#[test]
fn loads_of_one_file_at_once_wait_for_the_first_one() {
    let mut state = state();
    state.handle(load(1, "a", 1, 100 * MIB), at(0));
    // Both loaders start, so that the second has its context when the first copy is there.
    assert!(state.handle(on_node(2), at(0)).contains(&WeightServerAction::StartLoader { generation: 2 }));
    state.handle(planned(2, 100 * MIB), at(1));
    assert_eq!(phase(&state, 2), Some(GenerationPhase::AwaitingSource));
    let first = state.handle(planned(1, 100 * MIB), at(1));
    assert!(first.contains(&WeightServerAction::Proceed { generation: 1 }));
    // A load that waits makes no progress, and none is due.
    let waited = PROGRESS_TIMEOUT - at(1);
    state.handle(WeightServerEvent::LoadProgressed { generation: 1, done_bytes: 1 }, waited);
    assert!(
        !state
            .handle(WeightServerEvent::Tick, waited * 2)
            .contains(&WeightServerAction::StopLoader { generation: 2 })
    );
    assert!(finish(&mut state, 1).contains(&COPY_1_TO_2));
    finish(&mut state, 2);
    assert_eq!(phase(&state, 2), Some(GenerationPhase::Ready));
}

#[test]
fn the_first_load_that_plans_reads_the_files_if_it_came_first() {
    let mut state = state();
    state.handle(load(1, "a", 1, 100 * MIB), at(0));
    state.handle(on_node(2), at(0));
    assert!(
        state.handle(planned(1, 100 * MIB), at(1)).contains(&WeightServerAction::Proceed { generation: 1 })
    );
    let second = state.handle(planned(2, 100 * MIB), at(1));
    assert!(!second.contains(&PROCEED_2) && !second.contains(&COPY_1_TO_2), "{second:?}");
    check_integrity(&state);
}

#[test]
fn a_first_load_that_fails_lets_the_next_one_read_the_files() {
    for how in ["fails", "is unloaded", "makes no progress"] {
        let mut state = state();
        state.handle(load(1, "a", 1, 100 * MIB), at(0));
        state.handle(on_node(2), at(0));
        state.handle(planned(2, 100 * MIB), at(1));
        let actions = match how {
            "fails" => state.handle(failed(1, LoaderErrorKind::File), at(2)),
            "is unloaded" => state.handle(unload(Some(1)), at(2)),
            _ => state.handle(WeightServerEvent::Tick, at(60)),
        };
        assert!(actions.contains(&PROCEED_2), "{how}: {actions:?}");
        check_integrity(&state);
        let actions = finish(&mut state, 2);
        assert!(matches!(answers(&actions)[..], [(2, Ok(LoadOutcome { read_from_file: true, .. }))]));
    }
}

#[test]
fn other_files_layouts_and_packings_are_not_copied() {
    let mut state = state();
    load_fully(&mut state, 1, "a", 1, 100 * MIB);
    state.handle(on_gpu(load(2, "a", 1, 100 * MIB)), at(4));
    assert!(state.handle(planned(2, 100 * MIB), at(5)).contains(&PROCEED_2), "the GPU has another layout");
    state.handle(on_device(HOST_NODE, load(3, "b", 2, 100 * MIB)), at(4));
    let actions = state.handle(planned(3, 100 * MIB), at(5));
    assert!(actions.contains(&WeightServerAction::Proceed { generation: 3 }), "{actions:?}");
    check_integrity(&state);
}

#[test]
fn an_unloaded_source_stays_until_its_copy_is_done() {
    for is_killed in [false, true] {
        let mut state = copying();
        let actions = state.handle(unload(Some(1)), at(6));
        assert!(actions.contains(&WeightServerAction::MarkRetired { generation: 1 }));
        assert!(!actions.contains(&WeightServerAction::RemoveGeneration { generation: 1 }));
        check_integrity(&state);
        let actions = match is_killed {
            false => finish(&mut state, 2),
            true => state.handle(failed(2, LoaderErrorKind::OutOfMemory), at(7)),
        };
        assert!(actions.contains(&WeightServerAction::RemoveGeneration { generation: 1 }), "{actions:?}");
        check_integrity(&state);
    }
}

#[test]
fn unloading_every_copy_stops_the_copy_and_releases_both() {
    let mut state = copying();
    let actions = state.handle(unload(None), at(6));
    assert!(actions.contains(&WeightServerAction::StopLoader { generation: 2 }));
    assert!(actions.contains(&WeightServerAction::RemoveGeneration { generation: 1 }));
    assert_eq!(state.ledger().reservations().count(), 0);
}

#[test]
fn a_copy_that_fails_is_read_from_the_files_once() {
    for (failure, starts_again) in [
        (LoadFailure::LoaderLost { how: "killed".to_owned() }, true),
        (LoadFailure::Loader { kind: LoaderErrorKind::Device, text: String::new() }, true),
        (LoadFailure::Loader { kind: LoaderErrorKind::OutOfMemory, text: String::new() }, false),
        (LoadFailure::Loader { kind: LoaderErrorKind::ModelRefused, text: String::new() }, false),
    ] {
        let mut state = copying();
        let event = WeightServerEvent::LoadFailed { generation: 2, failure: failure.clone() };
        let actions = state.handle(event, at(6));
        let report =
            WeightServerAction::ReportCopyFailure { generation: 2, source: 1, failure: failure.clone() };
        assert_eq!(actions.contains(&report), starts_again, "{failure}");
        let started = actions.contains(&WeightServerAction::StartLoader { generation: 2 });
        assert_eq!(started, starts_again, "{failure}");
        check_integrity(&state);
        if !starts_again {
            assert!(matches!(answers(&actions)[..], [(2, Err(_))]), "{actions:?}");
            continue;
        }
        assert!(state.handle(planned(2, 100 * MIB), at(7)).contains(&PROCEED_2));
        let event = WeightServerEvent::LoadFailed { generation: 2, failure };
        let actions = state.handle(event, at(8));
        assert!(matches!(answers(&actions)[..], [(2, Err(_))]), "once: {actions:?}");
        check_integrity(&state);
    }
}

#[test]
fn a_copy_with_other_checksums_has_its_source_verified() {
    let mut state = copying();
    let actions = state.handle(failed(2, LoaderErrorKind::SourceDamaged), at(6));
    assert!(actions.contains(&WeightServerAction::StartVerifier { generation: 1 }));
    assert!(actions.contains(&WeightServerAction::StartLoader { generation: 2 }));
    assert_eq!(state.generation(1).unwrap().integrity, GenerationIntegrity::Unverified);
    check_integrity(&state);
    // The transfer was to blame.
    state.handle(verified(1, 0), at(7));
    assert_eq!(state.generation(1).unwrap().integrity, GenerationIntegrity::Verified);
}

/// A GPU that has the model, and another one whose loader has planned.
fn planned_on_two_gpus(peers: &[&str], lease_bytes: u64) -> (WeightServerState, Vec<WeightServerAction>) {
    let mut state = state();
    state.handle(on_gpu(load(1, "a", 1, 100 * MIB)), at(0));
    state.handle(planned(1, 100 * MIB), at(1));
    finish(&mut state, 1);
    let WeightServerEvent::AttachRequested { connection, peer, params } = on_gpu(attach(10, "a")) else {
        panic!()
    };
    let params = AttachParams { kv_bytes: lease_bytes, workspace_bytes: 0, ..params };
    state.handle(WeightServerEvent::AttachRequested { connection, peer, params }, at(4));
    state.handle(on_device(OTHER_GPU, load(2, "a", 1, 100 * MIB)), at(5));
    let peer_devices = peers.iter().map(|&peer| peer.to_owned()).collect();
    let contents = GenerationContents { peer_devices, ..contents(100 * MIB) };
    let planned = WeightServerEvent::LoadPlanned { generation: 2, contents, available_bytes: UNLIMITED };
    let actions = state.handle(planned, at(6));
    check_integrity(&state);
    (state, actions)
}

fn copying_bytes(state: &WeightServerState) -> Option<(String, u64)> {
    let mut rows = state.ledger().reservations();
    let row = rows.find(|(key, _)| *key == ReservationKey::Copying(2)).map(|(_, row)| row);
    row.map(|row| (row.device.clone(), row.bytes))
}

#[test]
fn a_gpu_without_peer_access_reserves_a_context_on_the_source() {
    let (state, actions) = planned_on_two_gpus(&[GPU], MIB);
    assert!(actions.contains(&COPY_1_TO_2));
    assert_eq!(copying_bytes(&state), Some((GPU.to_owned(), 0)));
    let (state, actions) = planned_on_two_gpus(&[], MIB);
    assert!(actions.contains(&COPY_1_TO_2));
    assert_eq!(copying_bytes(&state), Some((GPU.to_owned(), CONTEXT_BYTES)));
}

#[test]
fn a_full_source_without_peer_access_is_not_copied() {
    let full = GPU_BYTES - 100 * MIB;
    let (state, actions) = planned_on_two_gpus(&[], full);
    assert!(actions.contains(&PROCEED_2), "{actions:?}");
    assert!(actions.iter().any(|action| matches!(action, WeightServerAction::ReportCopyFailure { .. })));
    assert_eq!(copying_bytes(&state), None);
    let (_, actions) = planned_on_two_gpus(&[GPU], full);
    assert!(actions.contains(&COPY_1_TO_2), "peer access needs nothing");
}

#[test]
fn a_copy_begins_before_the_loader_of_its_source_has_exited() {
    let mut state = state();
    state.handle(load(1, "a", 1, 100 * MIB), at(0));
    state.handle(on_node(2), at(0));
    state.handle(planned(2, 100 * MIB), at(1));
    state.handle(planned(1, 100 * MIB), at(1));
    state.handle(WeightServerEvent::LoadHandedOver { generation: 1, contents: contents(100 * MIB) }, at(2));
    let stored = state.handle(WeightServerEvent::GenerationStored { generation: 1 }, at(2));
    assert!(stored.contains(&COPY_1_TO_2), "{stored:?}");
    assert!(answers(&stored).iter().any(|(call, _)| *call == 1), "the model is ready: {stored:?}");
    check_integrity(&state);
    state.handle(WeightServerEvent::LoaderEnded { generation: 1 }, at(3));
    check_integrity(&state);
}

#[test]
fn the_source_stays_until_the_copying_loader_has_exited() {
    let mut state = copying();
    let handed_over = WeightServerEvent::LoadHandedOver { generation: 2, contents: contents(100 * MIB) };
    state.handle(handed_over, at(6));
    state.handle(WeightServerEvent::GenerationStored { generation: 2 }, at(6));
    state.handle(unload(Some(1)), at(7));
    check_integrity(&state);
    assert_eq!(phase(&state, 1), Some(GenerationPhase::Retiring), "the loader still maps it");
    let ended = state.handle(WeightServerEvent::LoaderEnded { generation: 2 }, at(8));
    assert!(ended.contains(&WeightServerAction::RemoveGeneration { generation: 1 }), "{ended:?}");
    check_integrity(&state);
}

#[test]
fn the_next_loader_of_a_device_starts_after_the_exit_of_the_one_before() {
    let mut state = state();
    state.handle(load(1, "a", 1, 100 * MIB), at(0));
    state.handle(load(2, "b", 2, 100 * MIB), at(0));
    state.handle(planned(1, 100 * MIB), at(1));
    state.handle(WeightServerEvent::LoadHandedOver { generation: 1, contents: contents(100 * MIB) }, at(2));
    state.handle(WeightServerEvent::GenerationStored { generation: 1 }, at(2));
    assert_eq!(phase(&state, 2), Some(GenerationPhase::Queued));
    check_integrity(&state);
    let ended = state.handle(WeightServerEvent::LoaderEnded { generation: 1 }, at(3));
    assert!(ended.contains(&WeightServerAction::StartLoader { generation: 2 }), "{ended:?}");
}
