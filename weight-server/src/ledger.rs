// SPDX-License-Identifier: Apache-2.0

//! The ledger: reservations of device memory and of this process's descriptors, one per owner.
//!
//! Invariants:
//! 1. The reservations of a device never exceed its capacity, except for those made with
//!    `reserve_unchecked`.
//! 2. Memory is reserved before it is allocated.
//! 3. Memory of a NUMA node counts on the node ("host:N") and on the host.
//! 4. A GPU with unified memory has no capacity of its own: its reservations count on the host.

use std::collections::{BTreeMap, BTreeSet};

use memory::manifest::HOST_DEVICE;
use memory::numa::is_host_device;
use service::ByteSize;

use crate::config::DeviceBudget;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ReservationKey {
    /// A load that is queued or runs, by generation.
    Loading(u64),
    /// A resident generation.
    Weights(u64),
    /// KV cache and workspace of one lease.
    Lease(u64),
    /// A verifier's context, by the generation that it checks.
    Verifying(u64),
    /// What a loader takes on the device of the copy that it reads, by the generation that it
    /// makes.
    Copying(u64),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LedgerReservation {
    pub device: String,
    pub bytes: u64,
    pub fds: u64,
}

#[derive(Debug)]
pub struct Ledger {
    devices: BTreeMap<String, u64>,
    /// The GPUs whose memory is the host's.
    unified: BTreeSet<String>,
    fds: u64,
    reservations: BTreeMap<ReservationKey, LedgerReservation>,
}

/// Why a reservation was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReservationError {
    #[error("there is no device {device}: {known}")]
    UnknownDevice { device: String, known: String },
    #[error(
        "{} are needed on {device}, {} of {} are free, {} are missing: unload a model, give workers less, or raise the budget",
        ByteSize(*.needed).rounded(), ByteSize(*.free).rounded(), ByteSize(*.capacity).rounded(),
        ByteSize(needed.saturating_sub(*.free)).rounded()
    )]
    InsufficientMemory { device: String, needed: u64, free: u64, capacity: u64 },
    #[error(
        "{needed} file descriptors are needed, {free} of {capacity} are free: raise RLIMIT_NOFILE (ulimit -n)"
    )]
    InsufficientFds { needed: u64, free: u64, capacity: u64 },
}

impl Ledger {
    /// `devices` has the capacity of the host and of each device that has memory of its own.
    pub fn new(devices: BTreeMap<String, u64>, unified: BTreeSet<String>, fds: u64) -> Self {
        Self { devices, unified, fds, reservations: BTreeMap::new() }
    }

    /// Whether memory of this device is memory of the host.
    pub fn takes_host_memory(&self, device: &str) -> bool {
        is_host_device(device) || self.is_unified(device)
    }

    /// Whether the device is a GPU whose memory is the host's.
    pub fn is_unified(&self, device: &str) -> bool {
        self.unified.contains(device)
    }

    fn counts_on(&self, reservation: &LedgerReservation, device: &str) -> bool {
        reservation.device == device || (device == HOST_DEVICE && self.takes_host_memory(&reservation.device))
    }

    /// Adds a reservation or changes an existing one. A refusal changes nothing.
    pub fn reserve(
        &mut self,
        key: ReservationKey,
        reservation: LedgerReservation,
    ) -> Result<(), ReservationError> {
        if !self.devices.contains_key(&reservation.device) && !self.is_unified(&reservation.device) {
            let known = self.devices.keys().chain(&self.unified);
            let known = known.map(String::as_str).collect::<Vec<_>>().join(", ");
            return Err(ReservationError::UnknownDevice {
                device: reservation.device,
                known: format!("known are {known}"),
            });
        }
        let others = |of: fn(&LedgerReservation) -> u64, same: &dyn Fn(&LedgerReservation) -> bool| -> u64 {
            let counted = self.reservations.iter().filter(|(k, r)| **k != key && same(r));
            // Rows that workers have returned are not checked against a capacity.
            counted.map(|(_, r)| of(r)).fold(0, u64::saturating_add)
        };
        for (device, &capacity) in
            self.devices.iter().filter(|(device, _)| self.counts_on(&reservation, device))
        {
            let free = capacity.saturating_sub(others(|r| r.bytes, &|r| self.counts_on(r, device)));
            if reservation.bytes > free {
                let (device, needed) = (device.clone(), reservation.bytes);
                return Err(ReservationError::InsufficientMemory { device, needed, free, capacity });
            }
        }
        let free = self.fds.saturating_sub(others(|r| r.fds, &|_| true));
        if reservation.fds > free {
            return Err(ReservationError::InsufficientFds {
                needed: reservation.fds,
                free,
                capacity: self.fds,
            });
        }
        self.reservations.insert(key, reservation);
        Ok(())
    }

    /// Adds a reservation for memory that is in use already, whatever the capacity is.
    pub fn reserve_unchecked(&mut self, key: ReservationKey, reservation: LedgerReservation) {
        self.reservations.insert(key, reservation);
    }

    /// Adds a device. One that is known stays as it is. Returns whether it is new.
    pub fn add_device(&mut self, device: &str, budget: DeviceBudget) -> bool {
        if self.devices.contains_key(device) || self.is_unified(device) {
            return false;
        }
        match budget {
            DeviceBudget::Own(bytes) => drop(self.devices.insert(device.to_owned(), bytes.0)),
            DeviceBudget::Host => drop(self.unified.insert(device.to_owned())),
        }
        true
    }

    /// Takes away a device, unless something is reserved on it.
    pub fn remove_unused_device(&mut self, device: &str) {
        if !self.reservations.values().any(|reservation| reservation.device == device) {
            self.devices.remove(device);
        }
    }

    /// Lowers a capacity that was measured with memory which does not belong to it.
    pub fn lower_capacity(&mut self, device: &str, bytes: u64) {
        if let Some(capacity) = self.devices.get_mut(device) {
            *capacity = capacity.saturating_sub(bytes);
        }
    }

    /// Raises a capacity that was measured while this much memory was in use already.
    pub fn raise_capacity(&mut self, device: &str, bytes: u64) {
        if let Some(capacity) = self.devices.get_mut(device) {
            *capacity = capacity.saturating_add(bytes);
        }
    }

    pub fn free_fds(&self) -> u64 {
        let reserved = self.reservations.values().map(|reservation| reservation.fds);
        self.fds.saturating_sub(reserved.fold(0, u64::saturating_add))
    }

    /// Turns the reservation of a load into that of a resident generation.
    pub fn commit_load(&mut self, generation: u64) {
        if let Some(reservation) = self.reservations.remove(&ReservationKey::Loading(generation)) {
            self.reservations.insert(ReservationKey::Weights(generation), reservation);
        }
    }

    pub fn release(&mut self, key: ReservationKey) {
        self.reservations.remove(&key);
    }

    pub fn reservations(&self) -> impl Iterator<Item = (ReservationKey, &LedgerReservation)> {
        self.reservations.iter().map(|(key, reservation)| (*key, reservation))
    }

    /// The GPUs that have no capacity of their own.
    pub fn unified(&self) -> impl Iterator<Item = &str> {
        self.unified.iter().map(String::as_str)
    }

    /// Capacity and reserved bytes of each device.
    pub fn devices(&self) -> impl Iterator<Item = (&str, u64, u64)> {
        self.devices.iter().map(|(device, capacity)| {
            let reservations =
                self.reservations.values().filter(|reservation| self.counts_on(reservation, device));
            let bytes = reservations.map(|reservation| reservation.bytes);
            (device.as_str(), *capacity, bytes.fold(0, u64::saturating_add))
        })
    }

    pub fn capacity_fds(&self) -> u64 {
        self.fds
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn reservation(bytes: u64, fds: u64) -> LedgerReservation {
        LedgerReservation { device: "host".to_owned(), bytes, fds }
    }

    fn ledger() -> Ledger {
        let devices = BTreeMap::from([("host".to_owned(), 1000), ("gpu".to_owned(), 50)]);
        Ledger::new(devices, BTreeSet::new(), 10)
    }

    #[test]
    fn refusal_names_the_need_and_the_free_amount() {
        let mut ledger = ledger();
        ledger.reserve(ReservationKey::Weights(1), reservation(800, 2)).unwrap();
        assert_eq!(
            ledger.reserve(ReservationKey::Lease(1), reservation(201, 0)),
            Err(ReservationError::InsufficientMemory {
                device: "host".to_owned(),
                needed: 201,
                free: 200,
                capacity: 1000
            })
        );
        assert_eq!(
            ledger.reserve(ReservationKey::Lease(1), reservation(1, 9)),
            Err(ReservationError::InsufficientFds { needed: 9, free: 8, capacity: 10 })
        );
        let elsewhere = LedgerReservation { device: "moon".to_owned(), bytes: 0, fds: 0 };
        assert!(matches!(
            ledger.reserve(ReservationKey::Lease(1), elsewhere),
            Err(ReservationError::UnknownDevice { .. })
        ));
        assert_eq!(ledger.reservations().count(), 1);
    }

    #[test]
    fn each_device_has_its_own_budget() {
        let mut ledger = ledger();
        ledger.reserve(ReservationKey::Weights(1), reservation(1000, 0)).unwrap();
        ledger
            .reserve(
                ReservationKey::Weights(2),
                LedgerReservation { device: "gpu".to_owned(), bytes: 50, fds: 0 },
            )
            .unwrap();
    }

    #[test]
    fn memory_of_a_node_counts_on_the_node_and_on_the_host() {
        let devices = [("host", 1000), ("host:0", 600), ("host:1", 600)];
        let mut ledger =
            Ledger::new(devices.map(|(id, bytes)| (id.to_owned(), bytes)).into(), BTreeSet::new(), 10);
        let on = |device: &str, bytes| LedgerReservation { device: device.to_owned(), bytes, fds: 0 };
        ledger.reserve(ReservationKey::Weights(1), on("host:0", 600)).unwrap();
        ledger.reserve(ReservationKey::Weights(2), on("host:1", 300)).unwrap();
        let refused = |ledger: &mut Ledger, device, bytes| match ledger
            .reserve(ReservationKey::Weights(3), on(device, bytes))
        {
            Err(ReservationError::InsufficientMemory { device, free, .. }) => (device, free),
            other => panic!("{other:?}"),
        };
        assert_eq!(refused(&mut ledger, "host:0", 1), ("host:0".to_owned(), 0));
        assert_eq!(refused(&mut ledger, "host:1", 200), ("host".to_owned(), 100));
        assert_eq!(refused(&mut ledger, "host", 101), ("host".to_owned(), 100));
        let held: Vec<u64> = ledger.devices().map(|(_, _, held)| held).collect();
        assert_eq!(held, [900, 600, 300]);
    }

    #[test]
    fn unified_memory_is_promised_once_to_the_host_and_to_the_gpu() {
        let devices = [("host", 1000), ("host:0", 1000), ("discrete", 50)];
        let devices = devices.map(|(id, bytes)| (id.to_owned(), bytes)).into();
        let mut ledger = Ledger::new(devices, BTreeSet::from(["unified".to_owned()]), 10);
        let on = |device: &str, bytes| LedgerReservation { device: device.to_owned(), bytes, fds: 0 };
        ledger.reserve(ReservationKey::Weights(1), on("unified", 600)).unwrap();
        ledger.reserve(ReservationKey::Weights(2), on("discrete", 50)).unwrap();
        for device in ["host", "host:0", "unified"] {
            let refused = ledger.reserve(ReservationKey::Weights(3), on(device, 401)).unwrap_err();
            let is_host = |device: &str| device == "host";
            assert!(
                matches!(&refused, ReservationError::InsufficientMemory { device, free: 400, capacity: 1000, .. }
                    if is_host(device)),
                "{device}: {refused}"
            );
        }
        ledger.reserve(ReservationKey::Weights(3), on("host", 400)).unwrap();
        assert!(ledger.reserve(ReservationKey::Lease(1), on("unified", 1)).is_err());
        let rows: Vec<_> = ledger.devices().collect();
        assert_eq!(
            rows,
            [("discrete", 50, 50), ("host", 1000, 1000), ("host:0", 1000, 0)],
            "one row for both"
        );
    }

    #[test]
    fn changed_reservation_is_not_counted_twice() {
        let mut ledger = ledger();
        ledger.reserve(ReservationKey::Loading(1), reservation(900, 1)).unwrap();
        ledger.reserve(ReservationKey::Loading(1), reservation(1000, 10)).unwrap();
        assert!(ledger.reserve(ReservationKey::Loading(1), reservation(1001, 1)).is_err());
        ledger.commit_load(1);
        assert_eq!(
            ledger.reservations().collect::<Vec<_>>(),
            [(ReservationKey::Weights(1), &reservation(1000, 10))]
        );
    }

    proptest! {
        #[test]
        fn reservations_never_exceed_the_capacity(
            steps in prop::collection::vec((0u64..6, 0u64..600, 0u64..6, any::<bool>()), 0..60)
        ) {
            let mut ledger = ledger();
            for (id, bytes, fds, release) in steps {
                if release {
                    ledger.release(ReservationKey::Lease(id));
                } else {
                    let before: Vec<_> = ledger.reservations().map(|(k, r)| (k, r.clone())).collect();
                    if ledger.reserve(ReservationKey::Lease(id), reservation(bytes, fds)).is_err() {
                        let after: Vec<_> = ledger.reservations().map(|(k, r)| (k, r.clone())).collect();
                        prop_assert_eq!(before, after);
                    }
                }
                prop_assert!(ledger.reservations().map(|(_, r)| r.bytes).sum::<u64>() <= 1000);
                prop_assert!(ledger.reservations().map(|(_, r)| r.fds).sum::<u64>() <= 10);
            }
            for id in 0..6 {
                ledger.release(ReservationKey::Lease(id));
            }
            prop_assert_eq!(ledger.reservations().count(), 0);
        }
    }
}
