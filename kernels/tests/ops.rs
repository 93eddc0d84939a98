//! Every op but the linear layers against `ops::Reference`, and against itself: the same bits on every instruction set,
//! for any number of threads, rows in a step, and tokens in a block.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod random;

use bytes::Bytes;
use kernels::{Cpu, Isa};
use ops::{
    Activation, AttentionSpec, Backend, Experts, KvLayer, KvLayout, KvType, OpError, Reference, RopePairing,
    RopeSpec, Step, Weight,
};
use quant::DType;
use random::{DTYPES, Random};

fn weight<B: Backend<Data = Bytes>>(dtype: DType, dims: &[usize], data: &Bytes) -> Weight<B> {
    Weight { dtype, dims: dims.to_vec(), layout: 0, data: data.clone() }
}

fn filled<B: Backend>(backend: &mut B, rows: usize, cols: usize, host: &[f32]) -> B::Tensor {
    let mut tensor = backend.tensor(rows, cols).unwrap();
    backend.write(&mut tensor, rows, host).unwrap();
    tensor
}

fn values<B: Backend>(backend: &mut B, tensor: &B::Tensor, len: usize, rows: usize) -> Vec<f32> {
    let mut host = vec![0.0; len];
    backend.read(tensor, rows, &mut host).unwrap();
    host
}

/// Runs `op` on the reference and on every instruction set with one to three threads.
#[track_caller]
fn check(tolerance: f32, reference: impl Fn(&mut Reference) -> Vec<f32>, op: impl Fn(&mut Cpu) -> Vec<f32>) {
    let expected = reference(&mut Reference::new());
    let largest = expected.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
    let mut first: Option<Vec<u32>> = None;
    for isa in Isa::available() {
        for threads in 1..=3 {
            let found = op(&mut Cpu::with_isa(threads, isa).unwrap());
            assert_eq!(found.len(), expected.len());
            for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let difference = (found - expected).abs();
                assert!(
                    difference <= tolerance * largest,
                    "{isa}, {threads} threads: value {i} is {found:e}, expected {expected:e}"
                );
            }
            let bits: Vec<u32> = found.iter().map(|x| x.to_bits()).collect();
            assert!(
                *first.get_or_insert_with(|| bits.clone()) == bits,
                "{isa}, {threads} threads: other bits"
            );
        }
    }
}

/// The same generic body on the reference and on `Cpu`.
macro_rules! check {
    ($tolerance:expr, $body:ident($($argument:expr),*)) => {
        check($tolerance, |b| $body(b, $($argument),*), |b| $body(b, $($argument),*))
    };
}

fn norms<B: Backend<Data = Bytes>>(
    b: &mut B,
    rows: usize,
    head: usize,
    heads: usize,
    x: &[f32],
    w: &Bytes,
) -> Vec<f32> {
    let cols = head * heads;
    let len = rows * cols;
    let full = weight(DType::F32, &[cols], w);
    let per_head = weight(DType::F32, &[head], &w.slice(..4 * head));
    let (mut sum, y) = (filled(b, rows, cols, x), filled(b, rows, cols, x));
    let (mut first, mut second) = (b.tensor(rows, cols).unwrap(), b.tensor(rows, cols).unwrap());
    b.rms_norm(&sum, &full, 1e-6, &mut first, rows).unwrap();
    b.add_rms_norm(&mut sum, &y, &full, 1e-5, &mut second, rows).unwrap();
    b.add(&mut first, &y, rows).unwrap();
    b.rms_norm_heads(&mut first, &per_head, 1e-6, rows).unwrap();
    [values(b, &first, len, rows), values(b, &second, len, rows), values(b, &sum, len, rows)].concat()
}

#[test]
fn norms_and_sums_are_those_of_the_reference() {
    let mut random = Random(1);
    for (rows, head, heads) in [(1, 64, 4), (3, 20, 3), (70, 128, 8), (2, 7, 1)] {
        let x = random.values(rows * head * heads);
        let w = random::encoded(&mut random, DType::F32, head * heads, 1);
        check!(1e-6, norms(rows, head, heads, &x, &w));
    }
}

fn gate<B: Backend<Data = Bytes>>(b: &mut B, rows: usize, cols: usize, x: &[f32], y: &[f32]) -> Vec<f32> {
    let (x, y) = (filled(b, rows, cols, x), filled(b, rows, cols, y));
    let mut out = b.tensor(rows, cols).unwrap();
    b.gated(Activation::Silu, &x, &y, &mut out, rows).unwrap();
    values(b, &out, rows * cols, rows)
}

#[test]
fn gates_are_those_of_the_reference() {
    let mut random = Random(2);
    for (rows, cols, scale) in [(1, 33, 1.0), (5, 256, 20.0), (40, 1000, 200.0)] {
        let x: Vec<f32> = random.values(rows * cols).into_iter().map(|x| x * scale).collect();
        let y = random.values(rows * cols);
        check!(1e-6, gate(rows, cols, &x, &y));
    }
}

fn rotated<B: Backend<Data = Bytes>>(
    b: &mut B,
    spec: &RopeSpec,
    head_dim: usize,
    heads: usize,
    positions: &[u32],
    x: &[f32],
) -> Vec<f32> {
    let rows = positions.len();
    let zeros = vec![0; rows];
    let rope = b.rope_table(spec).unwrap();
    let mut out = Vec::new();
    // A second step at other positions: angles must not be those of the first.
    for shift in [0, 5] {
        let positions: Vec<u32> = positions.iter().map(|position| position + shift).collect();
        let step = Step {
            tokens: &zeros,
            positions: &positions,
            sequences: &zeros,
            kv_slots: &zeros,
            tables: &[&[]],
            outputs: &[],
        };
        b.begin(&step).unwrap();
        let mut tensor = filled(b, rows, head_dim * heads, x);
        b.rope(&mut tensor, &rope, head_dim, rows).unwrap();
        out.extend(values(b, &tensor, x.len(), rows));
    }
    out
}

#[test]
fn rotations_are_those_of_the_reference() {
    let mut random = Random(3);
    for pairing in [RopePairing::Adjacent, RopePairing::Halves] {
        for (head_dim, pairs, rows, last) in [(64, 32, 3, 100), (80, 20, 40, 100_000), (128, 64, 33, 1_000)] {
            let inverse_frequencies =
                (0..pairs).map(|i| 10_000_f32.powf(-(i as f32) / pairs as f32)).collect();
            let spec = RopeSpec { pairing, inverse_frequencies, magnitude: 1.25 };
            let positions: Vec<u32> = (0..rows).map(|_| random.next() as u32 % last).collect();
            let x = random.values(rows * 8 * head_dim);
            check!(1e-6, rotated(&spec, head_dim, 8, &positions, &x));
        }
    }
}

fn embedded<B: Backend<Data = Bytes>>(
    b: &mut B,
    dtype: DType,
    table: &Bytes,
    cols: usize,
    rows: usize,
) -> Vec<f32> {
    let tokens = [3, 0, rows as u32 - 1, 3];
    let zeros = [0; 4];
    let step = Step {
        tokens: &tokens,
        positions: &zeros,
        sequences: &zeros,
        kv_slots: &zeros,
        tables: &[&[]],
        outputs: &[1, 3],
    };
    b.begin(&step).unwrap();
    let table = weight(dtype, &[cols, rows], table);
    let (mut out, mut gathered) = (b.tensor(4, cols).unwrap(), b.tensor(2, cols).unwrap());
    b.embed(&table, &mut out, 4).unwrap();
    b.gather_outputs(&out, 0..2, &mut gathered).unwrap();
    let mut all = [values(b, &out, 4 * cols, 4), values(b, &gathered, 2 * cols, 2)].concat();
    b.gather_outputs(&out, 1..2, &mut gathered).unwrap();
    all.extend(values(b, &gathered, cols, 1));
    assert!(b.gather_outputs(&out, 1..3, &mut gathered).is_err(), "there are two outputs");
    all
}

#[test]
fn embeddings_are_those_of_the_reference() {
    let mut random = Random(4);
    for dtype in DTYPES {
        let table = random::encoded(&mut random, dtype, 256, 9);
        check!(0.0, embedded(dtype, &table, 256, 9));
    }
}

#[derive(Clone)]
struct Paged {
    spec: AttentionSpec,
    kind: KvType,
    block_tokens: usize,
    /// Length of each sequence, and how many of its last tokens are queries.
    sequences: Vec<(usize, usize)>,
    /// First tokens of each sequence whose blocks are those of sequence 0.
    shared: usize,
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
    queries: Vec<Vec<f32>>,
}

impl Paged {
    fn new(random: &mut Random, spec: AttentionSpec, kind: KvType, sequences: &[(usize, usize)]) -> Self {
        let (width, kv_width) = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim);
        let mut rows = |width: usize| -> Vec<Vec<f32>> {
            sequences.iter().map(|&(len, _)| random.values(len * width)).collect()
        };
        let (keys, values, queries) = (rows(kv_width), rows(kv_width), rows(width));
        let sequences = sequences.to_vec();
        Self { spec, kind, block_tokens: 16, sequences, shared: 0, keys, values, queries }
    }

    /// Writes all tokens in a first step, and asks for the last ones of every sequence in a second.
    fn run<B: Backend>(&self, b: &mut B) -> Vec<f32> {
        let AttentionSpec { heads, kv_heads, head_dim, .. } = self.spec;
        let layer = KvLayer { kv_heads, head_dim, kind: self.kind };
        let tables = self.tables();
        let tables: Vec<&[u32]> = tables.iter().map(Vec::as_slice).collect();
        let blocks = tables.iter().map(|table| table.len()).sum::<usize>() + 2;
        let layout = KvLayout { block_tokens: self.block_tokens, blocks, layers: vec![layer; 2] };
        let mut kv = b.kv(&layout).unwrap();

        let kv_width = kv_heads * head_dim;
        let own = |index: usize| if index == 0 { 0 } else { self.shared };
        let written = self.sequences.iter().enumerate().map(|(index, &(len, _))| own(index)..len);
        let rows = self.begin(b, &tables, written);
        let of_own = |all: &[Vec<f32>]| {
            let own = all.iter().enumerate().map(|(index, rows)| &rows[own(index) * kv_width..]);
            own.collect::<Vec<_>>().concat()
        };
        let keys = filled(b, rows, kv_width, &of_own(&self.keys));
        let values_ = filled(b, rows, kv_width, &of_own(&self.values));
        b.kv_write(&mut kv, 1, &keys, &values_, rows).unwrap();

        let asked = self.sequences.iter().map(|&(len, last)| len - last..len);
        let rows = self.begin(b, &tables, asked.clone());
        let width = heads * head_dim;
        let queries: Vec<f32> = (self.queries.iter().zip(asked))
            .flat_map(|(queries, range)| queries[range.start * width..range.end * width].to_vec())
            .collect();
        let queries = filled(b, rows, width, &queries);
        let mut out = b.tensor(rows, width).unwrap();
        b.attention(&kv, 1, &queries, &self.spec, &mut out, rows).unwrap();
        values(b, &out, rows * width, rows)
    }

    /// Blocks of the sequences interleaved, from the last one down.
    fn tables(&self) -> Vec<Vec<u32>> {
        let needed: Vec<usize> =
            self.sequences.iter().map(|&(len, _)| len.div_ceil(self.block_tokens)).collect();
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
        let shared = tables[0][..self.shared / self.block_tokens].to_vec();
        tables.iter_mut().for_each(|table| table[..shared.len()].copy_from_slice(&shared));
        tables
    }

    fn begin<B: Backend>(
        &self,
        b: &mut B,
        tables: &[&[u32]],
        ranges: impl Iterator<Item = std::ops::Range<usize>>,
    ) -> usize {
        let (mut positions, mut sequences, mut slots) = (Vec::new(), Vec::new(), Vec::new());
        for (sequence, range) in ranges.enumerate() {
            for position in range {
                positions.push(position as u32);
                sequences.push(sequence as u32);
                let block = tables[sequence][position / self.block_tokens];
                slots.push(block * self.block_tokens as u32 + (position % self.block_tokens) as u32);
            }
        }
        let tokens = vec![0; positions.len()];
        let step = Step {
            tokens: &tokens,
            positions: &positions,
            sequences: &sequences,
            kv_slots: &slots,
            tables,
            outputs: &[],
        };
        b.begin(&step).unwrap();
        positions.len()
    }
}

fn attended<B: Backend<Data = Bytes>>(b: &mut B, paged: &Paged) -> Vec<f32> {
    paged.run(b)
}

fn spec(heads: usize, kv_heads: usize, head_dim: usize) -> AttentionSpec {
    AttentionSpec { heads, kv_heads, head_dim, scale: 1.0 / (head_dim as f32).sqrt() }
}

#[test]
fn attention_is_that_of_the_reference() {
    let mut random = Random(5);
    for kind in KvType::ALL {
        for (heads, kv_heads, head_dim) in
            [(4, 2, 64), (3, 1, 16), (9, 1, 24), (2, 2, 128), (16, 2, 8), (1, 1, 5), (2, 1, 80)]
        {
            let sequences = [(1, 1), (40, 40), (16, 3), (300, 20), (257, 1)];
            let paged = Paged::new(&mut random, spec(heads, kv_heads, head_dim), kind, &sequences);
            check!(2e-6, attended(&paged));
        }
    }
}

#[test]
fn attention_over_long_contexts_is_that_of_the_reference() {
    let mut random = Random(6);
    for kind in [KvType::F16, KvType::Q8_0] {
        // One row: with several threads the splits are pieces of their own.
        let paged = Paged::new(&mut random, spec(2, 1, 64), kind, &[(1500, 1)]);
        check!(2e-6, attended(&paged));
    }
}

#[test]
fn attention_survives_extreme_scores() {
    let mut random = Random(7);
    let mut paged = Paged::new(&mut random, spec(2, 1, 32), KvType::F32, &[(600, 9)]);
    for query in &mut paged.queries {
        query.iter_mut().for_each(|x| *x *= 200.0);
    }
    // Scores of some hundreds: their rounding shows in the shares.
    check!(1e-4, attended(&paged));
}

#[test]
fn attention_does_not_depend_on_blocks_or_company() {
    let mut random = Random(8);
    for (kind, head_dim) in [(KvType::F16, 64), (KvType::Q8_0, 64), (KvType::Q8_0, 40)] {
        let mut paged = Paged::new(&mut random, spec(4, 2, head_dim), kind, &[(530, 530), (70, 70)]);
        let width = 4 * head_dim;
        for isa in Isa::available() {
            let mut cpu = Cpu::with_isa(3, isa).unwrap();
            paged.block_tokens = 16;
            paged.sequences = vec![(530, 530), (70, 70)];
            let all = paged.run(&mut cpu);
            for block_tokens in [1, 7, 32, 64] {
                paged.block_tokens = block_tokens;
                assert!(paged.run(&mut cpu) == all, "{kind} {isa}: blocks of {block_tokens}");
            }
            paged.block_tokens = 16;
            for last in [1, 2, 3, 5, 8, 100] {
                paged.sequences = vec![(530, last), (70, last.min(70))];
                let some = paged.run(&mut cpu);
                let expected = &all[(530 - last) * width..530 * width];
                assert!(some[..last * width] == *expected, "{kind} {isa}: last {last}");
            }
        }
    }
}

/// Rows of sequences that share blocks are computed together, of those that do not each by itself.
#[test]
fn attention_does_not_depend_on_what_is_shared() {
    let mut random = Random(9);
    // Shared: some blocks of a split; one split; two and a part of one; four.
    let sequences = [(1040, 1), (1030, 40), (1026, 2), (1100, 1), (1025, 1)];
    for (kind, spec) in [
        (KvType::F16, spec(4, 2, 64)),
        (KvType::Q8_0, spec(4, 2, 40)),
        (KvType::F32, spec(3, 1, 16)),
        (KvType::Bf16, spec(2, 2, 24)),
    ] {
        let mut paged = Paged::new(&mut random, spec, kind, &sequences);
        for block_tokens in [16, 64] {
            paged.block_tokens = block_tokens;
            for shared in [64, 256, 640, 1024] {
                let prefix = shared * spec.kv_heads * spec.head_dim;
                for all in [&mut paged.keys, &mut paged.values] {
                    let (first, others) = all.split_first_mut().unwrap();
                    others.iter_mut().for_each(|rows| rows[..prefix].copy_from_slice(&first[..prefix]));
                }
                for isa in Isa::available() {
                    // With many threads the splits are pieces of their own.
                    for threads in [2, 16] {
                        let mut cpu = Cpu::with_isa(threads, isa).unwrap();
                        paged.shared = 0;
                        let apart = paged.run(&mut cpu);
                        paged.shared = shared;
                        assert!(paged.run(&mut cpu) == apart, "{kind} {isa}: {shared} tokens are shared");
                    }
                }
            }
        }
    }
}

/// Every second vector of 16 values times 1000, the others tiny: scales that differ inside a head and between tokens.
fn jagged(values: &mut [f32]) {
    for (i, part) in values.chunks_mut(16).enumerate() {
        let factor = [1e3, 1e-6, 1.0, 0.0][i % 4];
        part.iter_mut().for_each(|x| *x *= factor);
    }
}

#[test]
fn attention_over_jagged_values_is_that_of_the_reference() {
    let mut random = Random(10);
    for kind in KvType::ALL {
        for (heads, kv_heads, head_dim) in [(4, 2, 96), (2, 1, 48)] {
            let mut paged =
                Paged::new(&mut random, spec(heads, kv_heads, head_dim), kind, &[(70, 70), (300, 3)]);
            paged.keys.iter_mut().chain(&mut paged.values).for_each(|values| jagged(values));
            // Scores of some hundreds.
            check!(1e-4, attended(&paged));
        }
    }
}

/// The value of the only token is what attention gives.
#[test]
fn every_type_stores_what_it_is_specified_to() {
    let special =
        [0.0, -0.0, 1.0, -1.0, 127.0, 0.5, 1e-3, -1e-8, 6e-8, 1e-40, -1e-45, 65_504.0, 8.3e6, 1e30, f32::MAX];
    for kind in KvType::ALL {
        for head_dim in [1, 5, 31, 32, 33, 64, 80] {
            for special in special {
                // Some of them beside other values, and nothing else.
                let beside = |i| if i % 7 == 3 { special } else { (i as f32 - 8.0) / 8.0 };
                for value in [(0..head_dim).map(beside).collect(), vec![special; head_dim]] {
                    let mut expected = value.clone();
                    kind.round(&mut expected);
                    let zeros = vec![0.0; head_dim];
                    let paged = Paged {
                        spec: spec(1, 1, head_dim),
                        kind,
                        block_tokens: 16,
                        shared: 0,
                        sequences: vec![(1, 1)],
                        keys: vec![zeros.clone()],
                        values: vec![value],
                        queries: vec![zeros],
                    };
                    for isa in Isa::available() {
                        let found = paged.run(&mut Cpu::with_isa(1, isa).unwrap());
                        for (found, expected) in found.iter().zip(&expected) {
                            // Infinite or no number: which of them is not specified.
                            let same = found == expected || !(found.is_finite() || expected.is_finite());
                            assert!(
                                same,
                                "{kind} {isa}, {head_dim}, {special:e}: {found:e}, not {expected:e}"
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn what_is_no_number_is_seen_by_its_readers_only() {
    for kind in KvType::ALL {
        for bad in [f32::NAN, f32::INFINITY] {
            let mut random = Random(11);
            let mut paged = Paged::new(&mut random, spec(2, 1, 64), kind, &[(40, 40)]);
            let clean = paged.run(&mut Cpu::new(1).unwrap());
            paged.values[0][20 * 64 + 5] = bad;
            let width = 2 * 64;
            for isa in Isa::available() {
                let found = paged.run(&mut Cpu::with_isa(1, isa).unwrap());
                assert!(found[..20 * width] == clean[..20 * width], "{kind} {isa}: earlier positions");
                for row in found[20 * width..].chunks(width) {
                    assert!(!row[5].is_finite() && !row[64 + 5].is_finite(), "{kind} {isa}: {bad} is hidden");
                    assert!(row[40].is_finite(), "{kind} {isa}: another scale");
                }
            }
        }
    }
}

fn mixed<B: Backend<Data = Bytes>>(b: &mut B, stacks: &[Bytes; 3], router: &[f32], x: &[f32]) -> Vec<f32> {
    let (n_in, hidden, experts) = (64, 96, 5);
    let rows = x.len() / n_in;
    let layer = Experts {
        gate: weight(DType::Q8_0, &[n_in, hidden, experts], &stacks[0]),
        up: weight(DType::Q8_0, &[n_in, hidden, experts], &stacks[1]),
        down: weight(DType::Q8_0, &[hidden, n_in, experts], &stacks[2]),
        used: 2,
    };
    let (router, x) = (filled(b, rows, experts, router), filled(b, rows, n_in, x));
    let mut out = b.tensor(rows, n_in).unwrap();
    b.experts(&layer, Activation::Silu, &router, &x, &mut out, rows).unwrap();
    values(b, &out, rows * n_in, rows)
}

#[test]
fn experts_are_those_of_the_reference() {
    let mut random = Random(9);
    let stacks = [(64, 96), (64, 96), (96, 64)]
        .map(|(cols, rows)| random::encoded(&mut random, DType::Q8_0, cols, 5 * rows));
    let (router, x) = (random.values(7 * 5), random.values(7 * 64));
    // The gate's rounding may move an activation to another int8.
    check!(2e-2, mixed(&stacks, &router, &x));
}

#[test]
fn a_block_costs_memory_when_it_is_written() {
    let mut cpu = Cpu::new(1).unwrap();
    for (kind, token_bytes) in [(KvType::F16, 512), (KvType::Q8_0, 272)] {
        a_block_costs(&mut cpu, KvLayer { kv_heads: 2, head_dim: 64, kind }, token_bytes);
    }
}

fn a_block_costs(cpu: &mut Cpu, layer: KvLayer, token_bytes: u64) {
    // 1 TiB, or half of it: only a reservation can be that large.
    let layout = KvLayout { block_tokens: 16, blocks: 1 << 26, layers: vec![layer; 2] };
    let mut kv = cpu.kv(&layout).unwrap();
    assert_eq!(kv.used_bytes(), 0);
    let step = Step {
        tokens: &[0, 0],
        positions: &[0, 1],
        sequences: &[0, 0],
        kv_slots: &[16 * 60_000_000, 16 * 60_000_000 + 1],
        tables: &[&[60_000_000]],
        outputs: &[],
    };
    cpu.begin(&step).unwrap();
    let x = cpu.tensor(2, 128).unwrap();
    cpu.kv_write(&mut kv, 0, &x, &x, 2).unwrap();
    assert_eq!(kv.used_bytes(), 16 * token_bytes);
    assert_eq!(layer.token_bytes() as u64, token_bytes);
}

/// Attention over one sequence whose second block was copied, and the original then written over.
fn forked<B: Backend<Data = Bytes>>(b: &mut B, kind: KvType, rows: &[f32], over: &[f32]) -> [Vec<f32>; 2] {
    const WIDTH: usize = 2 * 32;
    let layer = KvLayer { kv_heads: 2, head_dim: 32, kind };
    let mut kv = b.kv(&KvLayout { block_tokens: 16, blocks: 8, layers: vec![layer; 2] }).unwrap();
    let mut attend = |b: &mut B, copy: Option<(u32, u32)>, table: [u32; 2], written: &[f32], first: u32| {
        if let Some(copy) = copy {
            b.kv_copy(&mut kv, &[copy]).unwrap();
        }
        let count = written.len() / WIDTH;
        let positions: Vec<u32> = (first..first + count as u32).collect();
        let slots: Vec<u32> = positions.iter().map(|p| table[(p / 16) as usize] * 16 + p % 16).collect();
        let step = Step {
            tokens: &vec![0; count],
            positions: &positions,
            sequences: &vec![0; count],
            kv_slots: &slots,
            tables: &[&table],
            outputs: &[],
        };
        b.begin(&step).unwrap();
        let x = filled(b, count, WIDTH, written);
        let mut out = b.tensor(count, WIDTH).unwrap();
        for layer in 0..2 {
            b.kv_write(&mut kv, layer, &x, &x, count).unwrap();
        }
        b.attention(&kv, 1, &x, &spec(2, 2, 32), &mut out, count).unwrap();
        values(b, &out, count * WIDTH, count)
    };
    let (shared, rest) = rows.split_at(20 * WIDTH);
    attend(b, None, [5, 3], shared, 0);
    attend(b, Some((3, 6)), [5, 3], over, 20);
    let forked = attend(b, None, [5, 6], rest, 20);
    attend(b, None, [1, 2], shared, 0);
    [forked, attend(b, None, [1, 2], rest, 20)]
}

#[test]
fn a_copied_block_reads_as_what_it_was_copied_from() {
    let mut random = Random(31);
    for kind in KvType::ALL {
        let (rows, over) = (random.values(25 * 64), random.values(12 * 64));
        check!(1e-5, forked_joined(kind, &rows, &over));
        let [copied, computed] = forked(&mut Cpu::new(1).unwrap(), kind, &rows, &over);
        assert_eq!(copied, computed, "{kind:?}");
    }
    let mut cpu = Cpu::new(1).unwrap();
    let layer = KvLayer { kv_heads: 1, head_dim: 32, kind: KvType::F16 };
    let mut kv = cpu.kv(&KvLayout { block_tokens: 16, blocks: 4, layers: vec![layer] }).unwrap();
    let unwritten = cpu.kv_copy(&mut kv, &[(1, 2)]).unwrap_err();
    assert!(matches!(unwritten, OpError::Unwritten { block: 1, .. }), "{unwritten}");
    let beyond = cpu.kv_copy(&mut kv, &[(1, 4)]).unwrap_err();
    assert!(matches!(beyond, OpError::Index { what: "block", index: 4, len: 4, .. }), "{beyond}");
}

fn forked_joined<B: Backend<Data = Bytes>>(b: &mut B, kind: KvType, rows: &[f32], over: &[f32]) -> Vec<f32> {
    forked(b, kind, rows, over).concat()
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let mut cpu = Cpu::new(1).unwrap();
    let step = Step {
        tokens: &[9],
        positions: &[20],
        sequences: &[0],
        kv_slots: &[70],
        tables: &[&[0, 1]],
        outputs: &[0],
    };
    cpu.begin(&step).unwrap();
    let layer = KvLayer { kv_heads: 1, head_dim: 32, kind: KvType::F16 };
    let layout = KvLayout { block_tokens: 16, blocks: 4, layers: vec![layer] };
    let mut kv = cpu.kv(&layout).unwrap();
    let (x, mut out) = (cpu.tensor(1, 32).unwrap(), cpu.tensor(1, 32).unwrap());
    let past_the_end = cpu.kv_write(&mut kv, 0, &x, &x, 1).unwrap_err();
    assert!(matches!(past_the_end, OpError::Index { what: "block", index: 4, len: 4, .. }), "{past_the_end}");
    let unwritten = cpu.attention(&kv, 0, &x, &spec(1, 1, 32), &mut out, 1).unwrap_err();
    assert!(matches!(unwritten, OpError::Unwritten { block: 0, .. }), "{unwritten}");
    let no_layer = cpu.attention(&kv, 1, &x, &spec(1, 1, 32), &mut out, 1).unwrap_err();
    assert!(matches!(no_layer, OpError::Index { what: "layer", .. }), "{no_layer}");

    let data = Bytes::from(vec![0; 34 * 4]);
    assert!(Cpu::weight(DType::Q8_0, &[32, 4], 0, data.clone()).is_ok());
    let short = Cpu::weight(DType::Q8_0, &[32, 5], 0, data.clone()).err().unwrap();
    assert!(matches!(short, OpError::Shape { found: 136, expected: 170, .. }), "{short}");
    let partial = Cpu::weight(DType::Q8_0, &[33, 4], 0, data.clone()).err().unwrap();
    assert!(matches!(partial, OpError::Shape { found: 1, expected: 0, .. }), "{partial}");
    let layout = Cpu::weight(DType::Q8_0, &[32, 4], 1, data.clone()).err().unwrap();
    assert!(matches!(layout, OpError::Layout { layout: 1, .. }), "{layout}");
    let no_kernel = Cpu::weight(DType::MXFP4, &[32, 4], 0, data.clone()).err().unwrap();
    assert!(matches!(no_kernel, OpError::Type { dtype: DType::MXFP4, .. }), "{no_kernel}");
    let endless = Cpu::weight(DType::Q8_0, &[32, usize::MAX, 2], 0, data.clone()).err().unwrap();
    assert!(matches!(endless, OpError::Shape { .. }), "{endless}");
    let table = Cpu::weight(DType::Q8_0, &[32, 4], 0, data).unwrap();
    let beyond = cpu.embed(&table, &mut out, 1).unwrap_err();
    assert!(matches!(beyond, OpError::Index { what: "token", index: 9, len: 4, .. }), "{beyond}");
    let narrow = cpu.tensor(1, 31).unwrap();
    let shape = cpu.add(&mut out, &narrow, 1).unwrap_err();
    assert!(matches!(shape, OpError::Shape { op: "add", .. }), "{shape}");
}
