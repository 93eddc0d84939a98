//! Who may hold how much: bytes of each device and descriptors of this process, one row per owner.
//!
//! A plain value. Invariant: the sum of rows never exceeds a capacity, except by rows that were there before this process
//! (`adopt`). Reservations come before the memory: what is not in here must not be allocated.

use std::collections::BTreeMap;

use service::ByteSize;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum RowKey {
    /// A load that runs or waits, by generation.
    Loading(u64),
    /// A resident generation.
    Weights(u64),
    /// KV cache and workspace of one lease.
    Lease(u64),
    /// A verifier's context, by the generation that it checks.
    Verifying(u64),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) device: String,
    pub(crate) bytes: u64,
    pub(crate) fds: u64,
}

#[derive(Debug)]
pub(crate) struct Ledger {
    devices: BTreeMap<String, u64>,
    fds: u64,
    rows: BTreeMap<RowKey, Row>,
}

/// Why a reservation is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Shortage {
    #[error("there is no device {device} here: {known}")]
    Device { device: String, known: String },
    #[error(
        "{} are needed on {device}, {} of {} are free, {} are missing: unload a model, give workers less, or raise the budget",
        ByteSize(*.needed).rounded(), ByteSize(*.free).rounded(), ByteSize(*.capacity).rounded(),
        ByteSize(needed.saturating_sub(*.free)).rounded()
    )]
    Bytes { device: String, needed: u64, free: u64, capacity: u64 },
    #[error(
        "{needed} file descriptors are needed, {free} of {capacity} are free: raise RLIMIT_NOFILE (ulimit -n)"
    )]
    Fds { needed: u64, free: u64, capacity: u64 },
}

impl Ledger {
    pub(crate) fn new(devices: BTreeMap<String, u64>, fds: u64) -> Self {
        Self { devices, fds, rows: BTreeMap::new() }
    }

    /// Books a row or changes an existing one; on refusal nothing has changed.
    pub(crate) fn reserve(&mut self, key: RowKey, row: Row) -> Result<(), Shortage> {
        let Some(&capacity) = self.devices.get(&row.device) else {
            let known = self.devices.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            return Err(Shortage::Device { device: row.device, known: format!("known are {known}") });
        };
        let others = |of: fn(&Row) -> u64, same: &dyn Fn(&Row) -> bool| -> u64 {
            self.rows.iter().filter(|(k, r)| **k != key && same(r)).map(|(_, r)| of(r)).sum()
        };
        let free = capacity.saturating_sub(others(|r| r.bytes, &|r| r.device == row.device));
        if row.bytes > free {
            return Err(Shortage::Bytes { device: row.device, needed: row.bytes, free, capacity });
        }
        let free = self.fds.saturating_sub(others(|r| r.fds, &|_| true));
        if row.fds > free {
            return Err(Shortage::Fds { needed: row.fds, free, capacity: self.fds });
        }
        self.rows.insert(key, row);
        Ok(())
    }

    /// Books what an earlier incarnation had reserved: it is in use already, whatever the capacity says.
    pub(crate) fn adopt(&mut self, key: RowKey, row: Row) {
        self.rows.insert(key, row);
    }

    /// A load has become a resident generation.
    pub(crate) fn settle(&mut self, generation: u64) {
        if let Some(row) = self.rows.remove(&RowKey::Loading(generation)) {
            self.rows.insert(RowKey::Weights(generation), row);
        }
    }

    pub(crate) fn release(&mut self, key: RowKey) {
        self.rows.remove(&key);
    }

    pub(crate) fn rows(&self) -> impl Iterator<Item = (RowKey, &Row)> {
        self.rows.iter().map(|(key, row)| (*key, row))
    }

    /// Capacity and sum of the rows of each device.
    pub(crate) fn devices(&self) -> impl Iterator<Item = (&str, u64, u64)> {
        self.devices.iter().map(|(device, capacity)| {
            let rows = self.rows.values().filter(|row| row.device == *device);
            (device.as_str(), *capacity, rows.map(|row| row.bytes).sum())
        })
    }

    pub(crate) fn capacity_fds(&self) -> u64 {
        self.fds
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn row(bytes: u64, fds: u64) -> Row {
        Row { device: "host".to_owned(), bytes, fds }
    }

    fn ledger() -> Ledger {
        Ledger::new(BTreeMap::from([("host".to_owned(), 1000), ("gpu".to_owned(), 50)]), 10)
    }

    #[test]
    fn refusal_says_what_is_needed_and_what_is_there() {
        let mut ledger = ledger();
        ledger.reserve(RowKey::Weights(1), row(800, 2)).unwrap();
        assert_eq!(
            ledger.reserve(RowKey::Lease(1), row(201, 0)),
            Err(Shortage::Bytes { device: "host".to_owned(), needed: 201, free: 200, capacity: 1000 })
        );
        assert_eq!(
            ledger.reserve(RowKey::Lease(1), row(1, 9)),
            Err(Shortage::Fds { needed: 9, free: 8, capacity: 10 })
        );
        let elsewhere = Row { device: "moon".to_owned(), bytes: 0, fds: 0 };
        assert!(matches!(ledger.reserve(RowKey::Lease(1), elsewhere), Err(Shortage::Device { .. })));
        assert_eq!(ledger.rows().count(), 1);
    }

    #[test]
    fn devices_have_budgets_of_their_own() {
        let mut ledger = ledger();
        ledger.reserve(RowKey::Weights(1), row(1000, 0)).unwrap();
        ledger.reserve(RowKey::Weights(2), Row { device: "gpu".to_owned(), bytes: 50, fds: 0 }).unwrap();
    }

    #[test]
    fn changed_row_is_not_counted_twice() {
        let mut ledger = ledger();
        ledger.reserve(RowKey::Loading(1), row(900, 1)).unwrap();
        ledger.reserve(RowKey::Loading(1), row(1000, 10)).unwrap();
        assert!(ledger.reserve(RowKey::Loading(1), row(1001, 1)).is_err());
        ledger.settle(1);
        assert_eq!(ledger.rows().collect::<Vec<_>>(), [(RowKey::Weights(1), &row(1000, 10))]);
    }

    proptest! {
        #[test]
        fn rows_never_exceed_the_capacity_and_all_comes_back(
            steps in prop::collection::vec((0u64..6, 0u64..600, 0u64..6, any::<bool>()), 0..60)
        ) {
            let mut ledger = ledger();
            for (id, bytes, fds, give_back) in steps {
                if give_back {
                    ledger.release(RowKey::Lease(id));
                } else {
                    let before: Vec<_> = ledger.rows().map(|(k, r)| (k, r.clone())).collect();
                    if ledger.reserve(RowKey::Lease(id), row(bytes, fds)).is_err() {
                        let after: Vec<_> = ledger.rows().map(|(k, r)| (k, r.clone())).collect();
                        prop_assert_eq!(before, after);
                    }
                }
                prop_assert!(ledger.rows().map(|(_, r)| r.bytes).sum::<u64>() <= 1000);
                prop_assert!(ledger.rows().map(|(_, r)| r.fds).sum::<u64>() <= 10);
            }
            for id in 0..6 {
                ledger.release(RowKey::Lease(id));
            }
            prop_assert_eq!(ledger.rows().count(), 0);
        }
    }
}
