// SPDX-License-Identifier: Apache-2.0

//! Compares attention.cu with `ops::Reference` and with itself (I5). The bits do not depend on how
//! rows are divided into steps, on other rows in a step, or on the block size.

use std::ops::Range;

use anyhow::{Context, Result, ensure};
use kernels::cuda::naive::NaiveKernels;
use kernels::cuda::{Buffer, Cuda, CudaKv};
use ops::{AttentionSpan, AttentionSpec, Backend, KvLayer, KvLayout, KvType, Reference, Step};
use quant::BlockFormat;

use crate::TestGpu;
use crate::ops::{close, filled, values};
use crate::random::TestRng;

/// The tensor-core kernels round queries and weights to f16. With a bf16 cache they round them to
/// bf16, which has 8 bits instead of 11. With a q8_0 cache they also round scale times byte. Scores
/// reach hundreds here. Computed in f64 over similar random values, such rounding alone gives
/// errors of up to 2e-3 (f16) and 7e-3 (q8_0).
pub(crate) fn tile_tolerance(kind: KvType) -> f32 {
    match kind {
        KvType::F32 => PLAIN_TOLERANCE,
        KvType::F16 => 2e-3,
        KvType::Bf16 => 1.6e-2,
        KvType::Q8_0 => 1e-2,
    }
}

const PLAIN_TOLERANCE: f32 = 3e-6;

/// The scalar kernel adds thousands of keys in f32, the naive kernel in f64. Measured on an H200:
/// 3.0e-6 of the largest value at 6,000 keys with heads of up to 128, and 1.6e-5 with heads of 256.
const LONG_CONTEXT_TOLERANCE: f32 = 3e-5;

pub(crate) struct PagedAttention {
    pub(crate) spec: AttentionSpec,
    pub(crate) span: AttentionSpan,
    kind: KvType,
    lengths: Vec<usize>,
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
    queries: Vec<Vec<f32>>,
}

pub(crate) fn spec(heads: usize, kv_heads: usize, head_dim: usize) -> AttentionSpec {
    AttentionSpec { heads, kv_heads, head_dim, scale: 1.0 / (head_dim as f32).sqrt() }
}

impl PagedAttention {
    pub(crate) fn new(random: &mut TestRng, spec: AttentionSpec, kind: KvType, lengths: &[usize]) -> Self {
        let (width, kv_width) = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim);
        let mut rows = |width: usize| -> Vec<Vec<f32>> {
            lengths.iter().map(|len| random.values(len * width)).collect()
        };
        let (keys, values, queries) = (rows(kv_width), rows(kv_width), rows(width));
        Self { spec, span: AttentionSpan::Full, kind, lengths: lengths.to_vec(), keys, values, queries }
    }

    /// Writes all tokens in a first step. Then each step computes attention for ranges of
    /// sequences.
    pub(crate) fn run<B: Backend>(
        &self,
        b: &mut B,
        block_tokens: usize,
        steps: &[Vec<(usize, Range<usize>)>],
    ) -> Result<Vec<Vec<f32>>> {
        let AttentionSpec { heads, kv_heads, head_dim, .. } = self.spec;
        let layer = KvLayer { kv_heads, head_dim, kind: self.kind, span: self.span };
        let tables = self.tables(block_tokens);
        let tables: Vec<&[u32]> = tables.iter().map(Vec::as_slice).collect();
        let blocks = tables.iter().map(|table| table.len()).sum::<usize>() + 2;
        let mut kv = b.kv(&KvLayout { block_tokens, blocks, layers: vec![layer; 2] })?;

        let all: Vec<_> = self.lengths.iter().map(|&len| 0..len).enumerate().collect();
        let rows = begin(b, block_tokens, &tables, &all)?;
        let keys = filled(b, rows, kv_heads * head_dim, &self.keys.concat())?;
        let written = filled(b, rows, kv_heads * head_dim, &self.values.concat())?;
        b.kv_write(&mut kv, 1, &keys, &written, rows)?;

        let width = heads * head_dim;
        let mut results = Vec::new();
        for parts in steps {
            let rows = begin(b, block_tokens, &tables, parts)?;
            let queries: Vec<f32> = (parts.iter())
                .flat_map(|(sequence, range)| {
                    &self.queries[*sequence][range.start * width..range.end * width]
                })
                .copied()
                .collect();
            let queries = filled(b, rows, width, &queries)?;
            let mut out = b.tensor(rows, width)?;
            b.attention(&kv, 1, &queries, &self.spec, &mut out, rows)?;
            results.push(values(b, &out, rows, width)?);
        }
        Ok(results)
    }

    /// Block tables with falling block ids. The blocks of the sequences are interleaved.
    fn tables(&self, block_tokens: usize) -> Vec<Vec<u32>> {
        let needed: Vec<usize> = self.lengths.iter().map(|len| len.div_ceil(block_tokens)).collect();
        let mut next = needed.iter().sum::<usize>() as u32 + 1;
        let mut tables = vec![Vec::new(); needed.len()];
        while tables.iter().zip(&needed).any(|(table, &needed)| table.len() < needed) {
            for (table, &needed) in tables.iter_mut().zip(&needed) {
                if table.len() < needed {
                    table.push(next);
                    next -= 1;
                }
            }
        }
        tables
    }
}

pub(crate) fn begin<B: Backend>(
    b: &mut B,
    block_tokens: usize,
    tables: &[&[u32]],
    parts: &[(usize, Range<usize>)],
) -> Result<usize> {
    let (mut positions, mut sequences, mut slots) = (Vec::new(), Vec::new(), Vec::new());
    for (sequence, range) in parts {
        for position in range.clone() {
            positions.push(position as u32);
            sequences.push(*sequence as u32);
            let block = tables[*sequence][position / block_tokens];
            slots.push(block * block_tokens as u32 + (position % block_tokens) as u32);
        }
    }
    let tokens = vec![0; positions.len()];
    b.begin(&Step {
        tokens: &tokens,
        positions: &positions,
        sequences: &sequences,
        kv_slots: &slots,
        tables,
        outputs: &[],
    })?;
    Ok(positions.len())
}

pub(crate) fn it_is_that_of_the_reference(gpu: &TestGpu) -> Result<()> {
    let mut random = TestRng::new(11);
    let shapes = [
        (4, 2, 64, true),
        (8, 2, 128, true),
        (14, 2, 64, true),
        (6, 2, 96, true),
        (5, 1, 128, true),
        (6, 2, 80, true),
        (8, 2, 192, true),
        (4, 2, 256, true),
        (16, 1, 64, true),
        (3, 1, 16, false),
        (9, 1, 24, false),
        (40, 2, 64, false),
        (1, 1, 5, false),
    ];
    for kind in KvType::ALL {
        for (heads, kv_heads, head_dim, tiles) in shapes {
            let lengths = if gpu.small { [1, 40, 16, 81, 70, 65, 64] } else { [1, 40, 16, 300, 257, 65, 64] };
            let paged = PagedAttention::new(&mut random, spec(heads, kv_heads, head_dim), kind, &lengths);
            let step: Vec<_> = [1, 40, 3, 80, 1, 1, 2]
                .iter()
                .zip(lengths)
                .map(|(last, len)| len - last..len)
                .enumerate()
                .collect();
            let steps = [step];
            let found = paged.run(&mut Cuda::new(&gpu.device)?, 16, &steps)?;
            let expected = paged.run(&mut Reference::new(), 16, &steps)?;
            let tolerance = if tiles { tile_tolerance(kind) } else { PLAIN_TOLERANCE };
            let what = format!("{heads} heads on {kv_heads} of {head_dim}, {kind:?}");
            close(&what, &found.concat(), &expected.concat(), tolerance)?;
        }
    }
    Ok(())
}

pub(crate) fn it_survives_long_contexts_and_extreme_scores(gpu: &TestGpu) -> Result<()> {
    let mut random = TestRng::new(12);
    for (kind, len, scale, tolerance) in [
        (KvType::F16, 9_000, 1.0, tile_tolerance(KvType::F16)),
        (KvType::F16, 700, 30.0, 0.1),
        (KvType::Bf16, 9_000, 1.0, tile_tolerance(KvType::Bf16)),
        (KvType::Bf16, 700, 4.0, 0.1),
        (KvType::Q8_0, 9_000, 1.0, tile_tolerance(KvType::Q8_0)),
        (KvType::Q8_0, 700, 30.0, 0.15),
        (KvType::F32, 5_000, 1.0, PLAIN_TOLERANCE),
        (KvType::F32, 700, 200.0, 1e-3),
    ] {
        let len = if gpu.small { len.min(130) } else { len };
        let mut paged = PagedAttention::new(&mut random, spec(4, 1, 64), kind, &[len]);
        paged.queries[0].iter_mut().for_each(|x| *x *= scale);
        // These steps use both the split-KV kernel and the prefill kernel.
        let steps = [vec![(0, len - 1..len)], vec![(0, len - 2..len)], vec![(0, len - 66..len)]];
        let found = paged.run(&mut Cuda::new(&gpu.device)?, 16, &steps)?;
        let expected = paged.run(&mut Reference::new(), 16, &steps)?;
        close(
            &format!("{kind:?}, {len} keys, queries times {scale}"),
            &found.concat(),
            &expected.concat(),
            tolerance,
        )?;
    }
    Ok(())
}

/// Returns the values that a cache of `kind` holds after `x` was written. `x` is rows of whole
/// heads.
fn stored(kind: KvType, head_dim: usize, x: &[f32]) -> Vec<f32> {
    match kind {
        KvType::F32 => x.to_vec(),
        KvType::F16 => x.iter().map(|&x| half::f16::from_f32(x).to_f32()).collect(),
        KvType::Bf16 => x.iter().map(|&x| half::bf16::from_f32(x).to_f32()).collect(),
        KvType::Q8_0 => (x.chunks(head_dim))
            .flat_map(|head| head.chunks(32))
            .flat_map(|part| {
                let mut whole = [0.0; 32];
                whole[..part.len()].copy_from_slice(part);
                let block = quant::BlockQ8_0::encode(&whole);
                let scale = block.d.to_f32();
                block.qs.iter().take(part.len()).map(|&q| scale * f32::from(q)).collect::<Vec<f32>>()
            })
            .collect(),
    }
}

/// Compares long contexts of several heads with naive.cu. At these positions, splits of the
/// split-KV and the prefill kernel have several tiles.
pub(crate) fn long_contexts_match_the_naive_kernel(gpu: &TestGpu) -> Result<()> {
    let mut rng = TestRng::new(18);
    let naive = NaiveKernels::new(&gpu.device);
    let len = if gpu.small { 130 } else { 6_000 };
    for kind in KvType::ALL {
        for (heads, kv_heads, head_dim) in
            [(8, 2, 128), (6, 2, 96), (4, 1, 64), (4, 2, 256), (4, 2, 80), (4, 1, 192)]
        {
            let spec = spec(heads, kv_heads, head_dim);
            let paged = PagedAttention::new(&mut rng, spec, kind, &[len]);
            let on_device = |x: &[f32]| Buffer::from_host(&gpu.stream, &stored(kind, head_dim, x));
            let (keys, values) = (on_device(&paged.keys[0])?, on_device(&paged.values[0])?);
            for tokens in [1, 3, 100] {
                let range = len - tokens..len;
                let found = paged.run(&mut Cuda::new(&gpu.device)?, 16, &[vec![(0, range.clone())]])?;
                let width = heads * head_dim;
                let queries = Buffer::from_host(
                    &gpu.stream,
                    &paged.queries[0][range.start * width..range.end * width],
                )?;
                let mut out = Buffer::<f32>::new(&gpu.device, tokens * width)?;
                naive.attention(
                    &gpu.stream,
                    &spec,
                    queries.view(),
                    keys.view(),
                    values.view(),
                    range.start,
                    &mut out.view_mut(),
                )?;
                let what =
                    format!("{heads} heads on {kv_heads} of {head_dim}, {kind:?}, last {tokens} of {len}");
                let tolerance = match kind {
                    KvType::F32 => LONG_CONTEXT_TOLERANCE,
                    // Large scores magnify the rounding of queries: 2.1e-3 measured for f16.
                    kind => 2.0 * tile_tolerance(kind),
                };
                close(&what, &found.concat(), &out.to_host(&gpu.stream)?, tolerance)?;
            }
        }
    }
    Ok(())
}

/// Uses values near the limits of each type. With factors below 1, keys are so small that scores
/// hardly differ: only the number of keys matters.
pub(crate) fn it_has_the_range_of_its_type(gpu: &TestGpu) -> Result<()> {
    let mut random = TestRng::new(17);
    for (kind, factors) in
        [(KvType::F16, [500.0, 1e-4]), (KvType::Bf16, [1e30, 1e-30]), (KvType::Q8_0, [500.0, 1e-5])]
    {
        for (factor, head_dim) in
            factors.into_iter().flat_map(|factor| [(factor, 64), (factor, 96), (factor, 40)])
        {
            let mut paged = PagedAttention::new(&mut random, spec(4, 2, head_dim), kind, &[90, 33]);
            paged.values.iter_mut().flatten().for_each(|x| *x *= factor);
            if factor < 1.0 {
                paged.keys.iter_mut().flatten().for_each(|x| *x *= factor);
            }
            let steps = [vec![(0, 89..90), (1, 0..33)], vec![(0, 0..90)]];
            let found = paged.run(&mut Cuda::new(&gpu.device)?, 16, &steps)?;
            let expected = paged.run(&mut Reference::new(), 16, &steps)?;
            let tolerance = if head_dim == 40 { PLAIN_TOLERANCE } else { tile_tolerance(kind) };
            close(
                &format!("{kind} times {factor:e}, {head_dim}"),
                &found.concat(),
                &expected.concat(),
                tolerance,
            )?;
        }
    }
    Ok(())
}

/// Windows shorter than a split, shorter than what splits of one tile hold, and longer.
const SPANS: [AttentionSpan; 4] = [
    AttentionSpan::Full,
    AttentionSpan::Window { tokens: 100 },
    AttentionSpan::Window { tokens: 1_024 },
    AttentionSpan::Window { tokens: 2_500 },
];

/// So many sequences fill the device that a block merges all splits of its rows. The last tokens of
/// each sequence have the bits that they have alone, when each split has a block.
pub(crate) fn rows_that_fill_the_device_have_the_bits_of_single_rows(gpu: &TestGpu) -> Result<()> {
    const SEQUENCES: usize = 60;
    let mut random = TestRng::new(19);
    for kind in [KvType::F16, KvType::Bf16, KvType::Q8_0] {
        for (heads, kv_heads, head_dim, is_long) in [
            (8, 4, 64, true),
            (12, 4, 96, false),
            (8, 8, 128, false),
            (16, 4, 128, false),
            (8, 4, 256, true),
            (8, 4, 80, false),
            (8, 2, 192, false),
            (40, 4, 64, false),
        ] {
            // From position 2,048 on, splits have two tiles.
            let lengths: Vec<usize> = (0..SEQUENCES)
                .map(|sequence| match (is_long && !gpu.small, sequence % 3) {
                    (false, _) => 100 + 37 * sequence % 130,
                    (true, 0) => 2_010 + sequence,
                    (true, _) => 1_000 + 7 * sequence,
                })
                .collect();
            let mut paged = PagedAttention::new(&mut random, spec(heads, kv_heads, head_dim), kind, &lengths);
            let mut cuda = Cuda::new(&gpu.device)?;
            let last = |sequence: usize| {
                let len = lengths[sequence];
                (sequence, len - 1 - sequence % 4..len)
            };
            let parts: Vec<_> = (0..SEQUENCES).map(last).collect();
            let width = heads * head_dim;
            for span in SPANS {
                paged.span = span;
                let together = paged.run(&mut cuda, 16, std::slice::from_ref(&parts))?.concat();
                let alone: Vec<_> = (0..SEQUENCES).map(|sequence| vec![last(sequence)]).collect();
                let alone = paged.run(&mut cuda, 16, &alone)?.concat();
                ensure!(together.iter().all(|x| x.is_finite()), "a value is not finite");
                ensure!(together.len() == alone.len(), "{} values, {} alone", together.len(), alone.len());
                let differs = together.iter().zip(&alone).position(|(a, b)| a.to_bits() != b.to_bits());
                let what = format!("{heads} heads on {kv_heads} of {head_dim}, {kind:?}, {span:?}");
                if let Some(at) = differs {
                    anyhow::bail!("{what}: row {}, value {} has other bits", at / width, at % width);
                }
            }
        }
    }
    Ok(())
}

/// Some steps begin at positions at which the length of splits changes, and some contain such
/// positions.
pub(crate) fn it_depends_on_neither_chunks_nor_batch_neighbours_nor_blocks(gpu: &TestGpu) -> Result<()> {
    let mut random = TestRng::new(13);
    for (heads, kv_heads, head_dim, kind) in [
        (4, 1, 64, KvType::F16),
        (8, 2, 128, KvType::F16),
        (6, 2, 96, KvType::F16),
        (3, 1, 48, KvType::F16),
        (4, 2, 256, KvType::F16),
        (3, 1, 80, KvType::F16),
        (4, 1, 192, KvType::F16),
        (4, 2, 256, KvType::Bf16),
        (4, 2, 256, KvType::Q8_0),
        (3, 1, 80, KvType::Q8_0),
        (4, 1, 192, KvType::Q8_0),
        (2, 1, 64, KvType::F32),
        (4, 1, 64, KvType::Bf16),
        (8, 2, 128, KvType::Bf16),
        (4, 1, 64, KvType::Q8_0),
        (8, 2, 128, KvType::Q8_0),
        (6, 2, 96, KvType::Q8_0),
        (3, 1, 48, KvType::Q8_0),
    ] {
        for span in SPANS {
            let spec = spec(heads, kv_heads, head_dim);
            chunks_neighbours_and_blocks_change_nothing(gpu, &mut random, spec, kind, span)?;
        }
    }
    Ok(())
}

fn chunks_neighbours_and_blocks_change_nothing(
    gpu: &TestGpu,
    random: &mut TestRng,
    spec: AttentionSpec,
    kind: KvType,
    span: AttentionSpan,
) -> Result<()> {
    let AttentionSpec { heads, kv_heads, head_dim, .. } = spec;
    let tiles = kind != KvType::F32 && head_dim != 48;
    let lengths = match (tiles, gpu.small) {
        (_, true) => [170, 130, 70],
        (true, false) => [4_300, 130, 2_100],
        (false, false) => [330, 130, 70],
    };
    let mut paged = PagedAttention::new(random, spec, kind, &lengths);
    paged.span = span;
    let width = heads * head_dim;
    let mut cuda = Cuda::new(&gpu.device)?;
    // Each sequence as one chunk, without batch neighbours.
    let alone: Vec<_> = lengths.iter().map(|&len| 0..len).enumerate().map(|part| vec![part]).collect();
    let whole = paged.run(&mut cuda, 16, &alone)?;
    ensure!(whole.concat().iter().all(|x| x.is_finite()), "a value is not finite");

    let len = lengths[0];
    let mut steps: Vec<Vec<(usize, Range<usize>)>> = Vec::new();
    // Decode rows of all sequences together.
    for back in [1, 2, 63, 64, 65, 129] {
        steps.push(
            lengths.iter().map(|len| len.saturating_sub(back)).map(|at| at..at + 1).enumerate().collect(),
        );
    }
    for at in [0, 1, 63, 64, 255, 256, 300, 511, 512, 700, 1023, 1024, 1500, 2047, 2048, 2049, 4095, 4096] {
        if at < len {
            steps.push(vec![(0, at..at + 1)]);
        }
    }
    // Chunks of all sizes at odd positions, in steps with decode rows.
    let mut at = 7;
    let sizes: &[usize] =
        if gpu.small { &[1, 2, 17, 64] } else { &[1, 2, 3, 5, 17, 40, 63, 64, 65, 100, 500, 3000] };
    for size in sizes {
        let end = (at + size).min(len);
        steps.push(vec![(1, 99..100), (0, at..end), (2, 3..68)]);
        at = end % (len - 1);
    }
    steps.push(vec![(0, len.saturating_sub(2300)..len), (1, 0..130)]);
    for block_tokens in [16, 1, 24, 64].into_iter().take(if gpu.small { 1 } else { 4 }) {
        let found = paged.run(&mut cuda, block_tokens, &steps)?;
        for (step, found) in steps.iter().zip(found) {
            let expected = step
                .iter()
                .flat_map(|(sequence, range)| &whole[*sequence][range.start * width..range.end * width]);
            let differs = found.iter().zip(expected).position(|(a, b)| a.to_bits() != b.to_bits());
            ensure!(
                differs.is_none(),
                "{heads} heads on {kv_heads} of {head_dim}, {kind:?}, {span:?}, blocks of {block_tokens}, step {step:?}: value {differs:?}"
            );
        }
    }
    Ok(())
}

/// On a large GPU, clusters compute rows of these lengths: two blocks and two rounds if there are
/// 16 rows, and up to four blocks for each alone.
pub(crate) fn clusters_have_the_bits_of_other_kernels(gpu: &TestGpu) -> Result<()> {
    let lengths: Vec<usize> = match gpu.small {
        true => vec![300, 270],
        false => (0..16).map(|sequence| 400 + 37 * sequence % 600).collect(),
    };
    let shapes = [(8, 4, 64), (12, 4, 96), (16, 4, 128), (12, 4, 80), (8, 1, 128), (32, 2, 128)];
    rows_have_the_bits_of_other_kernels(gpu, &lengths, &shapes)
}

/// On an H200, blocks compute two splits of these rows at a time. Rows alone have groups.
pub(crate) fn two_groups_have_the_bits_of_other_kernels(gpu: &TestGpu) -> Result<()> {
    let longest = if gpu.small { 200 } else { 1_000 };
    let lengths: Vec<usize> = (0..40).map(|sequence| longest - 13 * sequence % (longest / 3)).collect();
    rows_have_the_bits_of_other_kernels(gpu, &lengths, &[(8, 4, 64), (12, 4, 96), (64, 4, 128), (12, 4, 80)])
}

/// Compares the last rows of sequences, together and alone, with the last rows of runs of two
/// tokens, which have a block for each split. `shapes` are heads, KV heads and head dimensions.
fn rows_have_the_bits_of_other_kernels(
    gpu: &TestGpu,
    lengths: &[usize],
    shapes: &[(usize, usize, usize)],
) -> Result<()> {
    let mut random = TestRng::new(23);
    let rows = |tokens: usize| lengths.iter().map(move |&len| len - tokens..len).enumerate();
    for kind in [KvType::F16, KvType::Bf16, KvType::Q8_0] {
        for &(heads, kv_heads, head_dim) in shapes {
            let paged = PagedAttention::new(&mut random, spec(heads, kv_heads, head_dim), kind, lengths);
            let mut cuda = Cuda::new(&gpu.device)?;
            let width = heads * head_dim;
            let together = paged.run(&mut cuda, 16, &[rows(1).collect()])?.concat();
            let alone: Vec<_> = rows(1).map(|row| vec![row]).collect();
            let alone = paged.run(&mut cuda, 16, &alone)?.concat();
            let runs: Vec<_> = rows(2).map(|run| vec![run]).collect();
            let runs = paged.run(&mut cuda, 16, &runs)?;
            let expected: Vec<f32> = runs.iter().flat_map(|run| &run[width..]).copied().collect();
            let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            for (what, found) in [("together", &together), ("alone", &alone)] {
                let what = format!("{heads} heads on {kv_heads} of {head_dim}, {kind:?}, {what}");
                ensure!(bits(found) == bits(&expected), "{what}");
            }
        }
    }
    Ok(())
}

/// Writes blocks that are far apart. The cache maps its units when they are written.
pub(crate) fn the_cache_grows_as_it_is_written(gpu: &TestGpu) -> Result<()> {
    let mut cuda = Cuda::new(&gpu.device)?;
    let layer = KvLayer { kv_heads: 2, head_dim: 64, kind: KvType::F16, span: AttentionSpan::Full };
    // The layout has 1 TiB, so it can only be reserved, not mapped.
    let layout = KvLayout { block_tokens: 16, blocks: 1 << 26, layers: vec![layer; 2] };
    let mut kv = cuda.kv(&layout)?;
    let unit = kv.mapped_bytes();
    ensure!((1..=64 << 20).contains(&unit), "{unit} bytes at the start");
    let mut random = TestRng::new(14);
    let (mut largest, shape) = (0, spec(4, 2, 64));
    let mut first: Option<Vec<f32>> = None;
    let (keys, queries) = (random.values(2 * 128), random.values(2 * 256));
    let random_row = queries[256..].to_vec();
    for block in [1_u32, 5_000, 20_000, 3, 50_000] {
        let step = Step {
            tokens: &[0, 0],
            positions: &[0, 1],
            sequences: &[0, 0],
            kv_slots: &[16 * block, 16 * block + 1],
            tables: &[&[block]],
            outputs: &[],
        };
        cuda.begin(&step)?;
        let (x, queries) = (filled(&mut cuda, 2, 128, &keys)?, filled(&mut cuda, 2, 256, &queries)?);
        let mut out = cuda.tensor(2, 256)?;
        cuda.kv_write(&mut kv, 1, &x, &x, 2)?;
        cuda.attention(&kv, 1, &queries, &shape, &mut out, 2)?;
        let found = values(&mut cuda, &out, 2, 256)?;
        ensure!(*first.get_or_insert_with(|| found.clone()) == found, "block {block} gives other bits");
        ensure!(kv.mapped_bytes() >= largest, "memory was taken away");
        largest = kv.mapped_bytes();
    }
    ensure!(largest < 2 << 30, "{largest} bytes behind 50,000 blocks of 16 KiB");
    let unwritten = Step {
        tokens: &[0],
        positions: &[0],
        sequences: &[0],
        kv_slots: &[16 * 7],
        tables: &[&[7]],
        outputs: &[],
    };
    cuda.begin(&unwritten)?;
    let queries = cuda.tensor(1, 256)?;
    let mut out = cuda.tensor(1, 256)?;
    let refused = cuda.attention(&kv, 1, &queries, &shape, &mut out, 1);
    ensure!(matches!(refused, Err(ops::OpError::Unwritten { block: 7, .. })), "{refused:?}");

    let first = first.context("no block was written")?;
    trim_keeps_lower_blocks(&mut cuda, &mut kv, &keys[128..], &random_row, &first[256..])?;
    cuda.trim(&mut kv, 0)?;
    ensure!(kv.mapped_bytes() == unit, "{} bytes are left", kv.mapped_bytes());
    Ok(())
}

/// Checks that `trim` keeps block 5,000 and its bits, but not block 20,000. Then the cache grows
/// again. `expected` is what `query` attends to in block 5,000.
fn trim_keeps_lower_blocks(
    cuda: &mut Cuda,
    kv: &mut CudaKv,
    keys: &[f32],
    query: &[f32],
    expected: &[f32],
) -> Result<()> {
    let (shape, largest) = (spec(4, 2, 64), kv.mapped_bytes());
    cuda.trim(kv, 5_001)?;
    ensure!(kv.mapped_bytes() < largest, "{} of {largest} bytes are left", kv.mapped_bytes());
    for block in [5_000_u32, 20_000] {
        let step = Step {
            tokens: &[0],
            positions: &[1],
            sequences: &[0],
            kv_slots: &[16 * block + 1],
            tables: &[&[block]],
            outputs: &[],
        };
        cuda.begin(&step)?;
        let last = filled(cuda, 1, 256, query)?;
        let mut out = cuda.tensor(1, 256)?;
        let kept = cuda.attention(kv, 1, &last, &shape, &mut out, 1);
        if block == 5_000 {
            kept?;
            let found = values(cuda, &out, 1, 256)?;
            ensure!(found == expected, "block 5,000 has lost its bits");
        } else {
            ensure!(matches!(kept, Err(ops::OpError::Unwritten { block: 20_000, .. })), "{kept:?}");
            let x = filled(cuda, 1, 128, keys)?;
            cuda.kv_write(kv, 1, &x, &x, 1)?;
            cuda.attention(kv, 1, &last, &shape, &mut out, 1)?;
            values(cuda, &out, 1, 256)?;
        }
    }
    Ok(())
}
