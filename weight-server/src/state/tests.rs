// SPDX-License-Identifier: Apache-2.0

//! Tests of the state machine. `random` checks the invariants under random events.

use std::path::PathBuf;

use bytes::Bytes;
use handoff::PROTOCOL_VERSION;
use handoff::manifest::MANIFEST_FORMAT;
use memory::manifest::FileIdentity;

mod copying;
mod devices;
mod limits;
mod random;
mod returning;

use self::returning::claim;
use super::*;
use crate::catalog::{GenerationContents, LoadKey};
use crate::events::{LoadOutcome, LoadParams, VerifyReport};
use crate::ids::{CallId, ConnectionId};
use crate::lease_table::WorkerProcess;
use crate::ledger::ReservationError;
use crate::refusal::{AttachRefusal, UnloadRefusal, VerifyFailure};
use crate::waiters::{AttachParams, LeaseClaim, WaiterId};

const HOST: &str = "host";
const MIB: u64 = 1 << 20;
const UNLIMITED: u64 = u64::MAX;
const HOST_NODE: &str = "host:0";
const GPU: &str = "GPU-01010101-0101-0101-0101-010101010101";
const OTHER_GPU: &str = "GPU-02020202-0202-0202-0202-020202020202";
/// Shares the host's memory.
const UNIFIED_GPU: &str = "GPU-03030303-0303-0303-0303-030303030303";
/// Fits a model of 400 MiB and two contexts, but not two more such models.
const GPU_BYTES: u64 = 1800 * MIB;

fn limits(capacity: u64, fds: u64) -> WeightServerLimits {
    let devices = [(HOST, capacity), (HOST_NODE, capacity), (GPU, GPU_BYTES), (OTHER_GPU, GPU_BYTES)];
    let device_bytes = devices.map(|(device, bytes)| (device.to_owned(), bytes)).into();
    WeightServerLimits {
        device_bytes,
        unified_devices: BTreeSet::from([UNIFIED_GPU.to_owned()]),
        fds,
        uids: BTreeSet::from([1000]),
        host_capacity_is_measured: false,
        tokens_required: false,
    }
}

fn state_with(capacity: u64, fds: u64) -> WeightServerState {
    WeightServerState::new(limits(capacity, fds), InheritedState::default(), Duration::ZERO)
}

fn state() -> WeightServerState {
    state_with(1000 * MIB, 1000)
}

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn key(file: u64, bytes: u64) -> LoadKey {
    let file = FileIdentity {
        path: format!("/models/{file}.gguf").into(),
        device: 1,
        inode: file,
        bytes,
        modified_seconds: 0,
        modified_nanoseconds: 0,
        head_digest: None,
    };
    LoadKey { files: vec![file], device: HOST.to_owned(), layout: 0, one_per_tensor: false }
}

fn load(call: u64, model: &str, file: u64, bytes: u64) -> WeightServerEvent {
    let key = key(file, bytes);
    let path = key.files[0].path.clone();
    let device = key.device.clone();
    let params = LoadParams { model: model.to_owned(), path, device, key: Ok(key) };
    WeightServerEvent::LoadRequested { call: CallId(call), params, available_bytes: UNLIMITED }
}

fn contents(bytes: u64) -> GenerationContents {
    GenerationContents {
        allocation_bytes: bytes,
        tensor_bytes: bytes,
        allocations: 1,
        tensors: 1,
        ..GenerationContents::default()
    }
}

fn peer(pid: i32) -> WorkerProcess {
    WorkerProcess { pid, uid: 1000, start_ticks: 7 }
}

fn ask(model: &str) -> AttachParams {
    AttachParams {
        protocol: PROTOCOL_VERSION,
        layout: 0,
        manifest_format: MANIFEST_FORMAT,
        device: HOST.to_owned(),
        model: model.to_owned(),
        token: Bytes::new(),
        kv_bytes: 10 * MIB,
        workspace_bytes: MIB,
    }
}

fn attach(connection: u64, model: &str) -> WeightServerEvent {
    WeightServerEvent::AttachRequested {
        connection: ConnectionId(connection),
        peer: peer(connection as i32),
        params: ask(model),
    }
}

fn planned(generation: u64, bytes: u64) -> WeightServerEvent {
    WeightServerEvent::LoadPlanned { generation, contents: contents(bytes), available_bytes: UNLIMITED }
}

fn answers(actions: &[WeightServerAction]) -> Vec<(u64, &Result<LoadOutcome, LoadFailure>)> {
    actions
        .iter()
        .filter_map(|action| match action {
            WeightServerAction::ReplyLoad { call, result } => Some((call.0, result)),
            _ => None,
        })
        .collect()
}

fn refusals(actions: &[WeightServerAction]) -> Vec<&AttachRefusal> {
    actions
        .iter()
        .filter_map(|action| match action {
            WeightServerAction::Refuse { refusal, .. } => Some(refusal),
            _ => None,
        })
        .collect()
}

/// Runs a load from its request to Ready; returns the actions of the last event.
fn load_fully(
    state: &mut WeightServerState,
    call: u64,
    model: &str,
    file: u64,
    bytes: u64,
) -> (u64, Vec<WeightServerAction>) {
    state.handle(load(call, model, file, bytes), at(1));
    let id = state.generations().last().unwrap().id;
    state.handle(planned(id, bytes), at(1));
    state.handle(WeightServerEvent::LoadHandedOver { generation: id, contents: contents(bytes) }, at(2));
    state.handle(WeightServerEvent::LoaderEnded { generation: id }, at(2));
    (id, state.handle(WeightServerEvent::GenerationStored { generation: id }, at(3)))
}

/// Attaches and takes all descriptors; returns the lease.
fn attach_fully(state: &mut WeightServerState, connection: u64, model: &str) -> u64 {
    state.handle(attach(connection, model), at(4));
    let lease = state.leases().last().unwrap().id;
    state.handle(WeightServerEvent::LeaseStored { lease }, at(4));
    state.handle(WeightServerEvent::Delivered { connection: ConnectionId(connection) }, at(4));
    assert_eq!(state.lease(lease).unwrap().phase, LeasePhase::Held { connection: ConnectionId(connection) });
    lease
}

fn check_integrity(state: &WeightServerState) {
    invariants::check(state);
    for (device, capacity, reserved) in state.ledger().devices() {
        assert!(reserved <= capacity, "{reserved} bytes reserved on {device}");
    }
}

#[test]
fn load_is_reserved_before_its_loader_starts() {
    let mut state = state();
    assert!(
        state
            .handle(load(1, "a", 1, 600 * MIB), at(0))
            .contains(&WeightServerAction::StartLoader { generation: 1 })
    );
    let actions = state.handle(load(2, "b", 2, 600 * MIB), at(0));
    assert!(matches!(
        answers(&actions)[..],
        [(2, Err(LoadFailure::Reservation(ReservationError::InsufficientMemory { .. })))]
    ));
    assert!(!actions.iter().any(|action| matches!(action, WeightServerAction::StartLoader { .. })));
    check_integrity(&state);
}

#[test]
fn plan_that_does_not_fit_stops_the_loader() {
    let mut state = state();
    state.handle(load(1, "a", 1, 600 * MIB), at(0));
    let actions = state.handle(planned(1, 1001 * MIB), at(0));
    assert_eq!(actions[0], WeightServerAction::StopLoader { generation: 1 });
    assert!(matches!(answers(&actions)[..], [(1, Err(LoadFailure::Reservation(_)))]));
    assert!(!actions.contains(&WeightServerAction::Proceed { generation: 1 }));
    assert_eq!(state.ledger().reservations().count(), 0);
}

#[test]
fn load_is_refused_if_the_machine_lacks_memory() {
    let mut state = state();
    let mut event = load(1, "a", 1, 600 * MIB);
    if let WeightServerEvent::LoadRequested { available_bytes, .. } = &mut event {
        *available_bytes = 500 * MIB;
    }
    let actions = state.handle(event, at(0));
    let expected = LoadFailure::InsufficientMemory { needed: 600 * MIB, available: 500 * MIB };
    assert_eq!(answers(&actions), [(1, &Err(expected))]);
}

#[test]
fn memory_reserved_by_one_load_is_not_available_to_the_next() {
    let mut state = state();
    state.handle(load(1, "a", 1, 300 * MIB), at(0));
    state.handle(planned(1, 300 * MIB), at(0));
    state.handle(WeightServerEvent::LoadProgressed { generation: 1, done_bytes: 100 * MIB }, at(1));
    let mut event = load(2, "b", 2, 300 * MIB);
    if let WeightServerEvent::LoadRequested { available_bytes, .. } = &mut event {
        // The first load has still to take 200 MiB of it.
        *available_bytes = 450 * MIB;
    }
    let actions = state.handle(event, at(1));
    let expected = LoadFailure::InsufficientMemory { needed: 300 * MIB, available: 250 * MIB };
    assert_eq!(answers(&actions), [(2, &Err(expected))]);
}

#[test]
fn device_has_one_loader_and_queued_loads_report_their_position() {
    let mut state = state();
    state.handle(load(1, "a", 1, MIB), at(0));
    state.handle(load(2, "b", 2, MIB), at(0));
    state.handle(load(3, "c", 3, MIB), at(0));
    let places: Vec<u32> = state
        .handle(WeightServerEvent::Tick, at(1))
        .into_iter()
        .filter_map(|action| match action {
            WeightServerAction::SendProgress { progress, .. } => Some(progress.jobs_ahead),
            _ => None,
        })
        .collect();
    assert_eq!(places, [0, 1, 2]);
    let lost = LoadFailure::LoaderLost { how: "killed".to_owned() };
    let actions = state.handle(WeightServerEvent::LoadFailed { generation: 1, failure: lost }, at(1));
    assert!(actions.contains(&WeightServerAction::StartLoader { generation: 2 }));
    check_integrity(&state);
}

#[test]
fn second_request_for_a_file_joins_and_another_model_name_is_refused() {
    let mut state = state();
    state.handle(load(1, "a", 1, MIB), at(0));
    assert!(state.handle(load(2, "a", 1, MIB), at(0)).is_empty());
    let actions = state.handle(load(3, "b", 1, MIB), at(0));
    assert_eq!(answers(&actions), [(3, &Err(LoadFailure::LoadedAs { model: "a".to_owned() }))]);
    state.handle(planned(1, MIB), at(0));
    state.handle(WeightServerEvent::LoadHandedOver { generation: 1, contents: contents(MIB) }, at(1));
    let actions = state.handle(WeightServerEvent::GenerationStored { generation: 1 }, at(2));
    assert_eq!(answers(&actions).iter().map(|(call, _)| *call).collect::<Vec<_>>(), [1, 2]);
}

#[test]
fn loader_without_progress_is_stopped_after_the_timeout() {
    let mut state = state();
    state.handle(load(1, "a", 1, MIB), at(0));
    state.handle(planned(1, MIB), at(20));
    state.handle(WeightServerEvent::LoadProgressed { generation: 1, done_bytes: 1 }, at(40));
    // A report with the same number is not progress.
    state.handle(WeightServerEvent::LoadProgressed { generation: 1, done_bytes: 1 }, at(60));
    let stopped =
        |actions: &[WeightServerAction]| actions.contains(&WeightServerAction::StopLoader { generation: 1 });
    assert!(!stopped(&state.handle(WeightServerEvent::Tick, at(40) + PROGRESS_TIMEOUT)));
    let actions = state.handle(WeightServerEvent::Tick, at(41) + PROGRESS_TIMEOUT);
    assert!(stopped(&actions));
    assert!(matches!(answers(&actions)[..], [(1, Err(LoadFailure::NoProgress { seconds: 30 }))]));
    check_integrity(&state);
}

#[test]
fn lease_is_stored_before_it_is_granted() {
    let mut state = state();
    load_fully(&mut state, 1, "a", 1, MIB);
    let actions = state.handle(attach(5, "a"), at(4));
    assert!(matches!(actions[0], WeightServerAction::StoreLease { lease: 1, .. }));
    assert!(!actions.iter().any(|action| matches!(action, WeightServerAction::Deliver { .. })));
    let actions = state.handle(WeightServerEvent::LeaseStored { lease: 1 }, at(4));
    assert_eq!(
        actions,
        [WeightServerAction::Deliver { connection: ConnectionId(5), lease: 1, generation: 1 }]
    );
}

#[test]
fn attach_during_the_load_is_granted_when_it_is_ready() {
    let mut state = state();
    state.handle(load(1, "a", 1, MIB), at(0));
    let actions = state.handle(attach(5, "a"), at(1));
    assert!(matches!(
        actions[..],
        [WeightServerAction::SendProgress { waiter: WaiterId::Worker(ConnectionId(5)), .. }]
    ));
    // A worker that disconnects is not granted a lease.
    state.handle(attach(6, "a"), at(1));
    state.handle(WeightServerEvent::ConnectionEnded { connection: ConnectionId(6) }, at(1));
    state.handle(planned(1, MIB), at(1));
    state.handle(WeightServerEvent::LoadHandedOver { generation: 1, contents: contents(MIB) }, at(1));
    state.handle(WeightServerEvent::GenerationStored { generation: 1 }, at(2));
    assert_eq!(state.leases().map(|lease| lease.worker.pid).collect::<Vec<_>>(), [5]);
}

#[test]
fn reservation_outlives_the_connection_until_the_process_exits() {
    let mut state = state();
    load_fully(&mut state, 1, "a", 1, MIB);
    let lease = attach_fully(&mut state, 5, "a");
    state.handle(WeightServerEvent::ConnectionEnded { connection: ConnectionId(5) }, at(10));
    state.handle(WeightServerEvent::Tick, at(10) + RECLAIM_TIMEOUT);
    assert_eq!(state.lease(lease).unwrap().phase, LeasePhase::Disconnected { since: at(10) });
    state.handle(WeightServerEvent::Tick, at(11) + RECLAIM_TIMEOUT);
    assert_eq!(state.lease(lease).unwrap().phase, LeasePhase::Orphaned);
    check_integrity(&state);
    // The reclaim is late, but comes from the same process.
    let reclaim = WeightServerEvent::ReclaimRequested {
        connection: ConnectionId(9),
        peer: peer(5),
        claim: LeaseClaim { generation: 1, lease, token: Bytes::new(), ..claim() },
    };
    let actions = state.handle(reclaim, at(100));
    assert_eq!(
        actions[0],
        WeightServerAction::Reclaimed { connection: ConnectionId(9), lease, generation: 1 }
    );
    let actions = state.handle(WeightServerEvent::ProcessEnded { lease }, at(101));
    assert!(actions.contains(&WeightServerAction::RemoveLease { lease }));
    check_integrity(&state);
}

#[test]
fn reclaim_needs_the_same_process_user_token_and_generation() {
    let mut state = state();
    load_fully(&mut state, 1, "a", 1, MIB);
    state.allow_token("w".to_owned(), crate::tokens::token_digest(&[9; 32])).unwrap();
    let mut with_token = ask("a");
    with_token.token = Bytes::from_static(&[9; 32]);
    let event =
        WeightServerEvent::AttachRequested { connection: ConnectionId(5), peer: peer(5), params: with_token };
    state.handle(event, at(4));
    let right = (peer(5), 1, Bytes::from_static(&[9; 32]));
    let wrong = [
        (peer(6), 1, right.2.clone()),
        (WorkerProcess { uid: 0, ..peer(5) }, 1, right.2.clone()),
        (WorkerProcess { start_ticks: 8, ..peer(5) }, 1, right.2.clone()),
        (peer(5), 2, right.2.clone()),
        (peer(5), 1, Bytes::from_static(&[8; 32])),
        (peer(5), 1, Bytes::new()),
    ];
    let claim = |state: &mut WeightServerState, (peer, generation, token): (WorkerProcess, u64, Bytes)| {
        let connection = ConnectionId(9);
        state.handle(
            WeightServerEvent::ReclaimRequested {
                connection,
                peer,
                claim: LeaseClaim { generation, lease: 1, token, ..claim() },
            },
            at(5),
        )
    };
    for wrong in wrong {
        let actions = claim(&mut state, wrong);
        assert!(matches!(refusals(&actions)[..], [AttachRefusal::UnknownLease { lease: 1, .. }]));
    }
    assert!(claim(&mut state, right).contains(&WeightServerAction::Close { connection: ConnectionId(5) }));
}

#[test]
fn replaced_generation_is_removed_with_its_last_lease() {
    let mut state = state();
    load_fully(&mut state, 1, "a", 1, MIB);
    let old = attach_fully(&mut state, 5, "a");
    load_fully(&mut state, 2, "a", 2, MIB);
    let new = attach_fully(&mut state, 6, "a");
    assert_eq!(state.generation(1).unwrap().phase, GenerationPhase::Retiring);
    assert_eq!(state.lease(new).unwrap().generation, 2);
    check_integrity(&state);
    let actions = state.handle(WeightServerEvent::ProcessEnded { lease: old }, at(9));
    let order: Vec<_> =
        actions.iter().filter(|action| !matches!(action, WeightServerAction::Publish(_))).collect();
    assert_eq!(
        order,
        [
            &WeightServerAction::Close { connection: ConnectionId(5) },
            &WeightServerAction::RemoveLease { lease: old },
            &WeightServerAction::RemoveGeneration { generation: 1 },
        ]
    );
}

#[test]
fn loads_and_unloads_wait_until_adopted_leases_are_reclaimed_or_orphaned() {
    let limits = limits(100 * MIB, 100);
    let record = |lease| LeaseRecord {
        lease,
        generation: 4,
        device: HOST.to_owned(),
        kv_bytes: MIB,
        workspace_bytes: 0,
        uid: 1000,
        pid: lease as i32,
        pid_start_ticks: 7,
        token_name: String::new(),
        token_digest: None,
    };
    let generation = AdoptedGeneration {
        id: 4,
        model: "a".to_owned(),
        key: key(1, MIB),
        contents: contents(MIB),
        retired: false,
    };
    let mut state = WeightServerState::new(
        limits,
        InheritedState {
            generations: vec![generation],
            leases: vec![record(7), record(8)],
            ..InheritedState::default()
        },
        at(0),
    );
    check_integrity(&state);

    // A load of a resident model succeeds, even if its file no longer exists.
    assert!(answers(&state.handle(load(1, "a", 1, MIB), at(1)))[0].1.is_ok());
    let failure =
        LoadFailure::Loader { kind: crate::refusal::LoaderErrorKind::File, text: "gone".to_owned() };
    let path: PathBuf = "/models/1.gguf".into();
    let asked = |path, key| LoadParams { model: "a".to_owned(), path, device: HOST.to_owned(), key };
    let gone = asked(path, Err(failure.clone()));
    let gone = WeightServerEvent::LoadRequested { call: CallId(2), params: gone, available_bytes: UNLIMITED };
    assert!(answers(&state.handle(gone, at(1)))[0].1.is_ok());
    let elsewhere = asked("/b".into(), Err(failure));
    let elsewhere =
        WeightServerEvent::LoadRequested { call: CallId(3), params: elsewhere, available_bytes: UNLIMITED };
    assert!(answers(&state.handle(elsewhere, at(1)))[0].1.is_err());

    let refused = |state: &mut WeightServerState, now| {
        let actions = state.handle(load(9, "b", 2, MIB), now);
        let settling = matches!(answers(&actions)[..], [(9, Err(LoadFailure::AwaitingReclaim { .. }))]);
        let actions = state.handle(
            WeightServerEvent::UnloadRequested { call: CallId(9), model: "a".to_owned(), generation: None },
            now,
        );
        let unload = matches!(
            actions[..],
            [WeightServerAction::ReplyUnload { result: Err(UnloadRefusal::AwaitingReclaim { .. }), .. }]
        );
        assert_eq!(settling, unload);
        settling
    };
    assert!(refused(&mut state, at(2)));
    state.handle(WeightServerEvent::ProcessEnded { lease: 7 }, at(3));
    assert!(refused(&mut state, at(3)));
    // New workers delay nothing, and ids continue after those of the earlier incarnation.
    assert_eq!(attach_fully(&mut state, 20, "a"), 9);
    state.handle(WeightServerEvent::Tick, at(1) + RECLAIM_TIMEOUT);
    assert!(!refused(&mut state, at(2) + RECLAIM_TIMEOUT));
    assert_eq!(state.generations().last().unwrap().id, 5);
}

#[test]
fn adopted_generations_without_lease_and_name_are_removed() {
    let limits = limits(100 * MIB, 100);
    let generation = |id, model: &str, retired| {
        let model = model.to_owned();
        AdoptedGeneration { id, model, key: key(id, MIB), contents: contents(MIB), retired }
    };
    // One that was replaced by the third, one that was unloaded, and the current one.
    let adopted = vec![generation(1, "a", false), generation(2, "b", true), generation(3, "a", false)];
    let mut state = WeightServerState::new(
        limits,
        InheritedState { generations: adopted, ..InheritedState::default() },
        at(0),
    );
    let forgotten: Vec<_> = state
        .handle(WeightServerEvent::Tick, at(0))
        .into_iter()
        .filter(|action| matches!(action, WeightServerAction::RemoveGeneration { .. }))
        .collect();
    assert_eq!(
        forgotten,
        [
            WeightServerAction::RemoveGeneration { generation: 1 },
            WeightServerAction::RemoveGeneration { generation: 2 }
        ]
    );
    check_integrity(&state);
    assert_eq!(state.generations().map(|generation| generation.id).collect::<Vec<_>>(), [3]);
}

#[test]
fn shutdown_stops_loads_and_refuses_requests() {
    let mut state = state();
    state.handle(load(1, "a", 1, MIB), at(0));
    state.handle(load(2, "b", 2, MIB), at(0));
    let actions = state.handle(WeightServerEvent::ShutdownRequested, at(1));
    assert!(actions.contains(&WeightServerAction::StopLoader { generation: 1 }));
    assert!(!actions.iter().any(|action| matches!(action, WeightServerAction::StartLoader { .. })));
    assert_eq!(answers(&actions).len(), 2);
    assert_eq!(refusals(&state.handle(attach(5, "a"), at(1))), [&AttachRefusal::ShuttingDown]);
    assert!(answers(&state.handle(load(3, "c", 3, MIB), at(1)))[0].1.is_err());
}

#[test]
fn leases_of_one_process_are_limited() {
    let mut state = state();
    load_fully(&mut state, 1, "a", 1, MIB);
    let mut small = ask("a");
    small.kv_bytes = 0;
    for connection in 0.. {
        let event = WeightServerEvent::AttachRequested {
            connection: ConnectionId(connection),
            peer: peer(5),
            params: small.clone(),
        };
        let actions = state.handle(event, at(1));
        if let [refusal] = refusals(&actions)[..] {
            assert!(matches!(
                refusal,
                AttachRefusal::LeasesOfProcess { pid: 5, leases: MAX_LEASES_PER_PROCESS }
            ));
            assert_eq!(connection as usize, MAX_LEASES_PER_PROCESS);
            return;
        }
    }
}

/// The same event for the GPU.
fn on_gpu(event: WeightServerEvent) -> WeightServerEvent {
    on_device(GPU, event)
}

/// The same request for another device.
fn on_device(device: &str, event: WeightServerEvent) -> WeightServerEvent {
    let (device, layout) = (device.to_owned(), u32::from(!is_host_device(device)));
    match event {
        WeightServerEvent::LoadRequested { call, mut params, available_bytes } => {
            params.key = params.key.map(|key| LoadKey { device: device.clone(), layout, ..key });
            params.device = device;
            WeightServerEvent::LoadRequested { call, params, available_bytes }
        }
        WeightServerEvent::AttachRequested { connection, peer, params } => {
            let params = AttachParams { device, layout, ..params };
            WeightServerEvent::AttachRequested { connection, peer, params }
        }
        other => other,
    }
}

fn verified(generation: u64, damaged_count: u32) -> WeightServerEvent {
    let damaged = (0..damaged_count).map(|index| format!("t{index}")).collect();
    let report = VerifyReport { damaged, damaged_count, checked_bytes: MIB, took: at(1) };
    WeightServerEvent::Verified { generation, report }
}
