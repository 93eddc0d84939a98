// SPDX-License-Identifier: Apache-2.0

//! The fleet of the soak: `ballast serve` with several models, restarted like a service manager
//! does it whenever the supervisor ends.

use std::collections::VecDeque;
use std::fmt::Write;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::harness::http::HttpClient;
use crate::harness::{ServedFleet, TIMEOUT, ballast, demo_22m, device, executable, proc};

/// A silent process is replaced after this time. Pauses of the soak are shorter and longer.
pub(super) const WATCHDOG: Duration = Duration::from_secs(5);

/// Name of the model that is loaded and unloaded while the fleet serves others.
pub(super) const THIRD: &str = "third";

/// Last lines of the log, printed if the soak fails.
const LOG_LINES_MAX: usize = 400;

pub(super) struct SoakFleet {
    pub(super) fleet: ServedFleet,
    pub(super) models: Vec<(String, PathBuf)>,
    folder: tempfile::TempDir,
    listen: String,
    /// `ballast.toml` as the fleet starts with it.
    config: String,
    /// What the next supervisor executes.
    program: PathBuf,
    pub(super) log: Log,
    /// When supervisors ended. A successor followed each.
    pub(super) supervisor_ends: Vec<Instant>,
    /// When the router was told to restart.
    pub(super) router_stops: Vec<Instant>,
}

/// What the processes write to standard error, which is a pipe.
#[derive(Clone, Default)]
pub(super) struct Log {
    lines: Arc<Mutex<VecDeque<String>>>,
    /// Nothing is read, so that the pipe becomes full.
    pub(super) stalls: Arc<AtomicBool>,
}

impl Log {
    fn read(&self, child: &mut Child) {
        let (log, stderr) = (self.clone(), child.stderr.take().unwrap());
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                while log.stalls.load(Ordering::Relaxed) {
                    std::thread::sleep(Duration::from_millis(10));
                }
                let mut lines = log.lines.lock().unwrap();
                if lines.len() == LOG_LINES_MAX {
                    lines.pop_front();
                }
                lines.push_back(line);
            }
        });
    }

    pub(super) fn last_lines(&self) -> String {
        self.lines.lock().unwrap().iter().fold(String::new(), |all, line| all + line + "\n")
    }
}

impl SoakFleet {
    pub(super) fn start(models: &[PathBuf], workers: u32) -> Self {
        let folder = tempfile::Builder::new().prefix("ballast-soak-").tempdir().unwrap();
        let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
        let named = |(index, path): (usize, &PathBuf)| (format!("m{index}"), path.clone());
        let models: Vec<(String, PathBuf)> = models.iter().enumerate().map(named).collect();
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let (path, program) = (folder.path().join("ballast.toml"), executable());
        let config = configuration(&models, workers);
        std::fs::write(&path, &config).unwrap();
        let log = Log::default();
        let mut command = serve(&program, &path, &directory.path().join("run"), &free.to_string());
        let mut supervisor = command.spawn().unwrap();
        log.read(&mut supervisor);
        let fleet = ServedFleet::announced(directory, supervisor);
        let (listen, supervisor_ends) = (free.to_string(), Vec::new());
        let router_stops = Vec::new();
        Self { fleet, models, folder, listen, config, program, log, supervisor_ends, router_stops }
    }

    pub(super) fn runtime_dir(&self) -> &Path {
        self.fleet.runtime_dir()
    }

    /// Starts a successor if the supervisor has ended.
    pub(super) fn keep_supervised(&mut self) {
        if self.fleet.supervisor.try_wait().unwrap().is_none() {
            return;
        }
        self.supervisor_ends.push(Instant::now());
        let config = self.folder.path().join("ballast.toml");
        let mut successor = serve(&self.program, &config, self.runtime_dir(), &self.listen).spawn().unwrap();
        self.log.read(&mut successor);
        let mut stdout = successor.stdout.take().unwrap();
        std::thread::spawn(move || std::io::copy(&mut stdout, &mut std::io::sink()));
        self.fleet.supervisor = successor;
    }

    /// Waits, and replaces the supervisor if it ends meanwhile.
    pub(super) fn sleep_until(&mut self, end: Instant) {
        while Instant::now() < end {
            self.keep_supervised();
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Living processes of a role, from /proc: `ballast ps` does not answer while the supervisor is
    /// away.
    pub(super) fn pids(&self, role: &str) -> Vec<u32> {
        if role == "supervisor" {
            return vec![self.fleet.supervisor.id()];
        }
        let mark = format!("{}/", self.runtime_dir().display());
        let has_role = |pid: &u32| proc::arguments(*pid).get(1).is_some_and(|first| first == role);
        proc::processes_with_argument(&mark).into_iter().filter(has_role).collect()
    }

    /// Waits until all processes are ready, and the router says so too.
    pub(super) fn wait_until_ready(&mut self) {
        let end = Instant::now() + TIMEOUT;
        loop {
            self.keep_supervised();
            let processes = self.fleet.try_processes().unwrap_or_default();
            let is_ready = !processes.is_empty() && processes.iter().all(|process| process.state == "ready");
            if is_ready && HttpClient::connect(&self.fleet).try_get("/ready") == Some(200) {
                return;
            }
            let log = self.log.last_lines();
            assert!(Instant::now() < end, "not ready after {TIMEOUT:?}: {processes:?}\n{log}");
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// Stops the fleet as Ctrl-C does, and checks that nothing is left.
    pub(super) fn stop(self) {
        let directory = self.runtime_dir().to_owned();
        self.fleet.stop();
        let left = proc::processes_with_argument(&directory.display().to_string());
        assert!(left.is_empty(), "processes are left: {left:?}");
        assert!(!directory.exists(), "{} is left", directory.display());
    }

    /// A copy of the file, made at the first call.
    pub(super) fn file(&self, name: &str, from: &Path) -> PathBuf {
        let path = self.folder.path().join(name);
        if !path.exists() {
            std::fs::copy(from, &path).unwrap();
        }
        path
    }

    /// Writes `ballast.toml`: the configuration of the start, changed.
    pub(super) fn configure(&self, change: impl FnOnce(&str) -> String) {
        std::fs::write(self.folder.path().join("ballast.toml"), change(&self.config)).unwrap();
    }

    /// Later supervisors execute another copy of the executable.
    pub(super) fn use_next_executable(&mut self) {
        let copies = ["first-copy", "second-copy"].map(|name| self.file(name, &executable()));
        self.program = copies.into_iter().find(|copy| *copy != self.program).unwrap();
    }

    /// Whether every process of the fleet executes what the next supervisor will.
    pub(super) fn executes_only_its_executable(&self) -> Result<(), String> {
        let program = |pid: u32| std::fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
        let processes = self.fleet.try_processes().ok_or("ps does not answer")?;
        let other = processes.iter().find(|process| program(process.pid) != self.program);
        other.map_or(Ok(()), |process| Err(format!("{} executes another file", process.name)))
    }

    /// Arguments of `ballast` that load the third model: a copy of a small one.
    pub(super) fn load_arguments(&self) -> Vec<String> {
        let model = self.file("third.gguf", &demo_22m());
        let options = ["--threads", "1", "--kv-tokens", "512", "--device", &device(), "--name", THIRD];
        let mut arguments = vec!["load".to_owned(), model.display().to_string()];
        arguments.extend(options.map(str::to_owned));
        arguments
    }

    /// Restarts the process of a role that has one.
    pub(super) fn restart(&mut self, role: &str) -> Result<(), String> {
        if role == "router" {
            self.router_stops.push(Instant::now());
        }
        self.command(&["restart", role])
    }

    /// Runs a command of at most a minute, and returns what it says if it fails.
    pub(super) fn command(&mut self, arguments: &[&str]) -> Result<(), String> {
        let mut command = ballast();
        command.args(arguments).arg("--runtime-dir").arg(self.runtime_dir());
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let began = Instant::now();
        while child.try_wait().unwrap().is_none() {
            self.keep_supervised();
            if began.elapsed() > Duration::from_secs(60) {
                child.kill().unwrap();
                let _ = child.wait();
                return Err(format!("{arguments:?} did not end within a minute"));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let output = child.wait_with_output().unwrap();
        match output.status.success() {
            true => Ok(()),
            false => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        }
    }
}

fn configuration(models: &[(String, PathBuf)], workers: u32) -> String {
    let each = (workers / models.len() as u32).max(1);
    let mut config = format!(
        "[supervision]\nwatchdog = \"{}s\"\n[router]\nquarantine = \"5s\"\n[routing]\nmode = \"least-loaded\"\n",
        WATCHDOG.as_secs()
    );
    for (index, (name, path)) in models.iter().enumerate() {
        let draft = if index == 1 { "draft = \"lookup\"\n" } else { "" };
        writeln!(
            config,
            "[[models]]\nname = {name:?}\npath = {path:?}\ndevice = {:?}\nworkers = {each}\nthreads = 1\n\
             kv-tokens = 8192\n{draft}",
            device()
        )
        .unwrap();
    }
    config
}

fn serve(program: &Path, config: &Path, runtime_dir: &Path, listen: &str) -> Command {
    let mut command = Command::new(program);
    command.stdin(Stdio::null()).env_remove("NOTIFY_SOCKET");
    command.args(["serve", "--json", "--listen", listen, "--config"]).arg(config);
    command.arg("--runtime-dir").arg(runtime_dir);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}
