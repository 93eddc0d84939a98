// SPDX-License-Identifier: Apache-2.0

//! Compares every op except linear layers with `ops::Reference` and with itself. The bits do not
//! depend on the instruction set, the number of threads, the rows in a step, or the tokens in a
//! block.

use self::attention::spec;
use crate::random::{self, DTYPES};
use crate::split_mix::SplitMix64;
use bytes::Bytes;
use kernels::{Cpu, Isa};
use ops::{
    Activation, AttentionSpan, Backend, Experts, KvLayer, KvLayout, KvType, OpError, Reference, RopePairing,
    RopeSpec, Step, Weight,
};
use quant::DType;

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

/// Runs `op` on the reference, and on every instruction set with one to three threads.
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

/// Runs the same generic body on the reference and on `Cpu`.
macro_rules! check {
    ($tolerance:expr, $body:ident($($argument:expr),*)) => {
        check($tolerance, |b| $body(b, $($argument),*), |b| $body(b, $($argument),*))
    };
}

mod attention;

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
fn norms_and_sums_match_the_reference() {
    let mut random = SplitMix64(1);
    for (rows, head, heads) in [(1, 64, 4), (3, 20, 3), (70, 128, 8), (2, 7, 1)] {
        let x = random.values(rows * head * heads);
        let w = random::encoded(&mut random, DType::F32, head * heads, 1);
        check!(1e-6, norms(rows, head, heads, &x, &w));
    }
}

fn gate<B: Backend<Data = Bytes>>(
    b: &mut B,
    activation: Activation,
    rows: usize,
    cols: usize,
    x: &[f32],
    y: &[f32],
) -> Vec<f32> {
    let (mut x, y) = (filled(b, rows, cols, x), filled(b, rows, cols, y));
    b.gated(activation, &mut x, &y, rows).unwrap();
    values(b, &x, rows * cols, rows)
}

#[test]
fn gates_match_the_reference() {
    let mut random = SplitMix64(2);
    for (rows, cols, scale) in [(1, 33, 1.0), (5, 256, 20.0), (40, 1000, 200.0)] {
        let x: Vec<f32> = random.values(rows * cols).into_iter().map(|x| x * scale).collect();
        let y = random.values(rows * cols);
        for activation in [Activation::Silu, Activation::GeluTanh] {
            check!(1e-6, gate(activation, rows, cols, &x, &y));
        }
    }
}

/// For large inputs a gate is its input or zero, and near zero it is half of its input. Neither
/// cancellation nor overflow may occur.
#[test]
fn gates_are_accurate_over_the_whole_range() {
    let x = [1e-30, -1e-12, 1e-6, -1e-4, 0.5, -3.0, -8.0, 30.0, 1e15, -1e15, 3e38, -3e38, 0.0];
    let ones = [1.0; 13];
    for activation in [Activation::Silu, Activation::GeluTanh] {
        let expected = gate(&mut Reference::new(), activation, 1, 13, &x, &ones);
        for isa in Isa::available() {
            let found = gate(&mut Cpu::with_isa(1, isa).unwrap(), activation, 1, 13, &x, &ones);
            for ((x, found), expected) in x.iter().zip(found).zip(&expected) {
                // An exponential may be off by 1e-5. Where the reference gives zero, the result may
                // be up to 1e-37 of its input.
                let bound = 1e-5 * expected.abs() + x.abs() * 1e-37;
                assert!(
                    (found - expected).abs() <= bound,
                    "{activation:?}({x:e}) is {found:e}, not {expected:e}"
                );
            }
        }
    }
}

fn scaled<B: Backend<Data = Bytes>>(b: &mut B, rows: usize, cols: usize, x: &[f32]) -> Vec<f32> {
    let mut x = filled(b, rows + 1, cols, x);
    b.scale(&mut x, 9.797_959, rows, cols).unwrap();
    values(b, &x, (rows + 1) * cols, rows + 1)
}

#[test]
fn scale_matches_the_reference_and_keeps_other_rows() {
    let mut random = SplitMix64(12);
    for (rows, cols) in [(1, 7), (5, 96), (70, 640)] {
        let x = random.values((rows + 1) * cols);
        check!(0.0, scaled(rows, cols, &x));
        let last = &scaled(&mut Cpu::new(1).unwrap(), rows, cols, &x)[rows * cols..];
        assert_eq!(last, &x[rows * cols..]);
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
    // A second step at other positions. It must not use the angles of the first step.
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
fn rotations_match_the_reference() {
    let mut random = SplitMix64(3);
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
fn embeddings_match_the_reference() {
    let mut random = SplitMix64(4);
    for dtype in DTYPES {
        let table = random::encoded(&mut random, dtype, 256, 9);
        check!(0.0, embedded(dtype, &table, 256, 9));
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
fn experts_match_the_reference() {
    let mut random = SplitMix64(9);
    let stacks = [(64, 96), (64, 96), (96, 64)]
        .map(|(cols, rows)| random::encoded(&mut random, DType::Q8_0, cols, 5 * rows));
    let (router, x) = (random.values(7 * 5), random.values(7 * 64));
    // The rounding of the gate may change an int8 activation by one step.
    check!(2e-2, mixed(&stacks, &router, &x));
}

#[test]
fn a_written_block_takes_memory() {
    let mut cpu = Cpu::new(1).unwrap();
    for (kind, token_bytes) in [(KvType::F16, 512), (KvType::Q8_0, 272)] {
        a_block_costs(
            &mut cpu,
            KvLayer { kv_heads: 2, head_dim: 64, kind, span: AttentionSpan::Full },
            token_bytes,
        );
    }
}

fn a_block_costs(cpu: &mut Cpu, layer: KvLayer, token_bytes: u64) {
    // The layout has 1 TiB or half of it, so it can only be reserved, not filled.
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

/// Computes attention over a sequence whose second block was copied, after which the original block
/// was overwritten.
fn forked<B: Backend<Data = Bytes>>(b: &mut B, kind: KvType, rows: &[f32], over: &[f32]) -> [Vec<f32>; 2] {
    const WIDTH: usize = 2 * 32;
    let layer = KvLayer { kv_heads: 2, head_dim: 32, kind, span: AttentionSpan::Full };
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
fn a_copied_block_equals_its_source() {
    let mut random = SplitMix64(31);
    for kind in KvType::ALL {
        let (rows, over) = (random.values(25 * 64), random.values(12 * 64));
        check!(1e-5, forked_joined(kind, &rows, &over));
        let [copied, computed] = forked(&mut Cpu::new(1).unwrap(), kind, &rows, &over);
        assert_eq!(copied, computed, "{kind:?}");
    }
    let mut cpu = Cpu::new(1).unwrap();
    let layer = KvLayer { kv_heads: 1, head_dim: 32, kind: KvType::F16, span: AttentionSpan::Full };
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
fn errors_name_the_operand_that_does_not_fit() {
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
    let layer = KvLayer { kv_heads: 1, head_dim: 32, kind: KvType::F16, span: AttentionSpan::Full };
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
