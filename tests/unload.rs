// SPDX-License-Identifier: Apache-2.0

//! Unloading while the weight-server restarts, and what is left of removed workers.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::Stdio;
use std::time::Duration;

use proto::fleet::v1::fleet_client::FleetClient;
use proto::weights::v1::GetStatusRequest;
use proto::weights::v1::weight_server_client::WeightServerClient;
use proto::worker::v1::StatsRequest;
use proto::worker::v1::worker_client::WorkerClient;

use crate::harness::admin::try_weight_server_status;
use crate::harness::api::{TestRequest, generate_all, runtime};
use crate::harness::{ServedFleet, demo_7m, demo_22m, device, eventually, proc, serve, text};

const ONE_WORKER: [&str; 4] = ["--workers", "1", "--threads", "1"];
/// A user without rights on any machine.
const OTHER_USER: u32 = 65_534;

fn load_second(fleet: &ServedFleet) {
    let model = demo_22m();
    fleet.run(&[
        "load",
        model.to_str().unwrap(),
        "--name",
        "second",
        "--threads",
        "1",
        "--device",
        &device(),
    ]);
}

#[test]
fn a_model_is_unloaded_although_the_weight_server_restarts_meanwhile() {
    let fleet = ServedFleet::start(&demo_7m(), &ONE_WORKER);
    for _ in 0..3 {
        load_second(&fleet);
        proc::send_signal(fleet.only_process("weight-server").pid, "KILL");
        fleet.run(&["unload", "second"]);
        let lines = fleet.try_ps_lines().unwrap();
        assert!(lines.iter().all(|line| line["name"] != "model:second"), "{lines:?}");
        eventually("one generation is left", || {
            let status = runtime().block_on(try_weight_server_status(&fleet))?;
            (status.generations.len() == 1).then_some(())
        });
    }
    fleet.stop();
}

#[test]
fn a_load_ends_when_its_model_is_unloaded() {
    let fleet = ServedFleet::start(&demo_7m(), &ONE_WORKER);
    let weight_server = fleet.only_process("weight-server").pid;
    proc::send_signal(weight_server, "STOP");
    let file = demo_22m();
    let load = ["load", file.to_str().unwrap(), "--name", "second", "--threads", "1", "--device", &device()];
    let output = std::thread::scope(|scope| {
        let load = scope.spawn(|| fleet.run_command(&load));
        let unload = scope.spawn(|| {
            eventually("the model is known and unloaded", || {
                fleet.run_command(&["unload", "second"]).status.success().then_some(())
            });
        });
        // Neither can end before.
        std::thread::sleep(Duration::from_millis(500));
        proc::send_signal(weight_server, "CONT");
        unload.join().unwrap();
        load.join().unwrap()
    });
    let said = text(&output).1;
    // If this machine was slow, the unload came only after the load.
    assert!(output.status.success() || said.contains("was unloaded before it was ready"), "{said}");
    fleet.stop();
}

#[test]
fn a_model_of_the_same_file_under_another_name_waits_until_the_file_is_unloaded() {
    let config = |name: &str| {
        let (path, device) = (demo_7m(), device());
        format!(
            "[[models]]\nname = {name:?}\npath = {path:?}\nworkers = 1\nthreads = 1\ndevice = {device:?}\n"
        )
    };
    let fleet = ServedFleet::start_config(&config("m"));
    fleet.run(&["remove-worker", "worker-0"]);
    let weight_server = fleet.only_process("weight-server").pid;
    proc::send_signal(weight_server, "STOP");
    fleet.configure(&config("q"));
    fleet.reload(&[]);
    proc::send_signal(weight_server, "CONT");
    eventually("q serves, m is gone", || {
        let lines = fleet.try_ps_lines()?;
        let is_ready = |line: &serde_json::Value| line["model"] == "q" && line["state"] == "ready";
        let models = lines.iter().filter(|line| line["role"] == "model").count();
        (models == 1 && lines.iter().any(is_ready)).then_some(())
    });
    fleet.stop();
}

/// Streams that last for seconds.
fn long_request(model: &str) -> TestRequest {
    TestRequest {
        model: model.to_owned(),
        prompt: (0..20).map(|i| 10 + i * 13).collect(),
        max_tokens: 300,
        temperature: 0.8,
        choices: 16,
        without_logprobs: true,
        ..TestRequest::default()
    }
}

#[test]
fn a_stream_in_flight_ends_whole_when_its_worker_is_removed_or_its_model_unloaded() {
    let fleet = ServedFleet::start(&demo_22m(), &[&ONE_WORKER[..], &["--name", "first"]].concat());
    load_second(&fleet);
    let await_served = |model: &str| {
        let short = TestRequest { max_tokens: 1, choices: 1, ..long_request(model) };
        eventually("the model is served", || {
            runtime().block_on(generate_all(&fleet.grpc, std::slice::from_ref(&short))).remove(0).ok()
        });
    };
    await_served("first");
    await_served("second");
    let requests = [long_request("first"), long_request("second")];
    let done = runtime().block_on(fleet.generate_during_fault(&requests, || {
        std::thread::scope(|scope| {
            scope.spawn(|| fleet.run(&["remove-worker", "worker-0"]));
            scope.spawn(|| fleet.run(&["unload", "second"]));
            eventually("both workers drain", || {
                let workers = fleet.processes_by_role("worker");
                workers.iter().all(|worker| worker.state == "draining").then_some(())
            });
        });
    }));
    for whole in done {
        let whole = whole.unwrap();
        assert_eq!((whole.tokens.len(), whole.resumes), (16 * 300, 0));
    }
    fleet.run(&["add-worker", "first"]);
    await_served("first");

    // The streams are cut when the time is over, and the router has no other worker for them.
    let cut = runtime().block_on(fleet.generate_during_fault(&[long_request("first")], || {
        fleet.run(&["unload", "first", "--timeout", "1ms"]);
    }));
    assert!(cut[0].is_err(), "{cut:?}");
    fleet.stop();
}

#[test]
fn tokens_of_removed_workers_are_forgotten() {
    let fleet = ServedFleet::start(&demo_7m(), &ONE_WORKER);
    let tokens = || Some(runtime().block_on(try_weight_server_status(&fleet))?.registered_tokens);
    eventually("one token is registered", || (tokens()? == 1).then_some(()));
    for _ in 0..2 {
        fleet.run(&["add-worker"]);
        fleet.run(&["add-worker"]);
        eventually("three tokens are registered", || (tokens()? == 3).then_some(()));
        fleet.run(&["remove-worker", "worker-1"]);
        fleet.run(&["remove-worker", "worker-2"]);
        eventually("one token is left", || (tokens()? == 1).then_some(()));
    }
    fleet.stop();
}

#[test]
fn sockets_of_a_fleet_refuse_another_user_whatever_their_modes() {
    let is_root =
        std::fs::metadata("/proc/self").is_ok_and(|own| std::os::unix::fs::MetadataExt::uid(&own) == 0);
    if !is_root {
        return crate::harness::report_skipped(format_args!("only root can become another user"));
    }
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let log = tempfile::NamedTempFile::new().unwrap();
    let mut command = serve(directory.path(), &demo_7m(), &ONE_WORKER);
    command.env("BALLAST_LOG", "warn").stderr(log.reopen().unwrap());
    let fleet = ServedFleet::start_command(directory, command);
    let set_mode = |path: &std::path::Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    set_mode(fleet.runtime_dir(), 0o755);
    for entry in std::fs::read_dir(fleet.runtime_dir()).unwrap() {
        set_mode(&entry.unwrap().path(), 0o777);
    }
    // This executable may lie in a folder that only root may enter.
    let folder = tempfile::tempdir().unwrap();
    set_mode(folder.path(), 0o755);
    let copy = folder.path().join("client");
    std::fs::copy(std::env::current_exe().unwrap(), &copy).unwrap();
    let mut foreign = std::process::Command::new(&copy);
    foreign.args(["--ignored", "--exact", "unload::client_of_another_user", "--nocapture"]);
    foreign.env(RUNTIME_DIR, fleet.runtime_dir()).uid(OTHER_USER).gid(OTHER_USER).current_dir("/");
    let client = foreign.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let caller = format!("uid={OTHER_USER} pid={} ", client.id());
    let output = client.wait_with_output().unwrap();
    assert!(output.status.success() && text(&output).0.contains("1 passed"), "{:?}", text(&output));
    for (process, socket) in [
        ("weight-server", "weights-admin.sock"),
        ("worker-0", "worker-0.sock"),
        ("supervisor", "supervisor.sock"),
    ] {
        let start = format!(" WARN {process} closed a connection of another user {caller}socket=");
        eventually(&format!("{process} names the caller"), || {
            let log = std::fs::read_to_string(log.path()).unwrap();
            log.lines().any(|line| line.contains(&start) && line.ends_with(socket)).then_some(())
        });
    }
    fleet.stop();
}

/// Where [`client_of_another_user`] finds the fleet.
const RUNTIME_DIR: &str = "BALLAST_TEST_RUNTIME_DIR";

#[test]
#[ignore = "started as another user by sockets_of_a_fleet_refuse_another_user_whatever_their_modes"]
fn client_of_another_user() {
    let directory = service::RuntimeDir::at(std::env::var_os(RUNTIME_DIR).unwrap());
    runtime().block_on(async {
        let refused = async |socket: std::path::PathBuf, call: &str| {
            let answer = match service::grpc::connect(&socket).await {
                Err(_) => return,
                Ok(channel) => match call {
                    "weights" => {
                        WeightServerClient::new(channel).get_status(GetStatusRequest {}).await.map(drop)
                    }
                    "worker" => WorkerClient::new(channel).stats(StatsRequest {}).await.map(drop),
                    _ => {
                        let request = proto::fleet::v1::GetStatusRequest { memory: false, ledger: false };
                        FleetClient::new(channel).get_status(request).await.map(drop)
                    }
                },
            };
            answer.expect_err(call);
        };
        refused(directory.weights_admin_socket(), "weights").await;
        refused(directory.worker_socket(0), "worker").await;
        refused(directory.supervisor_socket(), "fleet").await;
    });
}
