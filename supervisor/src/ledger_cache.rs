// SPDX-License-Identifier: Apache-2.0

//! [`LedgerCache`]: the memory ledger for clients of the fleet API that ask for it.
//!
//! 1. No caller waits for the weight-server: an answer has what the cache has.
//! 2. While clients ask, one task at a time refreshes it. Nothing runs otherwise.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use proto::fleet::v1::DeviceLedger;
use proto::weights::v1::{Ledger, ReservationKind};
use tokio::time::Instant;

use crate::weight_server_admin::WeightServerAdmin;

/// An answer costs the weight-server well below a millisecond.
const REFRESH_INTERVAL: Duration = Duration::from_secs(1);
/// How long a weight-server may take. One that is stopped does not answer.
const ANSWER_WAIT: Duration = Duration::from_secs(2);
/// Older figures are those of a weight-server that is gone.
const AGE_MAX: Duration = Duration::from_secs(5);

/// Cheap to clone.
#[derive(Clone)]
pub(crate) struct LedgerCache {
    admin: WeightServerAdmin,
    state: Arc<Mutex<CacheState>>,
}

#[derive(Default)]
struct CacheState {
    rows: Vec<DeviceLedger>,
    answered: Option<Instant>,
    asked: Option<Instant>,
    is_asking: bool,
}

impl LedgerCache {
    pub(crate) fn new(admin: WeightServerAdmin) -> Self {
        Self { admin, state: Arc::default() }
    }

    /// The rows of the last answer, if it is recent. Starts a refresh if one is due.
    pub(crate) fn latest(&self) -> Vec<DeviceLedger> {
        let now = Instant::now();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.begin_refresh(now) {
            tokio::spawn(self.clone().refresh());
        }
        state.rows_at(now)
    }

    async fn refresh(mut self) {
        let answer = tokio::time::timeout(ANSWER_WAIT, self.admin.status()).await;
        let ledger = answer.ok().and_then(Result::ok).and_then(|status| status.ledger);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.is_asking = false;
        if let Some(ledger) = ledger {
            state.rows = device_rows(&ledger);
            state.answered = Some(Instant::now());
        }
    }
}

impl CacheState {
    /// Returns true if the caller is to ask the weight-server.
    fn begin_refresh(&mut self, now: Instant) -> bool {
        let is_due = self.asked.is_none_or(|asked| now.duration_since(asked) >= REFRESH_INTERVAL);
        let begins = is_due && !self.is_asking;
        if begins {
            self.asked = Some(now);
            self.is_asking = true;
        }
        begins
    }

    fn rows_at(&self, now: Instant) -> Vec<DeviceLedger> {
        match self.answered {
            Some(answered) if now.duration_since(answered) <= AGE_MAX => self.rows.clone(),
            _ => Vec::new(),
        }
    }
}

/// The reservations of each device, summed by whom they are for. A GPU with unified memory counts
/// on the row of the host.
pub fn device_rows(ledger: &Ledger) -> Vec<DeviceLedger> {
    let mut rows: BTreeMap<&str, DeviceLedger> = BTreeMap::new();
    let mut unified: BTreeMap<&str, &str> = BTreeMap::new();
    for device in &ledger.devices {
        let (name, capacity_bytes) = (device.device.clone(), device.capacity_bytes);
        let row = DeviceLedger { device: name, capacity_bytes, ..DeviceLedger::default() };
        rows.insert(&device.device, row);
        unified.extend(device.unified_devices.iter().map(|gpu| (gpu.as_str(), device.device.as_str())));
    }
    for reservation in &ledger.reservations {
        let device = reservation.device.as_str();
        let device = unified.get(device).copied().unwrap_or(device);
        let Some(row) = rows.get_mut(device) else { continue };
        let sum = match reservation.kind() {
            ReservationKind::Weights | ReservationKind::Loading => &mut row.weights_bytes,
            ReservationKind::Lease | ReservationKind::Orphaned => &mut row.workers_bytes,
            ReservationKind::Verifying | ReservationKind::Copying | ReservationKind::Unspecified => {
                &mut row.other_bytes
            }
        };
        *sum = sum.saturating_add(reservation.bytes);
    }
    rows.into_values().collect()
}

#[cfg(test)]
mod tests {
    use proto::weights::v1::{DeviceCapacity, Reservation};

    use super::*;

    #[test]
    fn one_question_at_a_time_is_asked_at_most_once_a_second_and_old_rows_are_not_given() {
        let start = Instant::now();
        let after = |milliseconds| start + Duration::from_millis(milliseconds);
        let mut state = CacheState::default();
        assert!(state.begin_refresh(start) && state.rows_at(start).is_empty());
        assert!(!state.begin_refresh(after(3_000)), "one is on its way");
        state.is_asking = false;
        state.rows = vec![DeviceLedger::default()];
        state.answered = Some(after(100));
        assert!(!state.begin_refresh(after(999)) && state.begin_refresh(after(1_000)));
        assert_eq!((state.rows_at(after(5_100)).len(), state.rows_at(after(5_101)).len()), (1, 0));
    }

    #[test]
    fn reservations_are_summed_by_device_and_by_whom_they_are_for() {
        let device = |name: &str| DeviceCapacity {
            device: name.to_owned(),
            capacity_bytes: 1_000,
            ..DeviceCapacity::default()
        };
        let row = |device: &str, kind: ReservationKind, bytes| Reservation {
            device: device.to_owned(),
            kind: kind.into(),
            bytes,
            ..Reservation::default()
        };
        let reservations = vec![
            row("host", ReservationKind::Weights, 100),
            row("host", ReservationKind::Loading, 10),
            row("host", ReservationKind::Lease, 7),
            row("GPU-a", ReservationKind::Orphaned, 5),
            row("GPU-a", ReservationKind::Copying, 3),
            row("gone", ReservationKind::Weights, 9),
            row("GPU-u", ReservationKind::Weights, 20),
        ];
        let host = DeviceCapacity { unified_devices: vec!["GPU-u".to_owned()], ..device("host") };
        let devices = vec![host, device("GPU-a")];
        let rows = device_rows(&Ledger { devices, reservations, ..Ledger::default() });
        let sums =
            |row: &DeviceLedger| (row.device.clone(), row.weights_bytes, row.workers_bytes, row.other_bytes);
        let expected = [("GPU-a".to_owned(), 0, 5, 3), ("host".to_owned(), 130, 7, 0)];
        assert_eq!(rows.iter().map(sums).collect::<Vec<_>>(), expected);
        assert!(rows.iter().all(|row| row.capacity_bytes == 1_000));
    }
}
