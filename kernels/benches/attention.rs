// SPDX-License-Identifier: Apache-2.0

//! Measures attention at the shape of qwen3-0.6b (16 query heads, 8 KV heads of 128 values).
//!
//! 1. One row over a long context: the bytes of keys and values limit the speed.
//! 2. A prefill chunk: the operations limit the speed.
//! 3. One row of each of 16 sequences, with shared or separate blocks before it.

use divan::Bencher;
use divan::counter::{BytesCount, ItemsCount};
use kernels::Cpu;
use ops::{AttentionSpan, AttentionSpec, Backend, KvLayer, KvLayout, KvType, Step};

const BLOCK_TOKENS: usize = 16;
const SPEC: AttentionSpec = AttentionSpec { heads: 16, kv_heads: 8, head_dim: 128, scale: 0.088 };

fn main() {
    divan::main();
}

/// Measures the attention of the last `rows` of `context` tokens.
fn attention(bencher: Bencher<'_, '_>, context: usize, rows: usize, threads: usize) {
    let mut cpu = Cpu::new(threads).expect("threads");
    let layer = KvLayer {
        kv_heads: SPEC.kv_heads,
        head_dim: SPEC.head_dim,
        kind: KvType::F16,
        span: AttentionSpan::Full,
    };
    let blocks = context.div_ceil(BLOCK_TOKENS);
    let layout = KvLayout { block_tokens: BLOCK_TOKENS, blocks, layers: vec![layer] };
    let mut kv = cpu.kv(&layout).expect("memory");
    let table: Vec<u32> = (0..blocks as u32).collect();
    let step = |cpu: &mut Cpu, from: usize| {
        let positions: Vec<u32> = (from as u32..context as u32).collect();
        let zeros = vec![0; positions.len()];
        let step = Step {
            tokens: &zeros,
            positions: &positions,
            sequences: &zeros,
            kv_slots: &positions,
            tables: &[&table],
            outputs: &[],
        };
        cpu.begin(&step).expect("a step");
    };
    let values = |len: usize| (0..len).map(|i| (i * 7919 % 997) as f32 / 500.0 - 1.0).collect::<Vec<_>>();

    let (width, kv_width) = (SPEC.heads * SPEC.head_dim, SPEC.kv_heads * SPEC.head_dim);
    let mut keys = cpu.tensor(context, kv_width).expect("memory");
    cpu.write(&mut keys, context, &values(context * kv_width)).expect("shape");
    step(&mut cpu, 0);
    cpu.kv_write(&mut kv, 0, &keys, &keys, context).expect("shape");
    step(&mut cpu, context - rows);
    let mut queries = cpu.tensor(rows, width).expect("memory");
    let mut out = cpu.tensor(rows, width).expect("memory");
    cpu.write(&mut queries, rows, &values(rows * width)).expect("shape");
    // A multiply-add is two operations. Scores need one per query value and key, weighted values
    // another.
    let operations = 4 * SPEC.heads * SPEC.head_dim * rows * (context - rows / 2);
    bencher
        .counter(BytesCount::new(context * layer.token_bytes()))
        .counter(ItemsCount::new(operations))
        .bench_local(|| cpu.attention(&kv, 0, &queries, &SPEC, &mut out, rows).expect("shape"));
}

#[divan::bench(args = [256, 4096, 16384], sample_count = 20)]
fn one_row(bencher: Bencher<'_, '_>, context: usize) {
    attention(bencher, context, 1, 2);
}

#[divan::bench(args = [256, 4096, 16384], sample_count = 20)]
fn one_row_on_one_thread(bencher: Bencher<'_, '_>, context: usize) {
    attention(bencher, context, 1, 1);
}

#[divan::bench(args = [256, 4096], sample_count = 5)]
fn last_256_rows(bencher: Bencher<'_, '_>, context: usize) {
    attention(bencher, context, 256, 1);
}

/// Measures one row of each of 16 sequences of `context` tokens. If `is_shared`, the sequences
/// share all blocks but the last.
fn sixteen_sequences(bencher: Bencher<'_, '_>, context: usize, is_shared: bool) {
    const SEQUENCES: usize = 16;
    let mut cpu = Cpu::new(2).expect("threads");
    let layer = KvLayer {
        kv_heads: SPEC.kv_heads,
        head_dim: SPEC.head_dim,
        kind: KvType::F16,
        span: AttentionSpan::Full,
    };
    let each = context.div_ceil(BLOCK_TOKENS);
    let blocks = SEQUENCES * each;
    let layout = KvLayout { block_tokens: BLOCK_TOKENS, blocks, layers: vec![layer] };
    let mut kv = cpu.kv(&layout).expect("memory");
    let tables: Vec<Vec<u32>> = (0..SEQUENCES)
        .map(|sequence| {
            let own = (sequence * each) as u32..((sequence + 1) * each) as u32;
            if is_shared { (0..each as u32 - 1).chain(own.end - 1..own.end).collect() } else { own.collect() }
        })
        .collect();
    let tables: Vec<&[u32]> = tables.iter().map(Vec::as_slice).collect();
    let step = |cpu: &mut Cpu, positions: &[u32], sequences: &[u32], kv_slots: &[u32]| {
        let tokens = &vec![0; positions.len()];
        let step = Step { tokens, positions, sequences, kv_slots, tables: &tables, outputs: &[] };
        cpu.begin(&step).expect("a step");
    };
    let values = |len: usize| (0..len).map(|i| (i * 7919 % 997) as f32 / 500.0 - 1.0).collect::<Vec<_>>();

    let (width, kv_width) = (SPEC.heads * SPEC.head_dim, SPEC.kv_heads * SPEC.head_dim);
    let mut keys = cpu.tensor(context, kv_width).expect("memory");
    cpu.write(&mut keys, context, &values(context * kv_width)).expect("shape");
    let places: Vec<u32> = (0..context as u32).collect();
    for sequence in 0..SEQUENCES as u32 {
        let slots: Vec<u32> =
            places.iter().map(|place| sequence * (each * BLOCK_TOKENS) as u32 + place).collect();
        step(&mut cpu, &places, &vec![sequence; context], &slots);
        cpu.kv_write(&mut kv, 0, &keys, &keys, context).expect("shape");
    }
    let sequences: Vec<u32> = (0..SEQUENCES as u32).collect();
    step(&mut cpu, &[context as u32 - 1; SEQUENCES], &sequences, &[0; SEQUENCES]);
    let mut queries = cpu.tensor(SEQUENCES, width).expect("memory");
    let mut out = cpu.tensor(SEQUENCES, width).expect("memory");
    cpu.write(&mut queries, SEQUENCES, &values(SEQUENCES * width)).expect("shape");
    bencher.bench_local(|| cpu.attention(&kv, 0, &queries, &SPEC, &mut out, SEQUENCES).expect("shape"));
}

#[divan::bench(args = [2048, 8192], sample_count = 20)]
fn sixteen_sequences_of_one_past(bencher: Bencher<'_, '_>, context: usize) {
    sixteen_sequences(bencher, context, true);
}

#[divan::bench(args = [2048, 8192], sample_count = 20)]
fn sixteen_sequences_apart(bencher: Bencher<'_, '_>, context: usize) {
    sixteen_sequences(bencher, context, false);
}
