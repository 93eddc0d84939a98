// SPDX-License-Identifier: Apache-2.0

//! [`LedgerWatch`]: what the weight-server last said about the memory of the fleet.
//!
//! After the death of a worker its reservation is gone within milliseconds, and a dead
//! weight-server answers nothing. So the ledger is asked for while all is well.

use std::sync::Arc;
use std::time::{Duration, Instant};

use proto::weights::v1 as wire;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

use crate::weight_server_admin::WeightServerAdmin;

/// How often the ledger is asked for. An answer costs the weight-server well below a millisecond.
const ASK_INTERVAL: Duration = Duration::from_secs(1);
/// How long a weight-server may take. One that is stopped does not answer.
const ANSWER_WAIT: Duration = Duration::from_secs(2);
/// The longest ledger of a report: each worker of the largest fleet, and as many weights.
const ROWS_MAX: usize = 512;

type LedgerAnswer = Option<(Instant, Arc<wire::Status>)>;

#[derive(Debug)]
pub(super) struct LedgerWatch {
    latest: watch::Receiver<LedgerAnswer>,
}

/// An answer of the weight-server, and how old it was when it was needed.
#[derive(Clone, Debug)]
pub(crate) struct KnownLedger {
    age: Duration,
    status: Arc<wire::Status>,
}

impl LedgerWatch {
    /// Starts a task that ends with this value.
    pub(super) fn start(admin: WeightServerAdmin) -> Self {
        let (sender, latest) = watch::channel(None);
        tokio::spawn(async move {
            tokio::select! {
                () = ask_for_ever(admin, &sender) => {}
                () = sender.closed() => {}
            }
        });
        Self { latest }
    }

    #[cfg(test)]
    pub(super) fn unknown() -> Self {
        Self { latest: watch::channel(None).1 }
    }

    pub(super) fn latest(&self, now: Instant) -> Option<KnownLedger> {
        let (at, status) = self.latest.borrow().clone()?;
        Some(KnownLedger { age: now.saturating_duration_since(at), status })
    }
}

async fn ask_for_ever(mut admin: WeightServerAdmin, latest: &watch::Sender<LedgerAnswer>) {
    let mut ask = tokio::time::interval(ASK_INTERVAL);
    ask.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ask.tick().await;
        // Without an answer the last one stays, and its age tells.
        if let Ok(Ok(status)) = tokio::time::timeout(ANSWER_WAIT, admin.status()).await {
            latest.send_replace(Some((Instant::now(), Arc::new(status))));
        }
    }
}

impl KnownLedger {
    pub(super) fn age_ms(&self) -> u64 {
        u64::try_from(self.age.as_millis()).unwrap_or(u64::MAX)
    }

    /// Sums of each device, and the reservations with whom they are for.
    pub(super) fn to_json(&self) -> Value {
        let ledger = self.status.ledger.clone().unwrap_or_default();
        let devices = ledger.devices.iter().map(|device| {
            json!({
                "device": device.device,
                "capacity_bytes": device.capacity_bytes,
                "reserved_bytes": device.reserved_bytes,
                "unified_devices": device.unified_devices,
            })
        });
        let rows = ledger.reservations.iter().take(ROWS_MAX).map(|row| {
            json!({
                "kind": row.kind().as_str_name().trim_start_matches("RESERVATION_KIND_").to_lowercase(),
                "for": self.owner(row),
                "device": row.device,
                "bytes": row.bytes,
                "fds": row.fds,
            })
        });
        json!({
            "age_ms": self.age_ms(),
            "capacity_bytes": ledger.capacity_bytes,
            "reserved_bytes": ledger.reserved_bytes,
            "capacity_fds": ledger.capacity_fds,
            "reserved_fds": ledger.reserved_fds,
            "devices": devices.collect::<Vec<_>>(),
            "reservations": rows.collect::<Vec<_>>(),
            "reservations_left_out": ledger.reservations.len().saturating_sub(ROWS_MAX),
        })
    }

    /// The worker of a lease, or the model of weights.
    fn owner(&self, row: &wire::Reservation) -> Option<&str> {
        use wire::ReservationKind::{Copying, Lease, Loading, Orphaned, Unspecified, Verifying, Weights};
        match row.kind() {
            Lease | Orphaned => {
                let lease = self.status.leases.iter().find(|lease| lease.lease == row.id)?;
                Some(&lease.token_name)
            }
            Weights | Loading | Verifying | Copying => {
                let found = self.status.generations.iter().find(|found| found.generation == row.id)?;
                Some(&found.model)
            }
            Unspecified => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reservation_names_its_worker_or_its_model_and_their_number_is_bounded() {
        let row = |kind: wire::ReservationKind, id, bytes| wire::Reservation {
            kind: kind.into(),
            id,
            device: "host".to_owned(),
            bytes,
            fds: 2,
        };
        let mut reservations =
            vec![row(wire::ReservationKind::Weights, 3, 100), row(wire::ReservationKind::Lease, 9, 50)];
        reservations.extend((0..ROWS_MAX as u64).map(|id| row(wire::ReservationKind::Lease, 100 + id, 1)));
        let status = wire::Status {
            generations: vec![wire::Generation {
                generation: 3,
                model: "m".to_owned(),
                ..Default::default()
            }],
            leases: vec![wire::Lease { lease: 9, token_name: "worker-0".to_owned(), ..Default::default() }],
            ledger: Some(wire::Ledger { reserved_bytes: 150, reservations, ..Default::default() }),
            ..Default::default()
        };
        let known = KnownLedger { age: Duration::from_millis(20), status: Arc::new(status) };
        let json = known.to_json();
        assert_eq!((&json["age_ms"], &json["reserved_bytes"]), (&json!(20), &json!(150)));
        let rows = json["reservations"].as_array().unwrap();
        assert_eq!((&rows[0]["kind"], &rows[0]["for"]), (&json!("weights"), &json!("m")));
        assert_eq!((&rows[1]["kind"], &rows[1]["for"]), (&json!("lease"), &json!("worker-0")));
        assert_eq!((rows.len(), &json["reservations_left_out"]), (ROWS_MAX, &json!(2)));
    }
}
