// SPDX-License-Identifier: Apache-2.0

//! What a supervisor does about the generations that a weight-server holds: which of them is the
//! model's, which are unloaded, and which workers have to restart. Plain functions on the
//! weight-server's status.

use bytes::Bytes;
use proto::weights::v1 as wire;

use crate::memory_room::{DeviceLedger, DeviceRow};

/// Older generations of a copy.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct OlderGenerations {
    /// Those that still have the weights' name.
    pub to_unload: Vec<u64>,
    /// Process ids of the workers that hold any of them.
    pub readers: Vec<u32>,
}

/// A copy of weights: their name at the weight-server, and where they are.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WeightsOnDevice {
    pub weights: String,
    pub device: String,
}

/// The copies that are not of this fleet, among those that the weight-server names.
pub fn leftovers(
    resident: Vec<WeightsOnDevice>,
    is_of_fleet: impl Fn(&WeightsOnDevice) -> bool,
) -> Vec<WeightsOnDevice> {
    resident.into_iter().filter(|copy| !is_of_fleet(copy)).collect()
}

/// The copies that the weight-server holds or loads, and that have a name.
pub fn resident_weights(status: &wire::Status) -> Vec<WeightsOnDevice> {
    let named = status.generations.iter().filter(|generation| !is_retiring(generation));
    let copy = |generation: &wire::Generation| WeightsOnDevice {
        weights: generation.model.clone(),
        device: generation.device.clone(),
    };
    let mut copies: Vec<WeightsOnDevice> = named.map(copy).collect();
    copies.sort_unstable();
    copies.dedup();
    copies
}

/// Every generation of the copy, also one that lost its name.
pub fn generations_of(status: &wire::Status, copy: &WeightsOnDevice) -> Vec<u64> {
    let is_it = |generation: &&wire::Generation| is_of(generation, copy);
    status.generations.iter().filter(is_it).map(|generation| generation.generation).collect()
}

fn is_of(generation: &wire::Generation, copy: &WeightsOnDevice) -> bool {
    generation.model == copy.weights && generation.device == copy.device
}

/// The generation with the digest that the model is known to have.
pub fn find_known<'a>(
    status: &'a wire::Status,
    copy: &WeightsOnDevice,
    digest: &Bytes,
) -> Option<&'a wire::Generation> {
    status.generations.iter().find(|generation| {
        is_of(generation, copy)
            && generation.digest == *digest
            && generation.state() == wire::GenerationState::Ready
    })
}

/// The generations of the copy other than `current`, which replaces them. Without `current`: all
/// of them. Other devices are other copies.
pub fn older_generations(
    status: &wire::Status,
    copy: &WeightsOnDevice,
    current: Option<u64>,
) -> OlderGenerations {
    let is_older = |generation: &&wire::Generation| {
        is_of(generation, copy) && current.is_none_or(|current| generation.generation != current)
    };
    let older: Vec<&wire::Generation> = status.generations.iter().filter(is_older).collect();
    let named = older.iter().filter(|generation| !is_retiring(generation));
    let reads_older = |lease: &&wire::Lease| older.iter().any(|g| g.generation == lease.generation);
    let readers = status.leases.iter().filter(reads_older);
    OlderGenerations {
        to_unload: named.map(|generation| generation.generation).collect(),
        readers: readers.filter_map(|lease| u32::try_from(lease.pid).ok()).collect(),
    }
}

/// What is reserved on each device, and for which weights.
pub(crate) fn device_ledger(status: &wire::Status) -> DeviceLedger {
    let ledger = status.ledger.clone().unwrap_or_default();
    let row = |device: wire::DeviceCapacity| {
        let wire::DeviceCapacity { device, capacity_bytes, reserved_bytes, unified_devices: _ } = device;
        (device, DeviceRow { capacity: capacity_bytes, reserved: reserved_bytes })
    };
    let reserved = |generation: &wire::Generation| {
        let is_own = |row: &&wire::Reservation| {
            matches!(row.kind(), wire::ReservationKind::Weights | wire::ReservationKind::Loading)
                && row.id == generation.generation
        };
        ledger.reservations.iter().filter(is_own).map(|row| row.bytes).sum::<u64>()
    };
    let named = status.generations.iter().filter(|generation| !is_retiring(generation));
    let weights =
        named.map(|generation| ((generation.model.clone(), generation.device.clone()), reserved(generation)));
    DeviceLedger {
        weights: weights.collect(),
        unified: ledger.devices.iter().flat_map(|device| device.unified_devices.clone()).collect(),
        devices: ledger.devices.iter().cloned().map(row).collect(),
    }
}

fn is_retiring(generation: &wire::Generation) -> bool {
    generation.state() == wire::GenerationState::Retiring
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_of_older_generations_restart_and_named_ones_are_unloaded() {
        let generation = |number, model: &str, state: wire::GenerationState| wire::Generation {
            generation: number,
            model: model.to_owned(),
            device: if number == 5 { "host:1" } else { "host" }.to_owned(),
            state: state.into(),
            ..Default::default()
        };
        let lease = |pid, generation| wire::Lease { pid, generation, ..Default::default() };
        let status = wire::Status {
            generations: vec![
                generation(1, "m", wire::GenerationState::Retiring),
                generation(2, "m", wire::GenerationState::Ready),
                generation(3, "m", wire::GenerationState::Ready),
                generation(4, "other", wire::GenerationState::Ready),
                generation(5, "m", wire::GenerationState::Ready),
            ],
            leases: vec![lease(11, 1), lease(12, 2), lease(13, 3), lease(14, 4), lease(15, 5)],
            ..Default::default()
        };
        let expected = OlderGenerations { to_unload: vec![2], readers: vec![11, 12] };
        let copy = |weights: &str, device: &str| WeightsOnDevice {
            weights: weights.to_owned(),
            device: device.to_owned(),
        };
        let (m, elsewhere) = (copy("m", "host"), copy("m", "host:1"));
        assert_eq!(older_generations(&status, &m, Some(3)), expected);
        assert_eq!(older_generations(&status, &elsewhere, Some(5)), OlderGenerations::default());
        let all = OlderGenerations { to_unload: vec![2, 3], readers: vec![11, 12, 13] };
        assert_eq!(older_generations(&status, &m, None), all);
        assert_eq!(generations_of(&status, &m), [1, 2, 3]);
        let other = copy("other", "host");
        assert_eq!(resident_weights(&status), [m.clone(), elsewhere.clone(), other.clone()]);
        assert_eq!(leftovers(resident_weights(&status), |copy| *copy == m), [elsewhere, other]);
    }
}
