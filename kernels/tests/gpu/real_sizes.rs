// SPDX-License-Identifier: Apache-2.0

//! Checks invariant I5 on models with the sizes of real ones: equal sequences give equal logits,
//! however many there are in a batch, in whatever chunks, behind a shared prefix or not. The number
//! of rows of a step and the sizes of matrices decide which kernels run, so small models do not
//! reach all of them.

use anyhow::{Result, ensure};
use models::ForwardLimits;
use ops::KvTypes;

use crate::TestGpu;
use crate::exact::{BLOCK_TOKENS, ModelRun, SequencePart};
use crate::random::TestRng;
use crate::throughput::{MODEL_PRESETS, QuantMix, metadata, weights};

/// Among these layers are some of each type of [`QuantMix`].
const LAYERS: usize = 4;
/// A kernel that takes a wrong tile fails.
const DIFFERENT_ROW_TILES: usize = 5;
const PROMPT: usize = 60;
/// Tokens that each sequence computes one by one after its prompt.
const DECODED: usize = 3;
const SEQUENCES: [usize; 15] = [1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 24, 32, 33, 48, 64];
/// Under the sanitizers.
const SMALL_SEQUENCES: [usize; 3] = [1, 3, 12];
/// Tokens of a prefix that another sequence computed, and tokens of a chunk.
const CHUNKS: [(usize, usize); 5] = [(0, PROMPT), (48, PROMPT), (0, 1), (0, 13), (0, 32)];
/// Of a sequence.
const BLOCKS: usize = (PROMPT + DECODED).div_ceil(BLOCK_TOKENS);

pub(crate) fn equal_sequences_give_equal_logits(gpu: &TestGpu) -> Result<()> {
    let mut failures = Vec::new();
    let real = [
        (&MODEL_PRESETS[0], QuantMix::Q4KM, "qwen3-8b Q4_K_M"),
        (&MODEL_PRESETS[0], QuantMix::Q80, "qwen3-8b Q8_0"),
        (&MODEL_PRESETS[2], QuantMix::Q4KM, "qwen3-30b-a3b Q4_K_M"),
    ];
    let small = [(&MODEL_PRESETS[1], QuantMix::Q4KM, "qwen3-0.6b Q4_K_M")];
    let counts = if gpu.small { &SMALL_SEQUENCES[..] } else { &SEQUENCES };
    for (preset, mix, name) in if gpu.small { &small[..] } else { &real } {
        let (mix, preset) = (*mix, preset.with(if gpu.small { 1 } else { LAYERS }, DIFFERENT_ROW_TILES));
        let limits = ForwardLimits { rows_max: 2048, outputs_max: 64 };
        let blocks = BLOCKS * counts.iter().copied().max().unwrap_or_default();
        let weights = weights(gpu, &preset, mix)?;
        let mut run =
            ModelRun::build(gpu, &metadata(&preset)?, weights, limits, &KvTypes::default(), blocks)?;
        let mut random = TestRng::new(43);
        let tokens: Vec<u32> = (0..PROMPT + DECODED).map(|_| (random.bits() % 100_000) as u32).collect();
        let expected = logits(&mut run, &tokens, 1, 0, PROMPT)?;
        for &sequences in counts {
            for (cached, chunk) in CHUNKS.into_iter().take(if gpu.small { 2 } else { CHUNKS.len() }) {
                let steps = logits(&mut run, &tokens, sequences, cached, chunk)?;
                for (at, (found, expected)) in steps.iter().zip(&expected).enumerate() {
                    let others: Vec<usize> =
                        (0..found.len()).filter(|&i| bits(&found[i]) != bits(&expected[0])).collect();
                    if !others.is_empty() {
                        failures.push(format!(
                            "{name}, {sequences} sequences, {cached} tokens cached, chunks of {chunk}: after \
                             {at} tokens, sequences {others:?} have other logits"
                        ));
                    }
                }
            }
        }
    }
    ensure!(failures.is_empty(), "{} failures:\n  {}", failures.len(), failures.join("\n  "));
    Ok(())
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

/// Returns the logits of each sequence after the prompt and after each further token.
fn logits(
    run: &mut ModelRun,
    tokens: &[u32],
    sequences: usize,
    cached: usize,
    chunk: usize,
) -> Result<Vec<Vec<Vec<f32>>>> {
    let shared = cached / BLOCK_TOKENS;
    let tables: Vec<Vec<u32>> = (0..sequences)
        .map(|sequence| {
            let own = |block| (if block < shared { 0 } else { sequence } * BLOCKS + block) as u32;
            (0..BLOCKS).map(own).collect()
        })
        .collect();
    if cached > 0 {
        run.last_rows(&[SequencePart { table: &tables[0], first: 0, tokens: &tokens[..cached] }])?;
    }
    let mut found = Vec::new();
    let mut at = cached;
    while at < tokens.len() {
        let end = if at < PROMPT { (at + chunk).min(PROMPT) } else { at + 1 };
        let parts: Vec<SequencePart<'_>> =
            tables.iter().map(|table| SequencePart { table, first: at, tokens: &tokens[at..end] }).collect();
        let logits = run.last_rows(&parts)?;
        if end >= PROMPT {
            found.push(logits);
        }
        at = end;
    }
    Ok(found)
}
