// SPDX-License-Identifier: Apache-2.0

//! Checks the state machine's invariants under random events.

use proptest::prelude::*;

use super::super::returning::MAX_CLAIMED_ID;
use super::returning::returned;
use super::*;
use crate::refusal::LoaderErrorKind;

/// A number that a worker claims. The highest ones are taken too, so that the next number matters.
fn claimed_id() -> impl Strategy<Value = u64> {
    let highest = MAX_CLAIMED_ID;
    prop_oneof![8 => 1u64..6, 1 => prop::sample::select(vec![highest, highest + 1, u64::MAX - 1, u64::MAX])]
}

/// The process of each lease, which never changes.
fn workers(state: &WeightServerState) -> BTreeMap<u64, WorkerProcess> {
    state.leases().map(|lease| (lease.id, lease.worker)).collect()
}

fn any_load_failure() -> impl Strategy<Value = LoadFailure> {
    let loader = |kind| LoadFailure::Loader { kind, text: "failed".to_owned() };
    prop::sample::select(vec![
        LoadFailure::LoaderLost { how: "killed".to_owned() },
        loader(LoaderErrorKind::SourceDamaged),
        loader(LoaderErrorKind::OutOfMemory),
    ])
}

/// A loader's plan. Its GPU can access both GPUs, or none.
fn planned_with_peers(generation: u64, bytes: u64, peers: bool) -> WeightServerEvent {
    let peer_devices = [GPU, OTHER_GPU].map(str::to_owned).into_iter().filter(|_| peers).collect();
    let contents = GenerationContents { peer_devices, ..contents(bytes) };
    WeightServerEvent::LoadPlanned { generation, contents, available_bytes: UNLIMITED }
}

/// One step of a test.
#[derive(Debug)]
enum RandomStep {
    Event(Box<WeightServerEvent>),
    /// What comes next in the life of one of the pending generations. Unrelated events rarely bring
    /// one to Ready, and still more rarely two of one file.
    Advance {
        which: usize,
        peers: bool,
    },
}

fn any_step() -> impl Strategy<Value = RandomStep> {
    prop_oneof![
        3 => any_event().prop_map(|event| RandomStep::Event(Box::new(event))),
        2 => (0usize..4, any::<bool>()).prop_map(|(which, peers)| RandomStep::Advance { which, peers }),
    ]
}

/// The event of a step; `None` if nothing is pending.
fn event_of(step: RandomStep, state: &WeightServerState) -> Option<WeightServerEvent> {
    let (which, peers) = match step {
        RandomStep::Event(event) => return Some(*event),
        RandomStep::Advance { which, peers } => (which, peers),
    };
    let pending: Vec<&Generation> = state.generations().filter(|g| g.is_pending()).collect();
    let found = pending.get(which.checked_rem(pending.len())?)?;
    let generation = found.id;
    match found.phase {
        GenerationPhase::Starting => Some(planned_with_peers(generation, MIB, peers)),
        GenerationPhase::Loading => {
            Some(WeightServerEvent::LoadHandedOver { generation, contents: contents(MIB) })
        }
        GenerationPhase::Storing => Some(WeightServerEvent::GenerationStored { generation }),
        _ => None,
    }
}

/// A random event on a small domain, so that events refer to what exists.
fn any_event() -> impl Strategy<Value = WeightServerEvent> {
    let id = 1u64..6;
    let connection = (1u64..8).prop_map(ConnectionId);
    let model = prop::sample::select(vec!["a", "b", "c"]);
    let size = prop::sample::select(vec![MIB, 100 * MIB, 400 * MIB]);
    // Two pairs of devices with equal layouts, so that copies are made.
    let device = prop::sample::select(vec![HOST, HOST_NODE, GPU, OTHER_GPU]);
    prop_oneof![
        (1u64..9, model.clone(), 1u64..3, size.clone(), device.clone())
            .prop_map(|(c, m, f, b, device)| on_device(device, load(c, m, f, b))),
        (id.clone(), size.clone(), any::<bool>()).prop_map(|(g, b, peers)| planned_with_peers(g, b, peers)),
        (id.clone(), 0..300 * MIB)
            .prop_map(|(g, b)| WeightServerEvent::LoadProgressed { generation: g, done_bytes: b }),
        id.clone().prop_map(|g| WeightServerEvent::LoadHandedOver { generation: g, contents: contents(MIB) }),
        (id.clone(), any_load_failure())
            .prop_map(|(generation, failure)| WeightServerEvent::LoadFailed { generation, failure }),
        id.clone().prop_map(|g| WeightServerEvent::LoaderEnded { generation: g }),
        id.clone().prop_map(|g| WeightServerEvent::GenerationStored { generation: g }),
        model.clone().prop_map(|m| WeightServerEvent::UnloadRequested {
            call: CallId(1),
            model: m.to_owned(),
            generation: None
        }),
        (1u64..8, model.clone(), device).prop_map(|(c, m, device)| on_device(device, attach(c, m))),
        model.prop_map(|m| WeightServerEvent::VerifyRequested {
            call: CallId(1),
            model: m.to_owned(),
            device: String::new()
        }),
        (id.clone(), 0u32..2).prop_map(|(generation, damage)| verified(generation, damage)),
        id.clone().prop_map(|generation| WeightServerEvent::VerifyFailed {
            generation,
            failure: VerifyFailure::Unloaded
        }),
        id.clone().prop_map(|lease| WeightServerEvent::LeaseStored { lease }),
        connection.clone().prop_map(|connection| WeightServerEvent::Delivered { connection }),
        connection.clone().prop_map(|connection| WeightServerEvent::Detached { connection }),
        connection.clone().prop_map(|connection| WeightServerEvent::ConnectionEnded { connection }),
        id.clone().prop_map(|lease| WeightServerEvent::ProcessEnded { lease }),
        (connection, 1i32..8, claimed_id(), claimed_id()).prop_map(|(connection, pid, generation, lease)| {
            let peer = peer(pid);
            WeightServerEvent::ReclaimRequested {
                connection,
                peer,
                claim: LeaseClaim { generation, lease, token: Bytes::new(), ..claim() },
            }
        }),
        (1u64..8, claimed_id(), prop::sample::select(vec!["a", "b", "c"]), 1u64..4)
            .prop_map(|(connection, id, model, file)| returned(connection, id, model, file)),
        (1i32..8).prop_map(|pid| WeightServerEvent::AwaitedProcessEnded { pid }),
        Just(()).prop_map(|()| WeightServerEvent::Tick),
    ]
}

proptest! {
    // Without the check of a returned lease's number, the fault is found after about 9,000 cases.
    #![proptest_config(ProptestConfig::with_cases(8192))]

    #[test]
    fn invariants_hold_after_every_random_event(
        steps in prop::collection::vec((any_step(), 0u64..20), 0..120)
    ) {
        let mut state = state();
        let mut now = Duration::ZERO;
        let mut loaders = BTreeSet::new();
        for (step, seconds) in steps {
            now += at(seconds);
            let Some(event) = event_of(step, &state) else { continue };
            // A connection sends its first frame once.
            if let WeightServerEvent::AttachRequested { connection, .. } | WeightServerEvent::ReclaimRequested { connection, .. } = &event
                && state.leases.find_by_connection(*connection).is_some()
            {
                continue;
            }
            if let WeightServerEvent::Verified { generation, .. } | WeightServerEvent::VerifyFailed { generation, .. } = &event
                && !state.generation(*generation).is_some_and(|found| found.verification.running)
            {
                continue;
            }
            if let WeightServerEvent::LoadFailed { generation, .. } = &event {
                // Only a running loader fails.
                if !state.generation(*generation).is_some_and(Generation::occupies_loader) {
                    continue;
                }
                loaders.remove(generation);
            }
            let workers_before = workers(&state);
            for action in state.handle(event, now) {
                match action {
                    WeightServerAction::StartLoader { generation } => prop_assert!(loaders.insert(generation)),
                    WeightServerAction::StopLoader { generation } => { loaders.remove(&generation); }
                    WeightServerAction::ProceedCopying { generation, source } => {
                        prop_assert!(loaders.contains(&generation));
                        prop_assert_eq!(state.generation(generation).unwrap().copies_from(), Some(source));
                    }
                    _ => {}
                }
            }
            loaders.retain(|id| state.generation(*id).is_some_and(Generation::occupies_loader));
            let running: BTreeSet<u64> =
                state.generations().filter(|g| g.occupies_loader()).map(|g| g.id).collect();
            prop_assert_eq!(&loaders, &running);
            check_integrity(&state);
            for (lease, worker) in workers(&state) {
                prop_assert_eq!(workers_before.get(&lease).unwrap_or(&worker), &worker, "lease {}", lease);
            }
        }
        // After all leases, models and loaders are gone, nothing stays reserved.
        let leases: Vec<u64> = state.leases().map(|lease| lease.id).collect();
        for lease in leases {
            state.handle(WeightServerEvent::ProcessEnded { lease }, now);
        }
        for connection in 1..8 {
            state.handle(WeightServerEvent::ConnectionEnded { connection: ConnectionId(connection) }, now);
        }
        for model in ["a", "b", "c"] {
            state.handle(WeightServerEvent::UnloadRequested { call: CallId(99), model: model.to_owned(), generation: None }, now);
        }
        let ending: Vec<u64> = state.ending_loaders.iter().map(|(generation, _)| generation).collect();
        for generation in ending {
            state.handle(WeightServerEvent::LoaderEnded { generation }, now);
        }
        check_integrity(&state);
        prop_assert_eq!(state.ledger().reservations().count(), 0);
    }
}
