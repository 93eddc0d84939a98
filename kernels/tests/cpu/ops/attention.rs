// SPDX-License-Identifier: Apache-2.0

//! Compares attention with `ops::Reference` and with itself. The bits of a row depend neither on
//! the other rows of its step nor on the blocks that hold its keys and values.

use super::{check, filled, values};
use crate::split_mix::SplitMix64;
use bytes::Bytes;
use kernels::{Cpu, Isa};
use ops::{AttentionSpan, AttentionSpec, Backend, KvLayer, KvLayout, KvType, Step};

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
    fn new(random: &mut SplitMix64, spec: AttentionSpec, kind: KvType, sequences: &[(usize, usize)]) -> Self {
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
        let layer = KvLayer { kv_heads, head_dim, kind: self.kind, span: AttentionSpan::Full };
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

pub(super) fn spec(heads: usize, kv_heads: usize, head_dim: usize) -> AttentionSpec {
    AttentionSpec { heads, kv_heads, head_dim, scale: 1.0 / (head_dim as f32).sqrt() }
}

#[test]
fn attention_matches_the_reference() {
    let mut random = SplitMix64(5);
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
fn attention_over_long_contexts_matches_the_reference() {
    let mut random = SplitMix64(6);
    for kind in [KvType::F16, KvType::Q8_0] {
        // One row: with several threads the splits are pieces of their own.
        let paged = Paged::new(&mut random, spec(2, 1, 64), kind, &[(1500, 1)]);
        check!(2e-6, attended(&paged));
    }
}

#[test]
fn attention_survives_extreme_scores() {
    let mut random = SplitMix64(7);
    let mut paged = Paged::new(&mut random, spec(2, 1, 32), KvType::F32, &[(600, 9)]);
    for query in &mut paged.queries {
        query.iter_mut().for_each(|x| *x *= 200.0);
    }
    // Scores of some hundreds: their rounding shows in the shares.
    check!(1e-4, attended(&paged));
}

#[test]
fn attention_does_not_depend_on_blocks_or_batch_neighbours() {
    let mut random = SplitMix64(8);
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
fn attention_does_not_depend_on_shared_blocks() {
    let mut random = SplitMix64(9);
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

/// Every second vector of 16 values times 1000, the others tiny: scales that differ inside a head
/// and between tokens.
fn jagged(values: &mut [f32]) {
    for (i, part) in values.chunks_mut(16).enumerate() {
        let factor = [1e3, 1e-6, 1.0, 0.0][i % 4];
        part.iter_mut().for_each(|x| *x *= factor);
    }
}

#[test]
fn attention_over_jagged_values_matches_the_reference() {
    let mut random = SplitMix64(10);
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
fn every_kv_type_rounds_as_specified() {
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
fn nan_affects_only_rows_that_attend_to_it() {
    for kind in KvType::ALL {
        for bad in [f32::NAN, f32::INFINITY] {
            let mut random = SplitMix64(11);
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
