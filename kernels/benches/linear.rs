// SPDX-License-Identifier: Apache-2.0

//! Measures linear layers at the shapes of qwen3-0.6b and qwen3-8b. At few rows it reports weight
//! bytes per second, at many rows operations per second (two per multiply-add).
//!
//! `cargo bench -p kernels -- 'decode.*Q4_K'` runs a part of it. The weights exceed the caches, so
//! the result for one row shows the speed of memory.

use bytes::Bytes;
use divan::counter::{BytesCount, ItemsCount};
use divan::{Bencher, black_box};
use kernels::Cpu;
use ops::{Backend, Linear, Weight};
use quant::DType;

/// More than the 32 MiB of L3 that two cores of a server processor may have for themselves.
const WEIGHT_BYTES: usize = 96 << 20;

const TYPES: [DType; 7] =
    [DType::Q8_0, DType::Q4_0, DType::Q4_K, DType::Q5_K, DType::Q6_K, DType::F16, DType::F32];

/// `(n_in, n_out)` of the up projections.
const SMALL: (usize, usize) = (1024, 3072);
const LARGE: (usize, usize) = (4096, 12_288);

fn main() {
    divan::main();
}

/// Makes weights of arbitrary bytes. Scales stay below 1, so that nothing overflows.
fn weights(dtype: DType, (n_in, n_out): (usize, usize)) -> Vec<Linear<Cpu>> {
    let len = dtype.row_bytes((n_in * n_out) as u64).expect("whole blocks") as usize;
    let mut state = 1_u64;
    let bytes: Vec<u8> = (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 40) as u8 & 0x37
        })
        .collect();
    (0..WEIGHT_BYTES.div_ceil(len))
        .map(|_| {
            let data = Bytes::from(bytes.clone());
            let weight = Weight { dtype, dims: vec![n_in, n_out], layout: 0, data };
            Linear { weight, bias: None }
        })
        .collect()
}

fn linear(bencher: Bencher<'_, '_>, dtype: DType, shape: (usize, usize), rows: usize, threads: usize) {
    let (n_in, n_out) = shape;
    let layers = weights(dtype, shape);
    let mut cpu = Cpu::new(threads).expect("threads");
    let mut x = cpu.tensor(rows, n_in).expect("memory");
    let mut out = cpu.tensor(rows, n_out).expect("memory");
    let values: Vec<f32> = (0..rows * n_in).map(|i| ((i * 7919) % 1000) as f32 / 500.0 - 1.0).collect();
    cpu.write(&mut x, rows, &values).expect("shape");
    let mut next = 0;
    bencher
        .counter(BytesCount::new(layers[0].weight.data.len()))
        .counter(ItemsCount::new(2 * rows * n_in * n_out))
        .bench_local(|| {
            cpu.linear(black_box(&layers[next % layers.len()]), &x, &mut out, rows).expect("shape");
            next += 1;
        });
}

#[divan::bench_group(sample_count = 30, sample_size = 4)]
mod decode {
    use super::*;

    #[divan::bench(args = TYPES)]
    fn small(bencher: Bencher<'_, '_>, dtype: DType) {
        linear(bencher, dtype, SMALL, 1, 2);
    }

    #[divan::bench(args = TYPES)]
    fn large(bencher: Bencher<'_, '_>, dtype: DType) {
        linear(bencher, dtype, LARGE, 1, 2);
    }

    #[divan::bench(args = TYPES)]
    fn large_one_thread(bencher: Bencher<'_, '_>, dtype: DType) {
        linear(bencher, dtype, LARGE, 1, 1);
    }
}

#[divan::bench_group(sample_count = 20, sample_size = 1)]
mod batch_of_4 {
    use super::*;

    #[divan::bench(args = TYPES)]
    fn small(bencher: Bencher<'_, '_>, dtype: DType) {
        linear(bencher, dtype, SMALL, 4, 2);
    }
}

#[divan::bench_group(sample_count = 10, sample_size = 1)]
mod prompt_of_256 {
    use super::*;

    #[divan::bench(args = TYPES)]
    fn small(bencher: Bencher<'_, '_>, dtype: DType) {
        linear(bencher, dtype, SMALL, 256, 2);
    }

    #[divan::bench(args = TYPES)]
    fn large(bencher: Bencher<'_, '_>, dtype: DType) {
        linear(bencher, dtype, LARGE, 256, 1);
    }
}
