// SPDX-License-Identifier: Apache-2.0

//! Compares `Reference` with llama.cpp's greedy transcripts of the trained demo models.

use anyhow::Result;
use models::testing::{check_transcripts, demo_models, shared_data};
use ops::Reference;
use std::path::Path;

/// In quantized files, llama.cpp's own rounding of activations may decide a smaller gap.
const QUANTISED_GAP_MIN: f32 = 0.3;
/// The same limit in f16 files.
const F16_GAP_MIN: f32 = 0.01;
/// Reference is slow, so the tests use a few of the 20 transcripts of each model.
const LINES: usize = 4;

fn check(folder: &Path, name: &str, gap_min: f32) -> Result<()> {
    let model = folder.join(name).with_extension("gguf");
    let transcripts = folder.join(name).with_extension("greedy.jsonl");
    let decided = check_transcripts(&model, &transcripts, Reference::new, gap_min, LINES)?;
    eprintln!("{name}: {decided} steps");
    assert!(decided > 50 * LINES, "{name}: only {decided} steps were decided");
    Ok(())
}

#[test]
fn q8_0_model_says_what_llama_cpp_says() -> Result<()> {
    check(&demo_models(), "pycoder-7m-q8_0", QUANTISED_GAP_MIN)
}

#[test]
fn q4_k_m_model_says_what_llama_cpp_says() -> Result<()> {
    check(&demo_models(), "pycoder-22m-q4_k_m", QUANTISED_GAP_MIN)
}

#[test]
fn f16_model_says_what_llama_cpp_says() -> Result<()> {
    match shared_data("f16_model_says_what_llama_cpp_says") {
        Some(folder) => check(&folder.join("models"), "pycoder-7m-f16", F16_GAP_MIN),
        None => Ok(()),
    }
}
