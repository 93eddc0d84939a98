// SPDX-License-Identifier: Apache-2.0

//! Compares linear layers with `ops::Reference`: quantized types bit by bit, float types within
//! rounding. The bits do not depend on the number of rows and threads, or on the instruction set.

use crate::random::{self, DTYPES};
use crate::split_mix::SplitMix64;
use bytes::Bytes;
use kernels::{Cpu, Isa};
use ops::{Backend, Linear, Reference, Weight};
use quant::DType;

/// The offsets of the f16 scales in a block.
fn scale_offsets(dtype: DType) -> &'static [usize] {
    match dtype {
        DType::Q8_0 | DType::Q4_0 | DType::Q5_0 => &[0],
        DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => &[0, 2],
        DType::Q2_K => &[80, 82],
        DType::Q3_K => &[108],
        DType::Q6_K => &[208],
        _ => &[],
    }
}

/// Rows of random bits in quantized blocks. Their scales are zero, subnormal, ordinary, negative,
/// or the largest.
fn arbitrary(random: &mut SplitMix64, dtype: DType, cols: usize, rows: usize) -> Bytes {
    let len = dtype.row_bytes((cols * rows) as u64).unwrap() as usize;
    let mut bytes: Vec<u8> = (0..len + 8).map(|_| random.next() as u8).collect();
    for block in bytes[3..3 + len].chunks_exact_mut(dtype.block_bytes()) {
        for &offset in scale_offsets(dtype) {
            let scale = match random.next() % 8 {
                0 => 0x0000_u16,
                1 => 0x0001,
                2 => 0x83ff,
                3 => 0x7bff,
                4 => 0xfbff,
                _ => 0x2000 | (random.next() as u16 & 0x9fff),
            };
            block[offset..offset + 2].copy_from_slice(&scale.to_le_bytes());
        }
    }
    Bytes::from(bytes).slice(3..3 + len)
}

fn weight<B: Backend<Data = Bytes>>(dtype: DType, dims: &[usize], data: &Bytes) -> Weight<B> {
    Weight { dtype, dims: dims.to_vec(), layout: 0, data: data.clone() }
}

struct LinearCase {
    dtype: DType,
    n_in: usize,
    n_out: usize,
    data: Bytes,
    bias: Option<Bytes>,
    x: Vec<f32>,
}

impl LinearCase {
    fn new(random: &mut SplitMix64, dtype: DType, rows: usize, n_in: usize, n_out: usize) -> Self {
        let is_plain = dtype.block_len() == 1;
        let make = if is_plain || random.next().is_multiple_of(2) { random::encoded } else { arbitrary };
        let data = make(random, dtype, n_in, n_out);
        let bias = (random.next().is_multiple_of(2)).then(|| random::encoded(random, DType::F32, n_out, 1));
        let mut x = random.values(rows * n_in);
        for row in x.chunks_mut(n_in) {
            match random.next() % 6 {
                0 => row.fill(0.0),
                1 => row.iter_mut().for_each(|x| *x *= 1e-38),
                2 => row.iter_mut().for_each(|x| *x *= 1e4),
                3 => row[..n_in / 2].fill(0.0),
                _ => {}
            }
        }
        Self { dtype, n_in, n_out, data, bias, x }
    }

    fn run<B: Backend<Data = Bytes>>(&self, backend: &mut B, rows: std::ops::Range<usize>) -> Vec<f32> {
        let dims = [self.n_in, self.n_out];
        let layer = Linear {
            weight: weight(self.dtype, &dims, &self.data),
            bias: self.bias.as_ref().map(|bias| weight(DType::F32, &dims[1..], bias)),
        };
        let count = rows.len();
        let mut x = backend.tensor(count, self.n_in).unwrap();
        let mut out = backend.tensor(count, self.n_out).unwrap();
        backend.write(&mut x, count, &self.x[rows.start * self.n_in..rows.end * self.n_in]).unwrap();
        backend.linear(&layer, &x, &mut out, count).unwrap();
        let mut host = vec![0.0; count * self.n_out];
        backend.read(&out, count, &mut host).unwrap();
        host
    }

    #[track_caller]
    fn check(&self) {
        let rows = self.x.len() / self.n_in;
        let expected = self.run(&mut Reference::new(), 0..rows);
        let exact = self.dtype.block_len() > 1;
        let mut first: Option<Vec<f32>> = None;
        for isa in Isa::available() {
            for threads in 1..=3 {
                let what = format!("{} {rows}x{}x{} {isa} {threads}", self.dtype, self.n_in, self.n_out);
                let mut cpu = Cpu::with_isa(threads, isa).unwrap();
                let found = self.run(&mut cpu, 0..rows);
                if exact {
                    assert_same(&found, &expected, &what);
                } else {
                    assert_close(&found, &expected, &what);
                    assert_same(&found, first.get_or_insert(found.clone()), &what);
                }
                let row = rows / 2;
                let alone = self.run(&mut cpu, row..row + 1);
                assert_same(&alone, &found[row * self.n_out..(row + 1) * self.n_out], &what);
            }
        }
    }
}

#[track_caller]
fn assert_same(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len());
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let same = found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan();
        assert!(same, "{what}: value {i} is {found:e}, expected {expected:e}");
    }
}

#[track_caller]
fn assert_close(found: &[f32], expected: &[f32], what: &str) {
    let largest = expected.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let difference = (found - expected).abs();
        assert!(difference <= 2e-6 * largest, "{what}: value {i} is {found:e}, expected {expected:e}");
    }
}

#[test]
fn products_match_the_reference() {
    let mut random = SplitMix64(1);
    for dtype in DTYPES {
        let block = dtype.block_len();
        for (rows, n_in, n_out) in
            [(1, 256, 1), (1, 512, 17), (2, 1024, 33), (3, 256, 16), (7, 768, 40), (20, 512, 31)]
        {
            LinearCase::new(&mut random, dtype, rows, n_in.max(block), n_out).check();
        }
    }
}

#[test]
fn short_and_odd_rows_are_multiplied() {
    let mut random = SplitMix64(2);
    for dtype in DTYPES {
        let block = dtype.block_len();
        for n_in in [block, 3 * block, 5 * block] {
            LinearCase::new(&mut random, dtype, 5, n_in, 19).check();
        }
    }
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for n_in in [1, 15, 17, 24, 100] {
            LinearCase::new(&mut random, dtype, 6, n_in, 21).check();
        }
    }
}

#[test]
fn long_rows_and_many_rows_are_multiplied() {
    let mut random = SplitMix64(3);
    for dtype in DTYPES {
        LinearCase::new(&mut random, dtype, 70, 512, 50).check();
        LinearCase::new(&mut random, dtype, 9, 4352, 18).check();
    }
    // More than one window of K, with many rows.
    for dtype in [DType::Q8_0, DType::Q4_K, DType::Q6_K] {
        LinearCase::new(&mut random, dtype, 10, 21_504, 16).check();
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_rows() {
    let mut random = SplitMix64(4);
    for dtype in [DType::Q8_0, DType::Q4_K, DType::F16] {
        let case = LinearCase::new(&mut random, dtype, 40, 512, 35);
        let mut cpu = Cpu::new(2).unwrap();
        let all = case.run(&mut cpu, 0..40);
        for count in 1..40 {
            let some = case.run(&mut cpu, 0..count);
            assert_same(&some, &all[..count * 35], &format!("{dtype} {count}"));
        }
    }
}

#[test]
fn several_layers_at_once_equal_single_layers() {
    let mut random = SplitMix64(5);
    let cases: Vec<LinearCase> = [DType::Q4_K, DType::Q6_K, DType::Q8_0, DType::F16]
        .into_iter()
        .map(|dtype| LinearCase::new(&mut random, dtype, 6, 512, 37))
        .collect();
    let mut cpu = Cpu::new(2).unwrap();
    let mut x = cpu.tensor(6, 512).unwrap();
    cpu.write(&mut x, 6, &cases[0].x).unwrap();
    let layers: Vec<Linear<Cpu>> = cases
        .iter()
        .map(|case| Linear { weight: weight(case.dtype, &[512, 37], &case.data), bias: None })
        .collect();
    let mut outs: Vec<_> = layers.iter().map(|_| cpu.tensor(6, 37).unwrap()).collect();
    let mut group: Vec<_> = layers.iter().zip(outs.iter_mut()).collect();
    cpu.linears(&x, &mut group, 6).unwrap();
    for (case, out) in cases.iter().zip(&outs) {
        let single = LinearCase { bias: None, x: cases[0].x.clone(), data: case.data.clone(), ..*case };
        let mut found = vec![0.0; 6 * 37];
        cpu.read(out, 6, &mut found).unwrap();
        assert_same(&found, &single.run(&mut cpu, 0..6), &case.dtype.to_string());
    }
}
