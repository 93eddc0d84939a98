// SPDX-License-Identifier: Apache-2.0

//! The invariants of `state`, which tests and the fuzz target check after every event.

use std::collections::BTreeSet;

use super::WeightServerState;
use crate::catalog::{GenerationIntegrity, GenerationPhase};
use crate::ledger::ReservationKey;

/// Panics at the first invariant that does not hold.
pub(crate) fn check(state: &WeightServerState) {
    let mut expected: BTreeSet<ReservationKey> =
        state.leases().map(|lease| ReservationKey::Lease(lease.id)).collect();
    let (mut loading, mut ready) = (BTreeSet::new(), BTreeSet::new());
    for generation in state.generations() {
        expected.insert(match generation.phase {
            GenerationPhase::Ready | GenerationPhase::Retiring => ReservationKey::Weights(generation.id),
            _ => ReservationKey::Loading(generation.id),
        });
        expected.extend(generation.verification.running.then_some(ReservationKey::Verifying(generation.id)));
        assert!(
            generation.integrity != GenerationIntegrity::Quarantined
                || generation.phase == GenerationPhase::Retiring,
            "a model name resolves to damaged weights"
        );
        assert!(
            generation.waiters.is_empty() || generation.is_pending(),
            "a caller waits for a load that is not pending"
        );
        let leases = state.leases().filter(|lease| lease.generation == generation.id).count();
        assert!(
            generation.phase != GenerationPhase::Retiring || leases > 0,
            "a retired generation without leases"
        );
        let device = &generation.key.device;
        if generation.occupies_loader() {
            assert!(loading.insert(device), "two loaders on {device}");
        }
        if generation.phase == GenerationPhase::Ready {
            let name = (&generation.model, device);
            assert!(ready.insert(name), "two ready generations of one model on one device");
        }
    }
    assert_eq!(state.ledger().reservations().map(|(key, _)| key).collect::<BTreeSet<_>>(), expected);
    for lease in state.leases() {
        assert!(state.generation(lease.generation).is_some(), "a lease without its generation");
    }
}
