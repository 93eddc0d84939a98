// SPDX-License-Identifier: Apache-2.0

//! Devices as messages.

use std::time::Duration;

use proto::fleet::v1 as wire;

use crate::device_health::{DeviceReport, DeviceStatus, QuarantineStatus};

impl From<wire::DeviceReport> for DeviceReport {
    fn from(report: wire::DeviceReport) -> Self {
        let wire::DeviceReport {
            device,
            figures,
            new_xids,
            new_uncorrected_ecc_errors,
            recovery_action,
            problem,
            unanswered_ms,
        } = report;
        Self {
            device,
            figures: figures.unwrap_or_default(),
            new_xids,
            new_uncorrected_ecc_errors,
            recovery_action,
            problem,
            unanswered: Duration::from_millis(unanswered_ms),
        }
    }
}

impl From<DeviceStatus> for wire::Device {
    fn from(status: DeviceStatus) -> Self {
        let DeviceStatus { device, figures, xids, quarantine } = status;
        let xids = xids.into_iter().map(|(xid, count)| wire::XidCount { xid, count });
        Self { device, figures, xids: xids.collect(), quarantine: quarantine.map(wire::Quarantine::from) }
    }
}

impl From<QuarantineStatus> for wire::Quarantine {
    fn from(status: QuarantineStatus) -> Self {
        let milliseconds = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        Self {
            reason: status.reason,
            since_ms: milliseconds(status.since),
            ends_in_ms: status.ends_in.map(milliseconds),
        }
    }
}
