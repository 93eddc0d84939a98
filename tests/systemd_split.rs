// SPDX-License-Identifier: Apache-2.0

//! `deploy/systemd/ballast.target`, a unit and a user for each process: installed by
//! `scripts/install`, configured by `deploy/examples/split`, run under a real systemd. Units,
//! accounts and directories are those that are shipped; only default dependencies are left out.

use std::process::Command;

use crate::harness::{executable, in_tree, text};
use crate::systemd::run_in_machine;

#[test]
fn units_of_the_target_serve_restart_one_by_one_and_leave_nothing() {
    run_in_machine("systemd_split::inside", "life");
}

#[test]
fn weights_survive_the_death_of_every_process_of_the_target() {
    run_in_machine("systemd_split::inside", "every_process_killed");
}

#[test]
fn router_refuses_sockets_that_it_would_not_serve() {
    let example = in_tree("deploy/examples/split/router.toml");
    for (sockets, inherited, expected) in
        [(2, "3</dev/null 4</dev/null", "2 listening sockets"), (1, "3</dev/null", "not one of TCP")]
    {
        let command =
            format!("exec env LISTEN_PID=$$ LISTEN_FDS={sockets} \"$0\" router --config \"$1\" {inherited}");
        let mut shell = Command::new("sh");
        let output = shell.args(["-c", &command]).arg(executable()).arg(&example).output().unwrap();
        let stderr = text(&output).1;
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(stderr.contains(expected) && stderr.contains("ListenStream="), "{stderr}");
    }
}

/// Run one by one by `run_in_machine`.
mod inside {
    use std::collections::BTreeSet;
    use std::fs;
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    use std::path::Path;
    use std::process::Command;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use toml::{Table, Value};

    use crate::harness::{TIMEOUT, demo_7m, eventually, executable, in_tree, proc, text};
    use crate::systemd::inside::{FOLDER, LISTEN, loads, log, systemctl, tokens};

    const WEIGHTS: &str = "ballast-weight-server.service";
    const WORKERS: [&str; 2] = ["ballast-worker@0.service", "ballast-worker@1.service"];
    const ROUTER: &str = "ballast-router.service";
    const EXECUTABLE: &str = "/usr/local/bin/ballast";
    /// The demo model has no template of its own.
    const CHAT_TEMPLATE: &str = "/etc/ballast/chat.jinja";
    const UNITS: &str = "/usr/local/lib/systemd/system";

    fn run(command: &mut Command) -> String {
        let output = command.output().unwrap();
        assert!(output.status.success(), "{command:?}: {:?}\n{}", text(&output), log());
        text(&output).0
    }

    fn control(arguments: &[&str]) {
        run(Command::new("systemctl").args(arguments));
    }

    fn property(unit: &str, name: &str) -> String {
        let arguments = ["show", unit, "--value", "--property", name];
        text(&systemctl(&arguments)).0.trim().to_owned()
    }

    fn pid(unit: &str) -> Option<u32> {
        property(unit, "MainPID").parse().ok().filter(|&pid| pid != 0)
    }

    fn time(unit: &str, name: &str) -> u64 {
        property(unit, name).parse().unwrap()
    }

    fn all() -> Vec<&'static str> {
        [WEIGHTS].into_iter().chain(WORKERS).chain([ROUTER]).collect()
    }

    /// Nothing of this machine is started, and all processes write into one log.
    fn isolate() {
        fs::create_dir_all(FOLDER).unwrap();
        let units = Path::new("/run/systemd/system");
        for (kind, further) in [
            ("service", format!("[Service]\nStandardOutput=append:{FOLDER}/log\nStandardError=inherit\n")),
            ("socket", String::new()),
            ("slice", String::new()),
            ("target", String::new()),
        ] {
            fs::create_dir_all(units.join(format!("{kind}.d"))).unwrap();
            let drop_in = format!("[Unit]\nDefaultDependencies=no\n{further}");
            fs::write(units.join(format!("{kind}.d/test.conf")), drop_in).unwrap();
        }
    }

    fn example(name: &str) -> Table {
        let file = in_tree("deploy/examples/split").join(name);
        fs::read_to_string(file).unwrap().parse().unwrap()
    }

    fn write(name: &str, table: &Table) {
        fs::write(Path::new("/etc/ballast").join(name), table.to_string()).unwrap();
    }

    fn write_worker(index: usize, change: impl FnOnce(&mut Table)) {
        let mut worker = example("worker-0.toml");
        let socket = format!("/run/ballast-workers/worker-{index}.sock");
        for (key, value) in [
            ("name", format!("worker-{index}")),
            ("listen", socket),
            ("device", "host".to_owned()),
            ("kv-bytes", "16MiB".to_owned()),
            ("chat-template", CHAT_TEMPLATE.to_owned()),
        ] {
            worker.insert(key.to_owned(), Value::String(value));
        }
        worker.insert("threads".to_owned(), Value::Integer(1));
        change(&mut worker);
        write(&format!("workers/{index}.toml"), &worker);
    }

    /// Installs units, accounts and directories, and the examples with a model of the host.
    fn install(further_unit: &str) {
        isolate();
        let model = Path::new(FOLDER).join("model.gguf");
        fs::copy(demo_7m(), &model).unwrap();
        fs::set_permissions(&model, fs::Permissions::from_mode(0o644)).unwrap();
        if !further_unit.is_empty() {
            for unit in all() {
                let folder = Path::new("/run/systemd/system").join(format!("{unit}.d"));
                fs::create_dir_all(&folder).unwrap();
                fs::write(folder.join("further.conf"), further_unit).unwrap();
            }
        }
        run(Command::new(in_tree("scripts/install")).arg(executable()));
        fs::create_dir_all("/etc/ballast/workers").unwrap();
        fs::write(CHAT_TEMPLATE, "{{ messages[0].content }}").unwrap();
        fs::set_permissions(CHAT_TEMPLATE, fs::Permissions::from_mode(0o644)).unwrap();
        let mut weights = example("weight-server.toml");
        weights.remove("devices");
        let models = weights["models"].as_array_mut().unwrap();
        models.truncate(1);
        let entry = models[0].as_table_mut().unwrap();
        entry.insert("path".to_owned(), Value::String(model.to_str().unwrap().to_owned()));
        entry.insert("device".to_owned(), Value::String("host".to_owned()));
        write("weight-server.toml", &weights);
        (0..WORKERS.len()).for_each(|index| write_worker(index, |_| {}));
        write("router.toml", &example("router.toml"));
    }

    fn start() {
        control(&["enable", "--now", "ballast.target", WORKERS[0], WORKERS[1]]);
        wait_until_ready();
    }

    /// Waits until both workers and the router serve.
    fn wait_until_ready() {
        for worker in WORKERS {
            eventually("a worker serves", || {
                property(worker, "StatusText").starts_with("serving").then_some(())
            });
        }
        eventually("the router uses both", || get("/ready").contains("\"workers\":2").then_some(()));
    }

    /// An answer over a connection of its own.
    fn get(path: &str) -> String {
        let mut stream = TcpStream::connect(LISTEN).unwrap_or_else(|error| panic!("{error}\n{}", log()));
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
        let mut answer = String::new();
        // A router that stops may reset a connection that it has accepted.
        let _ = stream.write_all(request.as_bytes()).and_then(|()| stream.read_to_string(&mut answer));
        answer
    }

    /// Does this while other connections are made, none of which may be refused.
    fn without_refused_connections(work: impl FnOnce()) {
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(Ordering::Relaxed) {
                    get("/health");
                    std::thread::sleep(Duration::from_millis(10));
                }
            });
            work();
            is_done.store(true, Ordering::Relaxed);
        });
    }

    fn sockets() -> Vec<String> {
        let folders = ["/run/ballast-weights", "/run/ballast-workers"];
        let entries = folders.iter().flat_map(|folder| fs::read_dir(folder).unwrap());
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.ends_with(".sock")).collect()
    }

    fn check_users() {
        let owner = |unit: &str| fs::metadata(format!("/proc/{}", pid(unit).unwrap())).unwrap().uid();
        let users: BTreeSet<u32> = all().into_iter().map(owner).collect();
        assert_eq!(users.len(), 3, "a user for each role: {users:?}");
        assert!(!users.contains(&0));
    }

    /// Another user reaches no socket; if modes are changed, the processes refuse it.
    fn check_foreign_user() {
        let attach = |user: &str| {
            let mut command = Command::new("setpriv");
            command.args([&format!("--reuid={user}"), &format!("--regid={user}"), "--clear-groups"]);
            let config = format!("{FOLDER}/foreign.toml");
            let output = command.args([EXECUTABLE, "worker", "--config", &config]).output().unwrap();
            assert!(!output.status.success());
            text(&output).1
        };
        let mut foreign = example("worker-0.toml");
        foreign.insert("device".to_owned(), Value::String("host".to_owned()));
        foreign.insert("listen".to_owned(), Value::String("/run/ballast-workers/foreign.sock".to_owned()));
        fs::write(Path::new(FOLDER).join("foreign.toml"), foreign.to_string()).unwrap();
        let denied = attach("ballast-router");
        assert!(denied.contains("Permission denied"), "{denied}");
        for (path, mode) in [("/run/ballast-weights", 0o711), ("/run/ballast-weights/weights.sock", 0o777)] {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        }
        let refused = attach("ballast-router");
        assert!(refused.contains("may not attach here"), "{refused}");
        write_worker(1, |worker| drop(worker.remove("allow-users")));
        control(&["restart", WORKERS[1]]);
        eventually("the worker refuses the router", || {
            log().contains("closed a connection of another user").then_some(())
        });
        write_worker(1, |_| {});
        control(&["restart", WORKERS[1]]);
        wait_until_ready();
    }

    #[test]
    #[ignore = "runs inside tests/systemd/machine"]
    fn life() {
        install("");
        start();
        let order: Vec<u64> =
            all().into_iter().map(|unit| time(unit, "ActiveEnterTimestampMonotonic")).collect();
        assert!(order[0] <= order[1] && order[1].max(order[2]) <= order[3], "{order:?}");
        check_users();
        assert!(get("/server_info").contains("\"has_chat_template\":true"), "{}", log());
        let expected = tokens();

        // The router: a stopped one is started by the next connection, a restart refuses none.
        control(&["stop", ROUTER]);
        assert_eq!(property(ROUTER, "ActiveState"), "inactive");
        let health = get("/health");
        assert!(health.starts_with("HTTP/1.1 200"), "{health}\n{}", log());
        let before = pid(ROUTER);
        without_refused_connections(|| control(&["restart", ROUTER]));
        assert_ne!(pid(ROUTER), before);
        wait_until_ready();

        // The weight-server: no worker notices, the file is not read again, new workers attach.
        let workers = WORKERS.map(pid);
        let streams = std::thread::spawn(tokens);
        control(&["restart", WEIGHTS]);
        assert_eq!(streams.join().unwrap(), expected);
        assert_eq!(WORKERS.map(pid), workers);
        control(&["restart", WORKERS[1]]);
        wait_until_ready();
        assert_eq!(loads(), 1, "{}", log());

        // A worker: its streams continue on the other one.
        let streams = std::thread::spawn(tokens);
        std::thread::sleep(Duration::from_millis(100));
        proc::send_signal(workers[0].unwrap(), "KILL");
        assert_eq!(streams.join().unwrap(), expected);
        wait_until_ready();
        check_foreign_user();

        let pids: Vec<u32> = all().into_iter().map(|unit| pid(unit).unwrap()).collect();
        control(&["stop", "ballast.target"]);
        for (unit, pid) in all().into_iter().zip(pids) {
            // The end of the target's job does not wait for jobs of units that are stopped with it.
            let state = eventually("the unit stops", || {
                let state = property(unit, "ActiveState");
                ["inactive", "failed"].contains(&&*state).then_some(state)
            });
            let state = (state, property(unit, "Result"));
            assert_eq!(state, ("inactive".to_owned(), "success".to_owned()), "{unit}\n{}", log());
            assert!(!proc::is_alive(pid), "{unit} left a process behind");
        }
        let order: Vec<u64> =
            all().into_iter().map(|unit| time(unit, "InactiveEnterTimestampMonotonic")).collect();
        assert!(order[3] <= order[1].min(order[2]) && order[1].max(order[2]) <= order[0], "{order:?}");
        assert_eq!(property(WEIGHTS, "NFileDescriptorStore"), "0");
        assert_eq!(sockets(), Vec::<String>::new());
        assert!(TcpStream::connect(LISTEN).is_err(), "the public socket was left behind");
        check_uninstall();
    }

    fn check_uninstall() {
        control(&["start", "ballast.target", WORKERS[0]]);
        run(&mut Command::new(in_tree("scripts/uninstall")));
        for path in [EXECUTABLE, "/run/ballast-weights", "/run/ballast-workers"] {
            assert!(!Path::new(path).exists(), "{path} was left behind");
        }
        assert_eq!(fs::read_dir(UNITS).unwrap().count(), 0);
        let enabled = run(Command::new("find").args(["/etc/systemd/system", "-name", "ballast*"]));
        assert_eq!(enabled, "", "units are still enabled");
        assert!(TcpStream::connect(LISTEN).is_err());
        assert!(Path::new("/etc/ballast/router.toml").exists(), "the configuration is kept");
    }

    #[test]
    #[ignore = "runs inside tests/systemd/machine"]
    fn every_process_killed() {
        install("[Service]\nWatchdogSec=3\n");
        start();
        let (expected, before) = (tokens(), all().into_iter().map(pid).collect::<Vec<_>>());
        let replaced = |before: &[Option<u32>]| {
            for (unit, before) in all().into_iter().zip(before) {
                eventually("a new process", || pid(unit).filter(|&now| Some(now) != *before));
            }
            wait_until_ready();
            assert_eq!(loads(), 1, "the weights came from systemd, not from the file: {}", log());
            assert_eq!(tokens(), expected);
        };
        fs::write("/sys/fs/cgroup/ballast.slice/cgroup.kill", "1").unwrap();
        replaced(&before);
        // The watchdogs replace processes that do not run.
        let before: Vec<_> = all().into_iter().map(pid).collect();
        before.iter().flatten().for_each(|&pid| proc::send_signal(pid, "STOP"));
        replaced(&before);
    }
}
