// SPDX-License-Identifier: Apache-2.0

//! When a worker claims its lease again, and when the lease is lost. A plain value, which the
//! thread of a [`LeaseGuard`](crate::lease::LeaseGuard) drives.

use std::time::Duration;

use proto::weights::v1::RefusalReason;

/// First wait before a re-claim; each wait doubles, up to `LAST_RETRY`. Attempts end only with the
/// lease: a worker without a weight-server keeps serving, and a weight-server that comes back late
/// has to find it.
const FIRST_RETRY: Duration = Duration::from_millis(20);
const LAST_RETRY: Duration = Duration::from_secs(1);

/// How an attempt to claim the lease ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimAnswer {
    Reclaimed,
    Refused(RefusalReason),
    /// There is no server, or the connection broke off.
    Nothing,
}

/// What follows from an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimStep {
    Held,
    /// No further attempt can succeed.
    Lost(RefusalReason),
    TryAgain,
}

/// The attempts since the connection of the lease broke.
#[derive(Debug)]
pub struct ClaimRetry {
    wait: Duration,
}

impl Default for ClaimRetry {
    fn default() -> Self {
        Self { wait: FIRST_RETRY }
    }
}

impl ClaimRetry {
    /// The wait before the next attempt.
    pub fn next_wait(&mut self) -> Duration {
        let wait = self.wait;
        self.wait = LAST_RETRY.min(wait * 2);
        wait
    }

    pub fn handle(answer: ClaimAnswer) -> ClaimStep {
        match answer {
            ClaimAnswer::Reclaimed => ClaimStep::Held,
            ClaimAnswer::Refused(reason) if is_final(reason) => ClaimStep::Lost(reason),
            // There is no server, or it is busy, shuts down or broke off.
            ClaimAnswer::Refused(_) | ClaimAnswer::Nothing => ClaimStep::TryAgain,
        }
    }
}

/// Whether another attempt cannot succeed.
fn is_final(reason: RefusalReason) -> bool {
    match reason {
        RefusalReason::Busy | RefusalReason::ShuttingDown | RefusalReason::Unspecified => false,
        RefusalReason::Protocol
        | RefusalReason::Layout
        | RefusalReason::ManifestFormat
        | RefusalReason::Device
        | RefusalReason::UnknownModel
        | RefusalReason::LoadFailed
        | RefusalReason::Token
        | RefusalReason::PeerUid
        | RefusalReason::Ledger
        | RefusalReason::UnknownLease
        | RefusalReason::Violation
        | RefusalReason::Quarantined => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_a_second_and_only_a_final_refusal_ends_them() {
        let mut retry = ClaimRetry::default();
        let waits: Vec<u128> = (0..8).map(|_| retry.next_wait().as_millis()).collect();
        assert_eq!(waits, [20, 40, 80, 160, 320, 640, 1000, 1000]);
        let step = |reason| ClaimRetry::handle(ClaimAnswer::Refused(reason));
        assert_eq!(step(RefusalReason::Busy), ClaimStep::TryAgain);
        assert_eq!(step(RefusalReason::UnknownLease), ClaimStep::Lost(RefusalReason::UnknownLease));
        assert_eq!(ClaimRetry::handle(ClaimAnswer::Nothing), ClaimStep::TryAgain);
    }
}
