// SPDX-License-Identifier: Apache-2.0

//! Random and mutated frames on every socket of a running fleet. The fleet goes on: no process
//! dies, its descriptors do not grow, and it gives the same output as before.
//!
//! The seed determines the frames. BALLAST_TEST_FUZZ_SECONDS and BALLAST_TEST_FUZZ_SEED change the
//! run.

mod grpc_bodies;
mod mutation;
mod raw_frames;

use std::time::{Duration, Instant};

use crate::harness::api::{Continuation, TestRequest, generate_all, runtime};
use crate::harness::http::HttpClient;
use crate::harness::random::SeededRandom;
use crate::harness::{FleetProcess, ServedFleet, demo_7m, eventually, proc};

/// Descriptors that a process may have more than before: connections that are being closed.
const DESCRIPTOR_SLACK: usize = 4;

#[test]
fn i8_fuzzed_frames_on_every_socket_end_no_process_and_change_no_stream() {
    fuzz(5, 1);
}

#[test]
#[ignore = "nightly: takes five minutes"]
fn nightly_fuzzed_frames_on_every_socket_end_no_process_and_change_no_stream() {
    let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    fuzz(300, since_epoch.as_secs());
}

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap())
}

fn fuzz(seconds: u64, seed: u64) {
    let seconds = variable("BALLAST_TEST_FUZZ_SECONDS").unwrap_or(seconds);
    let seed = variable("BALLAST_TEST_FUZZ_SEED").unwrap_or(seed);
    eprintln!("fuzzed frames: seed {seed}, {seconds} s");
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "2", "--threads", "1"]);
    let expected = output(&fleet);
    let before = observe(&fleet);
    let end = Instant::now() + Duration::from_secs(seconds);
    let mut random = SeededRandom::new(seed);
    std::thread::scope(|scope| {
        let fleet = &fleet;
        let [mut handoff, mut notify, mut bytes, grpc] = [(); 4].map(|()| random.fork());
        scope.spawn(move || until(end, || raw_frames::to_hand_off(fleet, &mut handoff)));
        scope.spawn(move || until(end, || raw_frames::to_notify_sockets(fleet, &mut notify)));
        scope.spawn(move || until(end, || raw_frames::to_stream_sockets(fleet, &mut bytes)));
        scope.spawn(move || runtime().block_on(grpc_bodies::send_until(end, fleet, grpc)));
    });
    assert_eq!(output(&fleet), expected, "seed {seed}");
    assert_eq!(HttpClient::connect(&fleet).get("/health").0, 200);
    eventually("descriptors are back", || {
        let now = observe(&fleet);
        assert_eq!(identities(&now), identities(&before), "seed {seed}: a process was replaced");
        let is_back = now.iter().zip(&before).all(|(now, before)| now.1 <= before.1 + DESCRIPTOR_SLACK);
        is_back.then_some(())
    });
    fleet.stop();
}

/// Calls `send` again and again, and prints how often.
fn until(end: Instant, mut send: impl FnMut() -> &'static str) {
    let (mut frames, mut what) = (0, "");
    while Instant::now() < end {
        what = send();
        frames += 1;
    }
    eprintln!("measured: {frames} fuzzed frames to {what}");
}

fn output(fleet: &ServedFleet) -> Vec<Continuation> {
    let request = |seed: u64| TestRequest {
        prompt: (0..20).map(|i| 10 + i * 13 + seed as u32).collect(),
        max_tokens: 60,
        temperature: 0.7,
        seed,
        ..TestRequest::default()
    };
    let requests: Vec<_> = (0..4).map(request).collect();
    eventually("requests are served", || {
        let outputs = runtime().block_on(generate_all(&fleet.grpc, &requests));
        outputs.into_iter().collect::<Result<_, _>>().ok()
    })
}

/// All processes, each with its number of descriptors.
fn observe(fleet: &ServedFleet) -> Vec<(FleetProcess, usize)> {
    let processes = eventually("ps answers", || fleet.try_processes());
    processes.into_iter().map(|process| (process.clone(), proc::open_files(process.pid).len())).collect()
}

fn identities(processes: &[(FleetProcess, usize)]) -> Vec<(&str, u32, u64)> {
    processes.iter().map(|(process, _)| (process.name.as_str(), process.pid, process.restarts)).collect()
}
