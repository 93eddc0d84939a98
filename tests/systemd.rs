// SPDX-License-Identifier: Apache-2.0

//! `deploy/systemd/ballast.service`, unchanged, under a real systemd: `tests/systemd/machine`
//! starts one as process 1 of its own namespaces. Tests in `inside` run in there, with a drop-in
//! that names the executable under test. Skipped where namespaces or systemd are missing.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use crate::harness::{TIMEOUT, in_tree};

const UNIT: &str = "deploy/systemd/ballast.service";

/// A systemd of our own needs root, `unshare`, and a machine whose cgroups no other systemd
/// manages.
fn can_start_a_machine() -> bool {
    let own_namespaces = || {
        let mut unshare = Command::new("unshare");
        unshare.args(["--mount", "--pid", "--net", "--cgroup", "--fork", "true"]).stderr(Stdio::null());
        unshare.status().is_ok_and(|status| status.success())
    };
    Path::new("/lib/systemd/systemd").exists()
        && !Path::new("/run/systemd/system").exists()
        && own_namespaces()
}

fn run_inside(test: &str) {
    run_in_machine("systemd::inside", test);
}

/// Runs a test of `module` beside a systemd of its own.
pub(crate) fn run_in_machine(module: &str, test: &str) {
    if !can_start_a_machine() {
        crate::harness::report_skipped(format_args!(
            "{test} needs root, namespaces, and an installed but not running systemd"
        ));
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let log = std::fs::File::create(folder.path().join("log")).unwrap();
    let mut machine = Command::new(in_tree("tests/systemd/machine"))
        .arg(folder.path())
        .arg(std::env::current_exe().unwrap())
        .args([&format!("{module}::{test}"), "--exact", "--ignored", "--nocapture"])
        .stdin(Stdio::null())
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .spawn()
        .unwrap();
    let started = Instant::now();
    while machine.try_wait().unwrap().is_none() && started.elapsed() < 3 * TIMEOUT {
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    // SIGKILL of `unshare --kill-child` ends process 1 and with it all others.
    let _ = machine.kill();
    let _ = machine.wait();
    let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap_or_default();
    let (status, output) = (read("status"), read("output"));
    assert_eq!(status.trim(), "0", "{output}\n--- systemd ---\n{}", read("log"));
    assert!(output.contains("1 passed"), "no test ran: {output}");
}

#[test]
fn unit_serves_under_full_hardening_and_stop_leaves_nothing() {
    run_inside("serves_and_stops");
}

#[test]
fn killed_supervisor_of_the_unit_interrupts_no_stream() {
    run_inside("killed_supervisor");
}

#[test]
fn weights_survive_the_death_of_every_process_of_the_unit() {
    run_inside("every_process_killed");
}

#[test]
fn weights_survive_a_restart_of_the_unit() {
    run_inside("restarted_unit");
}

#[test]
fn crash_reports_of_the_unit_are_in_its_logs_directory() {
    run_inside("crashed_worker");
}

#[test]
fn watchdog_replaces_a_stopped_supervisor() {
    run_inside("stopped_supervisor");
}

#[test]
fn reload_of_the_unit_applies_a_configuration_or_says_what_is_wrong() {
    run_inside("reloaded_unit");
}

#[test]
fn wrong_configuration_ends_the_unit_without_retries() {
    run_inside("wrong_configuration");
}

/// Run one by one by `run_in_machine`.
pub(crate) mod inside {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;
    use std::process::{Command, Output};
    use std::time::Duration;

    use serde_json::Value;

    use crate::harness::api::{Continuation, TestRequest, generate_all, runtime};
    use crate::harness::http::HttpClient;
    use crate::harness::{demo_7m, eventually, executable, in_tree, proc, text};

    pub(crate) const LISTEN: &str = "127.0.0.1:8080";
    const RUNTIME_DIR: &str = "/run/ballast";
    /// Readable for the unit's user, unlike the build folder perhaps.
    pub(crate) const FOLDER: &str = "/run/under-test";

    pub(crate) fn systemctl(arguments: &[&str]) -> Output {
        Command::new("systemctl").args(arguments).output().unwrap()
    }

    fn property(name: &str) -> String {
        text(&systemctl(&["show", "ballast", "--value", "--property", name])).0.trim().to_owned()
    }

    fn main_pid() -> Option<u32> {
        property("MainPID").parse().ok().filter(|&pid| pid != 0)
    }

    /// Installs the unit with a drop-in that names executable, configuration and an existing user.
    fn install(further_configuration: &str, further_unit: &str) {
        fs::create_dir_all(FOLDER).unwrap();
        for (from, to) in [(executable(), "ballast"), (demo_7m(), "model.gguf")] {
            let to = Path::new(FOLDER).join(to);
            fs::copy(from, &to).unwrap();
            fs::set_permissions(&to, fs::Permissions::from_mode(0o755)).unwrap();
        }
        let configuration = format!(
            "listen = \"{LISTEN}\"\nruntime-dir = \"{RUNTIME_DIR}\"\n{further_configuration}\n\
             [[models]]\nname = \"model\"\npath = \"model.gguf\"\ndevice = \"host\"\nworkers = 2\nthreads = 1\n"
        );
        fs::write(Path::new(FOLDER).join("ballast.toml"), configuration).unwrap();
        let units = Path::new("/run/systemd/system");
        fs::copy(in_tree(super::UNIT), units.join("ballast.service")).unwrap();
        fs::create_dir_all(units.join("ballast.service.d")).unwrap();
        let drop_in = format!(
            "[Unit]\nDefaultDependencies=no\n\
             [Service]\nUser=daemon\nGroup=daemon\nExecStart=\n\
             ExecStart={FOLDER}/ballast supervisor --config {FOLDER}/ballast.toml\n\
             ExecReload=\nExecReload={FOLDER}/ballast reload --runtime-dir {RUNTIME_DIR}\n\
             StandardOutput=append:{FOLDER}/log\nStandardError=append:{FOLDER}/log\n{further_unit}\n"
        );
        fs::write(units.join("ballast.service.d/test.conf"), drop_in).unwrap();
        assert!(systemctl(&["daemon-reload"]).status.success());
    }

    pub(crate) fn log() -> String {
        fs::read_to_string(Path::new(FOLDER).join("log")).unwrap_or_default()
    }

    /// Starts the unit and waits until both workers serve.
    fn start() {
        let started = systemctl(&["start", "ballast"]);
        assert!(started.status.success(), "{}\n{}", text(&started).1, log());
        wait_until_ready();
    }

    fn ps() -> Option<Vec<Value>> {
        let mut command = Command::new(Path::new(FOLDER).join("ballast"));
        let output = command.args(["ps", "--json", "--runtime-dir", RUNTIME_DIR]).output().unwrap();
        let lines = || text(&output).0.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        output.status.success().then(lines)
    }

    /// Waits until the router serves and both workers are ready. Returns the workers' process ids.
    fn wait_until_ready() -> Vec<u32> {
        let http = HttpClient { runtime: runtime(), client: reqwest::Client::new(), url: grpc() };
        eventually("the router serves", || (http.try_get("/ready")? == 200).then_some(()));
        eventually("two workers are ready", || {
            let workers: Vec<u32> = ps()?
                .iter()
                .filter(|line| line["role"] == "worker" && line["state"] == "ready")
                .map(|line| line["pid"].as_u64().unwrap() as u32)
                .collect();
            (workers.len() == 2).then_some(workers)
        })
    }

    fn grpc() -> String {
        format!("http://{LISTEN}")
    }

    fn requests(tokens: u32) -> Vec<TestRequest> {
        let request = |seed: u64| TestRequest {
            prompt: (0..20).map(|i| 10 + i * 13 + seed as u32).collect(),
            max_tokens: tokens,
            temperature: 0.7,
            seed,
            ..TestRequest::default()
        };
        (0..4).map(request).collect()
    }

    /// Both workers continue the requests to their ends.
    pub(crate) fn tokens() -> Vec<Vec<u32>> {
        let results = runtime().block_on(generate_all(&grpc(), &requests(400)));
        let tokens = |result: Result<Continuation, _>| match result {
            Ok(continuation) => continuation.tokens,
            Err(status) => panic!("{status}\n{}", log()),
        };
        results.into_iter().map(tokens).collect()
    }

    /// How often a file was read into memory.
    pub(crate) fn loads() -> usize {
        log().matches("INFO weight-server loading").count()
    }

    #[test]
    #[ignore = "runs inside tests/systemd/machine"]
    fn restarted_unit() {
        install("", "");
        start();
        let (workers, expected) = (wait_until_ready(), tokens());
        assert!(systemctl(&["restart", "ballast"]).status.success(), "{}", log());
        let now = wait_until_ready();
        assert!(now.iter().all(|pid| !workers.contains(pid)), "{now:?} {workers:?}");
        assert_eq!(loads(), 1, "{}", log());
        assert_eq!(tokens(), expected);
    }

    #[test]
    #[ignore = "runs inside tests/systemd/machine"]
    fn reloaded_unit() {
        install("", "");
        start();
        let (workers, supervisor) = (wait_until_ready(), main_pid());
        let file = Path::new(FOLDER).join("ballast.toml");
        let valid = fs::read_to_string(&file).unwrap();
        fs::write(&file, valid.replace("workers = 2", "workres = 2")).unwrap();
        assert!(!systemctl(&["reload", "ballast"]).status.success());
        assert!(log().contains("workres"), "{}", log());
        assert_eq!(property("ActiveState"), "active");
        fs::write(&file, valid.replace("workers = 2", "workers = 3")).unwrap();
        assert!(systemctl(&["reload", "ballast"]).status.success(), "{}", log());
        assert_eq!((property("ActiveState").as_str(), main_pid()), ("active", supervisor));
        eventually("a third worker is ready", || {
            let lines = ps()?;
            let ready = |line: &&Value| line["role"] == "worker" && line["state"] == "ready";
            let now: Vec<u64> = lines.iter().filter(ready).filter_map(|line| line["pid"].as_u64()).collect();
            let stayed = workers.iter().all(|&pid| now.contains(&u64::from(pid)));
            (now.len() == 3 && stayed).then_some(())
        });
        assert_eq!(loads(), 1, "{}", log());
    }

    #[test]
    #[ignore = "runs inside tests/systemd/machine"]
    fn serves_and_stops() {
        install("", "");
        start();
        assert!(tokens().iter().all(|tokens| tokens.len() == 400));
        let stored: u32 = property("NFileDescriptorStore").parse().unwrap();
        assert!(stored > 0, "systemd keeps the descriptors of the weights");
        assert!(!log().contains("no system call filter"), "the loader filters its system calls: {}", log());
        let workers = wait_until_ready();
        assert!(systemctl(&["stop", "ballast"]).status.success());
        assert_eq!(property("ActiveState"), "inactive", "{}", log());
        assert_eq!(property("Result"), "success", "{}", log());
        assert_eq!(property("NFileDescriptorStore"), "0");
        assert!(!Path::new(RUNTIME_DIR).exists(), "the runtime directory was left behind");
        assert!(workers.iter().all(|&pid| !proc::is_alive(pid)), "workers were left behind");
    }

    #[test]
    #[ignore = "runs inside tests/systemd/machine"]
    fn killed_supervisor() {
        install("", "");
        start();
        let (workers, expected) = (wait_until_ready(), tokens());
        let killed = main_pid().unwrap();
        let streams = std::thread::spawn(tokens);
        std::thread::sleep(Duration::from_millis(100));
        proc::send_signal(killed, "KILL");
        eventually("systemd restarts the supervisor", || main_pid().filter(|&pid| pid != killed));
        assert_eq!(streams.join().unwrap(), expected);
        assert_eq!(wait_until_ready(), workers, "the successor took over the same workers");
        assert_eq!(property("NRestarts"), "1");
    }

    #[test]
    #[ignore = "runs inside tests/systemd/machine"]
    fn crashed_worker() {
        let delivered = fs::read_to_string(in_tree("deploy/systemd/ballast.toml")).unwrap();
        let delivered: toml::Table = delivered.parse().unwrap();
        let reports = delivered["supervision"]["crash-reports"].as_str().unwrap();
        install(&format!("[supervision]\ncrash-reports = {reports:?}"), "");
        start();
        let worker = wait_until_ready()[0];
        proc::end_by_signal(worker, "KILL");
        let report = eventually("the report is written", || {
            let lines = ps()?;
            lines.iter().find_map(|line| line["latest_crash_report"].as_str().map(str::to_owned))
        });
        assert!(report.starts_with(reports) && report.ends_with(&format!("-{worker}")), "{report}");
        let lines = fs::read_to_string(Path::new(&report).join("log.txt")).unwrap();
        assert!(lines.contains(" worker-"), "{lines}");
        let logs = Path::new(reports).parent().unwrap();
        for path in [logs, Path::new(reports), Path::new(&report)] {
            let mode = fs::metadata(path).unwrap().permissions().mode() & 0o777;
            assert_eq!(mode, 0o700, "{}", path.display());
        }
    }

    #[test]
    #[ignore = "runs inside tests/systemd/machine"]
    fn every_process_killed() {
        install("", "");
        start();
        let (workers, expected) = (wait_until_ready(), tokens());
        assert_eq!(loads(), 1, "{}", log());
        // All at the same moment, so that none can restart or take over another.
        fs::write("/sys/fs/cgroup/system.slice/ballast.service/cgroup.kill", "1").unwrap();
        let now = eventually("new workers", || Some(wait_until_ready()).filter(|now| now != &workers));
        assert!(now.iter().all(|pid| !workers.contains(pid)), "{now:?} {workers:?}");
        assert_eq!(loads(), 1, "the weights came back from systemd, not from the file: {}", log());
        assert_eq!(tokens(), expected);
    }

    #[test]
    #[ignore = "runs inside tests/systemd/machine"]
    fn stopped_supervisor() {
        install("", "WatchdogSec=3\n");
        start();
        let (workers, stopped) = (wait_until_ready(), main_pid().unwrap());
        proc::send_signal(stopped, "STOP");
        eventually("the watchdog replaces it", || main_pid().filter(|&pid| pid != stopped));
        assert_eq!(wait_until_ready(), workers, "the successor took over the same workers: {}", log());
    }

    #[test]
    #[ignore = "runs inside tests/systemd/machine"]
    fn wrong_configuration() {
        install("listne = 1", "");
        assert!(!systemctl(&["start", "ballast"]).status.success());
        assert_eq!(property("ExecMainStatus"), "2", "{}", log());
        assert!(log().contains("listne"), "{}", log());
        std::thread::sleep(Duration::from_secs(2));
        assert_eq!((property("ActiveState").as_str(), property("NRestarts").as_str()), ("failed", "0"));
    }
}
