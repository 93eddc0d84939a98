// SPDX-License-Identifier: Apache-2.0

//! Compares the device's shortlists of logits bit by bit with the generic implementation in `ops`.

use anyhow::{Result, ensure};
use kernels::cuda::shortlist::{self, ShortlistKernels};
use kernels::cuda::{Buffer, Cuda};
use ops::{Backend, DrawParams, Reference, Shortlist};

use crate::TestGpu;
use crate::bench::time;
use crate::ops::filled;
use crate::random::TestRng;

fn lists<B: Backend>(b: &mut B, host: &[f32], draw_params: &[DrawParams]) -> Result<Vec<Shortlist>> {
    let (rows, cols) = (draw_params.len(), host.len() / draw_params.len());
    let x = filled(b, rows, cols, host)?;
    let mut lists = vec![Shortlist::default(); rows];
    b.shortlists(&x, cols, draw_params, &mut lists)?;
    Ok(lists)
}

/// The tokens that a step would compute next.
fn tokens<B: Backend>(b: &mut B, host: &[f32], draw_params: &[DrawParams]) -> Result<Vec<u32>> {
    let (rows, cols) = (draw_params.len(), host.len() / draw_params.len());
    let mut tokens = vec![0; rows];
    // In one part and, from three rows on, in two.
    let first = if rows < 3 { rows } else { rows / 2 };
    for part in [0..first, first..rows].into_iter().filter(|part| !part.is_empty()) {
        let x = filled(b, part.len(), cols, &host[part.start * cols..part.end * cols])?;
        b.start_draws(&x, cols, draw_params, part)?;
    }
    b.finish_draws(&mut tokens)?;
    Ok(tokens)
}

/// Random draw parameters: a temperature and, in four of five cases, a random number for a draw.
fn random_draw_params(random: &mut TestRng) -> DrawParams {
    let temperature = [1.0, 0.8, 0.05, 1.7, 1e-30][(random.bits() % 5) as usize];
    let uniform = (random.bits() >> 11) as f64 / (1_u64 << 53) as f64;
    let extremes = [uniform, uniform, 0.0, 1.0 - f64::EPSILON / 2.0];
    let uniform = extremes[(random.bits() % 4) as usize];
    DrawParams { temperature, uniform: Some(uniform).filter(|_| !random.bits().is_multiple_of(5)) }
}

/// A row of one of 13 kinds. Examples are smooth rows, few values, one clear winner, many values
/// ruled out, and invalid values.
fn row(random: &mut TestRng, kind: usize, cols: usize) -> Vec<f32> {
    let mut row: Vec<f32> = random.values(cols).into_iter().map(|value| 3.0 * value).collect();
    let mut at = || (random.bits() % cols as u64) as usize;
    match kind {
        0 => {}
        // Hundreds of equal values at the top, and more of them below.
        1 => row.iter_mut().for_each(|value| *value = value.max(-8.0).round()),
        2 => row[at()] = 40.0,
        // The best values are neighbours, which does not happen in a shuffled row.
        3 => row.iter_mut().take(300).enumerate().for_each(|(i, value)| *value = 50.0 - i as f32 / 16.0),
        4 => (0..cols / 2).for_each(|_| row[at()] = f32::NEG_INFINITY),
        5 => row.iter_mut().skip(100).for_each(|value| *value = f32::NEG_INFINITY),
        // Positive and negative zero are equal values.
        6 => (0..cols).filter(|i| i % 3 > 0).for_each(|i| row[i] = if i % 2 == 0 { -0.0 } else { -9.0 }),
        7 => row.iter_mut().for_each(|value| *value *= 1e36),
        8 => row[at()] = f32::NAN,
        9 => row[at()] = f32::INFINITY,
        10 => row.fill(f32::NEG_INFINITY),
        11 => row[at()] = -f32::NAN,
        _ => row.iter_mut().for_each(|value| *value *= 1e-39),
    }
    row
}
const KINDS: usize = 13;

pub(crate) fn they_are_those_of_the_host(gpu: &TestGpu) -> Result<()> {
    let mut random = TestRng::new(31);
    let (mut cuda, mut reference) = (Cuda::new(&gpu.device)?, Reference::new());
    let vocabularies: &[usize] = if gpu.small { &[32_000] } else { &[32_000, 128_256, 151_936, 262_144] };
    let sizes = [1, 2, 255, 256, 257, 1000, 1024, 1025, 2047, 2049, 4096, 4097, 10_007];
    for &cols in sizes.iter().chain(vocabularies) {
        // A row in a batch with all other kinds. Two of the rows are computed again alone.
        let draw_params: Vec<DrawParams> = (0..KINDS).map(|_| random_draw_params(&mut random)).collect();
        let rows: Vec<Vec<f32>> = (0..KINDS).map(|kind| row(&mut random, kind, cols)).collect();
        let found = lists(&mut cuda, &rows.concat(), &draw_params)?;
        let expected = lists(&mut reference, &rows.concat(), &draw_params)?;
        for (kind, (found, expected)) in found.iter().zip(&expected).enumerate() {
            ensure_same_len(&format!("row of kind {kind} of {cols}"), &rows[kind], found, expected)?;
        }
        let greedy = [DrawParams::default(); KINDS];
        for draw_params in [&draw_params[..], &greedy] {
            let found = tokens(&mut cuda, &rows.concat(), draw_params)?;
            let expected = tokens(&mut reference, &rows.concat(), draw_params)?;
            ensure!(found == expected, "tokens of rows of {cols}: {found:?}, expected {expected:?}");
        }
        for kind in [0, 3] {
            let alone = lists(&mut cuda, &rows[kind], &draw_params[kind..=kind])?;
            ensure!(alone[0] == found[kind], "a row of {cols} alone is not that in a batch");
        }
    }
    // More rows than a model returns at once.
    let draw_params: Vec<DrawParams> = (0..70).map(|_| random_draw_params(&mut random)).collect();
    let host = random.values(70 * 2500);
    ensure!(lists(&mut cuda, &host, &draw_params)? == lists(&mut reference, &host, &draw_params)?, "70 rows");
    Ok(())
}

/// The device may omit the list of best values if too many values are equal or close to the last of
/// them. The drawn token and the sum must always be equal.
fn ensure_same_len(what: &str, row: &[f32], found: &Shortlist, expected: &Shortlist) -> Result<()> {
    ensure!(
        found.drawn() == expected.drawn(),
        "{what}: {:?}, expected {:?}",
        found.drawn(),
        expected.drawn()
    );
    let (total, of_host) = (found.total().to_bits(), expected.total().to_bits());
    ensure!(total == of_host, "{what}: sum {:e}, expected {:e}", found.total(), expected.total());
    if found.best().is_empty()
        && let Some(last) = expected.best().last()
    {
        let near = row.iter().filter(|&&value| value >= last.logit()).count();
        ensure!(near > 900, "{what}: there is no list, and {near} values reach the last of it");
        return Ok(());
    }
    let unequal = found.best().iter().zip(expected.best()).position(|(a, b)| a != b);
    ensure!(
        found.best() == expected.best(),
        "{what}: {} best, expected {}; the first of another kind is {unequal:?}",
        found.best().len(),
        expected.best().len()
    );
    Ok(())
}

/// Reads runs of rows, some of which come after rows that are not read.
pub(crate) fn single_rows_are_read(gpu: &TestGpu) -> Result<()> {
    let mut cuda = Cuda::new(&gpu.device)?;
    let (rows, cols) = (5, 33_001);
    let host = TestRng::new(32).values(rows * cols);
    let x = filled(&mut cuda, rows, cols, &host)?;
    for run in [0..1, 2..4, 4..5, 3..3, 0..5] {
        let mut found = vec![f32::NAN; run.len() * cols];
        cuda.read_rows(&x, run.clone(), &mut found)?;
        ensure!(found == host[run.start * cols..run.end * cols], "rows {run:?}");
    }
    ensure!(cuda.read_rows(&x, 4..6, &mut vec![0.0; 2 * cols]).is_err(), "a row too many");
    ensure!(cuda.read_rows(&x, 0..2, &mut vec![0.0; cols]).is_err(), "a row too few on the host");
    Ok(())
}

/// Measures shortlists of logits of a real vocabulary, with and without a draw, and the argmax of
/// the same rows.
pub(crate) fn bench(gpu: &TestGpu) -> Result<()> {
    let kernels = ShortlistKernels::new(&gpu.device);
    let argmaxes = kernels::cuda::argmax::ArgmaxKernels::new(&gpu.device);
    let cols = 151_936;
    let mut random = TestRng::new(33);
    for rows in [1, 16, 64] {
        let x = Buffer::from_host(&gpu.stream, &random.values(rows * cols))?;
        let mut best = Buffer::<u32>::new(&gpu.device, rows)?;
        let mut work = Buffer::<u64>::new(&gpu.device, shortlist::work_words(rows, cols))?;
        let seconds =
            time(gpu, 20, |_| Ok(argmaxes.rows(&gpu.stream, x.view(), cols, &mut best.view_mut())?))?;
        println!("argmax    {rows:2} rows of {cols}: {:6.1} us", seconds * 1e6);
        for (uniform, what) in [(None, "lists"), (Some(0.5), "lists and draws")] {
            let words = shortlist::draw_param_words(&DrawParams { temperature: 0.8, uniform });
            let draw_params = Buffer::from_host(&gpu.stream, &words.repeat(rows))?;
            let seconds = time(gpu, 20, |_| {
                Ok(kernels.rows(
                    &gpu.stream,
                    x.view(),
                    cols,
                    draw_params.view(),
                    &mut work.view_mut(),
                    None,
                )?)
            })?;
            let share = (2 * rows * cols * size_of::<f32>()) as f64 / seconds / 4.29e12;
            println!(
                "shortlist {rows:2} rows of {cols}: {:6.1} us ({:2.0}% of the copy rate) {what}",
                seconds * 1e6,
                share * 100.0
            );
        }
    }
    Ok(())
}
