// SPDX-License-Identifier: Apache-2.0

//! Tests the supervisor with real processes that crash, hang, send false messages and are killed.
//!
//! The supervisor executes /proc/self/exe, so its children are this test executable. The first
//! argument of `main` selects its role: the exec shim, a child that behaves as its configuration
//! says, a supervisor to be killed, or the test runner. Test names can be given as filters.

#![expect(clippy::print_stdout, reason = "a test runner reports on standard output")]

mod faults {
    pub(crate) mod fake_child;
    pub(crate) mod fake_weight_server;
    pub(crate) mod test_fleet;
}

use std::os::fd::AsFd;
use std::os::unix::net::UnixDatagram;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use faults::test_fleet::{GPU, Pid, SupervisedTestFleet, TEST_TIMEOUT, alive, eventually, fleet_client};
use proto::fleet::v1 as wire;
use service::Notify;
use service::runtime_dir::{ClaimedRuntimeDir, RuntimeDirError};
use supervisor::{BackoffReason, ChildState, FleetEvent, ModelState};

fn main() {
    let mut arguments = std::env::args_os().skip(1);
    let first = arguments.next();
    match first.as_ref().and_then(|a| a.to_str()) {
        Some(supervisor::shim::SUBCOMMAND) => panic!("{}", supervisor::shim::exec(arguments)),
        Some("weight-server" | "worker" | "router" | "device-monitor") => faults::fake_child::main(arguments),
        Some("supervisor") => faults::test_fleet::supervisor_main(arguments),
        _ => run_tests(first.iter().filter_map(|a| a.to_str())),
    }
}

macro_rules! tests {
    ($($name:ident),* $(,)?) => { &[$((stringify!($name), || block_on($name()))),*] };
}

type FaultTest = (&'static str, fn() -> Result<()>);

const TESTS: &[FaultTest] = tests![
    fleet_stop_leaves_no_process_and_no_directory,
    killed_worker_restarts_and_others_keep_running,
    restarted_weight_server_inherits_its_stored_descriptors,
    only_the_weight_server_may_store_descriptors,
    notification_from_another_process_is_ignored,
    crash_loop_is_failed_and_restarted_for_ever,
    permanent_exit_code_is_failed_at_once_and_restarted,
    child_that_ignores_sigterm_is_killed_with_its_process_group,
    second_supervisor_in_the_same_directory_is_refused,
    workers_are_added_and_removed_while_the_fleet_runs,
    failed_load_is_reported_and_its_workers_are_removed,
    successor_adopts_running_children_and_the_fd_store,
    successor_replaces_dead_and_stopped_children,
    children_exit_without_a_successor,
    every_descriptor_is_forwarded_to_systemd,
    steps_that_hang_again_and_again_quarantine_their_device,
    a_load_may_name_a_gpu_that_the_fleet_did_not_start_with,
];

fn run_tests<'a>(mut filters: impl Iterator<Item = &'a str>) {
    let filter = filters.next().filter(|f| !f.starts_with('-')).unwrap_or_default();
    let running: Vec<_> = TESTS
        .iter()
        .filter(|(name, _)| name.contains(filter))
        .map(|&(name, test)| (name, std::thread::Builder::new().name(name.to_owned()).spawn(test)))
        .collect();
    let mut failed = 0;
    for (name, thread) in running {
        let result = thread
            .map_err(anyhow::Error::from)
            .and_then(|t| t.join().unwrap_or_else(|_| Err(anyhow::anyhow!("panicked"))));
        match result {
            Ok(()) => println!("test {name} ... ok"),
            Err(error) => {
                failed += 1;
                println!("test {name} ... FAILED\n{error:?}");
            }
        }
    }
    if failed > 0 {
        println!("{failed} failed");
        std::process::exit(101);
    }
}

fn block_on(test: impl Future<Output = Result<()>>) -> Result<()> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?.block_on(test)
}

async fn fleet_stop_leaves_no_process_and_no_directory() -> Result<()> {
    let test_fleet = SupervisedTestFleet::new()?;
    let mut fleet = test_fleet.start().await?;
    test_fleet.wait_all_running(&fleet, 4).await?;
    let pids = test_fleet.pids(&fleet).await?;
    ensure!(pids.len() == 4, "weight-server, router and two workers: {pids:?}");
    fleet.stop().await;
    fleet.stopped().await;
    ensure!(!test_fleet.runtime_dir().exists(), "the runtime directory still exists");
    for (name, pid) in pids {
        ensure!(!alive(pid), "{name} is still running");
    }
    Ok(())
}

async fn killed_worker_restarts_and_others_keep_running() -> Result<()> {
    let test_fleet = SupervisedTestFleet::new()?;
    let mut fleet = test_fleet.start().await?;
    test_fleet.wait_all_running(&fleet, 4).await?;
    let before = test_fleet.pids(&fleet).await?;
    let killed = Instant::now();
    before["worker-1"].kill()?;
    eventually("the worker is back", || async {
        let now = test_fleet.pids(&fleet).await?;
        Ok(now.get("worker-1").is_some_and(|pid| *pid != before["worker-1"])
            && test_fleet.state(&fleet, "worker-1").await? == "running")
    })
    .await?;
    let took = killed.elapsed();
    // The goal is one second; on a busy machine the test allows ten.
    ensure!(took < Duration::from_secs(10), "took {took:?}");
    let after = test_fleet.pids(&fleet).await?;
    ensure!(after["weight-server"] == before["weight-server"], "other children keep running");
    ensure!(after["worker-0"] == before["worker-0"], "other children keep running");
    let status = fleet.status().await?;
    let worker = status.children.iter().find(|c| c.name == "worker-1").context("worker-1")?;
    let last_termination = worker.last_termination.as_ref().context("no last end")?.to_string();
    ensure!(worker.crashes == 1 && last_termination == "killed by SIGKILL", "{worker:?}");
    fleet.stop().await;
    fleet.stopped().await;
    Ok(())
}

async fn restarted_weight_server_inherits_its_stored_descriptors() -> Result<()> {
    let test_fleet = SupervisedTestFleet::new()?;
    let mut fleet = test_fleet.start().await?;
    test_fleet.wait_all_running(&fleet, 4).await?;
    ensure!(
        test_fleet.text(&fleet, "weight-server").await? == "stored 3",
        "the first start inherits nothing"
    );
    for _ in 0..2 {
        let before = test_fleet.pids(&fleet).await?;
        before["weight-server"].kill()?;
        eventually("the weight-server is back with its descriptors", || async {
            let now = test_fleet.pids(&fleet).await?;
            Ok(now.get("weight-server").is_some_and(|pid| *pid != before["weight-server"])
                && test_fleet.text(&fleet, "weight-server").await?
                    == "adopted weights=allocation 0, weights=allocation 1, manifest=manifest")
        })
        .await?;
        // The weight-server also stored and removed a fourth descriptor, which must not come back.
        ensure!(fleet.status().await?.stored_fds == 3);
    }
    fleet.stop().await;
    fleet.stopped().await;
    Ok(())
}

async fn only_the_weight_server_may_store_descriptors() -> Result<()> {
    let test_fleet = SupervisedTestFleet::new()?.worker("stores-a-descriptor");
    let mut fleet = test_fleet.start().await?;
    test_fleet.wait_all_running(&fleet, 4).await?;
    ensure!(fleet.status().await?.stored_fds == 3, "a worker's descriptor was stored");
    fleet.stop().await;
    fleet.stopped().await;
    Ok(())
}

async fn notification_from_another_process_is_ignored() -> Result<()> {
    let test_fleet = SupervisedTestFleet::new()?.worker("never-ready");
    let mut fleet = test_fleet.start().await?;
    eventually("the workers are started", || async { Ok(test_fleet.pids(&fleet).await?.len() == 4) }).await?;
    let socket = fleet.directory().notify_socket("worker-0");
    let other_process = Notify::to_socket(socket.to_str().context("path")?)?;
    other_process.ready()?;
    other_process.status("I am worker-0")?;
    // The supervisor answers in order: when the barrier returns, the earlier messages are handled.
    other_process.barrier(Duration::from_secs(5))?;
    ensure!(test_fleet.state(&fleet, "worker-0").await? == "starting");
    ensure!(test_fleet.text(&fleet, "worker-0").await?.is_empty());
    fleet.kill().await;
    fleet.stopped().await;
    Ok(())
}

async fn crash_loop_is_failed_and_restarted_for_ever() -> Result<()> {
    let test_fleet = SupervisedTestFleet::new()?.worker("exits-1");
    let mut fleet = test_fleet.start().await?;
    let started = Instant::now();
    eventually("the workers have failed", || async {
        Ok(test_fleet.state(&fleet, "worker-0").await? == "failed"
            && test_fleet.state(&fleet, "worker-1").await? == "failed")
    })
    .await?;
    ensure!(started.elapsed() > Duration::from_secs(6), "the backoff grows with each crash");
    let status = fleet.status().await?;
    let worker = status.children.iter().find(|c| c.name == "worker-0").context("worker-0")?;
    ensure!(
        matches!(worker.state, ChildState::BackingOff { reason: BackoffReason::CrashLoop, .. })
            && worker.crashes == 7
            && worker.next_start_in.is_some_and(|wait| wait <= Duration::from_millis(6400)),
        "{worker:?}"
    );
    eventually("worker-1 starts again without a command", || async {
        let status = fleet.status().await?;
        Ok(status.children.iter().any(|c| c.name == "worker-1" && c.crashes > 7))
    })
    .await?;
    let mut events = fleet.events();
    let mut client = fleet_client(&test_fleet.runtime_dir()).await?;
    client.restart_child(wire::RestartChildRequest { name: "worker-0".to_owned(), drain_ms: None }).await?;
    let restarted = async {
        loop {
            if let FleetEvent::Child(child) = events.recv().await?
                && child.name == "worker-0"
                && matches!(child.state, ChildState::Starting { .. })
            {
                return anyhow::Ok(());
            }
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, restarted).await??;
    let unknown = wire::RestartChildRequest { name: "worker-7".to_owned(), drain_ms: None };
    let unknown = client.restart_child(unknown).await;
    ensure!(unknown.is_err_and(|status| status.code() == tonic::Code::NotFound));
    fleet.stop().await;
    fleet.stopped().await;
    Ok(())
}

async fn permanent_exit_code_is_failed_at_once_and_restarted() -> Result<()> {
    let test_fleet = SupervisedTestFleet::new()?.router("exits-2");
    let mut fleet = test_fleet.start().await?;
    eventually("the router has failed", || async {
        Ok(test_fleet.state(&fleet, "router").await? == "failed")
    })
    .await?;
    let status = fleet.status().await?;
    let router = status.children.iter().find(|c| c.name == "router").context("router")?;
    let last_termination = router.last_termination.as_ref().context("no last end")?;
    ensure!(last_termination.exit() == Some(service::Exit::Usage), "{router:?}");
    ensure!(last_termination.to_string() == "exit code 2 (Usage): port 70000 does not exist", "{router:?}");
    eventually("the router is started again", || async {
        Ok(fleet.status().await?.children.iter().any(|c| c.name == "router" && c.crashes > 2))
    })
    .await?;
    fleet.stop().await;
    fleet.stopped().await;
    Ok(())
}

async fn child_that_ignores_sigterm_is_killed_with_its_process_group() -> Result<()> {
    let test_fleet = SupervisedTestFleet::new()?.weight_server("ignores-sigterm-with-a-grandchild");
    let mut fleet = test_fleet.start().await?;
    test_fleet.wait_all_running(&fleet, 4).await?;
    let pids = test_fleet.pids(&fleet).await?;
    let mut grandchild = None;
    eventually("the grandchild is there", || async {
        Ok(test_fleet.text(&fleet, "weight-server").await?.starts_with("grandchild "))
    })
    .await?;
    if let Some(pid) = test_fleet.text(&fleet, "weight-server").await?.strip_prefix("grandchild ") {
        grandchild = Some(Pid(pid.parse()?));
    }
    let grandchild = grandchild.context("no grandchild")?;
    ensure!(alive(grandchild));
    let asked = Instant::now();
    fleet.stop().await;
    fleet.stopped().await;
    let took = asked.elapsed();
    ensure!(took >= Duration::from_secs(5), "the grace period passes first: {took:?}");
    ensure!(!alive(pids["weight-server"]));
    eventually("the grandchild is gone", || async { Ok(!alive(grandchild)) }).await
}

async fn second_supervisor_in_the_same_directory_is_refused() -> Result<()> {
    let test_fleet = SupervisedTestFleet::new()?;
    let mut fleet = test_fleet.start().await?;
    let second = ClaimedRuntimeDir::claim(Some(&test_fleet.runtime_dir()));
    ensure!(matches!(second, Err(RuntimeDirError::InUse { .. })));
    fleet.stop().await;
    fleet.stopped().await;
    Ok(())
}

async fn workers_are_added_and_removed_while_the_fleet_runs() -> Result<()> {
    let test_fleet = SupervisedTestFleet::new()?;
    let mut fleet = test_fleet.start().await?;
    test_fleet.wait_all_running(&fleet, 4).await?;
    let mut client = fleet_client(&test_fleet.runtime_dir()).await?;
    let added = client.add_worker(wire::AddWorkerRequest::default()).await?.into_inner().name;
    ensure!(added == "worker-2");
    test_fleet.wait_all_running(&fleet, 5).await?;
    let pid = test_fleet.pids(&fleet).await?["worker-2"];
    client.remove_worker(wire::RemoveWorkerRequest { name: added, drain_ms: None }).await?;
    ensure!(!alive(pid), "RemoveWorker replies after the exit");
    ensure!(test_fleet.pids(&fleet).await?.len() == 4);
    let again = client.add_worker(wire::AddWorkerRequest { model: "m".to_owned() }).await?.into_inner().name;
    ensure!(again == "worker-2", "the free index is used again");
    let unknown = client.add_worker(wire::AddWorkerRequest { model: "x".to_owned() }).await;
    ensure!(unknown.is_err_and(|status| status.code() == tonic::Code::NotFound));
    let router =
        client.remove_worker(wire::RemoveWorkerRequest { name: "router".to_owned(), drain_ms: None }).await;
    ensure!(router.is_err_and(|status| status.code() == tonic::Code::InvalidArgument));

    // A child that has just started has no private memory yet.
    test_fleet.wait_all_running(&fleet, 5).await?;
    let status =
        client.get_status(wire::GetStatusRequest { memory: true, ledger: false }).await?.into_inner();
    ensure!(status.stored_fds == 3 && status.supervisor_pid == std::process::id());
    for child in status.children {
        let memory = child.memory.with_context(|| format!("{} has no memory", child.name))?;
        ensure!(memory.resident >= memory.anonymous && memory.anonymous > 0, "{memory:?}");
    }

    let load = wire::LoadModelRequest {
        name: "second".to_owned(),
        path: "/second.gguf".to_owned(),
        workers: 1,
        worker_config: String::new(),
        device: String::new(),
        no_packing: false,
        ..Default::default()
    };
    let mut events = client.load_model(load.clone()).await?.into_inner();
    let mut last = None;
    while let Some(event) = events.message().await? {
        last = event.kind;
    }
    ensure!(
        matches!(last, Some(wire::load_model_event::Kind::Loaded(ref m)) if m.name == "second"),
        "{last:?}"
    );
    ensure!(client.load_model(load).await.is_err_and(|s| s.code() == tonic::Code::AlreadyExists));
    test_fleet.wait_all_running(&fleet, 6).await?;
    client.unload_model(wire::UnloadModelRequest { name: "second".to_owned(), ..Default::default() }).await?;
    let status = fleet.status().await?;
    ensure!(status.children.len() == 5 && status.models.len() == 1, "{status:?}");

    client.stop_fleet(wire::StopFleetRequest {}).await?;
    fleet.stopped().await;
    Ok(())
}

async fn failed_load_is_reported_and_its_workers_are_removed() -> Result<()> {
    let test_fleet = SupervisedTestFleet::new()?.weight_server("refuses-to-load");
    let mut fleet = test_fleet.start().await?;
    eventually("the model has failed", || async {
        let model = fleet.status().await?.models.pop().context("model")?;
        Ok(matches!(model.state, supervisor::ModelState::Failed(ref failure)
            if failure.text == "tensor 3 lies outside the file" && failure.exit == service::Exit::ModelRefused))
    })
    .await?;
    eventually("its workers are removed", || async { Ok(fleet.status().await?.children.len() == 2) }).await?;
    fleet.stop().await;
    fleet.stopped().await;
    Ok(())
}

async fn successor_adopts_running_children_and_the_fd_store() -> Result<()> {
    let test_fleet = SupervisedTestFleet::new()?;
    let mut first = test_fleet.start_supervisor()?;
    let mut client = test_fleet.connected().await?;
    client.add_worker(wire::AddWorkerRequest::default()).await?;
    let before = test_fleet.wait_running_over_grpc(&mut client, 5).await?;
    first.kill()?;
    first.wait()?;
    let mut second = test_fleet.start_supervisor()?;
    let mut client = test_fleet.connected().await?;
    let after = test_fleet.wait_running_over_grpc(&mut client, 5).await?;
    ensure!(before == after, "processes changed: {before:?} {after:?}");
    eventually("the weight-server stores its descriptors again", || {
        let mut client = client.clone();
        async move { Ok(client.get_status(wire::GetStatusRequest::default()).await?.into_inner().stored_fds == 3) }
    })
    .await?;
    // The successor supervises adopted children as usual: it restarts them, and they notice its
    // death.
    after["worker-2"].kill()?;
    eventually("an adopted worker is restarted", || {
        let (mut client, test_fleet, old) = (client.clone(), &test_fleet, after["worker-2"]);
        async move {
            let now = test_fleet.wait_running_over_grpc(&mut client, 5).await?;
            Ok(now["worker-2"] != old)
        }
    })
    .await?;
    let pids = test_fleet.wait_running_over_grpc(&mut client, 5).await?;
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(second.id().cast_signed()), nix::sys::signal::SIGTERM)?;
    ensure!(second.wait()?.success());
    ensure!(pids.values().all(|&pid| !alive(pid)));
    ensure!(!test_fleet.runtime_dir().exists());
    Ok(())
}

async fn successor_replaces_dead_and_stopped_children() -> Result<()> {
    let test_fleet = SupervisedTestFleet::new()?;
    let mut first = test_fleet.start_supervisor()?;
    let mut client = test_fleet.connected().await?;
    let before = test_fleet.wait_running_over_grpc(&mut client, 4).await?;
    first.kill()?;
    first.wait()?;
    before["router"].kill()?;
    before["worker-1"].stop()?;
    let mut second = test_fleet.start_supervisor()?;
    let mut client = test_fleet.connected().await?;
    let after = test_fleet.wait_running_over_grpc(&mut client, 4).await?;
    ensure!(before["worker-0"] == after["worker-0"] && before["weight-server"] == after["weight-server"]);
    ensure!(before["router"] != after["router"], "a dead process was adopted");
    ensure!(before["worker-1"] != after["worker-1"], "a stopped process was adopted");
    ensure!(!alive(before["worker-1"]));
    client.stop_fleet(wire::StopFleetRequest {}).await?;
    ensure!(second.wait()?.success());
    ensure!(!test_fleet.runtime_dir().exists());
    Ok(())
}

async fn children_exit_without_a_successor() -> Result<()> {
    let test_fleet = SupervisedTestFleet::new()?;
    let mut supervisor = test_fleet.start_supervisor()?;
    let mut client = test_fleet.connected().await?;
    let pids = test_fleet.wait_running_over_grpc(&mut client, 4).await?;
    supervisor.kill()?;
    supervisor.wait()?;
    let killed = Instant::now();
    tokio::time::sleep(Duration::from_secs(5)).await;
    ensure!(pids.values().all(|&pid| alive(pid)), "the children wait for a successor");
    eventually("all children and the directory are gone", || async {
        Ok(pids.values().all(|&pid| !alive(pid)) && !test_fleet.runtime_dir().exists())
    })
    .await?;
    ensure!(killed.elapsed() > Duration::from_secs(9), "the children exited too early");
    Ok(())
}

async fn every_descriptor_is_forwarded_to_systemd() -> Result<()> {
    let test_fleet = SupervisedTestFleet::new()?;
    let path = test_fleet.path().join("systemd.sock");
    let systemd = UnixDatagram::bind(&path)?;
    systemd.set_nonblocking(true)?;
    let systemd = tokio::net::UnixDatagram::from_std(systemd)?;
    let heard = tokio::spawn(async move {
        let mut lines = Vec::new();
        let mut buffer = [0u8; 4096];
        while let Ok(bytes) = systemd.recv(&mut buffer).await {
            let line = String::from_utf8_lossy(&buffer[..bytes]).replace('\n', " ");
            // The status of the fleet comes at any time.
            if line.starts_with("STATUS=") {
                continue;
            }
            lines.push(line);
            if lines.last().is_some_and(|l| l == "BARRIER=1") {
                break;
            }
        }
        lines
    });
    let parent = Notify::to_socket(path.to_str().context("path")?)?;
    let stored = service::listen::InheritedFd {
        name: "manifest".to_owned(),
        fd: test_fleet.file_with("manifest")?.as_fd().try_clone_to_owned()?,
    };
    let mut fleet = test_fleet.start_under(parent, vec![stored]).await?;
    test_fleet.wait_all_running(&fleet, 4).await?;
    ensure!(
        test_fleet.text(&fleet, "weight-server").await? == "adopted manifest=manifest",
        "the weight-server inherits what systemd stored"
    );
    fleet.stop().await;
    fleet.stopped().await;

    let test_fleet = SupervisedTestFleet::new()?;
    let parent = Notify::to_socket(path.to_str().context("path")?)?;
    let mut fleet = test_fleet.start_under(parent, Vec::new()).await?;
    let heard = tokio::time::timeout(TEST_TIMEOUT, heard).await??;
    let store = |name| format!("FDSTORE=1 FDNAME={name} FDPOLL=0");
    let expected = [
        store("weights"),
        store("weights"),
        store("gone"),
        store("manifest"),
        "FDSTOREREMOVE=1 FDNAME=gone".into(),
    ];
    ensure!(heard[..5] == expected && heard[5] == "BARRIER=1", "{heard:?}");
    fleet.stop().await;
    fleet.stopped().await;
    Ok(())
}

/// Workers that end as a worker does whose step hangs on a GPU.
async fn steps_that_hang_again_and_again_quarantine_their_device() -> Result<()> {
    let test_fleet = SupervisedTestFleet::new()?.worker("hangs-on-its-device");
    let mut fleet = test_fleet.start().await?;
    eventually("the device is quarantined", || async {
        let devices = fleet.status().await?.devices;
        Ok(devices.iter().any(|device| device.quarantine.is_some()))
    })
    .await?;
    eventually("its workers are gone", || async {
        let children = fleet.status().await?.children;
        Ok(children.iter().all(|child| child.model.is_none()))
    })
    .await?;
    let status = fleet.status().await?;
    let quarantine = status.devices[0].quarantine.clone().context("a quarantine")?;
    ensure!(quarantine.reason == "3 steps hung on it within 5 minutes", "{}", quarantine.reason);
    ensure!(quarantine.ends_in.is_some(), "it is tried again");
    let failure = match &status.models[0].state {
        ModelState::Failed(failure) => failure.text.clone(),
        state => anyhow::bail!("the model is {state:?}"),
    };
    ensure!(failure == "host is quarantined: 3 steps hung on it within 5 minutes", "{failure}");
    fleet.stop().await;
    fleet.stopped().await;
    Ok(())
}

async fn a_load_may_name_a_gpu_that_the_fleet_did_not_start_with() -> Result<()> {
    let test_fleet = SupervisedTestFleet::new()?;
    let mut first = test_fleet.start_supervisor()?;
    let mut client = test_fleet.connected().await?;
    let before = test_fleet.wait_running_over_grpc(&mut client, 4).await?;
    ensure!(!before.contains_key("device-monitor"), "a fleet on the host needs none");
    let load = |device: &str| wire::LoadModelRequest {
        name: "second".to_owned(),
        path: "/second.gguf".to_owned(),
        workers: 1,
        device: device.to_owned(),
        ..Default::default()
    };
    let refusal = client.load_model(load("GPU-elsewhere")).await.err().context("a refusal")?;
    ensure!(refusal.code() == tonic::Code::InvalidArgument, "{refusal:?}");
    let expected = "`device` of model \"second\": GPU-elsewhere cannot be used: there is no such GPU";
    ensure!(refusal.message() == expected, "{}", refusal.message());
    ensure!(test_fleet.wait_running_over_grpc(&mut client, 4).await? == before);

    let mut events = client.load_model(load(GPU)).await?.into_inner();
    let mut last = None;
    while let Some(event) = events.message().await? {
        last = event.kind;
    }
    ensure!(matches!(last, Some(wire::load_model_event::Kind::Loaded(_))), "{last:?}");
    let running = test_fleet.wait_running_over_grpc(&mut client, 6).await?;
    ensure!(running.contains_key("device-monitor") && running.contains_key("worker-2"), "{running:?}");
    ensure!(before.iter().all(|(name, pid)| running[name] == *pid), "nothing restarts: {running:?}");
    let weight_server = || std::fs::read_to_string(test_fleet.runtime_dir().join("weight-server.toml"));
    ensure!(weight_server()?.contains(GPU), "the next weight-server knows it");

    // Its successor has neither the GPU nor the model in its configuration.
    first.kill()?;
    first.wait()?;
    let mut second = test_fleet.start_supervisor()?;
    let mut client = test_fleet.connected().await?;
    let adopted = test_fleet.wait_running_over_grpc(&mut client, 6).await?;
    ensure!(adopted == running, "processes changed: {running:?} {adopted:?}");
    ensure!(weight_server()?.contains(GPU), "a weight-server after that knows it too");
    adopted["weight-server"].kill()?;
    eventually("the next weight-server has the model", || {
        let mut client = client.clone();
        async move {
            let models = client.get_status(wire::GetStatusRequest::default()).await?.into_inner().models;
            let model = models.into_iter().find(|model| model.name == "second").context("the model")?;
            Ok(model.state() == wire::ModelState::Ready)
        }
    })
    .await?;
    client.stop_fleet(wire::StopFleetRequest {}).await?;
    ensure!(second.wait()?.success());
    Ok(())
}
