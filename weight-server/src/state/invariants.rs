// SPDX-License-Identifier: Apache-2.0

//! The invariants of `state`, which tests and the fuzz target check after every event.

use std::collections::BTreeSet;

use super::WeightServerState;
use crate::catalog::{Generation, GenerationIntegrity, GenerationPhase};
use crate::ledger::ReservationKey;

/// Panics at the first invariant that does not hold.
pub(crate) fn check(state: &WeightServerState) {
    let mut expected: BTreeSet<ReservationKey> =
        state.leases().map(|lease| ReservationKey::Lease(lease.id)).collect();
    let (mut loading, mut ready) = (BTreeSet::new(), BTreeSet::new());
    for (generation, loader) in state.ending_loaders.iter() {
        assert!(loading.insert(&loader.device), "two loaders on {} end", loader.device);
        if let Some(source) = loader.source {
            expected.insert(ReservationKey::Copying(generation));
            assert!(state.generation(source).is_some(), "a copy without its source");
        }
    }
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
        expected.extend(generation.copies_from().map(|_| ReservationKey::Copying(generation.id)));
        let source = generation.copies_from().and_then(|source| state.generation(source));
        assert!(generation.copies_from().is_none() || source.is_some(), "a copy without its source");
        assert!(
            source.is_none_or(|source| source.key.has_same_bytes(&generation.key)
                && matches!(source.phase, GenerationPhase::Ready | GenerationPhase::Retiring)),
            "a copy of other bytes"
        );
        let works = |other: &Generation| other.is_loader_busy() || other.phase == GenerationPhase::Storing;
        let is_awaited = |other: &Generation| {
            other.key.device != generation.key.device
                && other.key.has_same_bytes(&generation.key)
                && works(other)
        };
        assert!(
            generation.phase != GenerationPhase::AwaitingSource || state.generations().any(is_awaited),
            "a load waits for no loader that works"
        );
        assert!(
            generation.phase != GenerationPhase::Retiring || state.is_in_use(generation.id),
            "a retired generation without leases and copies"
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
