// SPDX-License-Identifier: Apache-2.0

//! Test harness: starts a fleet from the real executable, talks to its public sockets, and observes
//! its processes through /proc.

pub(crate) mod admin;
pub(crate) mod api;
pub(crate) mod collector;
pub(crate) mod http;
pub(crate) mod lone_router;
pub(crate) mod proc;
pub(crate) mod random;
pub(crate) mod scripted_server;
pub(crate) mod separate;
pub(crate) mod stepped_worker;
pub(crate) mod terminal;
pub(crate) mod unusable_worker;
pub(crate) mod upgrade;

use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Timeout for anything that normally takes less than a second, for busy machines.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);
/// The same for a stream of some hundred tokens, which takes seconds on a free machine.
pub(crate) const STREAM_TIMEOUT: Duration = Duration::from_secs(240);

/// A path from the environment; by default the path that cargo set at build time. `scripts/gpu-run`
/// sets it on machines without the build.
fn place(variable: &str, built: &str) -> PathBuf {
    std::env::var_os(variable).map_or_else(|| built.into(), PathBuf::from)
}

/// The executable under test.
pub(crate) fn executable() -> PathBuf {
    place("BALLAST_TEST_EXECUTABLE", env!("CARGO_BIN_EXE_ballast"))
}

pub(crate) fn ballast() -> Command {
    let mut command = Command::new(executable());
    command.stdin(Stdio::null()).env_remove("NOTIFY_SOCKET");
    command
}

/// Device of the fleets under test: "host", unless BALLAST_TEST_DEVICE names a GPU, such as
/// "cuda:0".
pub(crate) fn device() -> String {
    std::env::var("BALLAST_TEST_DEVICE").unwrap_or_else(|_| HOST.to_owned())
}

/// The second GPU of tests on several devices: BALLAST_TEST_SECOND_DEVICE.
pub(crate) fn second_gpu() -> Option<String> {
    std::env::var("BALLAST_TEST_SECOND_DEVICE").ok()
}

fn gpus() -> &'static Value {
    static GPUS: OnceLock<Value> = OnceLock::new();
    GPUS.get_or_init(|| {
        let (stdout, stderr) = text(&ballast().args(["devices", "--json"]).output().unwrap());
        serde_json::from_str(&stdout).unwrap_or_else(|_| panic!("{stdout}{stderr}"))
    })
}

/// The UUID of the GPU with the name `cuda:N`.
pub(crate) fn gpu_uuid(name: &str) -> String {
    let is_it = |gpu: &&Value| format!("cuda:{}", gpu["ordinal"]) == name;
    let found = gpus()["gpus"].as_array().unwrap().iter().find(is_it);
    found.unwrap_or_else(|| panic!("no {name} in {}", gpus()))["uuid"].as_str().unwrap().to_owned()
}

/// The name `cuda:N` of the GPU with this UUID.
pub(crate) fn gpu_name(uuid: &str) -> String {
    let seen = gpus();
    let found = seen["gpus"].as_array().unwrap().iter().find(|gpu| gpu["uuid"] == uuid);
    format!("cuda:{}", found.unwrap_or_else(|| panic!("no {uuid} in {seen}"))["ordinal"])
}

/// A `[[models]]` entry of `ballast.toml` with one worker, and further lines.
pub(crate) fn model_table(name: &str, path: &Path, more: &str) -> String {
    let device = device();
    format!(
        "[[models]]\nname = {name:?}\npath = {path:?}\ndevice = {device:?}\nworkers = 1\nthreads = 1\n\
         kv-tokens = 1024\n{more}\n"
    )
}

/// Says what is not tested here, past the test runner. The runner hides what a passing test prints
/// with macros.
pub(crate) fn report_skipped(what: std::fmt::Arguments<'_>) {
    let _is_shown = writeln!(std::io::stderr(), "SKIPPED: {what}");
}

/// Returns false and prints a SKIPPED line if fleets run on a GPU.
pub(crate) fn runs_on_host(test: &str) -> bool {
    let host = device() == HOST;
    if !host {
        report_skipped(format_args!("{test} looks at memory of the host"));
    }
    host
}

/// Returns false and prints a SKIPPED line where streams end too soon for the test: on a GPU, where
/// a demo model decodes a whole context within a second.
pub(crate) fn streams_last_seconds(test: &str) -> bool {
    let host = device() == HOST;
    if !host {
        report_skipped(format_args!("{test} needs streams that last seconds, and a GPU ends them sooner"));
    }
    host
}

const HOST: &str = "host";

/// Path of a file in this repository.
pub(crate) fn in_tree(path: &str) -> PathBuf {
    place("BALLAST_TEST_TREE", concat!(env!("CARGO_MANIFEST_DIR"), "/..")).join(path)
}

pub(crate) fn demo_7m() -> PathBuf {
    in_tree("demo/pycoder-7m-q8_0.gguf")
}

pub(crate) fn demo_22m() -> PathBuf {
    in_tree("demo/pycoder-22m-q4_k_m.gguf")
}

/// A file below BALLAST_TEST_DATA. Returns `None` and prints a SKIPPED line if it does not exist.
pub(crate) fn test_data(path: &str) -> Option<PathBuf> {
    let file = std::env::var_os("BALLAST_TEST_DATA").map(|root| Path::new(&root).join(path));
    let file = file.filter(|file| file.exists());
    if file.is_none() {
        report_skipped(format_args!("{path} needs BALLAST_TEST_DATA"));
    }
    file
}

/// A model of random weights, generated once and kept.
pub(crate) fn synth(shape: &str, quant: &str) -> PathBuf {
    static ONE_AT_A_TIME: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let folder = place("BALLAST_TEST_SCRATCH", env!("CARGO_TARGET_TMPDIR"));
    let file = folder.join(format!("{shape}-{quant}.gguf"));
    if !file.exists() {
        let partial = folder.join(format!("{shape}-{quant}.{}.partial", std::process::id()));
        let status = ballast().args(["synth", shape, quant]).arg(&partial).status().unwrap();
        assert!(status.success(), "ballast synth {shape} {quant}: {status}");
        std::fs::rename(&partial, &file).unwrap();
    }
    file
}

/// Compiles `tests/NAME.c`, for LD_PRELOAD. A bundle has it compiled.
pub(crate) fn preload_library(name: &str, folder: &Path) -> PathBuf {
    let file = Path::new(name).file_name().unwrap();
    let library = folder.join(file).with_extension("so");
    if let Some(bundle) = std::env::var_os("BALLAST_TEST_LIBRARIES") {
        std::fs::copy(Path::new(&bundle).join(file).with_extension("so"), &library).unwrap();
        return library;
    }
    let mut compiler = Command::new("cc");
    compiler.args(["-O2", "-shared", "-fPIC", "-o"]).arg(&library);
    let status = compiler.arg(in_tree(&format!("tests/{name}.c"))).arg("-ldl").status().unwrap();
    assert!(status.success(), "cc: {status}");
    library
}

pub(crate) fn text(output: &Output) -> (String, String) {
    (
        String::from_utf8_lossy(&output.stdout).into_owned(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    )
}

/// Whether a command that failed printed no result: nothing, or with `--json` the error.
pub(crate) fn has_no_result(output: &Output) -> bool {
    let stdout = text(output).0;
    let is_error = |value: &Value| value.as_object().is_some_and(|object| object.keys().eq(["error"]));
    stdout.is_empty() || serde_json::from_str(&stdout).is_ok_and(|value| is_error(&value))
}

/// Polls until `condition` returns a value. Fails the test with `what` after [`TIMEOUT`].
#[track_caller]
pub(crate) fn eventually<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(started.elapsed() < TIMEOUT, "{what}: not within {TIMEOUT:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// `ballast serve` in a runtime directory of its own. Dropping it kills all its processes.
pub(crate) struct ServedFleet {
    pub(crate) supervisor: Child,
    pub(crate) http: String,
    pub(crate) grpc: String,
    runtime_dir: PathBuf,
    /// Deleted with everything in it when the test ends.
    _directory: tempfile::TempDir,
}

/// A process, from one line of `ballast ps --json`.
#[derive(Debug, Clone)]
pub(crate) struct FleetProcess {
    pub(crate) name: String,
    pub(crate) role: String,
    pub(crate) pid: u32,
    pub(crate) state: String,
    pub(crate) restarts: u64,
}

impl ServedFleet {
    pub(crate) fn start(model: &Path, arguments: &[&str]) -> ServedFleet {
        let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
        Self::start_in(directory, model, arguments)
    }

    /// Starts a fleet and waits for the line that `serve --json` prints when the fleet is ready.
    pub(crate) fn start_in(directory: tempfile::TempDir, model: &Path, arguments: &[&str]) -> ServedFleet {
        let command = serve(directory.path(), model, arguments);
        Self::start_command(directory, command)
    }

    /// The same for a complete `serve` command.
    pub(crate) fn start_command(directory: tempfile::TempDir, mut command: Command) -> ServedFleet {
        let supervisor = command.spawn().unwrap();
        Self::announced(directory, supervisor)
    }

    /// The same for a running `serve`, whose standard output is a pipe.
    pub(crate) fn announced(directory: tempfile::TempDir, mut supervisor: Child) -> ServedFleet {
        let ready = first_json_line(&mut supervisor);
        let url =
            |name: &str| ready[name].as_str().unwrap_or_else(|| panic!("no {name} in {ready}")).to_owned();
        let runtime_dir = url("runtime_dir").into();
        ServedFleet { supervisor, http: url("http"), grpc: url("grpc"), runtime_dir, _directory: directory }
    }

    /// A fleet whose announcement the test cannot read. It has no addresses.
    pub(crate) fn without_announcement(directory: tempfile::TempDir, supervisor: Child) -> ServedFleet {
        let runtime_dir = directory.path().to_owned();
        let (http, grpc) = (String::new(), String::new());
        ServedFleet { supervisor, http, grpc, runtime_dir, _directory: directory }
    }

    /// Uses this path for the runtime directory from now on: the fleet may be in a mount namespace
    /// of its own.
    pub(crate) fn seen_from(&mut self, path: PathBuf) {
        self.runtime_dir = path;
    }

    /// Starts a fleet with this `ballast.toml`.
    pub(crate) fn start_config(config: &str) -> ServedFleet {
        let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
        let command = serve_config(&directory.path().join("run"), config);
        Self::start_command(directory, command)
    }

    pub(crate) fn runtime_dir(&self) -> &Path {
        &self.runtime_dir
    }

    pub(crate) fn processes(&self) -> Vec<FleetProcess> {
        self.try_processes().expect("ballast ps")
    }

    pub(crate) fn try_processes(&self) -> Option<Vec<FleetProcess>> {
        let lines = self.try_ps_lines()?;
        Some(lines.iter().filter_map(FleetProcess::parse).collect())
    }

    /// All lines of `ballast ps --json`.
    pub(crate) fn try_ps_lines(&self) -> Option<Vec<Value>> {
        let output = self.run_command(&["ps", "--json"]);
        let lines = || text(&output).0.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        output.status.success().then(lines)
    }

    /// Runs a `ballast` command on this fleet.
    pub(crate) fn run_command(&self, arguments: &[&str]) -> Output {
        ballast().args(arguments).arg("--runtime-dir").arg(self.runtime_dir()).output().unwrap()
    }

    /// Runs a `ballast` command on this fleet, which succeeds.
    #[track_caller]
    pub(crate) fn run(&self, arguments: &[&str]) {
        let output = self.run_command(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", text(&output).1);
    }

    /// Runs a `ballast` command on this fleet, which fails, and returns what it says.
    #[track_caller]
    pub(crate) fn refusal(&self, arguments: &[&str]) -> String {
        let output = self.run_command(arguments);
        assert!(!output.status.success(), "{arguments:?} succeeds");
        text(&output).1
    }

    pub(crate) fn processes_by_role(&self, role: &str) -> Vec<FleetProcess> {
        self.processes().into_iter().filter(|process| process.role == role).collect()
    }

    /// The running process with this role.
    #[track_caller]
    pub(crate) fn only_process(&self, role: &str) -> FleetProcess {
        eventually(&format!("the {role} runs"), || {
            let mut found = self.processes_by_role(role);
            assert_eq!(found.len(), 1, "{role}: {found:?}");
            Some(found.remove(0)).filter(|process| process.pid != 0)
        })
    }

    /// Stops the fleet as Ctrl-C does, and checks that no process and no socket is left.
    pub(crate) fn stop(mut self) {
        let pids: Vec<u32> = self.processes().iter().map(|process| process.pid).collect();
        proc::send_signal(self.supervisor.id(), "INT");
        let status = eventually("the supervisor ends", || self.supervisor.try_wait().unwrap());
        assert!(status.success(), "serve ended with {status}");
        for pid in pids {
            assert!(!proc::is_alive(pid), "process {pid} was left behind");
        }
        let left: Vec<_> = std::fs::read_dir(self.runtime_dir())
            .map(|entries| entries.flatten().map(|entry| entry.file_name()).collect())
            .unwrap_or_default();
        assert!(
            left.iter().all(|name| !name.to_string_lossy().ends_with(".sock")),
            "sockets left behind: {left:?}"
        );
    }
}

impl Drop for ServedFleet {
    fn drop(&mut self) {
        // A test may have failed while its supervisor was stopped.
        proc::send_signal(self.supervisor.id(), "CONT");
        let pids: Vec<u32> = self.try_processes().unwrap_or_default().iter().map(|p| p.pid).collect();
        proc::send_signal(self.supervisor.id(), "KILL");
        let _ = self.supervisor.wait();
        // Process id 0 is that of a child that does not run.
        for pid in pids.into_iter().filter(|pid| *pid != 0) {
            proc::send_signal(pid, "KILL");
        }
    }
}

impl FleetProcess {
    /// Returns `None` for a line that does not describe a process.
    fn parse(line: &Value) -> Option<FleetProcess> {
        line.get("pid")?;
        let field = |name: &str| line.get(name).unwrap_or_else(|| panic!("no {name} in {line}"));
        Some(FleetProcess {
            name: field("name").as_str().unwrap().to_owned(),
            role: field("role").as_str().unwrap().to_owned(),
            pid: u32::try_from(field("pid").as_u64().unwrap()).unwrap(),
            state: field("state").as_str().unwrap().to_owned(),
            restarts: field("restarts").as_u64().unwrap(),
        })
    }
}

/// Builds a `ballast serve` command.
pub(crate) fn serve(runtime_dir: &Path, model: &Path, arguments: &[&str]) -> Command {
    let mut command = ballast();
    command
        .arg("serve")
        .arg(model)
        .args(["--device", &device(), "--json", "--listen", "127.0.0.1:0", "--runtime-dir"])
        .arg(runtime_dir)
        .args(arguments)
        .stdout(Stdio::piped());
    command
}

/// Builds a `ballast serve --config` command. `config` is what `ballast.toml` holds besides the
/// runtime directory.
pub(crate) fn serve_config(runtime_dir: &Path, config: &str) -> Command {
    let file = runtime_dir.with_extension("toml");
    std::fs::write(&file, config).unwrap();
    let mut command = ballast();
    command
        .args(["serve", "--json", "--listen", "127.0.0.1:0", "--runtime-dir"])
        .arg(runtime_dir)
        .arg("--config")
        .arg(file)
        .stdout(Stdio::piped());
    command
}

/// Parses the first line of a child's output as JSON. A thread keeps reading, so that the child
/// does not die of a closed pipe.
pub(crate) fn first_json_line(child: &mut Child) -> Value {
    let mut reader = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    std::thread::spawn(move || {
        let mut rest = Vec::new();
        let _ = reader.read_to_end(&mut rest);
    });
    serde_json::from_str(&line).unwrap_or_else(|error| panic!("not JSON: {line:?}: {error}"))
}
