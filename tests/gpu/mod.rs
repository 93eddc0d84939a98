// SPDX-License-Identifier: Apache-2.0

//! Tests that need a GPU. If BALLAST_TEST_DEVICE does not name one, each test prints SKIPPED and
//! passes.
//!
//! The tests compare the memory of the whole device before and after. So they run one at a time
//! (`--test-threads=1`) on a device that no other process uses; `scripts/gpu-run` does this. Lines
//! that begin with "measured:" are for the summary of that script.

mod added_device;
mod bad_input;
mod copies;
mod cycles;
mod faults;
mod health;
mod idle;
mod memory;
mod sharing;
mod start;
mod stray_write;
mod unified;

use crate::harness::api::TestRequest;
use crate::harness::{ServedFleet, ballast, device, eventually, text};
use serde_json::Value;

const MIB: u64 = 1 << 20;

/// The largest number of bytes that may still be in use on the device after everything has ended.
const BASELINE_TOLERANCE: u64 = 8 * MIB;

/// The GPU that fleets under test run on.
struct Gpu {
    name: String,
}

impl Gpu {
    fn here(test: &str) -> Option<Self> {
        let name = device();
        if name == "host" {
            crate::harness::report_skipped(format_args!("{test} needs a GPU, named by BALLAST_TEST_DEVICE"));
            return None;
        }
        Some(Self { name })
    }

    /// The memory of the device that all processes together use.
    fn used(&self) -> u64 {
        let gpu = self.listed();
        gpu["total_bytes"].as_u64().unwrap() - gpu["free_bytes"].as_u64().unwrap()
    }

    fn total(&self) -> u64 {
        self.listed()["total_bytes"].as_u64().unwrap()
    }

    /// What `ballast devices` says about it now.
    fn listed(&self) -> Value {
        let output = ballast().args(["devices", "--json"]).output().unwrap();
        let (stdout, stderr) = text(&output);
        let seen: Value = serde_json::from_str(&stdout).unwrap_or_else(|_| panic!("{stdout}{stderr}"));
        let is_it = |gpu: &&Value| {
            gpu["uuid"] == self.name.as_str() || format!("cuda:{}", gpu["ordinal"]) == self.name
        };
        let gpu = seen["gpus"].as_array().unwrap().iter().find(is_it);
        gpu.unwrap_or_else(|| panic!("no {} in {seen}", self.name)).clone()
    }

    /// Waits until the device is back at `baseline`. The driver frees the memory of a killed
    /// process a little later.
    fn assert_back_at(&self, baseline: u64) {
        eventually("the device is back at its baseline", || {
            (self.used() <= baseline + BASELINE_TOLERANCE).then_some(())
        });
        let off = self.used() as i64 - baseline as i64;
        eprintln!("measured: the device is {} KiB off its baseline", off / 1024);
    }
}

fn asks(count: u64, prompt_tokens: u32, max_tokens: u32) -> Vec<TestRequest> {
    let ask = |seed: u64| TestRequest {
        prompt: (0..prompt_tokens).map(|i| (10 + i * 13 + seed as u32 * 7) % 1000).collect(),
        max_tokens,
        temperature: 0.7,
        seed,
        ..TestRequest::default()
    };
    (0..count).map(ask).collect()
}

impl ServedFleet {
    /// The line of `ballast ps --json` with this name.
    fn line(&self, name: &str) -> Option<Value> {
        self.try_ps_lines()?.into_iter().find(|line| line["name"] == name)
    }

    /// Waits until the weights of the only model are verified. A separate process reads all of them
    /// for that.
    fn wait_until_verified(&self) {
        eventually("the adopted weights are verified", || {
            let lines = self.try_ps_lines()?;
            let generation = lines.iter().find(|line| line["role"] == "generation")?;
            assert_ne!(generation["integrity"], "quarantined", "{generation}");
            (generation["integrity"] == "verified").then_some(())
        });
    }

    /// Workers that have attached their weights.
    fn serving(&self, model: &str) -> Vec<u32> {
        let lines = self.try_ps_lines().unwrap_or_default();
        let serves = |line: &&Value| {
            let words = line["status"].as_str().unwrap_or_default();
            line["role"] == "worker" && line["model"] == model && words.starts_with("serving")
        };
        lines
            .iter()
            .filter(serves)
            .map(|line| u32::try_from(line["pid"].as_u64().unwrap()).unwrap())
            .collect()
    }
}
