// SPDX-License-Identifier: Apache-2.0

//! The last lines of a process that ends or panics, and how long a stalled reader holds it up. The
//! process is this test executable once more, with one ignored test.

#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do: at once, saying where")]

use std::io::{PipeWriter, Read, Write};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Lines before the last one: more than a pipe holds, less than the queue does.
const LINES: usize = 5_000;

/// The bound of a flush is a second; the rest is for a busy machine.
const ENDS_WITHIN: Duration = Duration::from_secs(30);

fn start(child: &str, stderr: PipeWriter) -> std::process::Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "--nocapture", child])
        .env("BALLAST_LOG", "info")
        .env_remove("JOURNAL_STREAM")
        .env_remove("RUST_BACKTRACE")
        .env_remove("RUST_LIB_BACKTRACE")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(stderr)
        .spawn()
        .unwrap()
}

fn run(child: &str) -> (ExitStatus, String) {
    let (mut reader, writer) = std::io::pipe().unwrap();
    let mut child = start(child, writer);
    let mut log = String::new();
    reader.read_to_string(&mut log).unwrap();
    (child.wait().unwrap(), log)
}

/// Runs a child whose stderr is a full pipe that is not read.
fn run_without_reader(child: &str) -> ExitStatus {
    let (_reader, mut writer) = std::io::pipe().unwrap();
    let bytes = rustix::pipe::fcntl_setpipe_size(&writer, 4096).unwrap();
    writer.write_all(&vec![b'.'; bytes]).unwrap();
    let mut child = start(child, writer);
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if started.elapsed() > ENDS_WITHIN {
            child.kill().unwrap();
            panic!("the process waits for its log");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn log_many_lines() {
    service::logging::init("child", tracing::Level::INFO);
    for line in 0..LINES {
        tracing::info!(line, "before the end");
    }
}

#[test]
#[ignore = "the process of other tests"]
fn child_that_exits() {
    log_many_lines();
    tracing::info!("the last line");
    service::logging::flush();
    std::process::exit(0);
}

#[test]
#[ignore = "the process of other tests"]
fn child_that_panics() {
    log_many_lines();
    // As in a release build, the process is gone when the hook returns.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        hook(info);
        std::process::abort();
    }));
    panic!("of an\nunlikely kind");
}

fn count_logged(log: &str) -> usize {
    log.lines().filter(|line| line.contains("INFO child before the end line=")).count()
}

#[test]
fn a_process_that_exits_has_written_its_last_line() {
    let (status, log) = run("child_that_exits");
    assert!(status.success(), "{status}");
    assert_eq!(count_logged(&log), LINES);
    assert!(log.ends_with("INFO child the last line\n"), "{:?}", log.lines().last());
}

#[test]
fn a_process_that_panics_has_written_all_lines_and_the_panic() {
    let (status, log) = run("child_that_panics");
    assert!(!status.success(), "{status}");
    assert_eq!(count_logged(&log), LINES);
    let last = log.lines().last().unwrap();
    assert!(last.contains("ERROR child panicked thread=child_that_panics at="), "{last}");
    assert!(last.contains("last_lines.rs:") && last.ends_with(": of an unlikely kind"), "{last}");
}

#[test]
fn a_process_whose_log_is_not_read_exits() {
    assert!(run_without_reader("child_that_exits").success());
}

#[test]
fn a_process_whose_log_is_not_read_dies_of_its_panic() {
    assert!(!run_without_reader("child_that_panics").success());
}
