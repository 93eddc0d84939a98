// SPDX-License-Identifier: Apache-2.0

//! Measures tokens per second of whole models with random weights, at the shapes for which
//! docs/PERFORMANCE.md compares Ballast with other engines.

use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use gguf::{Metadata, MetadataBuilder};
use kernels::cuda::{Buffer, Cuda, WeightData};
use models::{ForwardLimits, Model, WeightTable, build};
use ops::{Backend, DrawParams, KvLayout, KvTypes, Shortlist, Step, Weight};
use quant::DType;
use quant::layout::{LAYOUT_TILES, TILE_ROWS, Tiles};

use crate::TestGpu;
use crate::random::TestRng;

pub(crate) const BLOCK_TOKENS: usize = 16;
/// Row tiles of the embedding that differ, so that most tokens of a batch do.
const EMBEDDING_ROW_TILES: usize = 64;
/// Prompt tokens in one step.
const STEP_TOKENS: usize = 2048;

pub(crate) struct ModelPreset {
    pub(crate) name: &'static str,
    layers: usize,
    embedding: usize,
    heads: usize,
    kv_heads: usize,
    hidden: usize,
    vocabulary: usize,
    pub(crate) experts: usize,
    tied: bool,
    /// Tiles of 16 rows of a matrix that differ. The others repeat them: speed does not depend on
    /// the values.
    different_row_tiles: usize,
}

impl ModelPreset {
    /// With fewer layers, for tests.
    pub(crate) fn with(&self, layers: usize, different_row_tiles: usize) -> Self {
        Self { layers, different_row_tiles, ..*self }
    }
}

pub(crate) const MODEL_PRESETS: [ModelPreset; 3] = [
    ModelPreset {
        name: "qwen3-8b",
        layers: 36,
        embedding: 4096,
        heads: 32,
        kv_heads: 8,
        hidden: 12_288,
        vocabulary: 151_936,
        experts: 0,
        tied: false,
        different_row_tiles: 1,
    },
    ModelPreset {
        name: "qwen3-0.6b",
        layers: 28,
        embedding: 1024,
        heads: 16,
        kv_heads: 8,
        hidden: 3072,
        vocabulary: 151_936,
        experts: 0,
        tied: true,
        different_row_tiles: 1,
    },
    ModelPreset {
        name: "qwen3-30b-a3b",
        layers: 48,
        embedding: 2048,
        heads: 32,
        kv_heads: 4,
        hidden: 768,
        vocabulary: 151_936,
        experts: 128,
        tied: false,
        different_row_tiles: 1,
    },
];
const HEAD_DIM: usize = 128;

/// Decides the type of each tensor.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum QuantMix {
    F16,
    BF16,
    Q80,
    /// The choice of llama.cpp: half of the sensitive matrices are in Q6_K.
    Q4KM,
}

impl QuantMix {
    fn of(self, tensor: &str, layer: usize, layers: usize) -> DType {
        let more = layer < layers / 8 || layer >= 7 * layers / 8 || (layer - layers / 8) % 3 == 2;
        match self {
            Self::F16 => DType::F16,
            Self::BF16 => DType::BF16,
            Self::Q80 => DType::Q8_0,
            Self::Q4KM if tensor == "output" => DType::Q6_K,
            Self::Q4KM if more && (tensor == "attn_v" || tensor.starts_with("ffn_down")) => DType::Q6_K,
            Self::Q4KM => DType::Q4_K,
        }
    }
}

/// `BENCH_MODEL` selects models by a part of their names.
pub(crate) fn bench(gpu: &TestGpu) -> Result<()> {
    let wanted = std::env::var("BENCH_MODEL").unwrap_or_default();
    for preset in &MODEL_PRESETS {
        for (mix, name) in [(QuantMix::Q4KM, "Q4_K_M"), (QuantMix::Q80, "Q8_0")] {
            let name = format!("{} {name}", preset.name);
            if name.contains(&wanted) {
                run(gpu, preset, mix, &name)?;
            }
        }
    }
    Ok(())
}

pub(crate) fn floats(gpu: &TestGpu) -> Result<()> {
    let preset = &MODEL_PRESETS[0];
    for (mix, name) in [(QuantMix::F16, "F16"), (QuantMix::BF16, "BF16")] {
        run(gpu, preset, mix, &format!("{} {name}", preset.name))?;
    }
    Ok(())
}

/// Measures steps with sampling in three ways: logits read to the host, shortlists, and for
/// comparison the argmax.
pub(crate) fn sampled(gpu: &TestGpu) -> Result<()> {
    for (preset, mix, name) in [
        (&MODEL_PRESETS[0], QuantMix::Q4KM, "qwen3-8b Q4_K_M"),
        (&MODEL_PRESETS[1], QuantMix::Q80, "qwen3-0.6b Q8_0"),
    ] {
        let mut cuda = Cuda::new(&gpu.device)?;
        let limits = ForwardLimits { rows_max: STEP_TOKENS, outputs_max: 64 };
        let mut model = build(&metadata(preset)?, weights(gpu, preset, mix)?, &mut cuda, limits)?;
        let mut logits = vec![1.0; limits.outputs_max * model.vocab_size()];
        let (sequences, table_len) = (64, 1024 / BLOCK_TOKENS);
        let layers = model.kv_layers(&KvTypes::default());
        let blocks = sequences * table_len + 1;
        let mut kv = cuda.kv(&KvLayout { block_tokens: BLOCK_TOKENS, blocks, layers })?;
        let tables: Vec<Vec<u32>> = (0..sequences)
            .map(|sequence| (0..table_len).map(|i| (1 + i * sequences + sequence) as u32).collect())
            .collect();
        for start in (0..512).step_by(STEP_TOKENS / sequences) {
            let parts: Vec<_> = tables.iter().map(|table| (table, start, STEP_TOKENS / sequences)).collect();
            step(&mut cuda, &mut *model, &mut kv, &parts, StepOutput::Nothing, &mut logits)?;
        }
        for rows in [1, 8, 32, 64] {
            let mut line = format!("{name}: {rows:2} rows at 512:");
            for (wanted, what) in [
                (StepOutput::Logits, "rows read"),
                (StepOutput::Shortlists, "shortlists"),
                (StepOutput::Best, "best"),
            ] {
                let mut times = Vec::new();
                for at in 512..544 {
                    let parts: Vec<_> = tables[..rows].iter().map(|table| (table, at, 1)).collect();
                    times.push(step(&mut cuda, &mut *model, &mut kv, &parts, wanted, &mut logits)?);
                }
                let seconds = median(times);
                line += &format!(" {what} {:7.3} ms {:6.0} tok/s,", seconds * 1e3, rows as f64 / seconds);
            }
            println!("{line}");
        }
    }
    Ok(())
}

/// Tokens of context that the cache holds for each sequence of a decode batch.
const BATCH_CONTEXT: usize = 1024;
const BATCH_SEQUENCES: usize = 64;
/// Blocks of the table of a sequence with a long context.
const LONG_TABLE_LEN: usize = 16_384 / BLOCK_TOKENS + 1;

/// A model with a KV cache for [`BATCH_SEQUENCES`] short sequences and a long one.
struct MeasuredModel<'a> {
    name: &'a str,
    cuda: Cuda,
    model: Box<dyn Model<Cuda>>,
    kv: <Cuda as Backend>::Kv,
    logits: Vec<f32>,
}

/// Runs a step of each kind once, for a profiler such as `ncu --graph-profiling node`.
pub(crate) fn profiled(gpu: &TestGpu) -> Result<()> {
    for (preset, mix, name) in [
        (&MODEL_PRESETS[0], QuantMix::Q4KM, "qwen3-8b Q4_K_M"),
        (&MODEL_PRESETS[0], QuantMix::Q80, "qwen3-8b Q8_0"),
        (&MODEL_PRESETS[2], QuantMix::Q4KM, "qwen3-30b-a3b Q4_K_M"),
    ] {
        let mut model = measured_model(gpu, preset, mix, name)?;
        let tables = batch_tables();
        let context = STEP_TOKENS / BATCH_SEQUENCES;
        let prompts: Vec<_> = tables.iter().map(|table| (table, 0, context)).collect();
        model.step(&prompts, StepOutput::Nothing)?;
        for rows in [64, 8, 1] {
            let parts: Vec<_> = tables[..rows].iter().map(|table| (table, context, 1)).collect();
            model.step(&parts, StepOutput::Best)?;
        }
    }
    Ok(())
}

/// The KV blocks of [`BATCH_SEQUENCES`] sequences.
fn batch_tables() -> Vec<Vec<u32>> {
    (0..BATCH_SEQUENCES)
        .map(|sequence| {
            let blocks = 0..BATCH_CONTEXT / BLOCK_TOKENS;
            blocks.map(|i| (1 + i * BATCH_SEQUENCES + sequence) as u32).collect()
        })
        .collect()
}

fn measured_model<'a>(
    gpu: &TestGpu,
    preset: &ModelPreset,
    mix: QuantMix,
    name: &'a str,
) -> Result<MeasuredModel<'a>> {
    let started = Instant::now();
    let mut cuda = Cuda::new(&gpu.device)?;
    let limits = ForwardLimits { rows_max: STEP_TOKENS, outputs_max: 64 };
    let model = build(&metadata(preset)?, weights(gpu, preset, mix)?, &mut cuda, limits)?;
    // The logits are written once, so that their pages exist, as in an engine.
    let logits = vec![1.0; limits.outputs_max * model.vocab_size()];
    let blocks = BATCH_SEQUENCES * BATCH_CONTEXT / BLOCK_TOKENS + LONG_TABLE_LEN + 1;
    let layers = model.kv_layers(&KvTypes::default());
    let kv = cuda.kv(&KvLayout { block_tokens: BLOCK_TOKENS, blocks, layers })?;
    println!("{name}: built in {:.1} s", started.elapsed().as_secs_f32());
    Ok(MeasuredModel { name, cuda, model, kv, logits })
}

fn run(gpu: &TestGpu, preset: &ModelPreset, mix: QuantMix, name: &str) -> Result<()> {
    let mut measured = measured_model(gpu, preset, mix, name)?;
    measured.measure_prompts()?;
    measured.measure_decodes()?;
    if preset.experts == 0 {
        measured.measure_long_decode()?;
    }
    Ok(())
}

impl MeasuredModel<'_> {
    fn step(&mut self, parts: &[(&Vec<u32>, usize, usize)], wanted: StepOutput) -> Result<f64> {
        step(&mut self.cuda, &mut *self.model, &mut self.kv, parts, wanted, &mut self.logits)
    }

    /// Chunks of one sequence. The context before the measured chunk is written to the cache first.
    fn measure_prompts(&mut self) -> Result<()> {
        let table: Vec<u32> = (1..=LONG_TABLE_LEN as u32).collect();
        for (len, span) in [(512, 0), (2048, 0), (2048, 14_336)] {
            for start in (0..span).step_by(STEP_TOKENS) {
                self.step(&[(&table, start, STEP_TOKENS)], StepOutput::Nothing)?;
            }
            let mut best = f64::INFINITY;
            for _ in 0..4 {
                best = best.min(self.step(&[(&table, span, len)], StepOutput::Logits)?);
            }
            println!(
                "{}: prompt {len:5} after {span:6} {:9.2} ms {:8.0} tok/s",
                self.name,
                best * 1e3,
                len as f64 / best
            );
        }
        Ok(())
    }

    /// Decode steps of several sequences with a context of 512 tokens.
    fn measure_decodes(&mut self) -> Result<()> {
        let tables = batch_tables();
        let chunk = STEP_TOKENS / BATCH_SEQUENCES;
        for start in (0..512).step_by(chunk) {
            let parts: Vec<_> = tables.iter().map(|table| (table, start, chunk)).collect();
            self.step(&parts, StepOutput::Nothing)?;
        }
        for rows in [1, 2, 4, 8, 16, 32, 64] {
            let mut medians = Vec::new();
            for wanted in [StepOutput::Logits, StepOutput::Best] {
                let mut times = Vec::new();
                for at in 512..536 {
                    let parts: Vec<_> = tables[..rows].iter().map(|table| (table, at, 1)).collect();
                    times.push(self.step(&parts, wanted)?);
                }
                medians.push(median(times));
            }
            println!(
                "{}: {rows:2} rows at 512 {:8.3} ms a step {:8.0} tok/s, greedy on the device {:8.3} ms {:8.0} tok/s, {} graphs",
                self.name,
                medians[0] * 1e3,
                rows as f64 / medians[0],
                medians[1] * 1e3,
                rows as f64 / medians[1],
                self.cuda.graphs()
            );
        }
        Ok(())
    }

    fn measure_long_decode(&mut self) -> Result<()> {
        let table: Vec<u32> = (1..=LONG_TABLE_LEN as u32).collect();
        let mut times = Vec::new();
        for at in 16_350..16_366 {
            times.push(self.step(&[(&table, at, 1)], StepOutput::Best)?);
        }
        println!("{}:  1 row at 16k {:8.3} ms a step", self.name, median(times) * 1e3);
        Ok(())
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// The output that is read after a step.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum StepOutput {
    Nothing,
    /// The logits of each sequence's last token.
    Logits,
    /// The best next token of each sequence, found on the device.
    Best,
    /// The shortlist of each sequence's logits, found on the device. The device also draws a token
    /// from all logits.
    Shortlists,
}

/// Returns the seconds of one step of consecutive tokens of some sequences.
pub(crate) fn step(
    cuda: &mut Cuda,
    model: &mut dyn Model<Cuda>,
    kv: &mut <Cuda as Backend>::Kv,
    parts: &[(&Vec<u32>, usize, usize)],
    wanted: StepOutput,
    logits: &mut [f32],
) -> Result<f64> {
    let (mut tokens, mut positions, mut sequences, mut slots, mut outputs) =
        (vec![], vec![], vec![], vec![], vec![]);
    for (sequence, &(table, start, len)) in parts.iter().enumerate() {
        for position in start..start + len {
            // Tokens differ between sequences. Equal sequences would go through the same experts.
            tokens.push(((position * 7919 + sequence * 104_729) % 100_000) as u32);
            positions.push(position as u32);
            sequences.push(sequence as u32);
            slots.push(
                table[position / BLOCK_TOKENS] * BLOCK_TOKENS as u32 + (position % BLOCK_TOKENS) as u32,
            );
        }
        if wanted != StepOutput::Nothing {
            outputs.push(tokens.len() as u32 - 1);
        }
    }
    let tables: Vec<&[u32]> = parts.iter().map(|(table, _, _)| table.as_slice()).collect();
    let step = Step {
        tokens: &tokens,
        positions: &positions,
        sequences: &sequences,
        kv_slots: &slots,
        tables: &tables,
        outputs: &outputs,
    };
    let vocabulary = model.vocab_size();
    let mut best = vec![0; outputs.len()];
    let draw_params = vec![DrawParams { temperature: 0.8, uniform: Some(0.5) }; outputs.len()];
    let mut lists = vec![Shortlist::default(); outputs.len()];
    let mut take = |cuda: &mut Cuda, run: std::ops::Range<usize>, of_run: &_| match wanted {
        StepOutput::Best => cuda.argmax(of_run, run.len(), vocabulary, &mut best[run]),
        StepOutput::Shortlists => {
            cuda.shortlists(of_run, vocabulary, &draw_params[run.clone()], &mut lists[run])
        }
        _ => cuda.read(of_run, run.len(), &mut logits[run.start * vocabulary..run.end * vocabulary]),
    };
    cuda.wait()?;
    let start = Instant::now();
    model.forward(cuda, kv, &step, &[], &mut take)?;
    cuda.wait()?;
    Ok(start.elapsed().as_secs_f64())
}

pub(crate) fn metadata(preset: &ModelPreset) -> Result<Metadata> {
    let arch = if preset.experts > 0 { "qwen3moe" } else { "qwen3" };
    let mut builder = MetadataBuilder::default();
    builder.put("general.architecture", arch)?;
    for (key, value) in [
        ("block_count", preset.layers),
        ("embedding_length", preset.embedding),
        ("context_length", 40_960),
        ("feed_forward_length", preset.hidden),
        ("attention.head_count", preset.heads),
        ("attention.head_count_kv", preset.kv_heads),
        ("attention.key_length", HEAD_DIM),
        ("attention.value_length", HEAD_DIM),
        ("vocab_size", preset.vocabulary),
    ] {
        builder.put(&format!("{arch}.{key}"), value as u32)?;
    }
    if preset.experts > 0 {
        builder.put(&format!("{arch}.expert_count"), preset.experts as u32)?;
        builder.put(&format!("{arch}.expert_used_count"), 8_u32)?;
        builder.put(&format!("{arch}.expert_feed_forward_length"), preset.hidden as u32)?;
    }
    builder.put(&format!("{arch}.attention.layer_norm_rms_epsilon"), 1e-6_f32)?;
    builder.put(&format!("{arch}.rope.freq_base"), 1e6_f32)?;
    Ok(Metadata::parse(builder.bytes().to_vec())?)
}

/// Name, type and dimensions of each tensor.
pub(crate) fn tensors(preset: &ModelPreset, mix: QuantMix) -> Vec<(String, DType, Vec<usize>)> {
    let ModelPreset { layers, embedding, heads, kv_heads, hidden, vocabulary, experts, tied, .. } = *preset;
    let named = |name: &str, layer, dims: &[usize]| {
        (format!("{name}.weight"), mix.of(name, layer, layers), dims.to_vec())
    };
    let vector = |name: &str, len| (format!("{name}.weight"), DType::F32, vec![len]);
    let mut tensors =
        vec![named("token_embd", 0, &[embedding, vocabulary]), vector("output_norm", embedding)];
    if !tied {
        tensors.push(named("output", 0, &[embedding, vocabulary]));
    }
    let (width, kv_width) = (heads * HEAD_DIM, kv_heads * HEAD_DIM);
    for layer in 0..layers {
        let place = |(name, dtype, dims)| (format!("blk.{layer}.{name}"), dtype, dims);
        let mut add = |name: &str, dims: &[usize]| tensors.push(place(named(name, layer, dims)));
        add("attn_q", &[embedding, width]);
        add("attn_k", &[embedding, kv_width]);
        add("attn_v", &[embedding, kv_width]);
        add("attn_output", &[width, embedding]);
        if experts > 0 {
            add("ffn_gate_exps", &[embedding, hidden, experts]);
            add("ffn_up_exps", &[embedding, hidden, experts]);
            add("ffn_down_exps", &[hidden, embedding, experts]);
            let router = ("ffn_gate_inp.weight".to_owned(), DType::F32, vec![embedding, experts]);
            tensors.push(place(router));
        } else {
            add("ffn_gate", &[embedding, hidden]);
            add("ffn_up", &[embedding, hidden]);
            add("ffn_down", &[hidden, embedding]);
        }
        for (name, len) in [
            ("attn_norm", embedding),
            ("ffn_norm", embedding),
            ("attn_q_norm", HEAD_DIM),
            ("attn_k_norm", HEAD_DIM),
        ] {
            tensors.push(place(vector(name, len)));
        }
    }
    tensors
}

pub(crate) fn weights(gpu: &TestGpu, preset: &ModelPreset, mix: QuantMix) -> Result<WeightTable<Cuda>> {
    let mut table = WeightTable::new();
    let mut random = TestRng::new(21);
    for (name, dtype, dims) in tensors(preset, mix) {
        let weight = match dims[..] {
            [len] => {
                let values = Arc::new(Buffer::from_host(&gpu.stream, &vec![1.0_f32; len])?);
                let data = device_data(values.view().address(), 4 * len, values);
                Weight { dtype, dims, layout: LAYOUT_TILES, data }
            }
            _ => {
                let different = match name.as_str() {
                    // Equal tokens would go through the same experts, and equal rows of a router
                    // would choose experts in groups.
                    "token_embd.weight" => preset.different_row_tiles.max(EMBEDDING_ROW_TILES),
                    _ if dtype == DType::F32 => dims[1].div_ceil(TILE_ROWS),
                    _ => preset.different_row_tiles,
                };
                matrix(gpu, &mut random, dtype, dims, different)?
            }
        };
        table.insert(name, weight)?;
    }
    gpu.stream.synchronize()?;
    Ok(table)
}

/// Makes a matrix of random values in some row tiles, copied to all others.
fn matrix(
    gpu: &TestGpu,
    random: &mut TestRng,
    dtype: DType,
    dims: Vec<usize>,
    different_row_tiles: usize,
) -> Result<Weight<Cuda>> {
    let (cols, rows) = (dims[0], dims[1..].iter().product());
    let shape = Tiles::new(dtype, cols, rows)?;
    let group = Tiles::new(dtype, cols, rows.min(TILE_ROWS * different_row_tiles))?;
    let scale = 1.0 / (cols as f32).sqrt();
    let values: Vec<f32> = random.values(cols * group.rows()).into_iter().map(|x| x * scale).collect();
    let mut raw = vec![0; group.raw_bytes()];
    quant::encode(dtype, &values, &mut raw)?;
    let mut tiles = vec![0; group.bytes()];
    group.repack(&raw, &mut tiles)?;
    let mut buffer = Buffer::<u8>::new(&gpu.device, shape.bytes())?;
    let mut done = tiles.len();
    if let Some(mut first) = buffer.view_mut().slice_mut(0, done) {
        first.copy_from_host(&gpu.stream, &tiles)?;
    }
    while done < shape.bytes() {
        let next = done.min(shape.bytes() - done);
        let from = buffer.view().address();
        // SAFETY: the first `next` bytes of the buffer, which the copy does not write.
        let from = unsafe { kernels::cuda::DeviceView::from_raw(from, next) };
        if let Some(mut rest) = buffer.view_mut().slice_mut(done, next) {
            rest.copy_from(&gpu.stream, from)?;
        }
        done += next;
    }
    let buffer = Arc::new(buffer);
    let data = device_data(buffer.view().address(), shape.bytes(), buffer);
    Ok(Weight { dtype, dims, layout: LAYOUT_TILES, data })
}

fn device_data<T: Send + Sync + 'static>(address: u64, len: usize, owner: Arc<T>) -> WeightData {
    // SAFETY: the range is a whole buffer, which the owner keeps alive. When the owner is dropped,
    // it waits for the device.
    unsafe { WeightData::on_device(address, len, owner) }
}
