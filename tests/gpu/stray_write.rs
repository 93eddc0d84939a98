// SPDX-License-Identifier: Apache-2.0

//! Checks that a kernel that writes into the weights ends only its own worker. The supervisor
//! replaces that worker, and all other processes continue.
//!
//! The worker is a real one. A library that is preloaded into it launches the kernel
//! (stray_write.c).

use super::{Gpu, asks, preloaded};
use crate::harness::api::{generate_all, runtime};
use crate::harness::{ServedFleet, demo_7m, eventually, proc, serve};

#[test]
fn i2_a_stray_write_into_the_weights_ends_that_worker_alone() {
    let Some(gpu) = Gpu::here("i2_a_stray_write_into_the_weights_ends_that_worker_alone") else { return };
    let baseline = gpu.used();
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let order = tempfile::NamedTempFile::new().unwrap();
    let mut command = serve(directory.path(), &demo_7m(), &["--workers", "2", "--routing", "least-loaded"]);
    command.env("LD_PRELOAD", preloaded("stray_write", order.path().parent().unwrap()));
    command.env("BALLAST_TEST_STRAY_WRITE", order.path());
    let fleet = ServedFleet::start_command(directory, command);

    // The requests run long enough for the order to reach the worker while it computes.
    let asks = asks(6, 40, 1800);
    let expected = runtime().block_on(generate_all(&fleet.grpc, &asks));
    let workers = fleet.processes_by_role("worker");
    let (victim, sibling) = (workers[0].clone(), workers[1].clone());
    let give_order = || std::fs::write(order.path(), victim.pid.to_string()).unwrap();
    let found = runtime().block_on(fleet.generate_during_fault(&asks, give_order));
    let mut resumed = 0;
    for (expected, found) in expected.iter().zip(&found) {
        let (expected, found) = (expected.as_ref().unwrap(), found.as_ref().unwrap());
        assert_eq!(expected.tokens, found.tokens);
        assert_eq!(expected.logprob_bits, found.logprob_bits);
        resumed += found.resumes;
    }
    assert!(resumed > 0, "no stream was on the worker that broke");

    let back = eventually("the worker is back", || {
        fleet.line(&victim.name).filter(|line| line["pid"] != victim.pid && line["state"] == "ready")
    });
    let report = back["last_termination"].as_str().unwrap().to_owned();
    eprintln!("measured: a stray write is reported as: {report}");
    assert!(report.to_lowercase().contains("illegal"), "{report:?} does not say what happened");
    assert_eq!(fleet.line(&sibling.name).unwrap()["pid"], sibling.pid, "the sibling was restarted");

    // A new weight-server checks all bytes again.
    proc::send_signal(fleet.only_process("weight-server").pid, "KILL");
    fleet.wait_until_verified();
    let again = runtime().block_on(generate_all(&fleet.grpc, &asks));
    for (expected, again) in expected.iter().zip(&again) {
        assert_eq!(expected.as_ref().unwrap().tokens, again.as_ref().unwrap().tokens);
    }
    fleet.stop();
    gpu.assert_back_at(baseline);
}
