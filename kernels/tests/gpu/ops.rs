// SPDX-License-Identifier: Apache-2.0

//! Compares the ops of `Cuda`, except linear layers, with `ops::Reference` and with themselves.

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use kernels::cuda::word_copies::{WordCopy, WordCopyKernels};
use kernels::cuda::{Buffer, Cuda, PinnedBuffer};
use ops::{Activation, Backend, Reference, RopePairing, RopeSpec, Step, Weight};
use quant::DType;

use crate::TestGpu;
use crate::random::TestRng;

pub(crate) fn filled<B: Backend>(b: &mut B, rows: usize, cols: usize, host: &[f32]) -> Result<B::Tensor> {
    let mut tensor = b.tensor(rows, cols)?;
    b.write(&mut tensor, rows, host)?;
    Ok(tensor)
}

pub(crate) fn values<B: Backend>(b: &mut B, x: &B::Tensor, rows: usize, cols: usize) -> Result<Vec<f32>> {
    let mut host = vec![f32::NAN; rows * cols];
    b.read(x, rows, &mut host)?;
    Ok(host)
}

/// Checks that every value differs from the expected one by at most `tolerance` times the largest
/// expected value.
pub(crate) fn close(what: &str, found: &[f32], expected: &[f32], tolerance: f32) -> Result<()> {
    ensure!(found.len() == expected.len(), "{what}: {} values, expected {}", found.len(), expected.len());
    let largest = expected.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let difference = (found - expected).abs();
        ensure!(
            difference <= tolerance * largest,
            "{what}: value {i} is {found:e}, expected {expected:e}; the largest is {largest:e}"
        );
    }
    Ok(())
}

pub(crate) fn weight<B: Backend<Data: From<Bytes>>>(dtype: DType, dims: &[usize], data: &[u8]) -> Weight<B> {
    Weight { dtype, dims: dims.to_vec(), layout: 0, data: Bytes::copy_from_slice(data).into() }
}

fn floats<B: Backend<Data: From<Bytes>>>(values: &[f32]) -> Weight<B> {
    weight(DType::F32, &[values.len()], bytemuck::cast_slice(values))
}

/// Begins a step whose rows have positions and no other data.
pub(crate) fn rows_at<B: Backend>(b: &mut B, positions: &[u32], outputs: &[u32]) -> Result<()> {
    let zeros = vec![0; positions.len()];
    Ok(b.begin(&Step {
        tokens: &zeros,
        positions,
        sequences: &zeros,
        kv_slots: &zeros,
        tables: &[&[]],
        outputs,
    })?)
}

fn norms<B: Backend<Data: From<Bytes>>>(
    b: &mut B,
    rows: usize,
    head: usize,
    heads: usize,
    x: &[f32],
    w: &[f32],
) -> Result<Vec<f32>> {
    let cols = head * heads;
    let (full, per_head) = (floats(w), floats(&w[..head]));
    let (mut sum, y) = (filled(b, rows, cols, x)?, filled(b, rows, cols, x)?);
    let (mut first, mut second) = (b.tensor(rows, cols)?, b.tensor(rows, cols)?);
    b.rms_norm(&sum, &full, 1e-6, &mut first, rows)?;
    b.add_rms_norm(&mut sum, &y, &full, 1e-5, &mut second, rows)?;
    b.add(&mut first, &y, rows)?;
    b.rms_norm_heads(&mut first, &per_head, 1e-6, rows)?;
    let mut all = values(b, &first, rows, cols)?;
    all.extend(values(b, &second, rows, cols)?);
    all.extend(values(b, &sum, rows, cols)?);
    Ok(all)
}

pub(crate) fn norms_are_those_of_the_reference(gpu: &TestGpu) -> Result<()> {
    let mut random = TestRng::new(1);
    for (rows, head, heads) in
        [(1, 64, 4), (3, 20, 3), (70, 128, 8), (2, 7, 1), (5, 128, 32), (2, 96, 100), (3, 1, 1)]
    {
        let x = random.values(rows * head * heads);
        let w = random.values(head * heads);
        let found = norms(&mut Cuda::new(&gpu.device)?, rows, head, heads, &x, &w)?;
        let expected = norms(&mut Reference::new(), rows, head, heads, &x, &w)?;
        close(&format!("{rows} x {heads} x {head}"), &found, &expected, 1e-6)?;
        // The last row alone.
        let last = (rows - 1) * head * heads;
        let alone = norms(&mut Cuda::new(&gpu.device)?, 1, head, heads, &x[last..], &w)?;
        let all = found.chunks_exact(rows * head * heads).flat_map(|part| &part[last..]);
        ensure!(alone.iter().map(|x| x.to_bits()).eq(all.map(|x| x.to_bits())), "a row alone has other bits");
    }
    Ok(())
}

fn gate<B: Backend>(
    b: &mut B,
    activation: Activation,
    rows: usize,
    cols: usize,
    x: &[f32],
    y: &[f32],
) -> Result<Vec<f32>> {
    let (mut x, y) = (filled(b, rows, cols, x)?, filled(b, rows, cols, y)?);
    b.gated(activation, &mut x, &y, rows)?;
    values(b, &x, rows, cols)
}

pub(crate) fn gates_are_those_of_the_reference(gpu: &TestGpu) -> Result<()> {
    let mut random = TestRng::new(2);
    for (rows, cols, scale) in [(1, 33, 1.0), (5, 256, 20.0), (40, 1000, 200.0), (1, 1, 1.0)] {
        let x: Vec<f32> = random.values(rows * cols).into_iter().map(|x| x * scale).collect();
        let y = random.values(rows * cols);
        for activation in [Activation::Silu, Activation::GeluTanh] {
            let found = gate(&mut Cuda::new(&gpu.device)?, activation, rows, cols, &x, &y)?;
            let expected = gate(&mut Reference::new(), activation, rows, cols, &x, &y)?;
            close(&format!("{activation:?}, {rows} x {cols}"), &found, &expected, 1e-6)?;
        }
    }
    Ok(())
}

/// Only the wanted rows are multiplied.
pub(crate) fn a_factor_multiplies_rows(gpu: &TestGpu) -> Result<()> {
    let mut random = TestRng::new(9);
    let (rows, cols) = (5, 333);
    let x = random.values(rows * cols);
    let mut cuda = Cuda::new(&gpu.device)?;
    let mut scaled = filled(&mut cuda, rows, cols, &x)?;
    cuda.scale(&mut scaled, 25.3, 3, cols)?;
    let expected: Vec<f32> =
        x.iter().enumerate().map(|(at, &x)| if at < 3 * cols { x * 25.3 } else { x }).collect();
    ensure!(values(&mut cuda, &scaled, rows, cols)? == expected, "other values");
    Ok(())
}

fn rotated<B: Backend>(
    b: &mut B,
    spec: &RopeSpec,
    head_dim: usize,
    positions: &[u32],
    x: &[f32],
) -> Result<Vec<f32>> {
    const HEADS: usize = 5;
    let rope = b.rope_table(spec)?;
    let mut out = Vec::new();
    // A second step at other positions. It must not use the angles of the first step.
    for shift in [0, 5] {
        let positions: Vec<u32> = positions.iter().map(|position| position + shift).collect();
        rows_at(b, &positions, &[])?;
        let mut tensor =
            filled(b, positions.len(), head_dim * HEADS, &x[..positions.len() * head_dim * HEADS])?;
        b.rope(&mut tensor, &rope, head_dim, positions.len())?;
        out.extend(values(b, &tensor, positions.len(), head_dim * HEADS)?);
    }
    Ok(out)
}

pub(crate) fn rotations_are_those_of_the_reference(gpu: &TestGpu) -> Result<()> {
    let mut random = TestRng::new(3);
    for pairing in [RopePairing::Adjacent, RopePairing::Halves] {
        for (head_dim, pairs, rows, last) in [
            (64, 32, 3, 100),
            (80, 20, 40, 100_000),
            (128, 64, 33, 1_000_000),
            (600, 300, 2, 10),
            (5, 1, 2, 7),
        ] {
            let inverse_frequencies =
                (0..pairs).map(|i| 10_000_f32.powf(-(i as f32) / pairs as f32)).collect();
            let spec = RopeSpec { pairing, inverse_frequencies, magnitude: 1.25 };
            let positions: Vec<u32> = (0..rows).map(|_| random.bits() as u32 % last).collect();
            let x = random.values(rows * 5 * head_dim);
            let found = rotated(&mut Cuda::new(&gpu.device)?, &spec, head_dim, &positions, &x)?;
            let expected = rotated(&mut Reference::new(), &spec, head_dim, &positions, &x)?;
            close(&format!("{pairing:?}, {pairs} pairs of {head_dim}"), &found, &expected, 1e-6)?;
        }
    }
    Ok(())
}

pub(crate) fn gathered_rows_are_the_wanted_ones(gpu: &TestGpu) -> Result<()> {
    let mut random = TestRng::new(4);
    let mut cuda = Cuda::new(&gpu.device)?;
    for (rows, cols, outputs, run) in [
        (5, 37, vec![0, 1, 4], 0..3),
        (5, 37, vec![0, 1, 4], 1..3),
        (64, 1000, vec![63], 0..1),
        (3, 8, vec![], 0..0),
    ] {
        rows_at(&mut cuda, &vec![0; rows], &outputs)?;
        let host = random.values(rows * cols);
        let x = filled(&mut cuda, rows, cols, &host)?;
        let mut out = cuda.tensor(outputs.len(), cols)?;
        cuda.gather_outputs(&x, run.clone(), &mut out)?;
        let found = values(&mut cuda, &out, run.len(), cols)?;
        let expected: Vec<f32> = outputs[run.clone()]
            .iter()
            .flat_map(|&row| host[row as usize * cols..][..cols].to_vec())
            .collect();
        ensure!(found == expected, "{run:?} of {outputs:?} of {rows} rows");
        ensure!(cuda.gather_outputs(&x, 0..outputs.len() + 1, &mut out).is_err(), "an output too many");
    }
    Ok(())
}

/// Compares argmax with the generic implementation in `ops`, also for equal values and for NaN.
pub(crate) fn the_best_of_a_row_is_that_of_the_host(gpu: &TestGpu) -> Result<()> {
    let mut random = TestRng::new(7);
    let (mut cuda, mut reference) = (Cuda::new(&gpu.device)?, Reference::new());
    for (rows, cols) in [(1, 1), (3, 31), (2, 1024), (70, 1025), (5, 4096), (4, 151_936)] {
        let mut host = random.values(rows * cols);
        // Two equal best values, in different threads and rounds of the kernel.
        for row in host.chunks_exact_mut(cols) {
            let best = 30.0;
            row[(random.bits() % cols as u64) as usize] = best;
            row[(random.bits() % cols as u64) as usize] = best;
        }
        if rows > 2 {
            host[cols..2 * cols].fill(f32::NEG_INFINITY);
            host[2 * cols + cols / 2] = f32::NAN;
        }
        let (mut found, mut expected) = (vec![7; rows], vec![8; rows]);
        let x = filled(&mut cuda, rows, cols, &host)?;
        cuda.argmax(&x, rows, cols, &mut found)?;
        let x = filled(&mut reference, rows, cols, &host)?;
        reference.argmax(&x, rows, cols, &mut expected)?;
        ensure!(found == expected, "{rows} rows of {cols}: {found:?}, expected {expected:?}");
        ensure!(rows < 3 || found[1..3] == [ops::NO_ARGMAX; 2], "{rows} rows of {cols}: {found:?}");
    }
    Ok(())
}

/// Reads tensors that are larger than one chunk of a readback, and a part of their rows.
pub(crate) fn what_is_written_is_read(gpu: &TestGpu) -> Result<()> {
    let mut random = TestRng::new(5);
    let mut cuda = Cuda::new(&gpu.device)?;
    let (rows, cols) = (3, 700_001);
    let host = random.values(rows * cols);
    let x = filled(&mut cuda, rows, cols, &host)?;
    ensure!(values(&mut cuda, &x, rows, cols)? == host, "all rows");
    ensure!(values(&mut cuda, &x, 2, cols)? == host[..2 * cols], "two rows");
    ensure!(cuda.read(&x, 4, &mut vec![0.0; 4 * cols]).is_err(), "a row too many");
    Ok(())
}

/// A repeated list of ops is replayed as a graph. The replay uses the data of the current step.
pub(crate) fn replayed_steps_are_those_run_one_by_one(gpu: &TestGpu) -> Result<()> {
    let mut random = TestRng::new(6);
    let (rows, cols) = (7, 256);
    let w = floats(&random.values(cols));
    let frequencies = (0..32).map(|i| 0.9_f32.powi(i)).collect();
    let spec = RopeSpec { pairing: RopePairing::Halves, inverse_frequencies: frequencies, magnitude: 1.0 };
    let mut runs: Vec<(Cuda, _)> = Vec::new();
    for graphs in [true, false] {
        let mut cuda = Cuda::new(&gpu.device)?;
        cuda.set_graphs(graphs);
        let tensors = [cuda.tensor(rows, cols)?, cuda.tensor(rows, cols)?, cuda.tensor(rows, cols)?];
        let rope = cuda.rope_table(&spec)?;
        runs.push((cuda, (tensors, rope)));
    }
    for step in 0..6 {
        let positions: Vec<u32> = (0..rows as u32).map(|row| step * 100 + row * row).collect();
        let x = random.values(rows * cols);
        let mut results = Vec::new();
        for (cuda, ([a, b, c], rope)) in &mut runs {
            rows_at(cuda, &positions, &[])?;
            cuda.write(a, rows, &x)?;
            cuda.write(c, rows, &x)?;
            cuda.rms_norm(a, &w, 1e-6, b, rows)?;
            cuda.rope(b, rope, 64, rows)?;
            cuda.gated(Activation::Silu, c, b, rows)?;
            cuda.add_rms_norm(a, c, &w, 1e-6, b, rows)?;
            results.push(values(cuda, b, rows, cols)?);
        }
        ensure!(results[0].iter().all(|x| x.is_finite()) && results[0] == results[1], "step {step}");
    }
    ensure!(runs[0].0.graphs() == 1 && runs[1].0.graphs() == 0, "{} graphs", runs[0].0.graphs());
    Ok(())
}

/// Copies words to the device and back by kernels, in one to four ranges of odd lengths.
pub(crate) fn words_arrive_on_both_sides(gpu: &TestGpu) -> Result<()> {
    const ROOM: usize = 20_000;
    let copies = WordCopyKernels::new(&gpu.device);
    let mut random = TestRng::new(8);
    for lens in [&[1][..], &[0, 1], &[2047, 2048, 2049], &[5, 0, 16_384, 4097], &[ROOM]] {
        let (mut from, mut to) = (Vec::new(), Vec::new());
        for _ in lens {
            let mut words = PinnedBuffer::<u32>::new(&gpu.device, ROOM)?;
            words.as_mut_slice().fill_with(|| random.bits() as u32);
            from.push(words);
            to.push(Buffer::from_host(&gpu.stream, &vec![7_u32; ROOM])?);
        }
        let fetched: Vec<WordCopy> = (from.iter().zip(&to))
            .zip(lens)
            .map(|((from, to), &len)| WordCopy::new(from, to.view(), len))
            .collect();
        // SAFETY: the buffers live until the stream has ended, and nothing else uses them.
        unsafe { copies.fetch(&gpu.stream, &fetched) }?;
        for ((from, to), &len) in from.iter().zip(&to).zip(lens) {
            let found = to.to_host(&gpu.stream)?;
            ensure!(found[..len] == from.as_slice()[..len], "{lens:?}: {len} words arrive");
            ensure!(found[len..].iter().all(|&word| word == 7), "{lens:?}: nothing behind {len} words");
            let mut back = PinnedBuffer::<u32>::new(&gpu.device, ROOM)?;
            back.as_mut_slice().fill(9);
            let words = to.view().slice(0, len).context("the words are in the buffer")?;
            // SAFETY: as above.
            unsafe { copies.send(&gpu.stream, words, &mut back) }?;
            gpu.stream.synchronize()?;
            ensure!(back.as_slice()[..len] == from.as_slice()[..len], "{lens:?}: {len} words come back");
            ensure!(back.as_slice()[len..].iter().all(|&word| word == 9), "{lens:?}: nothing behind them");
        }
    }
    Ok(())
}
