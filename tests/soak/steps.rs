// SPDX-License-Identifier: Apache-2.0

//! Each process meets SIGKILL, SIGSEGV and SIGSTOP at each step of a fleet's life (fault_step.rs),
//! while clients have streams of models that the step does not touch.

use std::process::Child;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::client::{Client, Reader};
use super::fault::pause;
use super::fault_step::{FaultStep, STEPS};
use super::holdings::Holdings;
use super::output::Output;
use super::scenario::Scenario;
use super::soak_fleet::{SoakFleet, WATCHDOG};
use super::tally::{ProcessEnds, Tally};
use crate::harness::random::SeededRandom;
use crate::harness::{TIMEOUT, demo_7m, demo_22m, proc};

const ROLES: [&str; 5] = ["loader", "worker", "weight-server", "router", "supervisor"];
const SIGNALS: [&str; 3] = ["KILL", "SEGV", "STOP"];

/// Streams that run meanwhile.
const STREAMS: usize = 4;

/// Of ten cases, at least this many have to meet their step: a short one may be over before it is
/// seen.
const REACHED_OF_TEN_MIN: usize = 9;

#[derive(Debug, Clone, Copy)]
struct Case {
    step: FaultStep,
    role: &'static str,
    signal: &'static str,
}

fn cases() -> Vec<Case> {
    let of_step = |step: FaultStep| {
        let roles = ROLES.into_iter().filter(move |&role| step.loads() || role != "loader");
        roles.flat_map(move |role| SIGNALS.into_iter().map(move |signal| Case { step, role, signal }))
    };
    STEPS.into_iter().flat_map(of_step).collect()
}

#[test]
#[ignore = "nightly: takes many minutes"]
fn nightly_each_process_may_die_or_stop_at_each_step() {
    let cases = cases();
    let all = cases.len();
    let reached = run(&mut SeededRandom::new(super::seed()), cases);
    assert!(reached * 10 >= all * REACHED_OF_TEN_MIN, "{reached} of {all} cases met their step");
}

/// The cases whose text contains BALLAST_TEST_SOAK_CASE, ten times each: to look into one.
#[test]
#[ignore = "by hand: needs BALLAST_TEST_SOAK_CASE"]
fn named_cases_again_and_again() {
    let name: String = super::variable("CASE").expect("BALLAST_TEST_SOAK_CASE is a part of a case's text");
    let mut cases = cases();
    cases.retain(|case| format!("{case:?}").contains(&name));
    run(&mut SeededRandom::new(super::seed()), cases.repeat(10));
}

/// Three cases of the nightly test: one of the models, one of the streams, one of the fleet.
#[test]
fn a_process_may_die_at_a_step_of_models_of_streams_and_of_the_fleet() {
    let mut random = SeededRandom::new(super::seed());
    let groups: [&[FaultStep]; 3] = [
        &[FaultStep::Load, FaultStep::Attach, FaultStep::Swap],
        &[FaultStep::Prefill, FaultStep::Decode, FaultStep::Drain],
        &[FaultStep::Reload, FaultStep::Upgrade],
    ];
    let mut drawn = Vec::new();
    for group in groups {
        let mut cases = cases();
        cases.retain(|case| group.contains(&case.step) && case.signal != "STOP");
        drawn.push(*random.pick(&cases));
    }
    run(&mut random, drawn);
}

/// Returns how many cases met their step.
fn run(random: &mut SeededRandom, cases: Vec<Case>) -> usize {
    let mut soak = SoakFleet::start(&[demo_7m(), demo_22m()], 4);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let names: Vec<String> = soak.models.iter().map(|(name, _)| name.clone()).collect();
    let references = runtime.block_on(super::references(&soak.fleet.http, names.iter().map(String::as_str)));
    let long =
        |name: &str| ["long prompt", "gRPC sampled", "mirostat"].iter().any(|kind| name.contains(kind));
    let streams: Vec<(Scenario, Output)> =
        references.into_iter().filter(|(scenario, _)| long(&scenario.name)).collect();
    let before = Holdings::of(&soak);
    let (mut tally, mut ends, mut reached) = (Tally::default(), ProcessEnds::default(), 0);
    for case in cases {
        let began = Instant::now();
        reached += usize::from(one_case(&mut soak, &runtime, case, random, &streams, &mut tally));
        if case.role == "router" || case.step.ends_router() {
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
    reached
}

/// Returns whether the case met its step.
fn one_case(
    soak: &mut SoakFleet,
    runtime: &tokio::runtime::Runtime,
    case: Case,
    random: &mut SeededRandom,
    streams: &[(Scenario, Output)],
    tally: &mut Tally,
) -> bool {
    case.step.prepare(soak);
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
    let (victim, command) = case.step.reach(soak, &client, case.role, random);
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
    case.step.clean_up(soak);
    soak.wait_until_ready();
    victim.is_some()
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
