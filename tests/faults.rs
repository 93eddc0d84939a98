// SPDX-License-Identifier: Apache-2.0

//! `kill -9` of every process at a bad moment. docs/RELIABILITY.md lists the effects that each
//! death may have.

use crate::harness::admin::weight_server_status;
use crate::harness::api::{Continuation, TestRequest, generate, generate_all, runtime};
use crate::harness::{ServedFleet, TIMEOUT, demo_7m, demo_22m, device, eventually, proc, serve, synth};
use std::time::{Duration, Instant};

/// Tokens of a stream that is long enough for a fault in its middle.
const LONG: u32 = 400;

/// Two workers that both have streams, on every device.
const SPREAD: [&str; 6] = ["--workers", "2", "--threads", "1", "--routing", "least-loaded"];

fn request(seed: u64) -> TestRequest {
    TestRequest {
        prompt: (0..20).map(|i| 10 + i * 13 + seed as u32).collect(),
        max_tokens: LONG,
        temperature: 0.7,
        seed,
        ..TestRequest::default()
    }
}

fn requests(count: u64) -> Vec<TestRequest> {
    (0..count).map(request).collect()
}

fn generate_during_fault(
    fleet: &ServedFleet,
    requests: &[TestRequest],
    inject_fault: impl FnOnce() + Send,
) -> Vec<Result<Continuation, tonic::Status>> {
    runtime().block_on(fleet.generate_during_fault(requests, inject_fault))
}

#[test]
fn i6_streams_of_a_killed_worker_are_completed_by_another() {
    let fleet = ServedFleet::start(&demo_7m(), &SPREAD);
    let requests = requests(6);
    let expected = runtime().block_on(generate_all(&fleet.grpc, &requests));
    let victim = fleet.processes_by_role("worker")[0].clone();
    let found = generate_during_fault(&fleet, &requests, || proc::send_signal(victim.pid, "KILL"));
    let mut resumed = 0;
    for (index, (expected, found)) in expected.iter().zip(&found).enumerate() {
        let (expected, found) = (expected.as_ref().unwrap(), found.as_ref().unwrap());
        assert_eq!(expected.tokens, found.tokens, "request {index}");
        assert_eq!(expected.text, found.text, "request {index}");
        assert_eq!(expected.logprob_bits, found.logprob_bits, "request {index}");
        resumed += found.resumes;
    }
    assert!(resumed > 0, "no stream was on the killed worker");
    let back = eventually("the worker is back", || {
        fleet
            .processes_by_role("worker")
            .into_iter()
            .find(|w| w.name == victim.name && w.pid != victim.pid && w.state == "ready")
    });
    assert_eq!(back.restarts, victim.restarts + 1);
    fleet.stop();
}

#[test]
fn i6_a_stream_without_a_worker_ends_with_an_explicit_error() {
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "1", "--threads", "1"]);
    let (worker, weight_server) = (fleet.only_process("worker"), fleet.only_process("weight-server"));
    // The restarted worker cannot attach to a stopped weight-server, so no worker serves within the
    // 5 s that the router waits. The supervisor's watchdog allows 30 s.
    let found = generate_during_fault(&fleet, &[request(1)], || {
        proc::send_signal(weight_server.pid, "STOP");
        proc::send_signal(worker.pid, "KILL");
    });
    proc::send_signal(weight_server.pid, "CONT");
    let status = found[0].as_ref().expect_err("no worker was there to complete the stream");
    assert_eq!(status.code(), tonic::Code::Unavailable, "{status}");
    assert!(status.message().contains("worker"), "{status}");
    eventually("a new worker serves", || {
        fleet.processes_by_role("worker").into_iter().find(|w| w.pid != worker.pid && w.state == "ready")
    });
    fleet.stop();
}

#[test]
fn i3_a_killed_weight_server_disturbs_no_stream_and_its_successor_needs_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model.gguf");
    std::fs::copy(demo_7m(), &model).unwrap();
    let fleet = ServedFleet::start(&model, &["--workers", "2", "--threads", "1"]);
    std::fs::remove_file(&model).unwrap();
    let before = fleet.only_process("weight-server");
    let workers: Vec<u32> = fleet.processes_by_role("worker").iter().map(|w| w.pid).collect();
    let expected = runtime().block_on(generate_all(&fleet.grpc, &requests(4)));
    let found = generate_during_fault(&fleet, &requests(4), || proc::send_signal(before.pid, "KILL"));
    for (expected, found) in expected.iter().zip(&found) {
        let (expected, found) = (expected.as_ref().unwrap(), found.as_ref().unwrap());
        assert_eq!((&expected.tokens, 0), (&found.tokens, found.resumes));
    }
    eventually("the weight-server is back", || {
        fleet
            .processes_by_role("weight-server")
            .into_iter()
            .find(|p| p.pid != before.pid && p.state == "ready")
    });
    assert_eq!(
        workers,
        fleet.processes_by_role("worker").iter().map(|w| w.pid).collect::<Vec<_>>(),
        "workers were restarted"
    );

    // A new worker attaches to the adopted weights, although the file is deleted.
    proc::send_signal(workers[0], "KILL");
    eventually("a new worker serves", || {
        let now = fleet.processes_by_role("worker");
        now.iter().all(|w| w.state == "ready" && w.pid != workers[0]).then_some(())
    });
    let again = runtime().block_on(generate_all(&fleet.grpc, &requests(4)));
    for (expected, again) in expected.iter().zip(&again) {
        assert_eq!(expected.as_ref().unwrap().tokens, again.as_ref().unwrap().tokens);
    }
    fleet.stop();
}

#[test]
fn i3_weights_survive_the_death_of_weight_server_and_all_workers_together() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model.gguf");
    std::fs::copy(demo_7m(), &model).unwrap();
    let fleet = ServedFleet::start(&model, &["--workers", "2", "--threads", "1"]);
    std::fs::remove_file(&model).unwrap();
    let expected = runtime().block_on(generate_all(&fleet.grpc, &requests(2)));
    let killed: Vec<u32> = fleet
        .processes()
        .iter()
        .filter(|p| p.role == "worker" || p.role == "weight-server")
        .map(|p| p.pid)
        .collect();
    for pid in &killed {
        proc::send_signal(*pid, "KILL");
    }
    eventually("the fleet is back", || {
        let now = fleet.processes();
        let back = now.iter().filter(|p| p.role == "worker" || p.role == "weight-server");
        let back: Vec<_> = back.filter(|p| p.state == "ready" && !killed.contains(&p.pid)).collect();
        (back.len() == killed.len()).then_some(())
    });
    let again = eventually("requests are served", || {
        let again = runtime().block_on(generate_all(&fleet.grpc, &requests(2)));
        again.iter().all(Result::is_ok).then_some(again)
    });
    for (expected, again) in expected.iter().zip(&again) {
        assert_eq!(expected.as_ref().unwrap().tokens, again.as_ref().unwrap().tokens);
    }
    fleet.stop();
}

#[test]
fn a_killed_loader_is_reported_and_leaves_no_memory() {
    let model = synth("qwen3-0.6b", "q8_0");
    let directory = tempfile::tempdir().unwrap();
    let mark = directory.path().to_string_lossy().into_owned();
    let mut child = serve(directory.path(), &model, &["--workers", "1"])
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    // The loader reads 640 MB, so the test can kill it in the middle.
    let loader = eventually("a loader runs", || {
        let ballast_children = proc::descendants(child.id());
        ballast_children.into_iter().find(|pid| proc::arguments(*pid).iter().any(|a| a == "loader"))
    });
    proc::send_signal(loader, "KILL");
    let status = eventually("serve ends", || child.try_wait().unwrap());
    let mut said = String::new();
    std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut said).unwrap();
    assert!(!status.success());
    assert!(said.contains("loader"), "{said}");
    eventually("nothing is left", || proc::processes_with_argument(&mark).is_empty().then_some(()));
}

#[test]
fn streams_of_other_workers_do_not_notice_a_killed_worker() {
    let fleet = ServedFleet::start(&demo_7m(), &SPREAD);
    let found = generate_during_fault(&fleet, &requests(4), || {
        proc::send_signal(fleet.processes_by_role("worker")[1].pid, "KILL")
    });
    assert!(
        found.iter().all(|r| r.as_ref().is_ok_and(|done| done.tokens.len() == LONG as usize)),
        "{found:?}"
    );
    assert!(found.iter().any(|r| r.as_ref().is_ok_and(|done| done.resumes == 0)));
    fleet.stop();
}

#[test]
fn a_killed_router_is_back_and_its_connections_are_reset() {
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "1", "--threads", "1"]);
    let victim = fleet.only_process("router");
    let found = generate_during_fault(&fleet, &[request(1)], || proc::send_signal(victim.pid, "KILL"));
    assert!(found[0].is_err(), "the stream of a dead router cannot end well");
    let done = eventually("the router serves again on its old address", || {
        runtime().block_on(async {
            let mut client =
                proto::v1::inference_client::InferenceClient::connect(fleet.grpc.clone()).await.ok()?;
            generate(&mut client, &TestRequest { max_tokens: 4, ..request(2) }, |_| {}).await.ok()
        })
    });
    assert_eq!(done.tokens.len(), 4);
    fleet.stop();
}

#[test]
fn a_dead_supervisor_is_followed_by_a_successor_that_keeps_workers_and_weights() {
    let directory = tempfile::tempdir().unwrap();
    let mut first = ServedFleet::start_in(directory, &demo_7m(), &["--workers", "2", "--threads", "1"]);
    let pids = |fleet: &ServedFleet| {
        let mut pids: Vec<u32> =
            fleet.processes().iter().filter(|p| p.role != "supervisor").map(|p| p.pid).collect();
        pids.sort_unstable();
        pids
    };
    let before = pids(&first);
    proc::send_signal(first.supervisor.id(), "KILL");
    let _ = first.supervisor.wait();
    let mut successor =
        serve(first.runtime_dir(), &demo_7m(), &["--workers", "2", "--threads", "1"]).spawn().unwrap();
    crate::harness::first_json_line(&mut successor);
    std::mem::swap(&mut first.supervisor, &mut successor);
    assert_eq!(before, pids(&first), "children were restarted");

    // The successor has adopted the FD store too, so the weight-server can be killed now.
    proc::send_signal(first.only_process("weight-server").pid, "KILL");
    eventually("the weight-server is back", || {
        first
            .processes_by_role("weight-server")
            .into_iter()
            .find(|p| !before.contains(&p.pid) && p.state == "ready")
    });
    let done = runtime().block_on(generate_all(&first.grpc, &[TestRequest { max_tokens: 8, ..request(1) }]));
    assert_eq!(done[0].as_ref().unwrap().tokens.len(), 8);
    first.stop();
}

#[test]
fn without_a_successor_all_children_end_after_a_grace_period() {
    let mut fleet = ServedFleet::start(&demo_7m(), &["--workers", "2", "--threads", "1"]);
    let pids: Vec<u32> = fleet.processes().iter().map(|p| p.pid).collect();
    proc::send_signal(fleet.supervisor.id(), "KILL");
    let _ = fleet.supervisor.wait();
    let died = Instant::now();
    eventually("all children end", || pids.iter().all(|pid| !proc::is_alive(*pid)).then_some(()));
    assert!(died.elapsed() > Duration::from_secs(5), "children must leave a successor some time");
}

/// Unloaded weights are freed as soon as the last worker has detached.
const RELEASE_TIMEOUT: Duration = TIMEOUT;

/// What the processes of a fleet hold together.
#[derive(Debug)]
struct HeldResources {
    generations: usize,
    reserved_bytes: u64,
    memfd_bytes: u64,
    /// Of weight-server and supervisor, whose FD store keeps weights too.
    descriptors: usize,
}

impl HeldResources {
    fn of(fleet: &ServedFleet) -> Self {
        let status = runtime().block_on(weight_server_status(fleet));
        let pids: Vec<u32> = fleet.processes().iter().map(|process| process.pid).collect();
        let keepers = [fleet.only_process("weight-server").pid, fleet.supervisor.id()];
        Self {
            generations: status.generations.len(),
            reserved_bytes: status.ledger.unwrap().reserved_bytes,
            memfd_bytes: proc::memfd_bytes(&pids),
            descriptors: keepers.iter().map(|&pid| proc::open_files(pid).len()).sum(),
        }
    }

    fn is_within(&self, baseline: &Self) -> bool {
        self.generations == baseline.generations
            && self.reserved_bytes == baseline.reserved_bytes
            && self.memfd_bytes <= baseline.memfd_bytes
            && self.descriptors <= baseline.descriptors
    }
}

#[test]
fn i4_load_and_unload_return_to_the_baseline() {
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "1", "--threads", "1"]);
    let baseline = HeldResources::of(&fleet);
    let folder = tempfile::tempdir().unwrap();
    for round in 0..20 {
        let model = folder.path().join(format!("copy-{round}.gguf"));
        let model_bytes = std::fs::copy(demo_22m(), &model).unwrap();
        let load = ["load", model.to_str().unwrap(), "--name", "second", "--device", &device()];
        fleet.run(&load);
        let loaded = HeldResources::of(&fleet);
        // Metadata and tensor table are not part of the weights: 10% is ample for them.
        let weight_bytes = model_bytes / 10 * 9;
        assert_eq!(loaded.generations, baseline.generations + 1, "{loaded:?}");
        assert!(loaded.reserved_bytes >= baseline.reserved_bytes + weight_bytes, "{loaded:?}, {baseline:?}");
        if device() == "host" {
            assert!(loaded.memfd_bytes >= baseline.memfd_bytes + weight_bytes, "{loaded:?}, {baseline:?}");
        }
        fleet.run(&["unload", "second"]);
    }
    let started = Instant::now();
    loop {
        let held = HeldResources::of(&fleet);
        if held.is_within(&baseline) {
            break;
        }
        assert!(started.elapsed() < RELEASE_TIMEOUT, "{held:?} instead of {baseline:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
    fleet.stop();
}
