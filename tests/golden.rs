// SPDX-License-Identifier: Apache-2.0

//! Compares greedy continuations of trained models with recorded ones of llama.cpp.
//!
//! `gap` is llama.cpp's margin between its two best logits at a step. Below [`GAP_QUANTISED`],
//! rounding decides, so another correct implementation may choose the other token.

use crate::harness::{ballast, demo_7m, demo_22m, device, in_tree, test_data, text};
use serde_json::Value;
use std::path::{Path, PathBuf};

const GAP_QUANTISED: f64 = 0.3;
const GAP_F16: f64 = 0.01;

struct RecordedContinuation {
    prompt: String,
    prompt_tokens: Vec<u32>,
    tokens: Vec<u32>,
    gap: Vec<f64>,
}

fn recorded(file: &Path) -> Vec<RecordedContinuation> {
    let ids = |value: &Value| -> Vec<u32> {
        value.as_array().unwrap().iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect()
    };
    let lines = std::fs::read_to_string(file).unwrap();
    let parse = |line: &str| {
        let line: Value = serde_json::from_str(line).unwrap();
        RecordedContinuation {
            prompt: line["prompt"].as_str().unwrap().to_owned(),
            prompt_tokens: ids(&line["prompt_tokens"]),
            tokens: ids(&line["tokens"]),
            gap: line["gap"].as_array().unwrap().iter().map(|gap| gap.as_f64().unwrap()).collect(),
        }
    };
    lines.lines().map(parse).collect()
}

/// Runs `ballast eval --tokens` and returns the most likely token after each position.
fn argmax_after_each(model: &Path, tokens: &[u32], folder: &Path) -> Vec<u32> {
    let (ids, logits) = (folder.join("ids.json"), folder.join("logits.f32"));
    std::fs::write(&ids, serde_json::to_string(tokens).unwrap()).unwrap();
    let output = ballast()
        .arg("eval")
        .arg(model)
        .args(["--device", &device()])
        .arg("--tokens")
        .arg(&ids)
        .arg("--logits-out")
        .arg(&logits)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text(&output).1);
    let bytes = std::fs::read(&logits).unwrap();
    let values: Vec<f32> =
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    assert_eq!(values.len() % tokens.len(), 0, "{} values for {} positions", values.len(), tokens.len());
    let vocabulary = values.len() / tokens.len();
    values.chunks_exact(vocabulary).map(argmax).collect()
}

fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (index, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = index;
        }
    }
    u32::try_from(best).unwrap()
}

/// Runs `ballast generate --prompts` and returns the greedy continuations.
fn generate_all(model: &Path, prompts: &[RecordedContinuation], folder: &Path) -> Vec<Value> {
    let file = folder.join("prompts.jsonl");
    let lines: Vec<String> = prompts.iter().map(|p| serde_json::to_string(&p.prompt).unwrap()).collect();
    std::fs::write(&file, lines.join("\n")).unwrap();
    let output = ballast()
        .arg("generate")
        .arg(model)
        .arg("--prompts")
        .arg(&file)
        .args(["--temperature", "0", "--max-tokens", "96", "--json", "--device", &device()])
        .output()
        .unwrap();
    let (stdout, stderr) = text(&output);
    assert!(output.status.success(), "{stderr}");
    stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn check(model: PathBuf, recording: PathBuf, gap_min: f64) {
    let folder = tempfile::tempdir().unwrap();
    let recording = recorded(&recording);
    let generated = generate_all(&model, &recording, folder.path());
    assert_eq!(generated.len(), recording.len());
    for (line, generated) in recording.iter().zip(&generated) {
        let name = &line.prompt;
        let mut forced = line.prompt_tokens.clone();
        forced.extend(&line.tokens);
        let best = argmax_after_each(&model, &forced, folder.path());
        let first = line.prompt_tokens.len() - 1;
        for (step, (token, gap)) in line.tokens.iter().zip(&line.gap).enumerate() {
            if *gap >= gap_min {
                assert_eq!(best[first + step], *token, "{name:?}: forced step {step}, gap {gap}");
            }
        }

        let ids = |field: &str| -> Vec<u32> { serde_json::from_value(generated[field].clone()).unwrap() };
        assert_eq!(ids("prompt_tokens"), line.prompt_tokens, "{name:?}");
        let tokens = ids("tokens");
        let certain = line.gap.iter().position(|gap| *gap < gap_min).unwrap_or(line.tokens.len());
        let common = certain.min(tokens.len());
        assert_eq!(tokens[..common], line.tokens[..common], "{name:?}");
        assert!(tokens.len() >= certain || generated["finish_reason"] == "stop", "{name:?}: ended early");

        // Every generated token is the most likely one by the model's own logits on that output.
        let mut own = ids("prompt_tokens");
        own.extend(&tokens);
        let best = argmax_after_each(&model, &own, folder.path());
        assert_eq!(best[first..first + tokens.len()], tokens[..], "{name:?}: generate against eval");
    }
}

#[test]
fn the_7m_demo_model_continues_as_llama_cpp_does() {
    check(demo_7m(), in_tree("demo/pycoder-7m-q8_0.greedy.jsonl"), GAP_QUANTISED);
}

#[test]
fn the_22m_demo_model_continues_as_llama_cpp_does() {
    check(demo_22m(), in_tree("demo/pycoder-22m-q4_k_m.greedy.jsonl"), GAP_QUANTISED);
}

#[test]
fn an_f16_model_continues_as_llama_cpp_does() {
    let Some(model) = test_data("models/pycoder-7m-f16.gguf") else { return };
    let Some(recording) = test_data("models/pycoder-7m-f16.greedy.jsonl") else { return };
    check(model, recording, GAP_F16);
}
