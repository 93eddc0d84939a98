// SPDX-License-Identifier: Apache-2.0

//! Which devices may be worked with. A plain value: reports, ended workers and commands go in, the
//! devices that are quarantined or returned to service come out.
//!
//! ```text
//!              Xid, ECC error, lost, silent, hung steps, command
//! in service ----------------------------------------------------> quarantined
//!      ^                                                                |
//!      '---- its time is over and the driver asks for nothing, or a command --'
//! ```
//! 1. A fault of the driver or of three workers quarantines a device, and a fault of one process
//!    does not.
//! 2. The time of a quarantine doubles with each one, until the device has worked for
//!    [`HEALTHY_AFTER`].
//! 3. A quarantine by a command ends with a command.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use proto::fleet::v1::DeviceFigures;

/// The time of the first quarantine: a driver that resets a GPU needs seconds.
pub(crate) const FIRST_QUARANTINE: Duration = Duration::from_secs(60);
/// The longest one. A device that is tried once an hour costs nothing.
const QUARANTINE_MAX: Duration = Duration::from_secs(3600);
/// A device that was in service for this long starts with [`FIRST_QUARANTINE`] again.
const HEALTHY_AFTER: Duration = Duration::from_secs(600);

/// So many hung steps within [`HUNG_STEPS_WINDOW`] are a fault of the device. A request can hang
/// two workers, then the router quarantines it.
const HUNG_STEPS_MAX: usize = 3;
const HUNG_STEPS_WINDOW: Duration = Duration::from_secs(300);

/// A driver that answers no question for this long has lost the device. An answer takes
/// milliseconds, and seconds while a GPU is being initialized or a large process is torn down. A
/// false alarm costs every worker of the device.
const SILENCE_MAX: Duration = Duration::from_secs(30);
/// A report counts for this long. The monitor reports every second.
const REPORT_LIFETIME: Duration = Duration::from_secs(5);

/// Xids that a process causes, and that leave the device as it is. The list of NVIDIA's device
/// plugin for Kubernetes, and 154, which announces what `recovery_action` says.
const XIDS_OF_PROCESSES: [u64; 7] = [13, 31, 43, 45, 68, 109, 154];

/// What the monitor says of one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DeviceReport {
    pub(crate) device: String,
    pub(crate) figures: DeviceFigures,
    pub(crate) new_xids: Vec<u64>,
    pub(crate) new_uncorrected_ecc_errors: u32,
    /// What the driver asks for; empty: nothing.
    pub(crate) recovery_action: String,
    /// Why the driver cannot use the device; empty: it can.
    pub(crate) problem: String,
    pub(crate) unanswered: Duration,
}

/// One device, for status and metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceStatus {
    pub device: String,
    pub figures: Option<DeviceFigures>,
    /// Since the supervisor was started: Xid and count.
    pub xids: BTreeMap<u64, u64>,
    pub quarantine: Option<QuarantineStatus>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuarantineStatus {
    pub reason: String,
    pub since: Duration,
    /// Until the device is tried again. `None`: a command decides.
    pub ends_in: Option<Duration>,
}

/// A quarantine as a successor of the supervisor needs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KnownQuarantine {
    pub(crate) device: String,
    pub(crate) reason: String,
    /// Only a command ends it.
    pub(crate) by_command: bool,
}

#[derive(Clone, Debug)]
struct Quarantine {
    reason: String,
    since: Instant,
    /// `None`: only a command ends it.
    ends: Option<Instant>,
}

#[derive(Clone, Debug, Default)]
struct DeviceState {
    report: Option<(Instant, DeviceReport)>,
    xids: BTreeMap<u64, u64>,
    /// At most [`HUNG_STEPS_MAX`], the newest last.
    hung_steps: Vec<Instant>,
    quarantine: Option<Quarantine>,
    /// Quarantines without [`HEALTHY_AFTER`] between them.
    quarantines: u32,
    in_service_since: Option<Instant>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct DeviceHealth {
    devices: BTreeMap<String, DeviceState>,
}

impl DeviceHealth {
    /// Takes a report. Returns whether the device is quarantined for it.
    pub(crate) fn reported(&mut self, now: Instant, report: DeviceReport) -> bool {
        let fault = fault(&report);
        let device = report.device.clone();
        let state = self.devices.entry(device.clone()).or_default();
        for xid in &report.new_xids {
            *state.xids.entry(*xid).or_default() += 1;
        }
        state.report = Some((now, report));
        fault.is_some_and(|reason| self.quarantine(now, &device, reason, false))
    }

    /// A worker has ended because its step hung on the device. Returns whether the device is
    /// quarantined for it.
    pub(crate) fn step_hung(&mut self, now: Instant, device: &str) -> bool {
        let state = self.devices.entry(device.to_owned()).or_default();
        state.hung_steps.retain(|&at| now.saturating_duration_since(at) < HUNG_STEPS_WINDOW);
        state.hung_steps.push(now);
        if state.hung_steps.len() < HUNG_STEPS_MAX {
            return false;
        }
        let minutes = HUNG_STEPS_WINDOW.as_secs() / 60;
        let reason = format!("{HUNG_STEPS_MAX} steps hung on it within {minutes} minutes");
        self.quarantine(now, device, reason, false)
    }

    /// Quarantines a device. Returns false if it is already.
    pub(crate) fn quarantine(
        &mut self,
        now: Instant,
        device: &str,
        reason: String,
        by_command: bool,
    ) -> bool {
        let state = self.devices.entry(device.to_owned()).or_default();
        if let Some(quarantine) = &mut state.quarantine {
            // A command holds a device that would come back by itself.
            if by_command {
                quarantine.ends = None;
            }
            return false;
        }
        let is_healthy = |since: Instant| now.saturating_duration_since(since) >= HEALTHY_AFTER;
        if state.in_service_since.is_none_or(is_healthy) {
            state.quarantines = 0;
        }
        let time = FIRST_QUARANTINE.saturating_mul(1 << state.quarantines.min(16)).min(QUARANTINE_MAX);
        state.quarantines += 1;
        state.hung_steps.clear();
        let ends = (!by_command).then(|| now + time);
        state.quarantine = Some(Quarantine { reason, since: now, ends });
        true
    }

    /// Ends a quarantine. Returns false if there is none.
    pub(crate) fn end(&mut self, now: Instant, device: &str) -> bool {
        let Some(state) = self.devices.get_mut(device) else { return false };
        state.in_service_since = Some(now);
        state.quarantine.take().is_some()
    }

    /// The devices whose time is over and of which the driver reports no problem. A device without
    /// a monitor is tried after its time.
    pub(crate) fn due(&self, now: Instant) -> Vec<String> {
        let is_due = |state: &DeviceState| {
            let is_over = |quarantine: &Quarantine| quarantine.ends.is_some_and(|ends| ends <= now);
            let has_no_problem = match &state.report {
                None => true,
                Some((at, report)) => {
                    now.saturating_duration_since(*at) < REPORT_LIFETIME && lasting_fault(report).is_none()
                }
            };
            state.quarantine.as_ref().is_some_and(is_over) && has_no_problem
        };
        self.devices.iter().filter(|(_, state)| is_due(state)).map(|(name, _)| name.clone()).collect()
    }

    /// Why the device is quarantined, if it is.
    pub(crate) fn reason(&self, device: &str) -> Option<&str> {
        let quarantine = self.devices.get(device)?.quarantine.as_ref()?;
        Some(&quarantine.reason)
    }

    pub(crate) fn quarantines(&self) -> Vec<KnownQuarantine> {
        let known = |(device, state): (&String, &DeviceState)| {
            let Quarantine { reason, ends, .. } = state.quarantine.clone()?;
            Some(KnownQuarantine { device: device.clone(), reason, by_command: ends.is_none() })
        };
        self.devices.iter().filter_map(known).collect()
    }

    /// `used` are the devices of the fleet.
    pub(crate) fn status<'a>(
        &'a self,
        now: Instant,
        used: impl Iterator<Item = &'a str>,
    ) -> Vec<DeviceStatus> {
        let is_quarantined = |(_, state): &(&String, &DeviceState)| state.quarantine.is_some();
        let quarantined = self.devices.iter().filter(is_quarantined).map(|(name, _)| name.as_str());
        let mut names: Vec<&str> = used.chain(quarantined).collect();
        names.sort_unstable();
        names.dedup();
        names.into_iter().map(|name| self.device_status(now, name)).collect()
    }

    fn device_status(&self, now: Instant, name: &str) -> DeviceStatus {
        let device = name.to_owned();
        let Some(state) = self.devices.get(name) else {
            return DeviceStatus { device, ..DeviceStatus::default() };
        };
        let is_fresh = |at: Instant| now.saturating_duration_since(at) < REPORT_LIFETIME;
        let report = state.report.as_ref().filter(|(at, _)| is_fresh(*at));
        let quarantine = state.quarantine.as_ref().map(|quarantine| QuarantineStatus {
            reason: quarantine.reason.clone(),
            since: now.saturating_duration_since(quarantine.since),
            ends_in: quarantine.ends.map(|ends| ends.saturating_duration_since(now)),
        });
        DeviceStatus {
            device,
            figures: report.map(|(_, report)| report.figures),
            xids: state.xids.clone(),
            quarantine,
        }
    }
}

/// Why the device cannot be relied on.
fn fault(report: &DeviceReport) -> Option<String> {
    let xid = report.new_xids.iter().find(|xid| !XIDS_OF_PROCESSES.contains(xid));
    let of_xid = xid.map(|&xid| format!("Xid {xid}: {}", xid_text(xid)));
    let ecc = report.new_uncorrected_ecc_errors;
    let of_ecc = (ecc > 0).then(|| format!("{ecc} new ECC errors that cannot be corrected"));
    of_xid.or(of_ecc).or_else(|| lasting_fault(report))
}

/// What a later report would say too.
fn lasting_fault(report: &DeviceReport) -> Option<String> {
    if !report.problem.is_empty() {
        return Some(format!("the driver cannot use it: {}", report.problem));
    }
    if !report.recovery_action.is_empty() {
        return Some(format!("the driver asks to {}", report.recovery_action));
    }
    let silence = report.unanswered;
    (silence >= SILENCE_MAX).then(|| format!("the driver has not answered for {} s", silence.as_secs()))
}

/// Of NVIDIA's catalog of Xid messages.
fn xid_text(xid: u64) -> &'static str {
    match xid {
        48 => "a memory error that ECC cannot correct",
        62 => "the internal microcontroller has halted",
        63 | 64 => "a row of memory has to be remapped",
        74 => "NVLink error",
        79 => "the GPU has fallen off the bus",
        92 => "many memory errors that ECC corrects",
        94 => "a contained memory error",
        95 => "a memory error that is not contained",
        119 | 120 => "the GPU system processor does not answer",
        140 => "a memory error that has not been recovered",
        _ => "see NVIDIA's catalog of Xid messages",
    }
}

#[cfg(test)]
mod tests;
