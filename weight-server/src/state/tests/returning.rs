// SPDX-License-Identifier: Apache-2.0

//! Workers return generations and leases that this weight-server has lost.

use super::*;

const DIGEST: [u8; 32] = [5; 32];

/// The claim of a worker that can return one allocation.
pub(super) fn claim() -> LeaseClaim {
    LeaseClaim {
        protocol: PROTOCOL_VERSION,
        generation: 1,
        lease: 1,
        token: Bytes::new(),
        digest: Bytes::from_static(&[5; 32]),
        device: HOST.to_owned(),
        kv_bytes: 10 * MIB,
        workspace_bytes: MIB,
        fds: 2,
        manifest_inode: 0,
    }
}

fn adopted(id: u64, model: &str, file: u64) -> AdoptedGeneration {
    let contents = GenerationContents { digest: Some(DIGEST), created_unix_seconds: id, ..contents(MIB) };
    AdoptedGeneration { id, model: model.to_owned(), key: key(file, MIB), contents, retired: false }
}

pub(super) fn returned(connection: u64, id: u64, model: &str, file: u64) -> WeightServerEvent {
    let connection = ConnectionId(connection);
    WeightServerEvent::GenerationReturned { connection, generation: adopted(id, model, file) }
}

/// Claims lease `lease` of generation 1 in the name of process `pid`, over a connection of the same
/// number.
fn reclaim(pid: i32, lease: u64) -> WeightServerEvent {
    WeightServerEvent::ReclaimRequested {
        connection: ConnectionId(pid as u64),
        peer: peer(pid),
        claim: LeaseClaim { lease, ..claim() },
    }
}

/// A state that awaits processes 1 and 2.
fn awaiting() -> WeightServerState {
    let inherited =
        InheritedState { awaited: vec![peer(1), peer(2)], first_id: 4096, ..InheritedState::default() };
    WeightServerState::new(limits(1000 * MIB, 1000), inherited, at(0))
}

fn requested(actions: &[WeightServerAction]) -> bool {
    actions.iter().any(|action| matches!(action, WeightServerAction::RequestReturn { .. }))
}

fn started(actions: &[WeightServerAction]) -> bool {
    actions.iter().any(|action| matches!(action, WeightServerAction::StartLoader { .. }))
}

#[test]
fn generation_comes_back_once_and_both_leases_are_held() {
    let mut state = awaiting();
    assert!(requested(&state.handle(reclaim(1, 1), at(1))));
    // The second worker is not asked for the same descriptors.
    assert!(matches!(refusals(&state.handle(reclaim(2, 2), at(1)))[..], [AttachRefusal::NotYet { .. }]));
    let actions = state.handle(returned(1, 1, "a", 1), at(1));
    assert!(actions.contains(&WeightServerAction::StoreGeneration { generation: 1 }));
    check_integrity(&state);
    let actions = state.handle(WeightServerEvent::LeaseStored { lease: 1 }, at(1));
    let reclaimed = WeightServerAction::Reclaimed { connection: ConnectionId(1), lease: 1, generation: 1 };
    assert!(actions.contains(&reclaimed));
    // The second worker comes again. Its lease needs no descriptors.
    let actions = state.handle(reclaim(2, 2), at(2));
    assert!(!requested(&actions) && refusals(&actions).is_empty());
    state.handle(WeightServerEvent::LeaseStored { lease: 2 }, at(2));
    assert!(state.leases().all(|lease| matches!(lease.phase, LeasePhase::Held { .. })));
    assert_eq!((state.generations().count(), state.leases().count()), (1, 2));
    // The file of the configuration is resident.
    assert!(answers(&state.handle(load(9, "a", 1, MIB), at(2)))[0].1.is_ok());
    check_integrity(&state);
}

#[test]
fn loads_wait_for_awaited_workers_and_for_those_alone() {
    let mut state = awaiting();
    let awaits = |actions: &[WeightServerAction]| {
        matches!(answers(actions)[..], [(_, Err(LoadFailure::AwaitingReclaim { workers: 2 }))])
    };
    assert!(awaits(&state.handle(load(9, "b", 2, MIB), at(1))));
    // One exits, the other attaches: it has nothing to return.
    state.handle(WeightServerEvent::AwaitedProcessEnded { pid: 1 }, at(1));
    state.handle(attach(2, "b"), at(1));
    state.handle(WeightServerEvent::Tick, at(5));
    assert!(started(&state.handle(load(10, "b", 2, MIB), at(5))));
    // A stopped worker is awaited for a bounded time.
    let mut state = awaiting();
    state.handle(WeightServerEvent::Tick, RECLAIM_TIMEOUT + at(1));
    assert!(started(&state.handle(load(9, "b", 2, MIB), at(40))));
}

#[test]
fn new_leases_wait_until_the_ledger_counts_what_other_workers_reserve() {
    let is_refused =
        |actions: &[WeightServerAction]| matches!(refusals(actions)[..], [AttachRefusal::NotYet { .. }]);
    let returned_to = |state: &mut WeightServerState| {
        state.handle(reclaim(1, 1), at(1));
        state.handle(returned(1, 1, "a", 1), at(1));
        state.handle(WeightServerEvent::LeaseStored { lease: 1 }, at(1));
    };
    let mut state = awaiting();
    returned_to(&mut state);
    assert!(is_refused(&state.handle(attach(3, "a"), at(1))), "process 2 has told nothing");
    state.handle(reclaim(2, 2), at(1));
    assert!(is_refused(&state.handle(attach(3, "a"), at(2))), "it may claim another lease");
    state.handle(WeightServerEvent::Tick, at(4));
    assert!(refusals(&state.handle(attach(3, "a"), at(4))).is_empty());
    assert_eq!(state.leases().count(), 3);
    check_integrity(&state);

    // A stopped worker delays others for a bounded time.
    let mut state = awaiting();
    returned_to(&mut state);
    state.handle(WeightServerEvent::Tick, at(9));
    assert!(is_refused(&state.handle(attach(3, "a"), at(9))));
    assert!(refusals(&state.handle(attach(3, "a"), UNKNOWN_RESERVATIONS_WAIT)).is_empty());
    check_integrity(&state);
}

#[test]
fn a_worker_that_dies_while_it_returns_is_followed_by_the_next_one() {
    let mut state = awaiting();
    assert!(requested(&state.handle(reclaim(1, 1), at(1))));
    state.handle(WeightServerEvent::ConnectionEnded { connection: ConnectionId(1) }, at(1));
    assert!(requested(&state.handle(reclaim(2, 2), at(1))));
    // What the first one had sent arrives late and is not taken.
    let actions = state.handle(returned(1, 1, "a", 1), at(1));
    assert_eq!(actions, [WeightServerAction::RemoveGeneration { generation: 1 }]);
    state.handle(returned(2, 1, "a", 1), at(1));
    assert_eq!(state.generations().count(), 1);
    check_integrity(&state);
}

#[test]
fn another_generation_than_claimed_is_refused_and_disturbs_none() {
    let mut state = state();
    load_fully(&mut state, 1, "b", 2, MIB);
    for foreign in [returned(1, 1, "b", 2), returned(1, 8, "x", 9)] {
        let claim = LeaseClaim { generation: 7, lease: 7, ..claim() };
        let claimed =
            WeightServerEvent::ReclaimRequested { connection: ConnectionId(1), peer: peer(1), claim };
        assert!(requested(&state.handle(claimed, at(1))));
        let actions = state.handle(foreign, at(1));
        assert!(matches!(refusals(&actions)[..], [AttachRefusal::Violation { .. }]), "{actions:?}");
        assert!(!actions.contains(&WeightServerAction::RemoveGeneration { generation: 1 }));
    }
    assert_eq!(state.generations().count(), 1);
    check_integrity(&state);
}

#[test]
fn a_return_with_the_number_of_a_load_leaves_no_descriptors() {
    let mut state = state();
    let returns = |state: &mut WeightServerState| {
        let claim = LeaseClaim { generation: 7, lease: 7, ..claim() };
        let claimed =
            WeightServerEvent::ReclaimRequested { connection: ConnectionId(1), peer: peer(1), claim };
        assert!(requested(&state.handle(claimed, at(1))));
        let actions = state.handle(returned(1, 1, "x", 9), at(1));
        actions.contains(&WeightServerAction::RemoveGeneration { generation: 1 })
    };
    state.handle(load(9, "b", 2, MIB), at(0));
    assert!(returns(&mut state), "the loader has handed over nothing yet");
    state.handle(planned(1, MIB), at(1));
    assert!(returns(&mut state), "the loader has handed over nothing yet");
    state.handle(WeightServerEvent::LoadHandedOver { generation: 1, contents: contents(MIB) }, at(2));
    assert!(!returns(&mut state), "these are the loader's");
    assert_eq!(state.generations().count(), 1);
    check_integrity(&state);
}

#[test]
fn a_claimed_number_never_replaces_a_lease_and_never_is_the_last() {
    let mut state = state();
    load_fully(&mut state, 1, "b", 2, MIB);
    // Two workers claim lease 1 while it is free.
    for (pid, generation) in [(1, 7), (2, 8)] {
        let claim = LeaseClaim { generation, lease: 1, ..claim() };
        let connection = ConnectionId(pid as u64);
        let claimed = WeightServerEvent::ReclaimRequested { connection, peer: peer(pid), claim };
        assert!(requested(&state.handle(claimed, at(1))));
    }
    // A third one gets it.
    let after_wait = UNKNOWN_RESERVATIONS_WAIT + at(4);
    state.handle(attach(3, "b"), after_wait);
    for (connection, generation) in [(1, 7), (2, 8)] {
        let actions = state.handle(returned(connection, generation, "x", generation), after_wait);
        assert!(matches!(refusals(&actions)[..], [AttachRefusal::UnknownLease { lease: 1, .. }]));
        assert!(actions.contains(&WeightServerAction::RemoveGeneration { generation }));
    }
    assert_eq!(state.lease(1).unwrap().worker, peer(3));
    check_integrity(&state);

    // The lease with the highest number that is taken is followed by others.
    let mut state = awaiting();
    state.handle(reclaim(1, super::super::returning::MAX_CLAIMED_ID), at(1));
    state.handle(returned(1, 1, "a", 1), at(1));
    state.handle(attach(3, "a"), after_wait);
    state.handle(attach(4, "a"), after_wait);
    assert_eq!(state.leases().count(), 3);
    check_integrity(&state);
}

#[test]
fn a_return_stops_the_load_of_the_same_bytes_and_answers_its_callers() {
    let mut state = state();
    assert!(started(&state.handle(load(9, "a", 1, MIB), at(0))));
    let claim = LeaseClaim { generation: 7, lease: 7, ..claim() };
    let claimed = WeightServerEvent::ReclaimRequested { connection: ConnectionId(1), peer: peer(1), claim };
    assert!(requested(&state.handle(claimed, at(1))));
    let actions = state.handle(returned(1, 7, "a", 1), at(1));
    assert!(actions.contains(&WeightServerAction::StopLoader { generation: 1 }));
    assert!(matches!(
        answers(&actions)[..],
        [(9, Ok(LoadOutcome { generation: 7, read_from_file: false, .. }))]
    ));
    assert_eq!(state.generations().map(|g| g.id).collect::<Vec<_>>(), [7]);
    check_integrity(&state);
}

#[test]
fn what_returns_after_a_new_load_is_accounted_and_retires() {
    let mut state = state();
    load_fully(&mut state, 1, "a", 1, MIB);
    state.generations.get_mut(&1).unwrap().contents.created_unix_seconds = 100;
    let claim = LeaseClaim { generation: 7, lease: 7, ..claim() };
    let claimed = WeightServerEvent::ReclaimRequested { connection: ConnectionId(1), peer: peer(1), claim };
    state.handle(claimed, at(1));
    let actions = state.handle(returned(1, 7, "a", 1), at(1));
    assert!(actions.contains(&WeightServerAction::MarkRetired { generation: 7 }));
    assert_eq!(state.find_ready("a", HOST).unwrap().id, 1);
    check_integrity(&state);
    let actions = state.handle(WeightServerEvent::ProcessEnded { lease: 7 }, at(2));
    assert!(actions.contains(&WeightServerAction::RemoveGeneration { generation: 7 }));
    check_integrity(&state);
}

#[test]
fn claims_without_right_are_refused() {
    let mut state = awaiting();
    let refusal = |state: &mut WeightServerState, peer: WorkerProcess, claim: LeaseClaim| {
        let event = WeightServerEvent::ReclaimRequested { connection: ConnectionId(1), peer, claim };
        refusals(&state.handle(event, at(1))).first().map(|refusal| (*refusal).clone())
    };
    let stranger = WorkerProcess { uid: 7, ..peer(1) };
    assert_eq!(refusal(&mut state, stranger, claim()), Some(AttachRefusal::PeerUid { uid: 7 }));
    for empty in [
        LeaseClaim { fds: 0, ..claim() },
        LeaseClaim { fds: 5000, ..claim() },
        LeaseClaim { generation: u64::MAX, ..claim() },
        LeaseClaim { lease: u64::MAX, ..claim() },
    ] {
        let found = refusal(&mut state, peer(1), empty);
        assert!(matches!(found, Some(AttachRefusal::UnknownLease { .. })), "{found:?}");
    }
    // A worker comes again until the supervisor has had time to register its token.
    state.allow_token("w".to_owned(), crate::tokens::token_digest(&[9; 32])).unwrap();
    assert!(matches!(refusal(&mut state, peer(1), claim()), Some(AttachRefusal::NotYet { .. })));
    let with_token = LeaseClaim { token: Bytes::from_static(&[9; 32]), ..claim() };
    assert_eq!(refusal(&mut state, peer(3), with_token), None);
    state.handle(WeightServerEvent::ConnectionEnded { connection: ConnectionId(1) }, at(1));
    let late =
        WeightServerEvent::ReclaimRequested { connection: ConnectionId(1), peer: peer(1), claim: claim() };
    let actions = state.handle(late, RECLAIM_TIMEOUT);
    assert_eq!(refusals(&actions), [&AttachRefusal::Token]);
}

#[test]
fn an_unloaded_generation_gets_its_name_back_instead_of_a_second_copy() {
    let mut state = state();
    load_fully(&mut state, 1, "a", 1, MIB);
    state.handle(attach(5, "a"), at(1));
    let unload =
        WeightServerEvent::UnloadRequested { call: CallId(2), model: "a".to_owned(), generation: None };
    state.handle(unload, at(1));
    assert!(state.find_ready("a", HOST).is_none());
    let actions = state.handle(load(3, "a", 1, MIB), at(2));
    assert!(actions.contains(&WeightServerAction::UnmarkRetired { generation: 1 }));
    assert!(!started(&actions) && answers(&actions)[0].1.is_ok());
    assert_eq!(state.find_ready("a", HOST).unwrap().id, 1);
    check_integrity(&state);
}
