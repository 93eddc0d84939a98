// SPDX-License-Identifier: Apache-2.0

use super::*;

const GPU: &str = "GPU-a";
const SECOND: Duration = Duration::from_secs(1);

fn report() -> DeviceReport {
    DeviceReport { device: GPU.to_owned(), ..DeviceReport::default() }
}

fn xid(xid: u64) -> DeviceReport {
    DeviceReport { new_xids: vec![xid], ..report() }
}

#[test]
fn a_fault_of_the_device_quarantines_it_and_a_fault_of_a_process_does_not() {
    let now = Instant::now();
    let is_fault = |report: DeviceReport| DeviceHealth::default().reported(now, report);
    for number in XIDS_OF_PROCESSES {
        assert!(!is_fault(xid(number)), "Xid {number}");
    }
    for number in [48, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140, 999] {
        assert!(is_fault(xid(number)), "Xid {number}");
    }
    assert!(!is_fault(report()));
    assert!(is_fault(DeviceReport { new_uncorrected_ecc_errors: 1, ..report() }));
    assert!(is_fault(DeviceReport { problem: "lost".to_owned(), ..report() }));
    assert!(is_fault(DeviceReport { recovery_action: "reset the GPU".to_owned(), ..report() }));
    assert!(!is_fault(DeviceReport { unanswered: SILENCE_MAX - SECOND, ..report() }));
    assert!(is_fault(DeviceReport { unanswered: SILENCE_MAX, ..report() }));
    let both = DeviceReport { new_xids: vec![31, 79], ..report() };
    assert!(is_fault(both), "a fault of a process hides none of the device");
}

#[test]
fn a_quarantine_is_reported_once_and_its_reason_is_kept() {
    let (mut health, now) = (DeviceHealth::default(), Instant::now());
    assert!(health.reported(now, xid(79)));
    assert!(!health.reported(now, xid(48)), "it is quarantined already");
    assert_eq!(health.reason(GPU), Some("Xid 79: the GPU has fallen off the bus"));
    assert_eq!(health.reason("GPU-b"), None);
    let status = health.status(now + SECOND, ["GPU-b"].into_iter());
    assert_eq!(status.iter().map(|device| device.device.as_str()).collect::<Vec<_>>(), [GPU, "GPU-b"]);
    assert_eq!(status[0].xids, [(79, 1), (48, 1)].into());
    let quarantine = status[0].quarantine.clone().unwrap();
    assert_eq!((quarantine.since, quarantine.ends_in), (SECOND, Some(FIRST_QUARANTINE - SECOND)));
}

#[test]
fn a_device_returns_after_its_time_when_the_driver_reports_no_problem() {
    let (mut health, start) = (DeviceHealth::default(), Instant::now());
    let asks = DeviceReport { recovery_action: "reset the GPU".to_owned(), ..report() };
    assert!(health.reported(start, asks.clone()));
    let end = start + FIRST_QUARANTINE;
    assert!(health.due(end).is_empty(), "the last report is too old");
    health.reported(end, asks);
    assert!(health.due(end).is_empty(), "the driver asks for a reset");
    health.reported(end, report());
    assert!(health.due(end - SECOND).is_empty());
    assert_eq!(health.due(end), [GPU]);
    assert!(health.end(end, GPU) && !health.end(end, GPU));
    assert!(health.due(end).is_empty() && health.reason(GPU).is_none());
}

#[test]
fn each_further_quarantine_is_twice_as_long_until_the_device_was_healthy() {
    let (mut health, mut now) = (DeviceHealth::default(), Instant::now());
    let mut time = |health: &mut DeviceHealth, healthy_for: Duration| {
        now += healthy_for;
        assert!(health.reported(now, xid(79)));
        let status = health.status(now, std::iter::empty());
        let time = status[0].quarantine.clone().unwrap().ends_in.unwrap();
        now += time;
        assert!(health.end(now, GPU));
        time
    };
    let times: Vec<Duration> = (0..8).map(|_| time(&mut health, SECOND)).collect();
    let expected = [60, 120, 240, 480, 960, 1920, 3600, 3600];
    assert_eq!(times, expected.map(Duration::from_secs));
    assert_eq!(time(&mut health, HEALTHY_AFTER), FIRST_QUARANTINE);
}

#[test]
fn three_hung_steps_within_five_minutes_are_a_fault_of_the_device() {
    let (mut health, start) = (DeviceHealth::default(), Instant::now());
    let at = |seconds| start + Duration::from_secs(seconds);
    assert!(!health.step_hung(at(0), GPU) && !health.step_hung(at(10), GPU));
    assert!(!health.step_hung(at(10), "GPU-b"));
    assert!(!health.step_hung(at(305), GPU), "the first one is too old");
    assert!(health.step_hung(at(306), GPU));
    assert!(health.reason("GPU-b").is_none());
}

#[test]
fn only_a_command_ends_a_quarantine_by_a_command() {
    let (mut health, now) = (DeviceHealth::default(), Instant::now());
    assert!(health.quarantine(now, "host:1", "repair".to_owned(), true));
    assert!(health.due(now + 2 * QUARANTINE_MAX).is_empty());
    assert!(health.quarantine(now, GPU, "Xid 79".to_owned(), false));
    assert!(!health.quarantine(now, GPU, "repair".to_owned(), true), "it is quarantined already");
    assert!(health.due(now + 2 * QUARANTINE_MAX).is_empty(), "the command holds it");
    let known = |device: &str, reason: &str| KnownQuarantine {
        device: device.to_owned(),
        reason: reason.to_owned(),
        by_command: true,
    };
    assert_eq!(health.quarantines(), [known(GPU, "Xid 79"), known("host:1", "repair")]);
    assert!(health.end(now, "host:1"));
}
