// SPDX-License-Identifier: Apache-2.0

//! [`MonitoredDevices`]: what the monitor knows of the GPUs, and what the next report says. A plain
//! value.
//!
//! 1. A fault is reported until the supervisor has answered a report with it.
//! 2. A question that is not answered counts by periods of reports, not by the clock: a monitor
//!    that was stopped finds no GPU silent.

use std::time::Duration;

use cuda::nvml::{DeviceFault, NvmlFigures, RecoveryAction};
use proto::fleet::v1 as wire;

/// How often the GPUs are asked and the supervisor gets a report.
pub(crate) const REPORT_PERIOD: Duration = Duration::from_secs(1);
/// Xids of one GPU that wait for a report. A GPU that fails reports a few.
const NEW_XIDS_MAX: usize = 64;

#[derive(Debug, Default)]
pub(crate) struct MonitoredDevices {
    devices: Vec<MonitoredDevice>,
}

#[derive(Debug, Default)]
struct MonitoredDevice {
    /// UUID.
    name: String,
    figures: NvmlFigures,
    /// Why the driver cannot use the device.
    problem: String,
    new_xids: Vec<u64>,
    new_uncorrected_ecc_errors: u32,
    /// Periods that have passed since the question; `None` while none is open.
    open_question: Option<u32>,
}

impl MonitoredDevices {
    pub(crate) fn new(names: impl Iterator<Item = String>) -> Self {
        let device = |name| MonitoredDevice { name, ..MonitoredDevice::default() };
        Self { devices: names.map(device).collect() }
    }

    /// The driver is being asked about the device with this index.
    pub(crate) fn begin_question(&mut self, index: usize) {
        if let Some(device) = self.devices.get_mut(index) {
            device.open_question = Some(0);
        }
    }

    /// The driver has answered. A counter of ECC errors that has grown is a fault.
    pub(crate) fn set_figures(&mut self, index: usize, figures: NvmlFigures) {
        let Some(device) = self.devices.get_mut(index) else { return };
        if let (Some(before), Some(now)) =
            (device.figures.uncorrected_ecc_errors, figures.uncorrected_ecc_errors)
        {
            let new = u32::try_from(now.saturating_sub(before)).unwrap_or(u32::MAX);
            device.new_uncorrected_ecc_errors = device.new_uncorrected_ecc_errors.saturating_add(new);
        }
        (device.figures, device.open_question) = (figures, None);
        device.problem.clear();
    }

    /// The driver cannot use the device.
    pub(crate) fn set_problem(&mut self, index: usize, problem: String) {
        let Some(device) = self.devices.get_mut(index) else { return };
        device.figures = NvmlFigures::default();
        (device.problem, device.open_question) = (problem, None);
    }

    /// The driver has refused to answer, which says nothing about the device.
    pub(crate) fn end_question(&mut self, index: usize) {
        if let Some(device) = self.devices.get_mut(index) {
            device.open_question = None;
        }
    }

    pub(crate) fn add_fault(&mut self, name: &str, fault: DeviceFault) {
        let Some(device) = self.devices.iter_mut().find(|device| device.name == name) else { return };
        match fault {
            DeviceFault::Xid(xid) if device.new_xids.len() < NEW_XIDS_MAX => device.new_xids.push(xid),
            // The supervisor does not answer, and knows of a fault when it does.
            DeviceFault::Xid(_) => {}
            DeviceFault::UncorrectedEcc => {
                device.new_uncorrected_ecc_errors = device.new_uncorrected_ecc_errors.saturating_add(1);
            }
        }
    }

    /// Another [`REPORT_PERIOD`] has passed.
    pub(crate) fn tick(&mut self) {
        for periods in self.devices.iter_mut().filter_map(|device| device.open_question.as_mut()) {
            *periods = periods.saturating_add(1);
        }
    }

    /// The next report.
    pub(crate) fn report(&self) -> Vec<wire::DeviceReport> {
        self.devices.iter().map(MonitoredDevice::report).collect()
    }

    /// The supervisor has answered this report.
    pub(crate) fn acknowledge(&mut self, report: &[wire::DeviceReport]) {
        for (device, reported) in self.devices.iter_mut().zip(report) {
            device.new_xids.drain(..reported.new_xids.len());
            device.new_uncorrected_ecc_errors -= reported.new_uncorrected_ecc_errors;
        }
    }
}

impl MonitoredDevice {
    fn report(&self) -> wire::DeviceReport {
        let unanswered = self.open_question.unwrap_or(0);
        wire::DeviceReport {
            device: self.name.clone(),
            figures: Some(wire_figures(&self.figures)),
            new_xids: self.new_xids.clone(),
            new_uncorrected_ecc_errors: self.new_uncorrected_ecc_errors,
            recovery_action: recovery_text(self.figures.recovery_action),
            problem: self.problem.clone(),
            unanswered_ms: u64::from(unanswered) * REPORT_PERIOD.as_millis() as u64,
        }
    }
}

fn wire_figures(figures: &NvmlFigures) -> wire::DeviceFigures {
    let used = figures.memory.map(|memory| memory.total_bytes.saturating_sub(memory.free_bytes));
    wire::DeviceFigures {
        temperature_celsius: figures.temperature_celsius,
        power_milliwatts: figures.power_milliwatts,
        utilization_percent: figures.utilization_percent,
        memory_used_bytes: used,
        memory_total_bytes: figures.memory.map(|memory| memory.total_bytes),
        corrected_ecc_errors: figures.corrected_ecc_errors,
        uncorrected_ecc_errors: figures.uncorrected_ecc_errors,
    }
}

fn recovery_text(action: RecoveryAction) -> String {
    match action {
        RecoveryAction::None => String::new(),
        RecoveryAction::ResetGpu => "reset the GPU".to_owned(),
        RecoveryAction::RebootNode => "reboot the machine".to_owned(),
        RecoveryAction::DrainPeers => "stop all work on the GPUs that are linked with it".to_owned(),
        RecoveryAction::DrainAndReset => "stop all work on the GPU, then reset it".to_owned(),
        RecoveryAction::Other(code) => format!("recovery action {code}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices() -> MonitoredDevices {
        MonitoredDevices::new(["GPU-a", "GPU-b"].into_iter().map(str::to_owned))
    }

    #[test]
    fn a_fault_is_reported_until_it_was_answered() {
        let mut devices = devices();
        devices.add_fault("GPU-b", DeviceFault::Xid(79));
        let first = devices.report();
        assert!(first[0].new_xids.is_empty() && first[1].new_xids == [79]);
        devices.add_fault("GPU-b", DeviceFault::Xid(48));
        devices.add_fault("GPU-b", DeviceFault::UncorrectedEcc);
        assert_eq!(devices.report()[1].new_xids, [79, 48], "the first report got no answer");
        devices.acknowledge(&first);
        let second = devices.report();
        assert_eq!((&second[1].new_xids[..], second[1].new_uncorrected_ecc_errors), (&[48][..], 1));
        devices.acknowledge(&second);
        let third = devices.report();
        assert!(third[1].new_xids.is_empty() && third[1].new_uncorrected_ecc_errors == 0);
    }

    #[test]
    fn only_a_counter_that_grows_is_a_fault() {
        let mut devices = devices();
        let figures = |count| NvmlFigures { uncorrected_ecc_errors: Some(count), ..NvmlFigures::default() };
        let mut new = |count| {
            devices.set_figures(0, figures(count));
            devices.report()[0].new_uncorrected_ecc_errors
        };
        assert_eq!([new(7), new(7), new(9), new(0)], [0, 0, 2, 2]);
    }

    #[test]
    fn an_open_question_counts_periods() {
        let mut devices = devices();
        let unanswered = |devices: &mut MonitoredDevices| {
            devices.tick();
            devices.report()[0].unanswered_ms
        };
        devices.begin_question(0);
        assert_eq!([0; 3].map(|_| unanswered(&mut devices)), [1000, 2000, 3000]);
        devices.set_figures(0, NvmlFigures::default());
        assert_eq!(unanswered(&mut devices), 0);
        devices.begin_question(0);
        devices.set_problem(0, "the GPU is lost".to_owned());
        assert_eq!(devices.report()[0].problem, "the GPU is lost");
        devices.set_figures(0, NvmlFigures::default());
        assert_eq!(devices.report()[0].problem, "");
    }

    #[test]
    fn xids_that_wait_for_a_report_are_bounded() {
        let mut devices = devices();
        (0..1000).for_each(|xid| devices.add_fault("GPU-a", DeviceFault::Xid(xid)));
        assert_eq!(devices.report()[0].new_xids.len(), NEW_XIDS_MAX);
    }
}
