// SPDX-License-Identifier: Apache-2.0

//! Workers that share a GPU: in turns, and through MPS. Faults of one while others compute.

use super::{Gpu, asks, preloaded};
use crate::harness::api::{Continuation, TestRequest, connect, generate, generate_all, runtime};
use crate::harness::{ServedFleet, ballast, demo_7m, demo_22m, device, eventually, proc};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tonic::Status;

type Continuations = Vec<Result<Continuation, Status>>;

/// The command of a fleet whose workers compute at the same time.
fn shared(directory: &Path, models: &[(&str, &Path, u32)], gpu: &str) -> (tempfile::TempDir, Command) {
    let mut text = format!("listen = \"127.0.0.1:0\"\n[routing]\nmode = \"least-loaded\"\n[gpu]\n{gpu}\n");
    for (name, path, workers) in models {
        let device = device();
        text += &format!(
            "[[models]]\nname = {name:?}\npath = {path:?}\nworkers = {workers}\ndevice = {device:?}\n"
        );
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("fleet.toml");
    std::fs::write(&file, text).unwrap();
    let mut command = ballast();
    command.args(["serve", "--json", "--config"]).arg(file).arg("--runtime-dir").arg(directory);
    command.stdout(Stdio::piped());
    (folder, command)
}

fn runtime_dir() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap()
}

fn assert_equal(expected: &Continuations, found: &Continuations) {
    for (expected, found) in expected.iter().zip(found) {
        let (expected, found) = (expected.as_ref().unwrap(), found.as_ref().unwrap());
        assert_eq!((&expected.tokens, &expected.logprob_bits), (&found.tokens, &found.logprob_bits));
    }
}

#[test]
fn a_worker_stopped_in_its_turn_delays_another_model_once() {
    let Some(gpu) = Gpu::here("a_worker_stopped_in_its_turn_delays_another_model_once") else { return };
    let baseline = gpu.used();
    let directory = runtime_dir();
    let (small, large) = (demo_7m(), demo_22m());
    let models = [("stopped", small.as_path(), 1), ("other", large.as_path(), 1)];
    let (_config, command) = shared(directory.path(), &models, "turns = true");
    let fleet = ServedFleet::start_command(directory, command);
    let [stopped, other] = ["stopped", "other"].map(|model| TestRequest {
        model: model.to_owned(),
        max_tokens: 1500,
        ..asks(1, 40, 1500).remove(0)
    });
    let both = [stopped, other.clone()];
    let expected = runtime().block_on(generate_all(&fleet.grpc, &both));
    let pid = fleet.serving("stopped")[0];
    let mut delayed = Duration::ZERO;
    let found = runtime().block_on(fleet.generate_during_fault(&both, || {
        proc::send_signal(pid, "STOP");
        let started = Instant::now();
        let again =
            runtime().block_on(async { generate(&mut connect(&fleet.grpc).await, &other, |_| {}).await });
        delayed = started.elapsed();
        proc::send_signal(pid, "CONT");
        assert_equal(&vec![expected[1].clone()], &vec![again]);
    }));
    eprintln!("measured: 1,500 tokens in {delayed:?} while another model's worker is stopped");
    assert_equal(&expected, &found);
    fleet.stop();
    gpu.assert_back_at(baseline);
}

/// Waits until all workers have attached again.
fn wait_for_workers(fleet: &ServedFleet, model: &str, count: usize) {
    eventually("all workers serve", || (fleet.serving(model).len() == count).then_some(()));
}

/// Asks until every stream completes: under MPS all workers may have ended.
fn ask_until_complete(fleet: &ServedFleet, asks: &[TestRequest]) -> Continuations {
    eventually("requests are served", || {
        let found = runtime().block_on(generate_all(&fleet.grpc, asks));
        found.iter().all(Result::is_ok).then_some(found)
    })
}

#[test]
fn workers_share_a_gpu_through_mps_and_survive_a_killed_worker_and_a_killed_mps() {
    let test = "workers_share_a_gpu_through_mps_and_survive_a_killed_worker_and_a_killed_mps";
    let Some(gpu) = Gpu::here(test) else { return };
    let baseline = gpu.used();
    let directory = runtime_dir();
    let model = demo_7m();
    let (_config, command) = shared(directory.path(), &[("m", &model, 3)], "mps = true");
    let fleet = ServedFleet::start_command(directory, command);
    let asks = asks(6, 40, 1500);
    let expected = runtime().block_on(generate_all(&fleet.grpc, &asks));

    let victim = fleet.processes_by_role("worker")[0].clone();
    let kill = |pid: u32| move || proc::send_signal(pid, "KILL");
    let found = runtime().block_on(fleet.generate_during_fault(&asks, kill(victim.pid)));
    let complete = found.iter().filter(|found| found.is_ok()).count();
    let restarts: u64 = fleet.processes_by_role("worker").iter().map(|worker| worker.restarts).sum();
    eprintln!(
        "measured: under MPS, kill -9 of a worker: {complete} of 6 streams complete, {restarts} restarts"
    );
    for (expected, found) in expected.iter().zip(&found).filter(|(_, found)| found.is_ok()) {
        assert_eq!(expected.as_ref().unwrap().tokens, found.as_ref().unwrap().tokens);
    }
    wait_for_workers(&fleet, "m", 3);
    assert_equal(&expected, &ask_until_complete(&fleet, &asks));

    let mps = fleet.only_process("mps");
    let found = runtime().block_on(fleet.generate_during_fault(&asks, kill(mps.pid)));
    let complete = found.iter().filter(|found| found.is_ok()).count();
    eprintln!("measured: kill -9 of MPS: {complete} of 6 streams complete");
    eventually("MPS is back", || {
        let now = fleet.try_processes()?;
        now.into_iter().find(|p| p.role == "mps" && p.pid != mps.pid && p.state == "ready")
    });
    wait_for_workers(&fleet, "m", 3);
    assert_equal(&expected, &ask_until_complete(&fleet, &asks));
    fleet.stop();
    gpu.assert_back_at(baseline);
}

#[test]
fn i2_under_mps_a_stray_write_ends_workers_and_never_changes_the_weights() {
    let test = "i2_under_mps_a_stray_write_ends_workers_and_never_changes_the_weights";
    let Some(gpu) = Gpu::here(test) else { return };
    let baseline = gpu.used();
    let directory = runtime_dir();
    let order = tempfile::NamedTempFile::new().unwrap();
    let model = demo_7m();
    let (_config, mut command) = shared(directory.path(), &[("m", &model, 2)], "mps = true");
    command.env("LD_PRELOAD", preloaded("stray_write", order.path().parent().unwrap()));
    command.env("BALLAST_TEST_STRAY_WRITE", order.path());
    let fleet = ServedFleet::start_command(directory, command);
    let asks = asks(6, 40, 1800);
    let expected = runtime().block_on(generate_all(&fleet.grpc, &asks));
    let victim = fleet.processes_by_role("worker")[0].clone();
    let give_order = || std::fs::write(order.path(), victim.pid.to_string()).unwrap();
    let found = runtime().block_on(fleet.generate_during_fault(&asks, give_order));
    // I6: a stream is complete and correct, or it ends with an error.
    for (expected, found) in expected.iter().zip(&found).filter(|(_, found)| found.is_ok()) {
        assert_eq!(expected.as_ref().unwrap().tokens, found.as_ref().unwrap().tokens);
    }
    eventually("the worker is back", || {
        fleet.line(&victim.name).filter(|line| line["pid"] != victim.pid && line["state"] == "ready")
    });
    wait_for_workers(&fleet, "m", 2);
    let complete = found.iter().filter(|found| found.is_ok()).count();
    let restarts: u64 = fleet.processes_by_role("worker").iter().map(|worker| worker.restarts).sum();
    eprintln!("measured: under MPS, a stray write: {complete} of 6 streams complete, {restarts} restarts");

    // A new weight-server checks all bytes.
    proc::send_signal(fleet.only_process("weight-server").pid, "KILL");
    fleet.wait_until_verified();
    assert_equal(&expected, &ask_until_complete(&fleet, &asks));
    fleet.stop();
    gpu.assert_back_at(baseline);
}
