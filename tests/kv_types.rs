// SPDX-License-Identifier: Apache-2.0

//! KV cache types: the bytes and the accuracy of each.

use crate::harness::{ballast, demo_7m, device, in_tree, text};
use serde_json::Value;
use std::path::Path;

const USAGE: i32 = 2;

const TYPES: [&str; 5] = ["f32", "f16", "bf16", "q8_0", "q8_0,0-1=f16"];

#[derive(Debug)]
struct Evaluation {
    perplexity: f64,
    token_bytes: u64,
}

fn evaluate(model: &Path, file: &Path, kv_type: &str) -> Evaluation {
    let output = ballast()
        .arg("eval")
        .arg(model)
        .arg("--text")
        .arg(file)
        .args(["--kv-type", kv_type, "--device", &device(), "--json"])
        .output()
        .unwrap();
    let (stdout, stderr) = text(&output);
    assert!(output.status.success(), "{kv_type}: {stderr}");
    let line: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(line["kv_type"], kv_type);
    Evaluation {
        perplexity: line["perplexity"].as_f64().unwrap(),
        token_bytes: line["kv_token_bytes"].as_u64().unwrap(),
    }
}

/// Bytes per token of the demo model: six layers, two KV heads of 64 values, keys and values.
fn token_bytes(kv_type: &str) -> u64 {
    let layer = |head_bytes: u64| 2 * 2 * head_bytes;
    match kv_type {
        "f32" => 6 * layer(4 * 64),
        "f16" | "bf16" => 6 * layer(2 * 64),
        "q8_0" => 6 * layer(64 + 2 * 2),
        "q8_0,0-1=f16" => 2 * layer(2 * 64) + 4 * layer(64 + 2 * 2),
        other => panic!("{other}"),
    }
}

/// Most relative change of a trained model's perplexity. Any change of a key or value changes the
/// rounding of some activations, so all types differ by about as much (docs/PERFORMANCE.md: up to
/// 0.15% over 4,000 tokens).
const LOSS_MAX: f64 = 5e-3;

#[test]
fn every_type_is_stored_in_its_bytes_and_loses_little() {
    // 13 kB of Python code.
    let file = in_tree("crates/text/tests/data/make.py");
    let mut all = Vec::new();
    for kv_type in TYPES {
        let found = evaluate(&demo_7m(), &file, kv_type);
        assert_eq!(found.token_bytes, token_bytes(kv_type), "{kv_type}");
        eprintln!("measured: {kv_type} on {}: perplexity {:.4}", device(), found.perplexity);
        all.push((kv_type, found.perplexity));
    }
    let (_, exact) = all[0];
    assert!((1.0..100.0).contains(&exact), "{exact} is no perplexity of a model of Python");
    for (index, (kv_type, perplexity)) in all.iter().enumerate() {
        let change = (perplexity / exact - 1.0).abs();
        assert!(change <= LOSS_MAX, "{kv_type}: {perplexity} instead of {exact}");
        // If a type were ignored, its result would equal that of another type bit for bit.
        for (other, of_other) in &all[..index] {
            assert_ne!(perplexity, of_other, "{kv_type} and {other}");
        }
    }
}

#[test]
fn logits_change_with_the_type_and_only_a_little() {
    let folder = tempfile::tempdir().unwrap();
    let ids = folder.path().join("ids.json");
    let tokens: Vec<u32> = (0..300).map(|i| 6 + i * 7919 % 8000).collect();
    std::fs::write(&ids, serde_json::to_string(&tokens).unwrap()).unwrap();
    let logits = |kv_type: &str| -> Vec<f32> {
        let file = folder.path().join(format!("{kv_type}.f32"));
        let output = ballast()
            .arg("eval")
            .arg(demo_7m())
            .args(["--kv-type", kv_type, "--device", &device(), "--tokens"])
            .arg(&ids)
            .arg("--logits-out")
            .arg(&file)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", text(&output).1);
        let bytes = std::fs::read(&file).unwrap();
        bytes.as_chunks::<4>().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
    };
    let exact = logits("f32");
    let square = |x: f64| x * x;
    let size = exact.iter().map(|&x| square(f64::from(x))).sum::<f64>().sqrt();
    for kv_type in &TYPES[1..] {
        let found = logits(kv_type);
        assert_eq!(found.len(), exact.len());
        let pairs = found.iter().zip(&exact);
        let off = pairs.map(|(&a, &b)| square(f64::from(a) - f64::from(b))).sum::<f64>().sqrt() / size;
        eprintln!("{kv_type}: logits off by {off:.2e}");
        assert!(off > 1e-6 && off < 0.05, "{kv_type}: logits off by {off:e}");
    }
}

#[test]
fn a_budget_of_tokens_takes_what_the_type_takes() {
    for kv_type in TYPES {
        let output = ballast()
            .arg("plan")
            .arg(demo_7m())
            .args(["--kv-type", kv_type, "--kv-tokens", "4096", "--device", "host", "--json"])
            .output()
            .unwrap();
        let (stdout, stderr) = text(&output);
        assert!(output.status.success(), "{stderr}");
        let plan: Value = serde_json::from_str(&stdout).unwrap();
        let worker = &plan["models"][0]["worker"];
        // Plus one block of 16 tokens, which padding rows write to.
        assert_eq!(worker["kv"].as_u64(), Some((4096 + 16) * token_bytes(kv_type)), "{kv_type}");
    }
}

#[test]
fn a_type_that_does_not_exist_or_a_layer_that_does_not_is_refused_by_name() {
    for (kv_type, part) in [
        ("q4_0", "\"q4_0\" is not a KV cache type; use f32, f16, bf16 or q8_0"),
        ("q8_0,2-4", "\"2-4\" is not LAYER=TYPE or FIRST-LAST=TYPE, as in 0-3=f16"),
        ("q8_0,0-3=f16,3=f32", "two KV cache types are given for layer 3"),
        ("q8_0,6=f16", "a KV cache type is given for layer 6, but the model has 6 layers, counted from 0"),
    ] {
        let output = ballast().arg("plan").arg(demo_7m()).args(["--kv-type", kv_type]).output().unwrap();
        assert_eq!(output.status.code(), Some(USAGE), "{kv_type}: {}", text(&output).1);
        assert!(text(&output).1.contains(part), "{kv_type}: {}", text(&output).1);
    }
}
