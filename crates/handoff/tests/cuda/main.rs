// SPDX-License-Identifier: Apache-2.0

//! Device memory handed between real processes on a real GPU: `cargo test -p handoff --features
//! handoff/cuda --test cuda`.
//!
//! The parent acts as the weight-server: it holds descriptors and never loads the driver. Children
//! of the same executable load, import, write where they may not, and query the device (`roles`).
//! Without a driver the test reports this and passes. One argument selects checks by name.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test without the harness: unwrap is how it fails, its report is its output"
)]

mod copies;
mod roles;

use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use handoff::seqpacket::{Connection, FrameError};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use proto::weights::v1::BatchReceived;

use roles::{MIB, NO_DRIVER, PATIENCE, ROLE};

/// Bound on the import of 1,000 allocations. The goal is 50 ms; H200s needed 42 to 68 ms (printed),
/// nearly all of it in the driver. The bound finds costs that grow faster than the number of
/// allocations.
const IMPORT_MAX: Duration = Duration::from_millis(200);

/// Free memory that the device may lack after all processes have ended (a goal).
const BASELINE_TOLERANCE_BYTES: u64 = 8 * MIB;

/// Memory of a context that the driver counts for no process: 5.6 MiB on an H200.
const UNCOUNTED_MAX: u64 = 16 * MIB;

/// The driver frees the memory of a killed process within this time.
const RECLAIM: Duration = Duration::from_secs(10);

struct Machine {
    uuid: String,
}

type GpuCheck = fn(&Machine) -> String;

/// In this order: a check that may leave the device in a bad state comes last.
const CHECKS: [(&str, GpuCheck); 10] = [
    ("descriptors_alone_keep_the_memory_and_a_later_process_reads_it", descriptors_alone),
    ("a_thousand_allocations_are_imported_in_time", import_speed),
    ("killed_loader_disturbs_no_importer", killed_loader),
    ("sixteen_processes_import_at_once", storm),
    ("contexts_made_at_once_are_counted_like_one_alone", contexts_at_once),
    ("copies_to_every_gpu_have_the_bytes_over_both_routes", |_| one_child("copies")),
    ("range_grows_and_shrinks", |_| one_child("grow")),
    ("too_little_memory_says_what_is_missing_and_leaves_nothing", |_| one_child("too-little")),
    ("memory_and_descriptors_are_at_their_baseline_after_a_hundred_cycles", cycles),
    ("write_to_imported_memory_ends_that_process_alone", stray_write),
];

/// A check of this process itself.
const NEVER_LOADED: &str = "process_that_held_the_descriptors_never_loaded_libcuda";

fn main() -> ExitCode {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard.min(1 << 20), hard).unwrap();
    if let Ok(role) = std::env::var(ROLE) {
        return roles::run(&role);
    }
    let facts = Role::start("facts", false);
    let (status, output) = facts.end();
    if status.code() == Some(i32::from(NO_DRIVER)) {
        println!("SKIPPED: no NVIDIA driver or no GPU here, nothing of CUDA memory was tested");
        return ExitCode::SUCCESS;
    }
    assert!(status.success(), "{output}");
    print!("{output}");
    let uuid = output.lines().find_map(|line| line.strip_prefix("uuid ")).unwrap().to_owned();
    let machine = Machine { uuid };
    let wanted = std::env::args().nth(1).unwrap_or_default();
    for (name, check) in CHECKS.iter().filter(|(name, _)| name.contains(&wanted)) {
        let started = Instant::now();
        let notes = check(&machine);
        println!("ok {name} ({:.2} s)", started.elapsed().as_secs_f64());
        for note in notes.lines() {
            println!("   {note}");
        }
    }
    assert!(
        !std::fs::read_to_string("/proc/self/maps").unwrap().contains("libcuda"),
        "libcuda was loaded here"
    );
    if NEVER_LOADED.contains(&wanted) {
        println!("ok {NEVER_LOADED}");
    }
    ExitCode::SUCCESS
}

/// A child of this executable. Its standard input is a socket to the parent.
struct Role {
    child: Child,
    socket: Connection,
}

impl Role {
    fn start(role: &str, quiet: bool) -> Self {
        let (ours, theirs) = Connection::pair().unwrap();
        ours.set_timeouts(Some(PATIENCE), Some(PATIENCE)).unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .env(ROLE, role)
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::piped())
            .stderr(if quiet { Stdio::null() } else { Stdio::inherit() })
            .spawn()
            .unwrap();
        Self { child, socket: ours }
    }

    fn receive_fds(&self) -> Vec<OwnedFd> {
        roles::receive_fds(&self.socket)
    }

    fn send_fds(&self, fds: &[OwnedFd]) {
        roles::send_fds(&self.socket, fds);
    }

    /// Waits until the child reports that it waits for the parent.
    fn wait_ready(&self) {
        self.socket.receive::<BatchReceived>().unwrap();
    }

    /// Lets the child read the imported memory again.
    fn look_again(&self) {
        self.socket.send(&BatchReceived { batch: 1 }, &[]).unwrap();
        self.wait_ready();
    }

    fn kill(mut self) -> ExitStatus {
        self.child.kill().unwrap();
        self.child.wait().unwrap()
    }

    /// Closes the socket, which ends the child, and returns its output.
    fn end(self) -> (ExitStatus, String) {
        drop(self.socket);
        let output = self.child.wait_with_output().unwrap();
        (output.status, String::from_utf8(output.stdout).unwrap())
    }

    fn end_well(self) -> String {
        let (status, output) = self.end();
        assert!(status.success(), "{status}: {output}");
        output
    }
}

impl Machine {
    /// Used bytes of the device, as a child reports them: NVML loads libcuda into its process.
    fn used(&self) -> u64 {
        one_child(&format!("used {}", self.uuid)).trim().parse().unwrap()
    }

    /// Waits until the device has about as much free memory as before.
    fn assert_back_at(&self, baseline: u64) -> String {
        let started = Instant::now();
        loop {
            let used = self.used();
            if used <= baseline + BASELINE_TOLERANCE_BYTES {
                let off = used as i64 - baseline as i64;
                return format!(
                    "baseline reached {off} bytes off after {:.3} s",
                    started.elapsed().as_secs_f64()
                );
            }
            assert!(started.elapsed() < RECLAIM, "{used} bytes are used, {baseline} were before");
        }
    }
}

fn one_child(role: &str) -> String {
    Role::start(role, false).end_well()
}

/// Runs a loader to its end, and returns its descriptors and its output.
fn loaded(count: u64, mib: u64) -> (Vec<OwnedFd>, String) {
    let loader = Role::start(&format!("load {count} {mib}"), false);
    let fds = loader.receive_fds();
    (fds, loader.end_well())
}

fn descriptors_alone(machine: &Machine) -> String {
    let baseline = machine.used();
    let (fds, mut notes) = loaded(40, 256);
    let held = machine.used() - baseline;
    assert!(held >= 40 * 256 * MIB, "{held} bytes are held by descriptors alone");
    let importer = Role::start("import", false);
    importer.send_fds(&fds);
    importer.wait_ready();
    notes += &importer.end_well();
    drop(fds);
    notes + &machine.assert_back_at(baseline)
}

fn import_speed(machine: &Machine) -> String {
    let baseline = machine.used();
    let mut notes = String::new();
    for (count, mib) in [(1000, 2), (300, 16), (1000, 64)] {
        let (fds, loading) = loaded(count, mib);
        let importer = Role::start("import", false);
        importer.send_fds(&fds);
        importer.wait_ready();
        let output = importer.end_well();
        notes += &loading;
        notes += &output;
        let micros = output.lines().find_map(|line| line.strip_prefix("import us ")).unwrap();
        let median = micros.split(' ').nth(1).unwrap().parse().map(Duration::from_micros).unwrap();
        assert!(count != 1000 || median < IMPORT_MAX, "{count} allocations took {median:?}");
    }
    notes + &machine.assert_back_at(baseline)
}

fn killed_loader(machine: &Machine) -> String {
    let baseline = machine.used();
    let loader = Role::start("load 64 32", false);
    let fds = loader.receive_fds();
    let importer = Role::start("import", false);
    importer.send_fds(&fds);
    importer.wait_ready();
    drop(fds);
    assert_eq!(loader.kill().signal(), Some(libc::SIGKILL));
    importer.look_again();
    std::thread::sleep(Duration::from_millis(200));
    importer.look_again();
    assert_eq!(importer.kill().signal(), Some(libc::SIGKILL));
    machine.assert_back_at(baseline)
}

fn storm(machine: &Machine) -> String {
    const PROCESSES: usize = 16;
    let baseline = machine.used();
    let (fds, _) = loaded(200, 2);
    let started = Instant::now();
    let importers: Vec<Role> = (0..PROCESSES).map(|_| Role::start("import", false)).collect();
    std::thread::scope(|scope| {
        for importer in &importers {
            let fds = &fds;
            scope.spawn(move || importer.send_fds(fds));
        }
    });
    for importer in &importers {
        importer.wait_ready();
    }
    let all = started.elapsed();
    let beside = machine.used() - baseline - 400 * MIB;
    let mut notes = format!(
        "all imported after {:.2} s; each costs {:.0} MiB beside the weights\n",
        all.as_secs_f64(),
        beside as f64 / MIB as f64 / PROCESSES as f64
    );
    for importer in importers {
        importer.end_well();
    }
    drop(fds);
    notes += &machine.assert_back_at(baseline);
    notes
}

fn contexts_at_once(machine: &Machine) -> String {
    let baseline = machine.used();
    let mut notes = String::new();
    let mut alone = None;
    for (processes, beside_a_loader) in [(1, false), (4, false), (2, true)] {
        let roles: Vec<Role> = (0..processes).map(|_| Role::start("context", false)).collect();
        roles.iter().for_each(Role::wait_ready);
        let loader = beside_a_loader.then(|| Role::start("load 200 32", false));
        for role in &roles {
            role.socket.send(&BatchReceived { batch: 1 }, &[]).unwrap();
        }
        roles.iter().for_each(Role::wait_ready);
        let taken = (machine.used() - baseline) / processes;
        if let Some(loader) = loader {
            loader.receive_fds();
            loader.end_well();
        }
        for role in roles {
            let output = role.end_well();
            let Ok(counted) = output.trim().parse::<u64>() else {
                return format!("the management library does not say what a process has: {output}");
            };
            assert_eq!(counted, *alone.get_or_insert(counted), "{processes} at once");
            assert!(beside_a_loader || taken.abs_diff(counted) <= UNCOUNTED_MAX, "{taken} bytes are taken");
        }
        let mib = |bytes: u64| bytes as f64 / MIB as f64;
        let counted = mib(alone.unwrap_or_default());
        notes += &match beside_a_loader {
            false => {
                format!("{processes} at once: {:.2} MiB taken, {counted:.2} counted, each\n", mib(taken))
            }
            true => format!("{processes} at once beside a loader: {counted:.2} MiB counted to each\n"),
        };
    }
    notes + &machine.assert_back_at(baseline)
}

fn cycles(machine: &Machine) -> String {
    let baseline = machine.used();
    let output = one_child("cycles");
    let mut notes = output + &machine.assert_back_at(baseline);
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = descriptors();
    for _ in 0..4 {
        let loader = Role::start("load 16 32", false);
        let fds = loader.receive_fds();
        loader.kill();
        let importer = Role::start("import", false);
        importer.send_fds(&fds);
        importer.wait_ready();
        importer.kill();
    }
    assert_eq!(descriptors(), before);
    notes += "\nafter 4 cycles of killed processes: ";
    notes += &machine.assert_back_at(baseline);
    notes
}

fn stray_write(machine: &Machine) -> String {
    let baseline = machine.used();
    let (fds, _) = loaded(4, 32);
    let sibling = Role::start("import", false);
    sibling.send_fds(&fds);
    sibling.wait_ready();
    let writer = Role::start("stray-write", false);
    writer.send_fds(&fds);
    let answer = writer.socket.receive::<BatchReceived>();
    assert!(!matches!(answer, Err(FrameError::NotReady)), "the writer hangs");
    let notes = writer.end_well();
    sibling.look_again();
    sibling.end_well();
    let later = Role::start("import", false);
    later.send_fds(&fds);
    later.wait_ready();
    later.end_well();
    drop(fds);
    notes + &machine.assert_back_at(baseline)
}
