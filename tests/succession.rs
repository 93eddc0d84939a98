// SPDX-License-Identifier: Apache-2.0

//! What a successor of the supervisor goes on with: the public socket, a rolling restart, and a
//! fleet whose executable has been replaced.

use std::fs::File;
use std::io::ErrorKind;
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::harness::api::{TestRequest, generate_all, runtime};
use crate::harness::upgrade::{complete_all, complete_during, copy_of_executable, serve_with};
use crate::harness::{
    ServedFleet, ballast, demo_7m, demo_22m, device, eventually, executable, first_json_line, proc,
    serve_config, streams_last_seconds, text,
};

/// `ballast.toml` for a demo model. Streams may last longer than the test.
fn config(workers: u32) -> String {
    format!(
        "[router]\ndrain = \"300s\"\n[[models]]\nname = \"m\"\npath = {:?}\ndevice = {:?}\n\
         workers = {workers}\nthreads = 1\nkv-tokens = 4096\n",
        demo_7m(),
        device(),
    )
}

fn requests(count: u64, max_tokens: u32) -> Vec<TestRequest> {
    let request = |seed: u64| TestRequest {
        prompt: (0..20).map(|i| 10 + i * 13 + seed as u32).collect(),
        max_tokens,
        temperature: 0.7,
        seed,
        ..TestRequest::default()
    };
    (0..count).map(request).collect()
}

#[test]
fn a_router_that_restarts_under_a_successor_refuses_no_connection() {
    let mut fleet = ServedFleet::start_config(&config(1));
    let address = fleet.http.strip_prefix("http://").unwrap().to_owned();
    for round in 0..2 {
        let router = fleet.only_process("router").pid;
        fleet.succeed(serve_config(fleet.runtime_dir(), &config(1)));
        assert_eq!(fleet.only_process("router").pid, router, "adopted");
        // The router gives its socket to the successor some time after its adoption.
        std::thread::sleep(Duration::from_secs(1));
        proc::send_signal(router, "KILL");
        let (mut refused, mut connected) = (0, 0);
        eventually("another router serves", || {
            match TcpStream::connect(&address) {
                Ok(_) => connected += 1,
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => refused += 1,
                Err(error) => panic!("{error}"),
            }
            let now = fleet.try_processes()?.into_iter().find(|process| process.role == "router")?;
            (now.pid != router && now.state == "ready").then_some(())
        });
        assert_eq!(refused, 0, "round {round}: {connected} connections were accepted");
        let found = runtime().block_on(generate_all(&fleet.grpc, &requests(1, 8)));
        assert_eq!(found[0].as_ref().unwrap().tokens.len(), 8);
    }
    fleet.stop();
}

/// A child has the descriptors of its supervisor until it executes its program.
#[test]
fn a_successor_waits_for_the_children_that_a_dead_supervisor_was_starting() {
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let runtime_dir = directory.path().join("run");
    std::fs::create_dir(&runtime_dir).unwrap();
    // `flock` takes the lock and ends at once; the shell has the descriptor for 3 s.
    let held = "exec 9>>\"$1\"; flock --nonblock 9 && echo locked; exec sleep 3 >/dev/null";
    let mut child = Command::new("sh");
    child.args(["-c", held, "sh"]).arg(runtime_dir.join("supervisor.lock"));
    let mut child = child.stdout(Stdio::piped()).spawn().unwrap();
    assert_eq!(std::io::read_to_string(child.stdout.take().unwrap()).unwrap(), "locked\n");
    let began = Instant::now();
    let mut successor = serve_config(&runtime_dir, &config(1)).spawn().unwrap();
    first_json_line(&mut successor);
    assert!(began.elapsed() > Duration::from_secs(2), "the lock was held");
    proc::send_signal(successor.id(), "INT");
    assert!(successor.wait().unwrap().success());
    child.wait().unwrap();
}

#[test]
fn a_router_offers_its_socket_until_the_supervisor_takes_it() {
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let [notify, config, log] = ["notify.sock", "router.toml", "log"].map(|name| directory.path().join(name));
    std::fs::write(&config, format!("listen = \"127.0.0.1:0\"\nruntime-dir = {:?}\n", directory.path()))
        .unwrap();
    // The test is the supervisor. Its queue is full from the start.
    let supervisor = UnixDatagram::bind(&notify).unwrap();
    supervisor.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let filler = UnixDatagram::unbound().unwrap();
    filler.set_nonblocking(true).unwrap();
    while filler.send_to(b"X=1", &notify).is_ok() {}
    let (_liveness, of_router) = UnixStream::pair().unwrap();
    let mut command = Command::new("sh");
    command.args(["-c", "exec 3<&0 </dev/null; exec \"$@\"", "sh"]).arg(executable());
    command.args(["router", "--config"]).arg(&config).stdin(OwnedFd::from(of_router));
    command.envs([("BALLAST_LIVENESS_FD", "3"), ("BALLAST_LOG", "warn")]).env("NOTIFY_SOCKET", &notify);
    let mut router = command.stderr(File::create(&log).unwrap()).spawn().unwrap();
    eventually("the supervisor does not take the socket", || {
        std::fs::read_to_string(&log).unwrap().contains("does not take the public socket").then_some(())
    });
    eventually("the supervisor gets the socket", || {
        let mut message = [0; 4096];
        let bytes = supervisor.recv(&mut message).ok()?;
        message[..bytes].starts_with(b"FDSTORE=1\nFDNAME=http\n").then_some(())
    });
    router.kill().unwrap();
    router.wait().unwrap();
}

/// The stop grace of the supervisor is 20 s, and the setting says 300 s.
#[test]
fn a_router_drains_as_long_as_its_setting_says() {
    let fleet = ServedFleet::start_config(&config(1));
    let worker = fleet.processes_by_role("worker")[0].pid;
    let began = Instant::now();
    let found = runtime().block_on(fleet.generate_during_fault(&requests(1, 600), || {
        std::thread::scope(|scope| {
            let restart = scope.spawn(|| fleet.run_command(&["restart", "router"]));
            // Slows the stream down. The router gives up a worker that answers no ping for 6 s.
            for _ in 0..8 {
                proc::send_signal(worker, "STOP");
                std::thread::sleep(Duration::from_secs(3));
                proc::send_signal(worker, "CONT");
                std::thread::sleep(Duration::from_millis(20));
            }
            let restarted = restart.join().unwrap();
            assert!(restarted.status.success(), "{}", text(&restarted).1);
        });
    }));
    let (took, done) = (began.elapsed(), found[0].as_ref().unwrap());
    assert!(took > Duration::from_secs(22), "the stream was too short for this test: {took:?}");
    assert_eq!((done.tokens.len(), done.resumes), (600, 0));
    fleet.stop();
}

#[test]
fn a_rolling_restart_goes_on_under_a_successor_of_the_supervisor() {
    let mut fleet = ServedFleet::start_config(&config(3));
    let before = fleet.processes_by_role("worker");
    // Streams that do not end in the time for a drain, so that the restart takes some seconds.
    let (grpc, long) = (fleet.grpc.clone(), requests(6, 1500));
    let load = std::thread::spawn(move || runtime().block_on(generate_all(&grpc, &long)));
    let mut restart = ballast();
    restart.args(["restart", "--rolling", "--timeout", "2s", "--runtime-dir"]).arg(fleet.runtime_dir());
    let mut restart = restart.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    eventually("the first worker is another process", || {
        let now = fleet.try_processes()?.into_iter().find(|process| process.name == "worker-0")?;
        (now.pid != before[0].pid && now.pid != 0).then_some(())
    });
    assert!(restart.try_wait().unwrap().is_none(), "the restart was too short for this test");
    fleet.succeed(serve_config(fleet.runtime_dir(), &config(3)));
    let output = restart.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output).1);
    assert_eq!(text(&output).0, "worker-0 restarted\nworker-1 restarted\nworker-2 restarted\n");
    for (before, after) in before.iter().zip(fleet.processes_by_role("worker")) {
        assert_ne!(before.pid, after.pid, "{}", before.name);
        assert_eq!(after.state, "ready");
    }
    for done in load.join().unwrap() {
        assert_eq!(done.unwrap().tokens.len(), 1500);
    }
    fleet.stop();
}

#[test]
fn a_worker_that_drains_while_its_supervisor_dies_is_replaced_by_the_successor() {
    if !streams_last_seconds("a_worker_that_drains_while_its_supervisor_dies_is_replaced_by_the_successor") {
        return;
    }
    let mut fleet = ServedFleet::start_config(&config(2));
    let before = fleet.processes_by_role("worker")[0].pid;
    let (grpc, long) = (fleet.grpc.clone(), requests(4, 600));
    let load = std::thread::spawn(move || runtime().block_on(generate_all(&grpc, &long)));
    std::thread::sleep(Duration::from_millis(300));
    let mut drain = ballast();
    drain.args(["drain", "worker-0", "--timeout", "1s", "--runtime-dir"]).arg(fleet.runtime_dir());
    let mut drain = drain.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    eventually("the worker drains", || {
        let now = fleet.try_processes()?.into_iter().find(|process| process.name == "worker-0")?;
        (now.state == "draining").then_some(())
    });
    fleet.succeed(serve_config(fleet.runtime_dir(), &config(2)));
    drain.wait().unwrap();
    let after = fleet.processes_by_role("worker");
    assert!(after[0].pid != before && after.iter().all(|worker| worker.state == "ready"), "{after:?}");
    for done in load.join().unwrap() {
        assert_eq!(done.unwrap().tokens.len(), 600);
    }
    fleet.stop();
}

/// Another executable takes over a fleet under load, and then replaces each process. The old file
/// is gone by then, as after an upgrade of a package.
#[test]
fn another_executable_takes_over_a_fleet_under_load_without_a_lost_stream() {
    let folder = tempfile::tempdir().unwrap();
    let (old, new) = (copy_of_executable(folder.path(), "old"), copy_of_executable(folder.path(), "new"));
    let config = format!(
        "{}[[models]]\nname = \"n\"\npath = {:?}\ndevice = {:?}\nworkers = 1\nthreads = 1\nkv-tokens = 4096\n",
        config(2),
        demo_22m(),
        device()
    );
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let run = directory.path().join("run");
    let mut fleet = ServedFleet::start_command(directory, serve_with(&old, &serve_config(&run, &config)));
    let requests: Vec<TestRequest> = requests(4, 200)
        .into_iter()
        .map(|request| TestRequest { model: "m".to_owned(), ..request })
        .collect();
    let expected = runtime().block_on(complete_all(&fleet.grpc, &requests));
    let rounds = complete_during(&fleet.grpc.clone(), &requests, &expected, || {
        std::fs::remove_file(&old).unwrap();
        fleet.succeed(serve_with(&new, &serve_config(&run, &config)));
        fleet.replace_processes(&new);
    });
    assert!(rounds > 0);
    fleet.stop();
}
