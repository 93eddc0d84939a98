// SPDX-License-Identifier: Apache-2.0

//! The time of day jumps while streams run (clock_jumps.c): nothing depends on it but timestamps.

use crate::harness::api::{TestRequest, generate_all, runtime};
use crate::harness::{ServedFleet, demo_7m, eventually, preload_library, proc, serve};

const DAY_SECONDS: i64 = 24 * 60 * 60;

#[test]
fn jumps_of_the_clock_disturb_no_stream_and_restart_no_process() {
    let folder = tempfile::tempdir().unwrap();
    let offset = folder.path().join("offset");
    std::fs::write(&offset, 0_i64.to_le_bytes()).unwrap();
    // In place and without truncation: processes have mapped the file.
    let set = |seconds: i64| {
        let file = std::fs::File::options().write(true).open(&offset).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &seconds.to_le_bytes(), 0).unwrap();
    };
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let mut command = serve(directory.path(), &demo_7m(), &["--workers", "2", "--threads", "1"]);
    command
        .env("LD_PRELOAD", preload_library("clock_jumps", folder.path()))
        .env("BALLAST_TEST_CLOCK_OFFSET", &offset);
    let fleet = ServedFleet::start_command(directory, command);
    let requests: Vec<_> = (0..4)
        .map(|seed| TestRequest {
            prompt: (0..20).map(|i| 10 + i * 13 + seed as u32).collect(),
            max_tokens: 300,
            temperature: 0.7,
            seed,
            ..TestRequest::default()
        })
        .collect();
    let expected: Vec<_> = runtime().block_on(generate_all(&fleet.grpc, &requests));
    let pids = || {
        let mut pids: Vec<_> = fleet.processes().into_iter().map(|process| process.pid).collect();
        pids.sort_unstable();
        pids
    };
    let before = pids();
    // A leap of a day forward, far back before the start of the fleet, and to 1970.
    for seconds in [DAY_SECONDS, -365 * DAY_SECONDS, -i64::from(i32::MAX), 0] {
        let found = runtime().block_on(fleet.generate_during_fault(&requests, || set(seconds)));
        for (expected, found) in expected.iter().zip(&found) {
            assert_eq!(expected.as_ref().unwrap(), found.as_ref().unwrap(), "{seconds} s");
        }
        assert_eq!(pids(), before, "a process was replaced after a jump by {seconds} s");
    }
    // A worker that starts while the clock is wrong attaches and serves.
    set(-365 * DAY_SECONDS);
    let victim = fleet.processes_by_role("worker")[0].clone();
    proc::send_signal(victim.pid, "KILL");
    eventually("the worker is back", || {
        let mut workers = fleet.processes_by_role("worker").into_iter();
        workers
            .find(|worker| worker.name == victim.name && worker.pid != victim.pid && worker.state == "ready")
    });
    let again = runtime().block_on(generate_all(&fleet.grpc, &requests));
    for (expected, found) in expected.iter().zip(&again) {
        assert_eq!(expected.as_ref().unwrap().tokens, found.as_ref().unwrap().tokens);
    }
    fleet.stop();
}
