// SPDX-License-Identifier: Apache-2.0

//! Crash reports: a directory for each child that ended unexpectedly.

use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::harness::http::HttpClient;
use crate::harness::{
    FleetProcess, ServedFleet, demo_7m, eventually, first_json_line, model_table, proc, serve_config, text,
};

const SIGSEGV: i64 = 11;
/// Text of a request, which no report may have.
const SECRET: &str = "def secret_name():";
/// The supervisor asks for the ledger every second.
const LEDGER_AGE_MAX_MS: u64 = 20_000;

fn config(reports: &Path) -> String {
    format!("[supervision]\ncrash-reports = {reports:?}\n{}", model_table("m", &demo_7m(), ""))
}

/// Starts a fleet of one worker whose log goes to `log`.
fn fleet_with_reports(config: &str, log: &Path) -> ServedFleet {
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let mut command = serve_config(&directory.path().join("run"), config);
    command.env("BALLAST_LOG", "info").stderr(File::create(log).unwrap());
    ServedFleet::start_command(directory, command)
}

/// Ends a process by a signal and waits until its successor serves. Returns the dead process.
fn crash(fleet: &ServedFleet, role: &str, signal: &str) -> FleetProcess {
    let victim = fleet.only_process(role);
    proc::end_by_signal(victim.pid, signal);
    eventually("the process is back", || {
        let now = fleet.try_processes()?.into_iter().find(|process| process.role == role)?;
        (now.pid != victim.pid && now.state == "ready").then_some(())
    });
    victim
}

fn supervisor_line(fleet: &ServedFleet) -> Option<Value> {
    fleet.try_ps_lines()?.into_iter().find(|line| line["role"] == "supervisor")
}

/// The report of this process, once `ballast ps` names it.
#[track_caller]
fn report_of(fleet: &ServedFleet, pid: u32) -> PathBuf {
    eventually("ps names the report", || {
        let latest = PathBuf::from(supervisor_line(fleet)?["latest_crash_report"].as_str()?);
        latest.to_string_lossy().ends_with(&format!("-{pid}")).then_some(latest)
    })
}

fn json_file(file: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
}

fn log_of(report: &Path) -> String {
    std::fs::read_to_string(report.join("log.txt")).unwrap()
}

#[test]
fn a_worker_that_dies_of_a_signal_leaves_its_last_lines_the_reason_and_the_ledger() {
    let folder = tempfile::tempdir().unwrap();
    let reports = folder.path().join("crash-reports");
    let fleet = fleet_with_reports(&config(&reports), &folder.path().join("log"));
    HttpClient::connect(&fleet).post_json("/v1/completions", &json!({"prompt": SECRET, "max_tokens": 4}));
    assert_eq!(supervisor_line(&fleet).unwrap()["latest_crash_report"], Value::Null);
    // Twice the time between two looks at the ledger.
    std::thread::sleep(Duration::from_secs(2));

    let dead = crash(&fleet, "worker", "SEGV");
    let report = report_of(&fleet, dead.pid);
    let summary = json_file(&report.join("report.json"));
    assert_eq!((&summary["child"], &summary["role"]), (&json!("worker-0"), &json!("worker")), "{summary}");
    assert_eq!((&summary["pid"], &summary["model"]), (&json!(dead.pid), &json!("m")), "{summary}");
    assert_eq!((&summary["signal"], &summary["exit_code"]), (&json!(SIGSEGV), &Value::Null), "{summary}");
    assert_eq!(summary["reason"], "killed by SIGSEGV");
    assert_eq!((&summary["restarts"], &summary["was_hung"]), (&json!(0), &json!(false)), "{summary}");
    assert!(summary["uptime_ms"].as_u64().unwrap() >= 2000, "{summary}");
    assert!(summary["configuration"].as_str().unwrap().ends_with("run/worker-0.toml"), "{summary}");

    let log = log_of(&report);
    assert_eq!(summary["log_lines"], json!(log.lines().count()), "{log}");
    assert!(!log.is_empty() && log.lines().all(|line| line.contains(" worker-0 ")), "{log}");
    let all = std::fs::read_to_string(folder.path().join("log")).unwrap();
    assert!(log.lines().all(|line| all.contains(line)), "the same lines as on stderr: {log}");

    let ledger = json_file(&report.join("ledger.json"));
    let is_of_worker = |row: &&Value| row["kind"] == "lease" && row["for"] == "worker-0";
    let lease = ledger["reservations"].as_array().unwrap().iter().find(is_of_worker);
    assert!(lease.is_some_and(|row| row["bytes"].as_u64().unwrap() > 0), "{ledger}");
    assert!(ledger["age_ms"].as_u64().unwrap() < LEDGER_AGE_MAX_MS, "{ledger}");

    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&reports), mode(&report)), (0o700, 0o700));
    for file in std::fs::read_dir(&report).unwrap() {
        let file = file.unwrap().path();
        assert_eq!(mode(&file), 0o600, "{}", file.display());
        assert!(!std::fs::read_to_string(&file).unwrap().contains(SECRET), "{}", file.display());
    }
    assert!(all.contains(&format!("report={}", report.display())), "{all}");
    let table = text(&fleet.run_command(&["ps"])).0;
    assert!(table.contains(&format!("latest crash report: {}\n", report.display())), "{table}");

    // The other processes, and one that hangs.
    let dead = crash(&fleet, "router", "SEGV");
    assert!(log_of(&report_of(&fleet, dead.pid)).contains(" router "));
    let dead = crash(&fleet, "weight-server", "KILL");
    let report = report_of(&fleet, dead.pid);
    assert!(log_of(&report).contains(" weight-server "));
    assert!(report.join("ledger.json").exists(), "the ledger from before the death");
    fleet.stop();
}

#[test]
fn a_successor_reports_the_crash_of_a_child_that_it_has_taken_over() {
    let folder = tempfile::tempdir().unwrap();
    // Relative to the configuration file.
    let config = config(Path::new("crash-reports"));
    let mut fleet = fleet_with_reports(&config, &folder.path().join("log"));
    let worker = fleet.only_process("worker");
    proc::send_signal(fleet.supervisor.id(), "KILL");
    let _ = fleet.supervisor.wait();
    let mut command = serve_config(fleet.runtime_dir(), &config);
    let mut successor = command.env("BALLAST_LOG", "info").spawn().unwrap();
    first_json_line(&mut successor);
    fleet.supervisor = successor;
    eventually("the worker is taken over", || (fleet.only_process("worker").state == "ready").then_some(()));

    let dead = crash(&fleet, "worker", "KILL");
    assert_eq!(dead.pid, worker.pid, "it was taken over");
    let report = report_of(&fleet, dead.pid);
    assert_eq!(report.parent(), Some(&*fleet.runtime_dir().with_file_name("crash-reports")));
    let summary = json_file(&report.join("report.json"));
    assert_eq!((&summary["was_adopted"], &summary["signal"]), (&json!(true), &Value::Null), "{summary}");
    assert!(log_of(&report).contains("the supervisor is gone"), "{}", log_of(&report));
    fleet.stop();
}

/// Crashes the worker and returns the time until the next one serves.
fn restart_time(fleet: &ServedFleet) -> Duration {
    let began = Instant::now();
    crash(fleet, "worker", "KILL");
    began.elapsed()
}

#[test]
fn reports_that_cannot_be_written_delay_no_restart_and_are_reported_once() {
    // Longer than what a busy machine makes of a restart in a fraction of a second.
    const SLACK: Duration = Duration::from_secs(5);
    let folder = tempfile::tempdir().unwrap();
    let (reports, log) = (folder.path().join("crash-reports"), folder.path().join("log"));
    // A file where the directory should be.
    std::fs::write(&reports, "").unwrap();
    let fleet = fleet_with_reports(&config(&reports), &log);
    let without = restart_time(&fleet);
    crash(&fleet, "worker", "KILL");
    let lost = || supervisor_line(&fleet)?["crash_reports_lost"].as_u64();
    eventually("both reports are counted", || (lost()? == 2).then_some(()));
    let complaints = |words: &str| {
        let all = std::fs::read_to_string(&log).unwrap();
        all.lines().filter(|line| line.contains(words)).map(str::to_owned).collect::<Vec<_>>()
    };
    let said = complaints("crash reports cannot be written");
    assert!(said.len() == 1 && said[0].contains(reports.to_str().unwrap()), "{said:?}");
    let table = text(&fleet.run_command(&["ps"])).0;
    assert!(table.contains("2 crash reports could not be written\n"), "{table}");

    // As soon as there is a directory, reports are written.
    std::fs::remove_file(&reports).unwrap();
    let dead = fleet.only_process("worker");
    let with = restart_time(&fleet);
    report_of(&fleet, dead.pid);
    let said = complaints("crash reports are written again");
    assert!(said.len() == 1 && said[0].contains("lost=2"), "{said:?}");
    assert!(without < with + SLACK, "{without:?} without a directory, {with:?} with one");
    fleet.stop();
}
