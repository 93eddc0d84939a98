// SPDX-License-Identifier: Apache-2.0

//! What the driver says about GPUs, and what a fleet does when one of two is lost.

use super::Gpu;
use super::copies::two_gpus;
use crate::harness::api::{TestRequest, generate_all, runtime};
use crate::harness::http::HttpClient;
use crate::harness::{
    ServedFleet, demo_7m, eventually, gpu_uuid, preload_library, serve, serve_config, synth,
};
use serde_json::Value;
use std::path::Path;
use std::time::{Duration, Instant};

fn device_lines(fleet: &ServedFleet) -> Vec<Value> {
    let lines = fleet.try_ps_lines().unwrap_or_default();
    lines.into_iter().filter(|line| line["role"] == "device").collect()
}

/// The UUIDs of the GPUs with a worker.
fn devices_with_workers(fleet: &ServedFleet) -> Vec<String> {
    let lines = fleet.try_ps_lines().unwrap_or_default();
    let workers = lines.iter().filter(|line| line["role"] == "worker" && line["state"] == "ready");
    workers.map(|line| line["device"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn figures_of_a_gpu_come_from_its_driver() {
    let Some(gpu) = Gpu::here("figures_of_a_gpu_come_from_its_driver") else { return };
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let command = serve(directory.path(), &demo_7m(), &["--workers", "1"]);
    let fleet = ServedFleet::start_command(directory, command);
    let line = eventually("the figures", || {
        device_lines(&fleet).pop().filter(|line| !line["temperature_celsius"].is_null())
    });
    let figure = |name: &str| line[name].as_u64().unwrap_or_else(|| panic!("no {name} in {line}"));
    assert!((10..=110).contains(&figure("temperature_celsius")), "{line}");
    assert!((10_000..=2_000_000).contains(&figure("power_milliwatts")), "{line}");
    assert!(figure("memory_used_bytes") > 0, "{line}");
    assert!(figure("memory_total_bytes").abs_diff(gpu.total()) < gpu.total() / 50, "{line}");
    assert!(line["quarantine"].is_null(), "{line}");
    let http = HttpClient::connect(&fleet);
    eventually("the metrics", || {
        let page = http.get("/metrics").1;
        page.lines().any(|line| line.starts_with("ballast:device_power_watts{device=\"GPU-")).then_some(())
    });
    eprintln!(
        "measured: {} C, {} mW, {} ECC errors that cannot be corrected",
        line["temperature_celsius"], line["power_milliwatts"], line["uncorrected_ecc_errors"]
    );
    fleet.stop();
}

/// The driver's library is replaced by one that reports the loss; the GPUs are real.
#[test]
fn i6_streams_of_a_lost_gpu_go_on_on_the_other_one() {
    let Some(devices) = two_gpus("i6_streams_of_a_lost_gpu_go_on_on_the_other_one") else { return };
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let library = preload_library("fake_nvml", folder.path());
    std::fs::rename(library, folder.path().join("libnvidia-ml.so.1")).unwrap();
    let state = folder.path().join("state");
    std::fs::write(&state, "temperature 40\n").unwrap();
    let model = |path: &Path| {
        format!(
            "[[models]]\nname = \"m\"\npath = {path:?}\ndevice = {devices:?}\nworkers = 1\n\
             kv-tokens = 32768\n[routing]\nmode = \"least-loaded\"\n"
        )
    };
    let lost = gpu_uuid(&devices[1]);
    let mut command = serve_config(&directory.path().join("run"), &model(&synth("qwen3-8b", "q4_k_m")));
    command.env("LD_LIBRARY_PATH", folder.path());
    command.env("BALLAST_TEST_NVML", &state).env("BALLAST_TEST_NVML_UUID", &lost);
    let fleet = ServedFleet::start_command(directory, command);
    eventually("a worker on each GPU", || (devices_with_workers(&fleet).len() == 2).then_some(()));

    let request = |seed: u64| TestRequest {
        model: "m".to_owned(),
        prompt: (0..40).map(|i| (10 + i * 13 + seed as u32 * 7) % 1000).collect(),
        max_tokens: 500,
        temperature: 0.7,
        seed,
        ..TestRequest::default()
    };
    let requests: Vec<TestRequest> = (0..8).map(request).collect();
    let expected = runtime().block_on(generate_all(&fleet.grpc, &requests));
    let mut told = Instant::now();
    let found = runtime().block_on(fleet.generate_during_fault(&requests, || {
        told = Instant::now();
        std::fs::write(&state, "xid 79\nlost\n").unwrap();
        eventually("the GPU is quarantined", || {
            let lines = device_lines(&fleet);
            let line = lines.iter().find(|line| line["device"] == lost.as_str())?;
            (!line["quarantine"].is_null()).then_some(())
        });
        eprintln!(
            "measured: quarantined {:.0} ms after the driver's event",
            told.elapsed().as_secs_f64() * 1e3
        );
    }));
    let resumes: u32 = found.iter().map(|found| found.as_ref().unwrap().resumes).sum();
    eprintln!("measured: {resumes} streams of a lost GPU went on on the other one");
    for (expected, found) in expected.iter().zip(&found) {
        let (expected, found) = (expected.as_ref().unwrap(), found.as_ref().unwrap());
        assert_eq!((&expected.tokens, &expected.logprob_bits), (&found.tokens, &found.logprob_bits));
    }
    assert!(resumes > 0, "no stream was on the GPU that was lost");
    eventually("its workers are gone", || (devices_with_workers(&fleet).len() == 1).then_some(()));
    assert!(!devices_with_workers(&fleet).contains(&lost));

    // A GPU that is still lost does not come back, and one that has recovered does.
    let line = device_lines(&fleet).into_iter().find(|line| line["device"] == lost.as_str()).unwrap();
    assert!(line["quarantine"]["reason"].as_str().unwrap().starts_with("Xid 79"), "{line}");
    std::fs::write(&state, "xid 79\n").unwrap();
    std::thread::sleep(Duration::from_secs(2));
    let output = fleet.run_command(&["quarantine", &lost, "--end"]);
    assert!(output.status.success(), "{output:?}");
    let returned = Instant::now();
    eventually("a worker on each GPU again", || (devices_with_workers(&fleet).len() == 2).then_some(()));
    eprintln!("measured: a GPU serves {:.0} ms after its quarantine", returned.elapsed().as_secs_f64() * 1e3);
    let again = runtime().block_on(generate_all(&fleet.grpc, &requests));
    for (expected, again) in expected.iter().zip(&again) {
        assert_eq!(expected.as_ref().unwrap().tokens, again.as_ref().unwrap().tokens);
    }
    fleet.stop();
}
