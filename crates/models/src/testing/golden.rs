// SPDX-License-Identifier: Apache-2.0

//! [`Golden`]: a small model with random weights, with the logits and greedy tokens that llama.cpp
//! computes for it.

use super::{
    ModelFile, Runner,
    runner::{argmax, same_bits},
};
use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use ops::{Backend, KvType};
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// The part of the tolerance that applies against llama.cpp's own rounded logits, for rounded
/// activations and an f32 KV cache. Both programs round by the same rule. Only a value at a
/// rounding edge goes to another side.
const LLAMA_CPP_SHARE: f32 = 0.5;

/// How the backend under test multiplies with weights that are not F32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    /// It decodes weights and does not round activations.
    Decoded,
    /// It rounds activations to the format of `DType::activation`.
    Rounded,
}

/// The contents of `NAME.json`, and its folder.
#[derive(Clone, Debug, Deserialize)]
pub struct Golden {
    pub name: String,
    pub arch: String,
    model: String,
    logits: String,
    n_vocab: usize,
    ids: Vec<u32>,
    prompt_len: usize,
    greedy: Vec<u32>,
    greedy_margin: Vec<f32>,
    greedy_deq: Option<Vec<u32>>,
    greedy_deq_margin: Option<Vec<f32>>,
    tolerance: Tolerance,
    #[serde(skip)]
    folder: PathBuf,
}

#[derive(Clone, Debug, Deserialize)]
struct Tolerance {
    /// The file of logits that the tolerances refer to.
    against: String,
    f32_max_abs: f32,
    f16_kv_max_abs: f32,
    int8_activations_max_abs: Option<f32>,
    int8_activations_rms: Option<f32>,
}

/// The largest allowed difference of logits, as a maximum and as a root mean square.
#[derive(Clone, Copy, Debug)]
struct Bound {
    max: f32,
    rms: f32,
}

impl Golden {
    /// Reads all models of `folder` whose architecture is in `architectures`, sorted by name.
    pub fn all(folder: &Path, architectures: &[&str]) -> Result<Vec<Self>> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "json") {
                let text = std::fs::read(&path)?;
                let golden: Self =
                    serde_json::from_slice(&text).with_context(|| path.display().to_string())?;
                found.push(Self { folder: folder.to_owned(), ..golden });
            }
        }
        found.retain(|golden| architectures.contains(&golden.arch.as_str()));
        found.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(found)
    }

    pub fn file(&self) -> Result<ModelFile> {
        ModelFile::open(&self.folder.join(&self.model))
    }

    /// Runs the model with an f32 and an f16 KV cache, and checks three claims:
    ///
    /// 1. The logits are within tolerance.
    /// 2. The logits have the same bits, however tokens are divided into steps and whatever the
    ///    batch neighbours are.
    /// 3. The greedy tokens are the recorded ones.
    pub fn check<B>(&self, make: impl Fn() -> B, arithmetic: Arithmetic) -> Result<()>
    where
        B: Backend<Data: From<Bytes>>,
    {
        let file = self.file()?;
        let rounded = arithmetic == Arithmetic::Rounded && file.rounds_activations();
        for kind in [KvType::F32, KvType::F16] {
            let bound = self.bound(kind, rounded)?;
            self.check_logits(&file, &make, kind, bound, rounded)
                .and_then(|()| self.check_ragged(&file, &make, kind))
                .and_then(|()| self.check_greedy(&file, &make, kind, bound))
                .with_context(|| format!("{} with {kind:?} cache, {arithmetic:?}", self.name))?;
        }
        Ok(())
    }

    fn check_logits<B>(
        &self,
        file: &ModelFile,
        make: impl Fn() -> B,
        kind: KvType,
        bound: Bound,
        rounded: bool,
    ) -> Result<()>
    where
        B: Backend<Data: From<Bytes>>,
    {
        let rows = Runner::new(file, make(), kind, 1, self.ids.len())?.extend(&self.ids)?;
        let logits = rows.concat();
        // `compare` ignores NaN, since `f32::max` does.
        ensure!(logits.iter().all(|logit| logit.is_finite()), "a logit is not finite");
        self.compare(&logits, &self.tolerance.against, bound)?;
        if rounded && kind == KvType::F32 {
            let own = Bound { max: bound.max * LLAMA_CPP_SHARE, rms: bound.rms * LLAMA_CPP_SHARE };
            self.compare(&logits, &self.logits, own)?;
        }

        let cut = Runner::new(file, make(), kind, 1, self.ids.len())?
            .extend_in_chunks(&self.ids, &[1, 2, 13, 1, 16])?;
        ensure!(same_bits(&rows, &cut), "logits depend on how the tokens are cut into steps");
        Ok(())
    }

    /// Checks that a sequence has the same logits, bit for bit, with batch neighbours and alone.
    /// Steps mix decodes with prefill chunks, and return the logits of some rows only.
    fn check_ragged<B>(&self, file: &ModelFile, make: impl Fn() -> B, kind: KvType) -> Result<()>
    where
        B: Backend<Data: From<Bytes>>,
    {
        let sequences = [&self.ids[..30], &self.ids[5..], &self.ids[10..28]];
        // Per step, pairs of sequence and number of tokens, decodes first.
        let steps: &[&[(usize, usize)]] = &[
            &[(0, 16)],
            &[(0, 1), (1, 20)],
            &[(0, 1), (1, 1), (2, 7)],
            &[(1, 1), (2, 1), (0, 12)],
            &[(2, 10), (1, 13)],
        ];
        let mut alone = Vec::new();
        for ids in sequences {
            alone.push(Runner::new(file, make(), kind, 1, ids.len())?.extend(ids)?);
        }
        let mut runner = Runner::new(file, make(), kind, sequences.len(), self.ids.len())?;
        let mut done = [0; 3];
        for (index, step) in steps.iter().enumerate() {
            // The first step returns no logits, like a prefill chunk before the last.
            let wanted = |row: usize| index > 0 && row % 3 != 1;
            let (mut parts, mut expected) = (Vec::new(), Vec::new());
            for &(sequence, len) in *step {
                let range = done[sequence]..done[sequence] + len;
                parts.push((sequence, &sequences[sequence][range.clone()]));
                expected.extend_from_slice(&alone[sequence][range.clone()]);
                done[sequence] = range.end;
            }
            let mut row = 0..;
            expected.retain(|_| row.next().is_some_and(wanted));
            let found = runner.step(&parts, wanted)?;
            ensure!(same_bits(&found, &expected), "logits depend on what shares the step (step {index})");
        }
        Ok(())
    }

    fn compare(&self, logits: &[f32], against: &str, bound: Bound) -> Result<()> {
        let expected = self.read_logits(against)?;
        let differences = logits.iter().zip(&expected).map(|(found, expected)| (found - expected).abs());
        let max = differences.clone().fold(0.0, f32::max);
        let rms = (differences.map(|d| d * d).sum::<f32>() / expected.len() as f32).sqrt();
        eprintln!("{against}: max {max:.2e} of {:.2e}, rms {rms:.2e} of {:.2e}", bound.max, bound.rms);
        ensure!(max <= bound.max, "logits differ from {against} by {max}, allowed are {}", bound.max);
        ensure!(rms <= bound.rms, "logits differ from {against} by {rms} (rms), allowed are {}", bound.rms);
        Ok(())
    }

    /// Checks that greedy tokens are the recorded ones. If a token differs and its recorded margin
    /// is within twice the tolerance, the check ends there with success.
    fn check_greedy<B>(
        &self,
        file: &ModelFile,
        make: impl Fn() -> B,
        kind: KvType,
        bound: Bound,
    ) -> Result<()>
    where
        B: Backend<Data: From<Bytes>>,
    {
        let greedy = self.greedy_deq.as_ref().unwrap_or(&self.greedy);
        let margins = self.greedy_deq_margin.as_ref().unwrap_or(&self.greedy_margin);
        let mut runner = Runner::new(file, make(), kind, 1, self.prompt_len + greedy.len())?;
        let mut logits = runner.extend(&self.ids[..self.prompt_len])?;
        for (step, (&expected, &margin)) in greedy.iter().zip(margins).enumerate() {
            let token = logits.last().map(|logits| argmax(logits)).context("no logits")?;
            if token != expected && margin < 2.0 * bound.max {
                return Ok(());
            }
            ensure!(
                token == expected,
                "greedy token {step} is {token}, expected {expected} by a margin of {margin}"
            );
            logits = runner.extend(&[token])?;
        }
        Ok(())
    }

    fn bound(&self, kind: KvType, rounded: bool) -> Result<Bound> {
        let Tolerance { f32_max_abs, f16_kv_max_abs, int8_activations_max_abs, int8_activations_rms, .. } =
            self.tolerance;
        if rounded {
            let max = int8_activations_max_abs.context("int8_activations_max_abs")?;
            let rms = int8_activations_rms.context("int8_activations_rms")?;
            return Ok(Bound { max, rms });
        }
        let max = match kind {
            KvType::F32 => f32_max_abs,
            KvType::F16 => f16_kv_max_abs,
            kind => bail!("there are no golden logits of {kind} KV"),
        };
        Ok(Bound { max, rms: max })
    }

    fn read_logits(&self, name: &str) -> Result<Vec<f32>> {
        let path = self.folder.join(name);
        let bytes = std::fs::read(&path).with_context(|| path.display().to_string())?;
        let (values, rest) = bytes.as_chunks();
        ensure!(rest.is_empty() && values.len() == self.ids.len() * self.n_vocab, "{}: size", path.display());
        Ok(values.iter().map(|&value| f32::from_le_bytes(value)).collect())
    }
}
