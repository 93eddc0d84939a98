// SPDX-License-Identifier: Apache-2.0

//! Checks invariant I5 on whole models: however the tokens of a sequence are computed, its logits
//! have the same bits. `COMPUTE_PATHS` lists the cases. Each case computes the same tokens in
//! another way.

use std::ops::Range;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use gguf::Metadata;
use kernels::cuda::{Cuda, CudaKv};
use models::testing::ModelFile;
use models::{ForwardLimits, Model, WeightTable, build};
use ops::{Backend, DRAWN_TOKEN, DrawParams, KvLayout, KvTypes, NO_ARGMAX, Step};

use crate::TestGpu;
use crate::random::TestRng;

pub(crate) const BLOCK_TOKENS: usize = 16;
const TOKENS: usize = 150;
const BLOCKS: usize = 64;
/// The small models have fewer commands than the first part of a step has otherwise.
const FIRST_PART_COMMANDS: usize = 4;
/// Small models of every architecture, in quantized types and floats.
const MODELS: [&str; 7] = [
    "llama.Q8_0",
    "llama.Q4_0",
    "llama-linear.F16",
    "llama-linear.BF16",
    "qwen3.Q4_K_M",
    "qwen3moe-q.Q2_K",
    "gemma3",
];

/// The models that run under the sanitizers. Their activations have both widths of blocks, and
/// their heads are with and without norms. The last one has attention windows.
const SMALL: [&str; 3] = ["llama.Q8_0", "qwen3.Q4_K_M", "gemma3"];

/// KV cache types. The first entry runs under the sanitizers; it uses kernels of all types except
/// f32.
const KV_TYPES: [&str; 4] = ["f16,0=q8_0,1=bf16", "f32", "f16", "q8_0"];

/// Some tokens of one sequence in a step.
pub(crate) struct SequencePart<'a> {
    pub(crate) table: &'a [u32],
    pub(crate) first: usize,
    pub(crate) tokens: &'a [u32],
}

/// The paths see block tables of one KV cache group. The other groups of a model have the same
/// tables, with other blocks.
pub(crate) struct ModelRun {
    cuda: Cuda,
    model: Box<dyn Model<Cuda>>,
    kv: CudaKv,
    groups: usize,
    /// Blocks of each group.
    blocks: usize,
}

impl ModelRun {
    fn new(gpu: &TestGpu, file: &ModelFile, types: &KvTypes) -> Result<Self> {
        // The limits are so small that the model computes a step, and its logits, in several runs
        // of rows.
        let limits = ForwardLimits { rows_max: 300, outputs_max: 300 };
        Self::build(gpu, file.header().metadata(), file.weights()?, limits, types, BLOCKS)
    }

    pub(crate) fn build(
        gpu: &TestGpu,
        metadata: &Metadata,
        weights: WeightTable<Cuda>,
        limits: ForwardLimits,
        types: &KvTypes,
        blocks: usize,
    ) -> Result<Self> {
        let mut cuda = Cuda::new(&gpu.device)?;
        let model = build(metadata, weights, &mut cuda, limits)?;
        let mut layout = KvLayout { block_tokens: BLOCK_TOKENS, blocks, layers: model.kv_layers(types) };
        let groups = layout.groups().len();
        layout.blocks *= groups;
        let kv = cuda.kv(&layout)?;
        Ok(Self { cuda, model, kv, groups, blocks })
    }

    /// Computes a step and returns the logits of all rows.
    fn step(&mut self, parts: &[SequencePart<'_>]) -> Result<Vec<Vec<f32>>> {
        let rows = parts.iter().map(|part| part.tokens.len()).sum::<usize>() as u32;
        self.step_with_outputs(parts, &(0..rows).collect::<Vec<_>>())
    }

    /// Computes a step and returns the logits of each part's last row.
    pub(crate) fn last_rows(&mut self, parts: &[SequencePart<'_>]) -> Result<Vec<Vec<f32>>> {
        let mut rows = 0;
        let last = parts.iter().map(|part| {
            rows += part.tokens.len() as u32;
            rows - 1
        });
        let last: Vec<u32> = last.collect();
        self.step_with_outputs(parts, &last)
    }

    fn step_with_outputs(&mut self, parts: &[SequencePart<'_>], outputs: &[u32]) -> Result<Vec<Vec<f32>>> {
        let (mut tokens, mut positions, mut sequences, mut slots) = (vec![], vec![], vec![], vec![]);
        for (sequence, part) in parts.iter().enumerate() {
            for (position, &token) in (part.first..).zip(part.tokens) {
                tokens.push(token);
                positions.push(position as u32);
                sequences.push(sequence as u32);
                let offset = position % BLOCK_TOKENS;
                for group in 0..self.groups {
                    let block = self.block_of(group, part.table[position / BLOCK_TOKENS]);
                    slots.push(block * BLOCK_TOKENS as u32 + offset as u32);
                }
            }
        }
        let of_group = &|part: &SequencePart<'_>, group: usize| -> Vec<u32> {
            part.table.iter().map(|&block| self.block_of(group, block)).collect()
        };
        let groups = self.groups;
        let tables: Vec<Vec<u32>> =
            parts.iter().flat_map(|part| (0..groups).map(move |group| of_group(part, group))).collect();
        let tables: Vec<&[u32]> = tables.iter().map(Vec::as_slice).collect();
        let vocabulary = self.model.vocab_size();
        let mut host = vec![f32::NAN; outputs.len() * vocabulary];
        let step = Step {
            tokens: &tokens,
            positions: &positions,
            sequences: &sequences,
            kv_slots: &slots,
            tables: &tables,
            outputs,
        };
        self.model.forward(&mut self.cuda, &mut self.kv, &step, &[], &mut |cuda, run, logits| {
            cuda.read(logits, run.len(), &mut host[run.start * vocabulary..run.end * vocabulary])
        })?;
        Ok(host.chunks_exact(vocabulary).map(<[f32]>::to_vec).collect())
    }

    fn block_of(&self, group: usize, block: u32) -> u32 {
        (group * self.blocks) as u32 + block
    }

    /// Copies a block of each group.
    fn copy_block(&mut self, from: u32, to: u32) -> Result<()> {
        let of_group = |group| (self.block_of(group, from), self.block_of(group, to));
        let copies: Vec<(u32, u32)> = (0..self.groups).map(of_group).collect();
        Ok(self.model.copy_blocks(&mut self.cuda, &mut self.kv, &copies)?)
    }

    fn one(&mut self, table: &[u32], tokens: &[u32], range: Range<usize>) -> Result<Vec<Vec<f32>>> {
        self.step(&[SequencePart { table, first: range.start, tokens: &tokens[range] }])
    }
}

fn blocks(first: usize) -> Vec<u32> {
    // Block ids fall, so a kernel that ignores the table fails.
    (0..TOKENS.div_ceil(BLOCK_TOKENS)).map(|i| (BLOCKS - 1 - first - i) as u32).collect()
}

/// A way to compute the logits of `tokens`.
type ComputePath = fn(&mut ModelRun, &[u32], &[u32]) -> Result<Vec<Vec<f32>>>;

const COMPUTE_PATHS: [(&str, ComputePath); 11] = [
    ("token by token", |run, tokens, _| {
        let table = blocks(0);
        (0..TOKENS).map(|at| Ok(run.one(&table, tokens, at..at + 1)?.concat())).collect()
    }),
    ("in chunks", |run, tokens, _| {
        let (table, mut rows, mut at) = (blocks(0), Vec::new(), 0);
        for size in [3, 64, 1, 7, 65, TOKENS] {
            let end = (at + size).min(TOKENS);
            rows.extend(run.one(&table, tokens, at..end)?);
            at = end;
        }
        Ok(rows)
    }),
    ("with batch neighbours", |run, tokens, other| {
        // Prefill of other sequences, then their decode rows. They come before and after this
        // sequence's rows.
        let (own, first, second) = (blocks(0), blocks(10), blocks(20));
        let mut rows = Vec::new();
        let mut at = 0;
        for (size, others) in [(40, 90), (1, 1), (1, 30), (60, 1), (TOKENS - 102, 1)] {
            let made = run.step(&[
                SequencePart { table: &first, first: at.min(20), tokens: &other[..others] },
                SequencePart { table: &own, first: at, tokens: &tokens[at..at + size] },
                SequencePart { table: &second, first: 0, tokens: &other[..17] },
            ])?;
            rows.extend(made[others..others + size].iter().cloned());
            at += size;
        }
        Ok(rows)
    }),
    ("behind a prefix that another sequence computed", |run, tokens, other| {
        let cached = 6 * BLOCK_TOKENS;
        let first = blocks(0);
        let mut rows = run.one(&first, tokens, 0..cached)?;
        // The blocks that only the second sequence has come after the shared ones.
        let table: Vec<u32> = first[..6].iter().copied().chain(blocks(20)[6..].iter().copied()).collect();
        run.one(&first, &[&tokens[..cached], &other[..20]].concat(), cached..cached + 20)?;
        rows.extend(run.one(&table, tokens, cached..TOKENS)?);
        Ok(rows)
    }),
    ("forked, in a copy of the block that another goes on in", |run, tokens, other| {
        // The fork is after 5 full blocks and a part of one.
        let shared = 5 * BLOCK_TOKENS + 7;
        let first = blocks(0);
        let mut rows = run.one(&first, tokens, 0..shared)?;
        let table: Vec<u32> = first[..5].iter().copied().chain(blocks(20)[5..].iter().copied()).collect();
        run.copy_block(first[5], table[5])?;
        let theirs: Vec<u32> = tokens[..shared].iter().chain(&other[..TOKENS - shared]).copied().collect();
        run.one(&first, &theirs, shared..TOKENS)?;
        rows.extend(run.one(&table, tokens, shared..TOKENS)?);
        Ok(rows)
    }),
    ("with drafts in the batch", |run, tokens, other| {
        // The rows of a step after its first one attend to it and to each other. The next step
        // overwrites the KV cache of wrong drafts.
        let table = blocks(0);
        let mut rows = run.one(&table, tokens, 0..30)?;
        let mut at = 30;
        while at < TOKENS {
            let right = (at % 4).min(TOKENS - at - 1);
            let drafts: Vec<u32> =
                tokens[at..at + right + 1].iter().chain(&other[..3]).copied().take(TOKENS - at).collect();
            let made = run.step(&[SequencePart { table: &table, first: at, tokens: &drafts }])?;
            rows.extend(made[..right + 1].iter().cloned());
            at += right + 1;
        }
        Ok(rows)
    }),
    ("computed again in other blocks", |run, tokens, other| {
        let first = blocks(0);
        run.one(&first, tokens, 0..100)?;
        run.step(&[SequencePart { table: &first, first: 0, tokens: &other[..100] }])?;
        let table = blocks(30);
        let mut rows = run.one(&table, tokens, 0..77)?;
        run.cuda.trim(&mut run.kv, BLOCKS * run.groups)?;
        rows.extend(run.one(&table, tokens, 77..TOKENS)?);
        Ok(rows)
    }),
    ("in two parts, in chunks", |run, tokens, _| {
        run.cuda.set_first_part_commands(FIRST_PART_COMMANDS);
        let table = blocks(0);
        let mut rows = run.one(&table, tokens, 0..70)?;
        rows.extend(run.one(&table, tokens, 70..71)?);
        rows.extend(run.one(&table, tokens, 71..TOKENS)?);
        Ok(rows)
    }),
    ("in two parts, token by token", |run, tokens, _| {
        run.cuda.set_first_part_commands(FIRST_PART_COMMANDS);
        let table = blocks(0);
        let rows: Result<Vec<_>> =
            (0..TOKENS).map(|at| Ok(run.one(&table, tokens, at..at + 1)?.concat())).collect();
        ensure!(run.cuda.graphs() >= 2, "a graph of each part, found {}", run.cuda.graphs());
        rows
    }),
    ("drawn on the device, token by token", |run, tokens, _| {
        let (table, vocabulary) = (blocks(0), run.model.vocab_size());
        let mut row = run.cuda.tensor(1, vocabulary)?;
        let (mut rows, mut read) = (Vec::new(), Vec::new());
        let mut finish = |cuda: &mut Cuda| -> Result<()> {
            let mut best = [NO_ARGMAX];
            cuda.finish_draws(&mut best)?;
            read.extend(best);
            Ok(())
        };
        for (at, &token) in tokens.iter().enumerate() {
            let mut largest = vec![0.0; vocabulary];
            largest[token as usize] = 1.0;
            run.cuda.write(&mut row, 1, &largest)?;
            run.cuda.start_draws(&row, vocabulary, &[DrawParams::default()], 0..1)?;
            // Two are in flight. The host reads the older one.
            if at > 0 {
                finish(&mut run.cuda)?;
            }
            let part = SequencePart { table: &table, first: at, tokens: &[DRAWN_TOKEN] };
            rows.push(run.step(&[part])?.concat());
        }
        finish(&mut run.cuda)?;
        ensure!(read == tokens, "the host reads other tokens than the device");
        Ok(rows)
    }),
    ("without graphs", |run, tokens, _| {
        let table = blocks(0);
        run.cuda.set_graphs(false);
        (0..TOKENS).map(|at| Ok(run.one(&table, tokens, at..at + 1)?.concat())).collect()
    }),
];

pub(crate) fn every_way_gives_the_same_logits(gpu: &TestGpu) -> Result<()> {
    let mut random = TestRng::new(41);
    for name in MODELS.into_iter().filter(|name| !gpu.small || SMALL.contains(name)) {
        let file = ModelFile::open(&Path::new("crates/models/tests/data").join(format!("{name}.gguf")))
            .with_context(|| name.to_owned())?;
        for types in KV_TYPES.into_iter().take(if gpu.small { 1 } else { KV_TYPES.len() }) {
            let types: KvTypes = types.parse()?;
            let mut whole = ModelRun::new(gpu, &file, &types)?;
            let vocabulary = whole.model.vocab_size() as u64;
            let mut draw =
                || -> Vec<u32> { (0..TOKENS).map(|_| (random.bits() % vocabulary) as u32).collect() };
            let (tokens, other) = (draw(), draw());
            let expected = whole.one(&blocks(0), &tokens, 0..TOKENS)?;
            ensure!(expected.concat().iter().all(|logit| logit.is_finite()), "{name}: a logit is not finite");
            // These take hundreds of steps.
            let long = |way: &str| way.ends_with("token by token") || way == "without graphs";
            for (way, compute) in COMPUTE_PATHS.into_iter().filter(|(way, _)| !gpu.small || !long(way)) {
                let found = compute(&mut ModelRun::new(gpu, &file, &types)?, &tokens, &other)?;
                ensure!(found.len() == expected.len(), "{name}, {types}, {way}: {} rows", found.len());
                let bits = |row: &Vec<f32>| row.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                let differs = found.iter().zip(&expected).position(|(a, b)| bits(a) != bits(b));
                ensure!(
                    differs.is_none(),
                    "{name}, {types}, {way}: logits at position {differs:?} have other bits"
                );
            }
        }
    }
    Ok(())
}
