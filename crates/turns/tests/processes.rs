// SPDX-License-Identifier: Apache-2.0

//! Turns between real processes, some of which are killed or stopped.
//!
//! This executable is also the process under test: [`take_turns`] runs if the environment names a
//! turn file. It appends its name to a journal in each turn.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do: at once, saying where")]

use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use turns::{TurnBounds, Turns};

/// For what takes milliseconds on an idle machine.
const TIMEOUT: Duration = Duration::from_secs(30);
/// A bound that no test reaches, so that a turn that is passed on was passed on by a death.
const UNREACHED: Duration = Duration::from_secs(600);
/// A bound that tests reach.
const REACHED: Duration = Duration::from_millis(500);

#[test]
#[ignore = "a process under test, not a test"]
fn take_turns() {
    let Some(folder) = std::env::var_os("TURNS_FOLDER").map(PathBuf::from) else { return };
    let text = |name: &str| std::env::var(name).unwrap();
    let number = |name: &str| text(name).parse::<u64>().unwrap();
    let bounds = TurnBounds { turn_max: Duration::from_millis(number("TURNS_MAX_MS")) };
    let turns = Turns::open(&folder.join("turns"), bounds).unwrap();
    let mut journal = OpenOptions::new().create(true).append(true).open(folder.join("journal")).unwrap();
    let name = text("TURNS_NAME");
    for _ in 0..number("TURNS_COUNT") {
        let mut held = Some(turns.take());
        journal.write_all(name.as_bytes()).unwrap();
        if let Ok(rest) = std::env::var("TURNS_HOLD") {
            println!("holds");
            std::thread::sleep(Duration::from_secs(rest.parse().unwrap()));
        }
        std::thread::sleep(Duration::from_micros(200));
        if let Ok(rest) = std::env::var("TURNS_REST") {
            held = held.and_then(|held| held.rest(Duration::ZERO));
            println!("rests: {}", held.is_some());
            std::thread::sleep(Duration::from_secs(rest.parse().unwrap()));
            held = held.and_then(turns::HeldTurn::resume);
        }
        drop(held);
        std::thread::sleep(Duration::from_micros(number("TURNS_PAUSE_US")));
    }
    println!("done");
}

struct TurnProcess {
    child: Child,
    output: BufReader<ChildStdout>,
}

struct Spawn<'a> {
    folder: &'a Path,
    name: &'a str,
    count: u32,
    pause_us: u32,
    turn_max: Duration,
    /// Seconds that each turn takes.
    hold: Option<u32>,
    /// Seconds that the process rests after a turn.
    rest: Option<u32>,
}

impl Spawn<'_> {
    fn start(&self) -> TurnProcess {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["take_turns", "--exact", "--ignored", "--nocapture", "--test-threads=1"])
            .env("TURNS_FOLDER", self.folder)
            .env("TURNS_NAME", self.name)
            .env("TURNS_COUNT", self.count.to_string())
            .env("TURNS_PAUSE_US", self.pause_us.to_string())
            .env("TURNS_MAX_MS", self.turn_max.as_millis().to_string())
            .stdout(Stdio::piped());
        if let Some(seconds) = self.hold {
            command.env("TURNS_HOLD", seconds.to_string());
        }
        if let Some(seconds) = self.rest {
            command.env("TURNS_REST", seconds.to_string());
        }
        let mut child = command.spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        TurnProcess { child, output }
    }
}

impl TurnProcess {
    fn wait_for_line(&mut self, expected: &str) {
        let mut line = String::new();
        while !line.trim().ends_with(expected) {
            line.clear();
            assert_ne!(self.output.read_line(&mut line).unwrap(), 0, "no line `{expected}`");
        }
    }

    fn send(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal).unwrap();
    }
}

impl Drop for TurnProcess {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

fn journal(folder: &Path) -> String {
    std::fs::read_to_string(folder.join("journal")).unwrap_or_default()
}

#[track_caller]
fn eventually(what: &str, mut condition: impl FnMut() -> bool) -> Duration {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < TIMEOUT, "{what}: not within {TIMEOUT:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
    start.elapsed()
}

fn turns_of(folder: &Path, name: &str) -> usize {
    journal(folder).matches(name).count()
}

fn spawn<'a>(folder: &'a Path, name: &'a str) -> Spawn<'a> {
    Spawn { folder, name, count: 1_000_000, pause_us: 0, turn_max: UNREACHED, hold: None, rest: None }
}

#[test]
fn processes_that_always_want_a_turn_take_turns() {
    let folder = tempfile::tempdir().unwrap();
    let names = ["a", "b", "c"];
    let processes: Vec<_> = names.map(|name| spawn(folder.path(), name).start()).into();
    eventually("turns of all", || names.iter().all(|name| turns_of(folder.path(), name) > 200));
    drop(processes);
    let journal = journal(folder.path());
    let first_turn_of_last = names.map(|name| journal.find(name).unwrap()).into_iter().max().unwrap();
    let together = &journal.as_bytes()[first_turn_of_last..first_turn_of_last + 300];
    // A process that the scheduler of the machine delays between two turns misses its place.
    let in_order = together.windows(3).filter(|turns| turns[0] != turns[1] && turns[0] != turns[2]);
    assert!(in_order.count() > 200, "{}", String::from_utf8_lossy(together));
}

#[test]
fn a_flooding_process_does_not_starve_another() {
    let folder = tempfile::tempdir().unwrap();
    let flood = spawn(folder.path(), "f").start();
    eventually("a flood", || turns_of(folder.path(), "f") > 100);
    let mut modest = Spawn { count: 50, pause_us: 3000, ..spawn(folder.path(), "m") }.start();
    modest.wait_for_line("done");
    drop(flood);
    let journal = journal(folder.path());
    assert_eq!(journal.matches('m').count(), 50);
}

#[test]
fn the_turn_of_a_killed_holder_goes_on_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let mut holder = Spawn { hold: Some(3600), ..spawn(folder.path(), "h") }.start();
    holder.wait_for_line("holds");
    let others = ["a", "b"].map(|name| spawn(folder.path(), name).start());
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(journal(folder.path()), "h", "the others wait");
    holder.send(Signal::SIGKILL);
    let took = eventually("turns of the others", || {
        turns_of(folder.path(), "a") > 50 && turns_of(folder.path(), "b") > 50
    });
    eprintln!("50 turns each {took:?} after the death of the holder");
    drop(others);
}

#[test]
fn the_turn_of_a_resting_process_goes_on_if_it_has_nothing_to_compute() {
    let folder = tempfile::tempdir().unwrap();
    let mut resting = Spawn { rest: Some(2), count: 3, ..spawn(folder.path(), "r") }.start();
    resting.wait_for_line("rests: true");
    let others = ["a", "b"].map(|name| spawn(folder.path(), name).start());
    eventually("turns of the others", || {
        turns_of(folder.path(), "a") > 50 && turns_of(folder.path(), "b") > 50
    });
    assert_eq!(turns_of(folder.path(), "r"), 1, "it rests still");
    resting.wait_for_line("done");
    drop(others);
}

#[test]
fn killed_waiting_processes_do_not_stop_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let mut holder = Spawn { hold: Some(1), count: 3, ..spawn(folder.path(), "h") }.start();
    holder.wait_for_line("holds");
    let waiting: Vec<_> = ["a", "b", "c", "d"].map(|name| spawn(folder.path(), name).start()).into();
    std::thread::sleep(Duration::from_millis(300));
    waiting.iter().for_each(|process| process.send(Signal::SIGKILL));
    let _last = spawn(folder.path(), "z").start();
    eventually("turns of a later process", || turns_of(folder.path(), "z") > 50);
    holder.wait_for_line("done");
}

#[test]
fn a_stopped_holder_delays_the_others_once_and_finds_its_way_back() {
    let folder = tempfile::tempdir().unwrap();
    let start = |name: &'static str| Spawn { turn_max: REACHED, ..spawn(folder.path(), name) }.start();
    let mut holder = Spawn { hold: Some(1), turn_max: REACHED, ..spawn(folder.path(), "h") }.start();
    holder.wait_for_line("holds");
    holder.send(Signal::SIGSTOP);
    let others = ["a", "b"].map(start);
    let both = |count| turns_of(folder.path(), "a") >= count && turns_of(folder.path(), "b") >= count;
    eventually("turns of the others", || both(1));
    let turns = journal(folder.path()).len();
    eventually("many turns while the holder is stopped", || both(200));
    assert_eq!(turns_of(folder.path(), "h"), 1);
    holder.send(Signal::SIGCONT);
    eventually("the holder takes turns again", || turns_of(folder.path(), "h") > 1);
    let after = journal(folder.path()).len();
    eventually("the others go on", || journal(folder.path()).len() > after + 10);
    eprintln!("{turns} turns at first, {after} when the holder was back");
    drop(others);
}

#[test]
fn a_stopped_waiting_process_delays_the_others_once() {
    let folder = tempfile::tempdir().unwrap();
    let start = |name: &'static str| Spawn { turn_max: REACHED, ..spawn(folder.path(), name) }.start();
    let others = ["a", "b", "c"].map(start);
    let all = |count: usize| ["a", "b", "c"].iter().all(|name| turns_of(folder.path(), name) > count);
    eventually("turns of all", || all(50));
    others[1].send(Signal::SIGSTOP);
    let before = turns_of(folder.path(), "a");
    eventually("the others go on", || turns_of(folder.path(), "a") > before + 500);
    others[1].send(Signal::SIGCONT);
    let before = turns_of(folder.path(), "b");
    eventually("it goes on too", || turns_of(folder.path(), "b") > before + 50);
}

#[test]
fn nonsense_in_the_file_stops_no_process() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("turns"), [0xa5; 4096]).unwrap();
    let mut first = Spawn { count: 20, turn_max: REACHED, ..spawn(folder.path(), "a") }.start();
    first.wait_for_line("done");
    // Other counters: the served ticket is far behind.
    let page: Vec<u8> = [1u32, 2_000_000_000].iter().flat_map(|word| word.to_le_bytes()).collect();
    std::fs::write(folder.path().join("turns"), page).unwrap();
    let mut second = Spawn { count: 20, turn_max: REACHED, ..spawn(folder.path(), "b") }.start();
    second.wait_for_line("done");
}

#[test]
fn slots_are_limited_and_free_again_after_use() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("turns");
    let open = || Turns::open(&path, TurnBounds::default());
    let mut all: Vec<Turns> = (0..turns::policy::PROCESSES_MAX).map(|_| open().unwrap()).collect();
    let error = open().err().unwrap().to_string();
    assert!(error.contains("run fewer workers"), "{error}");
    all.pop();
    let turn = open().unwrap().take();
    assert!(!turn.is_over());
}
