// SPDX-License-Identifier: Apache-2.0

//! Each process meets SIGKILL, SIGSEGV and SIGSTOP at each step: load, attach, prefill, decode,
//! drain. What the step is, is seen from outside: by a loader that runs, a worker that has just
//! started, and the frames that clients have received.

use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::client::{Client, Reader};
use super::fault::{loader_of, pause};
use super::holdings::Holdings;
use super::output::Output;
use super::scenario::Scenario;
use super::soak_fleet::{SoakFleet, THIRD, WATCHDOG};
use super::tally::{ProcessEnds, Tally};
use crate::harness::random::SeededRandom;
use crate::harness::{TIMEOUT, ballast, demo_7m, demo_22m, proc};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FaultStep {
    Load,
    Attach,
    Prefill,
    Decode,
    Drain,
}

const STEPS: [FaultStep; 5] =
    [FaultStep::Load, FaultStep::Attach, FaultStep::Prefill, FaultStep::Decode, FaultStep::Drain];
const ROLES: [&str; 5] = ["loader", "worker", "weight-server", "router", "supervisor"];
const SIGNALS: [&str; 3] = ["KILL", "SEGV", "STOP"];

/// Streams that run meanwhile.
const STREAMS: usize = 4;

#[derive(Debug, Clone, Copy)]
struct Case {
    step: FaultStep,
    role: &'static str,
    signal: &'static str,
}

fn cases() -> Vec<Case> {
    let of_step = |step: FaultStep| {
        let roles = ROLES.into_iter().filter(move |&role| step == FaultStep::Load || role != "loader");
        roles.flat_map(move |role| SIGNALS.into_iter().map(move |signal| Case { step, role, signal }))
    };
    STEPS.into_iter().flat_map(of_step).collect()
}

#[test]
#[ignore = "nightly: takes many minutes"]
fn nightly_each_process_may_die_or_stop_at_each_step() {
    let seed = super::variable("SEED").unwrap_or(1);
    run(&mut SeededRandom::new(seed), cases());
}

/// The cases whose text contains BALLAST_TEST_SOAK_CASE, ten times each: to look into one.
#[test]
#[ignore = "by hand: needs BALLAST_TEST_SOAK_CASE"]
fn named_cases_again_and_again() {
    let name: String = super::variable("CASE").expect("BALLAST_TEST_SOAK_CASE is a part of a case's text");
    let mut cases = cases();
    cases.retain(|case| format!("{case:?}").contains(&name));
    run(&mut SeededRandom::new(super::variable("SEED").unwrap_or(1)), cases.repeat(10));
}

/// A few of the cases of the nightly test, drawn by a fixed seed.
#[test]
fn processes_may_die_at_the_steps_of_a_load_and_of_an_attach() {
    let mut random = SeededRandom::new(super::variable("SEED").unwrap_or(1));
    let mut cases = cases();
    cases.retain(|case| matches!(case.step, FaultStep::Load | FaultStep::Attach) && case.signal != "STOP");
    random.shuffle(&mut cases);
    cases.truncate(3);
    run(&mut random, cases);
}

fn run(random: &mut SeededRandom, cases: Vec<Case>) {
    let mut soak = SoakFleet::start(&[demo_7m(), demo_22m()], 4);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let names: Vec<String> = soak.models.iter().map(|(name, _)| name.clone()).collect();
    let references = runtime.block_on(super::references(&soak.fleet.http, names.iter().map(String::as_str)));
    let long =
        |name: &str| ["long prompt", "gRPC sampled", "mirostat"].iter().any(|kind| name.contains(kind));
    let streams: Vec<(Scenario, Output)> =
        references.into_iter().filter(|(scenario, _)| long(&scenario.name)).collect();
    let before = Holdings::of(&soak);
    let (mut tally, mut ends) = (Tally::default(), ProcessEnds::default());
    for case in cases {
        let began = Instant::now();
        one_case(&mut soak, &runtime, case, random, &streams, &mut tally);
        if case.role == "router" {
            // One that is stopped for long ends later than it is signalled.
            ends.router.extend([began, Instant::now()]);
        }
        ends.supervisor.clone_from(&soak.supervisor_ends);
        let violations = tally.violations(&ends);
        assert!(violations.is_empty(), "{case:?}: {violations:?}\n{}", soak.log.last_lines());
        eprintln!("steps: {case:?} in {:.1} s", began.elapsed().as_secs_f64());
    }
    eprint!("{tally}");
    let end = Instant::now() + TIMEOUT;
    loop {
        let held = Holdings::of(&soak);
        if held.is_within(&before) {
            break;
        }
        assert!(Instant::now() < end, "{held:?} instead of {before:?}\n{}", soak.log.last_lines());
        soak.sleep_until(Instant::now() + Duration::from_millis(500));
    }
    soak.stop();
}

fn one_case(
    soak: &mut SoakFleet,
    runtime: &tokio::runtime::Runtime,
    case: Case,
    random: &mut SeededRandom,
    streams: &[(Scenario, Output)],
    tally: &mut Tally,
) {
    let began = Instant::now();
    let client = {
        let _context = runtime.enter();
        Arc::new(Client::new(&soak.fleet.http))
    };
    let tasks: Vec<_> = (0..STREAMS)
        .map(|_| {
            let (client, (scenario, reference)) = (client.clone(), random.pick(streams).clone());
            runtime.spawn(async move {
                let (found, ending) = client.run(&scenario, Reader::Fast).await;
                (scenario, reference, found, ending)
            })
        })
        .collect();
    let (victim, command) = reach(soak, &client, case, random);
    match (case.signal, victim) {
        ("STOP", Some(pid)) => pause(vec![pid], WATCHDOG.mul_f64(*random.pick(&[0.3, 1.6]))),
        (signal, Some(pid)) => proc::end_by_signal(pid, signal),
        // The step was over before it was seen.
        (_, None) => eprintln!("steps: {case:?} was not reached"),
    }
    while !tasks.iter().all(|task| task.is_finished()) {
        soak.sleep_until(Instant::now() + Duration::from_millis(100));
    }
    eprintln!("steps: {case:?}: streams ended after {:.1} s", began.elapsed().as_secs_f64());
    for task in tasks {
        let (scenario, reference, found, ending) = runtime.block_on(task).unwrap();
        tally.record(&scenario, &reference, &found, ending, began);
    }
    end_command(soak, command);
    if case.step == FaultStep::Load {
        let _not_loaded = soak.command(&["unload", THIRD]);
    }
    if case.step == FaultStep::Drain {
        let _restarted = soak.command(&["restart", "worker-0"]);
    }
    soak.wait_until_ready();
}

/// Waits for the step. Returns the process that the case names, and a command that goes on.
fn reach(
    soak: &mut SoakFleet,
    client: &Client,
    case: Case,
    random: &mut SeededRandom,
) -> (Option<u32>, Option<Child>) {
    let first = |soak: &SoakFleet| soak.pids(case.role).first().copied();
    match case.step {
        FaultStep::Load => {
            let command = spawn(soak, &soak.load_arguments());
            let weight_server = soak.pids("weight-server")[0];
            let loader = within(Duration::from_secs(5), || loader_of(weight_server));
            let victim = if case.role == "loader" { loader } else { first(soak) };
            (victim, Some(command))
        }
        FaultStep::Attach => {
            let before = soak.pids("worker");
            proc::send_signal(before[0], "KILL");
            let is_new = |pid: &u32| !before.contains(pid);
            let new = within(TIMEOUT, || soak.pids("worker").into_iter().find(is_new));
            std::thread::sleep(Duration::from_millis(random.below(150) as u64));
            let victim = if case.role == "worker" { new } else { first(soak) };
            (victim, None)
        }
        FaultStep::Prefill => {
            within(TIMEOUT, || (client.progress.started.load(Ordering::Relaxed) > 0).then_some(()));
            (first(soak), None)
        }
        FaultStep::Decode => {
            wait_for_tokens(client);
            (first(soak), None)
        }
        FaultStep::Drain => {
            wait_for_tokens(client);
            let command = spawn(soak, &["drain", "worker-0", "--timeout", "3s"].map(str::to_owned));
            std::thread::sleep(Duration::from_millis(30 + random.below(100) as u64));
            (first(soak), Some(command))
        }
    }
}

fn wait_for_tokens(client: &Client) {
    within(TIMEOUT, || (client.progress.deltas.load(Ordering::Relaxed) > 3).then_some(()));
}

/// Polls more often than `eventually`: steps are short.
fn within<T>(time: Duration, mut condition: impl FnMut() -> Option<T>) -> Option<T> {
    let end = Instant::now() + time;
    while Instant::now() < end {
        if let Some(value) = condition() {
            return Some(value);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    None
}

fn spawn(soak: &SoakFleet, arguments: &[String]) -> Child {
    let mut command = ballast();
    command.args(arguments).arg("--runtime-dir").arg(soak.runtime_dir());
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

/// A command ends, whatever happens to the fleet.
fn end_command(soak: &mut SoakFleet, command: Option<Child>) {
    let Some(mut command) = command else { return };
    let end = Instant::now() + TIMEOUT;
    while command.try_wait().unwrap().is_none() {
        assert!(Instant::now() < end, "a command did not end\n{}", soak.log.last_lines());
        soak.sleep_until(Instant::now() + Duration::from_millis(50));
    }
}
