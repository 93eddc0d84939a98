// SPDX-License-Identifier: Apache-2.0

//! Checks whole models: the logits and greedy tokens of llama.cpp on small random models of every
//! architecture, and its transcripts of the trained demo models. Logits must not depend on the
//! instruction set or the number of threads.

use anyhow::Result;
use kernels::{Cpu, Isa};
use models::testing::{
    Arithmetic, Golden, Runner, Transcript, check_transcripts, demo_models, shared_data, state_rows,
    tree_data, with_classifier,
};
use ops::KvTypes;
use std::path::Path;

const ARCHITECTURES: &[&str] = &["gemma3", "llama", "qwen2", "qwen3", "qwen3moe"];
/// If two logits are closer than this, llama.cpp's own rounding of activations decides their order.
/// The first gap is for quantized files, the second for f16 files.
const QUANTISED_GAP_MIN: f32 = 0.3;
const F16_GAP_MIN: f32 = 0.01;

fn cpu(threads: usize, isa: Isa) -> Cpu {
    Cpu::with_isa(threads, isa).unwrap()
}

fn check_goldens(folder: &Path, isas: &[Isa]) -> Result<()> {
    let mut checked = 0;
    for golden in Golden::all(folder, ARCHITECTURES)? {
        match golden.file()?.description() {
            Err(error) if format!("{error:#}").contains("cannot be computed with") => {
                eprintln!("SKIPPED: {}: {error:#}", golden.name);
                continue;
            }
            description => description?,
        };
        for &isa in isas {
            golden.check(|| cpu(2, isa), Arithmetic::Rounded)?;
        }
        checked += 1;
    }
    assert!(checked > 0, "no golden models in {}", folder.display());
    eprintln!("{checked} golden models");
    Ok(())
}

#[test]
fn golden_models_of_the_tree() -> Result<()> {
    check_goldens(&tree_data(), &Isa::available())
}

#[test]
fn golden_models_of_the_full_set() -> Result<()> {
    match shared_data("golden_models_of_the_full_set") {
        Some(folder) => check_goldens(&folder.join("data/golden"), &[Isa::best()]),
        None => Ok(()),
    }
}

fn transcripts(folder: &Path, name: &str, gap_min: f32) -> Result<()> {
    let model = folder.join(name).with_extension("gguf");
    let transcripts = folder.join(name).with_extension("greedy.jsonl");
    let lines = Transcript::all(&transcripts)?.len();
    let decided = check_transcripts(&model, &transcripts, || cpu(2, Isa::best()), gap_min, lines)?;
    assert!(decided > 50 * lines, "{name}: only {decided} steps were decided");
    Ok(())
}

#[test]
fn trained_models_match_llama_cpp() -> Result<()> {
    transcripts(&demo_models(), "pycoder-7m-q8_0", QUANTISED_GAP_MIN)?;
    transcripts(&demo_models(), "pycoder-22m-q4_k_m", QUANTISED_GAP_MIN)?;
    match shared_data("trained_models_say_what_llama_cpp_says") {
        Some(folder) => transcripts(&folder.join("models"), "pycoder-7m-f16", F16_GAP_MIN),
        None => Ok(()),
    }
}

#[test]
fn logits_do_not_depend_on_instruction_set_threads_or_chunks() -> Result<()> {
    for golden in Golden::all(&tree_data(), ARCHITECTURES)? {
        let file = golden.file()?;
        let ids: Vec<u32> = (0..40).map(|i| i * 7 % 200).collect();
        for types in ["f16", "bf16", "q8_0", "q8_0,0=f16,1=f32"] {
            let types: KvTypes = types.parse()?;
            let mut first: Option<Vec<u32>> = None;
            for isa in Isa::available() {
                for threads in 1..=3 {
                    let mut runner = Runner::new(&file, cpu(threads, isa), types.clone(), 1, ids.len())?;
                    // All runs but the first use chunks, which end inside blocks of the cache.
                    let chunks: &[usize] = if first.is_none() { &[] } else { &[5, 1, 17, threads] };
                    let logits = runner.extend_in_chunks(&ids, chunks)?.concat();
                    let bits: Vec<u32> = logits.into_iter().map(f32::to_bits).collect();
                    let same = *first.get_or_insert_with(|| bits.clone()) == bits;
                    assert!(same, "{}: {types}, {isa}, {threads} threads", golden.name);
                }
            }
        }
    }
    Ok(())
}

/// Hidden states and labels are near those of the reference, which adds in another order.
#[test]
fn hidden_states_and_labels_are_those_of_the_reference() -> Result<()> {
    let ids: Vec<u32> = (0..40).map(|place| place * 7 % 200).collect();
    for golden in Golden::all(&tree_data(), &["llama", "qwen3"])? {
        let width = golden.file()?.description()?.embedding_length;
        let file = with_classifier(&golden.file()?, width)?;
        let found = state_rows(&file, || cpu(2, Isa::best()), &ids)?;
        let expected = state_rows(&file, ops::Reference::new, &ids)?;
        for (found, expected) in [(found.states, expected.states), (found.labels, expected.labels)] {
            let (found, expected) = (found.concat(), expected.concat());
            let scale = expected.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
            let most = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(most < 0.02 * scale, "{}: {most} of {scale}", golden.name);
        }
    }
    Ok(())
}

#[test]
fn each_layer_uses_its_kv_type() -> Result<()> {
    let golden = Golden::all(&tree_data(), &["llama"])?.remove(0);
    let file = golden.file()?;
    let ids: Vec<u32> = (0..40).map(|i| i * 7 % 200).collect();
    let logits = |types: &str| -> Result<Vec<f32>> {
        let types: KvTypes = types.parse()?;
        let mut runner = Runner::new(&file, cpu(1, Isa::best()), types, 1, ids.len())?;
        Ok(runner.extend(&ids)?.concat())
    };
    let last = file.description()?.layers - 1;
    // Each layer is exact in one case and rounded in another. So all four results differ, and all
    // are close to each other.
    let all =
        ["f32".to_owned(), "q8_0".to_owned(), format!("q8_0,0-{}=f32", last - 1), format!("f32,{last}=f16")];
    let all = all.iter().map(|types| logits(types)).collect::<Result<Vec<_>>>()?;
    let scale = all[0].iter().fold(0.0_f32, |max, x| max.max(x.abs()));
    for (i, a) in all.iter().enumerate() {
        for b in &all[..i] {
            let most = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(most > 0.0 && most < 0.1 * scale, "{i}: {most} of {scale}");
        }
    }
    Ok(())
}
