// SPDX-License-Identifier: Apache-2.0

//! The soak: a fleet of two models serves streams of every kind, and meets a random fault every
//! 5 s. Each response is complete and equal to its reference, token for token and log probability
//! for log probability, or it ends with an explicit error.
//!
//! The seed determines faults, requests and clients; how they meet depends on the machine.
//! Environment variables change the run, also in the GPU bundle:
//! BALLAST_TEST_SOAK_SECONDS, _SEED, _WORKERS, _STREAMS, and _MODELS (paths, divided by colons).

mod client;
mod fault;
mod fault_step;
mod holdings;
mod output;
mod scenario;
mod soak_fleet;
mod steps;
mod tally;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use client::{Client, Ending, Reader};
use fault::Deck;
use holdings::Holdings;
use output::Output;
use scenario::{Scenario, scenarios};
use soak_fleet::{SoakFleet, THIRD};
use tally::{ProcessEnds, Tally};

use crate::harness::random::SeededRandom;
use crate::harness::{demo_7m, demo_22m, eventually, proc};

const FAULT_INTERVAL: Duration = Duration::from_secs(5);

#[test]
fn i6_streams_are_whole_or_end_with_an_error_through_a_minute_of_faults() {
    soak(Options::new(60));
}

#[test]
#[ignore = "nightly: takes half an hour"]
fn nightly_streams_are_whole_or_end_with_an_error_through_half_an_hour_of_faults() {
    soak(Options::new(30 * 60));
}

struct Options {
    time: Duration,
    seed: u64,
    workers: u32,
    streams: usize,
    models: Vec<PathBuf>,
}

impl Options {
    fn new(seconds: u64) -> Self {
        let models = std::env::var_os("BALLAST_TEST_SOAK_MODELS");
        let models = models.map(|paths| std::env::split_paths(&paths).collect());
        Self {
            time: Duration::from_secs(variable("SECONDS").unwrap_or(seconds)),
            seed: seed(),
            workers: variable("WORKERS").unwrap_or(4),
            streams: variable("STREAMS").unwrap_or(8),
            models: models.unwrap_or_else(|| vec![demo_7m(), demo_22m()]),
        }
    }
}

fn variable<T: FromStr>(name: &str) -> Option<T> {
    let value = std::env::var(format!("BALLAST_TEST_SOAK_{name}")).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("BALLAST_TEST_SOAK_{name}={value} is not a number")))
}

/// BALLAST_TEST_SOAK_SEED, or the time. It is printed.
fn seed() -> u64 {
    let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let seed = variable("SEED").unwrap_or(since_epoch.as_secs());
    eprintln!("measured: soak: seed {seed}");
    seed
}

/// What the load shares with the faults.
struct Load {
    scenarios: Vec<(Scenario, Output)>,
    tally: Mutex<Tally>,
    ends: AtomicBool,
}

fn soak(options: Options) {
    let Options { time, seed, workers, streams, ref models } = options;
    eprintln!(
        "measured: soak: {} s, {workers} workers of {} models, {streams} streams",
        time.as_secs(),
        models.len()
    );
    let mut random = SeededRandom::new(seed);
    let mut soak = SoakFleet::start(models, workers);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let url = soak.fleet.http.clone();
    let scenarios = runtime.block_on(references(&url, soak.models.iter().map(|(name, _)| name.as_str())));
    let load = Arc::new(Load { scenarios, tally: Mutex::default(), ends: AtomicBool::new(false) });
    let before = Holdings::of(&soak);
    let clients: Vec<_> =
        (0..streams).map(|_| runtime.spawn(run_client(load.clone(), url.clone(), random.fork()))).collect();
    let router_ends = watch_router(&soak, load.clone());

    let mut faults = inject_faults(&mut soak, random, time);
    load.ends.store(true, Ordering::Relaxed);
    for client in clients {
        runtime.block_on(client).unwrap();
    }
    let mut router = router_ends.join().unwrap();
    // A router that is told to stop closes its connections at once, and ends after its last stream.
    router.extend(soak.router_stops.clone());
    router.sort_unstable();
    let ends = ProcessEnds { router, supervisor: soak.supervisor_ends.clone() };
    faults.insert("a successor of the supervisor was started".into(), ends.supervisor.len() as u32);
    for (fault, count) in &faults {
        eprintln!("soak: {count:>4} x {fault}");
    }
    let tally = load.tally.lock().unwrap();
    eprint!("{tally}");
    let violations = tally.violations(&ends);
    assert!(
        violations.is_empty(),
        "seed {seed}:\n{}\nthe end of the log:\n{}",
        violations.join("\n"),
        soak.log.last_lines()
    );
    assert!(tally.complete() > 0);
    recover(&mut soak, &runtime, &load, &before);
    soak.stop();
}

/// The output of every request, before the first fault.
async fn references(url: &str, models: impl Iterator<Item = &str>) -> Vec<(Scenario, Output)> {
    let all = models.flat_map(scenarios).collect::<Vec<_>>();
    let outputs = outputs(url, &all).await;
    assert!(outputs.iter().all(|output| output.tokens() > 0), "{outputs:?}");
    all.into_iter().zip(outputs).collect()
}

/// Runs all requests at once. Each has to be completed.
async fn outputs(url: &str, scenarios: &[Scenario]) -> Vec<Output> {
    let client = Arc::new(Client::new(url));
    let run = |scenario: &Scenario| {
        let (client, scenario) = (client.clone(), scenario.clone());
        tokio::spawn(async move { client.run(&scenario, Reader::Fast).await })
    };
    let tasks: Vec<_> = scenarios.iter().map(run).collect();
    let mut outputs = Vec::new();
    for (scenario, task) in scenarios.iter().zip(tasks) {
        let (output, ending) = task.await.unwrap();
        assert!(matches!(ending, Ending::Complete { .. }), "{}: {ending:?}", scenario.name);
        outputs.push(output);
    }
    outputs
}

async fn run_client(load: Arc<Load>, url: String, mut random: SeededRandom) {
    let client = Client::new(&url);
    while !load.ends.load(Ordering::Relaxed) {
        let (scenario, reference) = random.pick(&load.scenarios);
        let began = Instant::now();
        let (found, ending) = client.run(scenario, Reader::random(&mut random)).await;
        let is_refused = matches!(ending, Ending::Refused(_) | Ending::Reset(_) | Ending::Unreachable(_));
        load.tally.lock().unwrap().record(scenario, reference, &found, ending, began);
        if is_refused {
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
}

/// Injects a fault every 5 s. Returns how often each was injected.
fn inject_faults(soak: &mut SoakFleet, random: SeededRandom, time: Duration) -> BTreeMap<String, u32> {
    let mut faults = BTreeMap::new();
    let mut deck = Deck::new(random);
    let began = Instant::now();
    let mut next = began;
    loop {
        next = (next + FAULT_INTERVAL).max(Instant::now());
        soak.sleep_until(next);
        if began.elapsed() >= time {
            return faults;
        }
        let fault = deck.draw();
        eprintln!("soak: {:>6.1} s: {fault:?}", began.elapsed().as_secs_f64());
        if let Err(refusal) = deck.inject(fault, soak) {
            eprintln!("soak: {:>6.1} s: refused: {refusal}", began.elapsed().as_secs_f64());
        }
        *faults.entry(format!("{fault:?}")).or_default() += 1;
    }
}

/// Watches for ends of the router until the load ends. Returns their times.
fn watch_router(soak: &SoakFleet, load: Arc<Load>) -> std::thread::JoinHandle<Vec<Instant>> {
    let mark = format!("{}/router.toml", soak.runtime_dir().display());
    std::thread::spawn(move || {
        let (mut ends, mut last) = (Vec::new(), Vec::new());
        while !load.ends.load(Ordering::Relaxed) {
            let now = proc::processes_with_argument(&mark);
            if now != last || now.is_empty() {
                ends.push(Instant::now());
            }
            last = now;
            std::thread::sleep(Duration::from_millis(100));
        }
        ends
    })
}

/// After the last fault everything serves again, and the fleet holds what it held before the first.
fn recover(soak: &mut SoakFleet, runtime: &tokio::runtime::Runtime, load: &Load, before: &Holdings) {
    let began = Instant::now();
    soak.sleep_until(began + Duration::from_secs(9));
    let _unloaded = soak.command(&["unload", THIRD]);
    soak.wait_until_ready();
    let all: Vec<Scenario> = load.scenarios.iter().map(|(scenario, _)| scenario.clone()).collect();
    let found = runtime.block_on(outputs(&soak.fleet.http, &all));
    for (found, (scenario, reference)) in found.iter().zip(&load.scenarios) {
        assert_eq!(found, reference, "{}", scenario.name);
    }
    let mut held = Holdings::of(soak);
    eventually("the fleet holds what it held before", || {
        held = Holdings::of(soak);
        if !held.is_within(before) {
            eprintln!("soak: {held:?} instead of {before:?}");
            std::thread::sleep(Duration::from_secs(2));
        }
        held.is_within(before).then_some(())
    });
    eprintln!(
        "measured: soak: everything serves and is at its baseline after {:.1} s",
        began.elapsed().as_secs_f64()
    );
}
