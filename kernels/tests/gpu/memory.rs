// SPDX-License-Identifier: Apache-2.0

//! Measures the device memory of a worker besides its context and KV cache. It compares three
//! figures: free memory that disappears, the backend's count, and the prediction of a memory plan.
//!
//! Each case runs in its own process, like a worker. Otherwise, memory that the driver keeps after
//! one case would count as free in the next.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use kernels::cuda::{Cuda, CudaWorkerShape, DeviceBytes, predict_device_bytes};
use models::{ForwardLimits, TensorHead, build, validate};
use ops::{AttentionSpan, Backend, KvLayout, KvTypes};
use quant::DType;

use crate::TestGpu;
use crate::throughput::{
    BLOCK_TOKENS, MODEL_PRESETS, ModelPreset, QuantMix, StepOutput, metadata, step, tensors, weights,
};

/// The argument of a process that measures one case.
pub(crate) const ONE: &str = "memory-of";

const MIB: u64 = 1 << 20;

/// Preset, types, name of the types, and tokens of a step.
type MemoryCase = (&'static ModelPreset, QuantMix, &'static str, usize);

fn cases() -> impl Iterator<Item = MemoryCase> {
    let models = [
        (&MODEL_PRESETS[0], QuantMix::Q4KM, "Q4_K_M"),
        (&MODEL_PRESETS[0], QuantMix::Q80, "Q8_0"),
        (&MODEL_PRESETS[1], QuantMix::Q80, "Q8_0"),
        (&MODEL_PRESETS[2], QuantMix::Q4KM, "Q4_K_M"),
    ];
    models.into_iter().flat_map(|(preset, mix, name)| [512, 2048].map(|tokens| (preset, mix, name, tokens)))
}

pub(crate) fn bench(_: &TestGpu) -> Result<()> {
    println!("MiB as measured, counted / predicted: tensors, scratch, graphs, modules and driver, all");
    for index in 0..cases().count() {
        let status = Command::new(std::env::current_exe()?).args([ONE, &index.to_string()]).status()?;
        ensure!(status.success(), "case {index} ended with {status}");
    }
    Ok(())
}

/// The memory that an additional worker of an 8B model may take.
fn allowed(preset: &ModelPreset, step_tokens: usize) -> Option<u64> {
    (preset.name == "qwen3-8b").then_some(if step_tokens <= 512 { 64 * MIB } else { 288 * MIB })
}

pub(crate) fn one(gpu: &TestGpu, index: &str) -> Result<()> {
    let (preset, mix, types, step_tokens) = cases().nth(index.parse()?).context("no such case")?;
    let limits = ForwardLimits { rows_max: step_tokens, outputs_max: 77 };
    let weights = weights(gpu, preset, mix)?;
    let free_bytes = || gpu.device.context()?.memory_info().map(|info| info.free_bytes);
    let before = free_bytes()?;
    let mut cuda = Cuda::new(&gpu.device)?;
    let mut model = build(&metadata(preset)?, weights, &mut cuda, limits)?;
    let layers = model.kv_layers(&KvTypes::default());
    let mut kv = cuda.kv(&KvLayout { block_tokens: BLOCK_TOKENS, blocks: 1024, layers })?;
    let mut logits = vec![0.0; limits.outputs_max * model.vocab_size()];
    let tables: Vec<Vec<u32>> = (0..64).map(|row| (16 * row..16 * row + 16).collect()).collect();
    let whole: Vec<_> = tables.iter().map(|table| (table, 0, step_tokens / 64)).collect();
    let one: Vec<u32> = (0..1024).collect();
    // Prompts of one sequence and of many sequences. Then steps of as many sizes as there are
    // graphs, with every kind of output.
    step(&mut cuda, &mut *model, &mut kv, &[(&one, 0, step_tokens)], StepOutput::Best, &mut logits)?;
    for rows in [64, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64] {
        let mut parts = whole.clone();
        for wanted in [StepOutput::Best, StepOutput::Best, StepOutput::Logits, StepOutput::Shortlists] {
            step(&mut cuda, &mut *model, &mut kv, &parts, wanted, &mut logits)?;
            parts = tables[..rows].iter().map(|table| (table, step_tokens / 64, 1)).collect();
        }
    }
    let taken = before.saturating_sub(free_bytes()?) - kv.mapped_bytes();
    let (counted, predicted) = (cuda.device_bytes(), predict_device_bytes(&shape(preset, mix, limits)?));
    let mib = |bytes: u64| bytes as f64 / MIB as f64;
    let parts = |of: &DeviceBytes| [of.tensors, of.scratch, of.graphs, of.modules, of.total()];
    let line: Vec<String> = parts(&counted)
        .into_iter()
        .zip(parts(&predicted))
        .map(|(counted, predicted)| format!("{:.1} / {:.1}", mib(counted), mib(predicted)))
        .collect();
    println!("{} {types}, {step_tokens}: {:.1}, {}", preset.name, mib(taken), line.join(", "));
    if let Some(allowed) = allowed(preset, step_tokens) {
        ensure!(taken <= allowed, "a worker takes more than {} MiB", mib(allowed));
    }
    Ok(())
}

/// Makes the shape as a memory plan does, from the tensor heads of a file.
fn shape(preset: &ModelPreset, mix: QuantMix, limits: ForwardLimits) -> Result<CudaWorkerShape> {
    let tensors = tensors(preset, mix);
    let dims: Vec<Vec<u64>> =
        tensors.iter().map(|(_, _, dims)| dims.iter().map(|&dim| dim as u64).collect()).collect();
    let heads =
        tensors.iter().zip(&dims).map(|((name, dtype, _), dims)| TensorHead { name, dtype: *dtype, dims });
    let model = validate(&metadata(preset)?, heads)?;
    let mut dtypes: Vec<DType> = tensors.iter().map(|(_, dtype, _)| *dtype).collect();
    dtypes.sort_unstable();
    dtypes.dedup();
    Ok(CudaWorkerShape {
        layers: model.layers,
        embedding: model.embedding_length,
        heads: model.heads,
        head_dim: model.head_dim,
        feed_forward: model.feed_forward,
        experts: model.experts,
        experts_used: model.experts_used,
        rows_at_once: limits.rows_at_once(model.experts),
        tensors: model.workspace_tensors(limits).collect(),
        kv_layers: vec![(KvTypes::default().of(0), AttentionSpan::Full)],
        dtypes,
    })
}
