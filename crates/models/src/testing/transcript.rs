// SPDX-License-Identifier: Apache-2.0

//! [`Transcript`]: the greedy tokens of llama.cpp for a prompt to a trained model.

use super::{ModelFile, Runner, runner::argmax};
use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use ops::{Backend, KvType};
use serde::Deserialize;
use std::path::Path;

/// One line of `NAME.greedy.jsonl`.
#[derive(Clone, Debug, Deserialize)]
pub struct Transcript {
    pub prompt_tokens: Vec<u32>,
    pub tokens: Vec<u32>,
    /// At each of `tokens`, the highest logit minus the second highest.
    pub gap: Vec<f32>,
}

impl Transcript {
    pub fn all(path: &Path) -> Result<Vec<Self>> {
        let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
        text.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
    }
}

/// Runs the model over the recorded tokens of the first `lines` transcripts (teacher forcing). At
/// each step with a gap of at least `gap_min`, the best token must be the recorded one. Returns the
/// number of these steps.
pub fn check_transcripts<B>(
    model: &Path,
    transcripts: &Path,
    make: impl Fn() -> B,
    gap_min: f32,
    lines: usize,
) -> Result<usize>
where
    B: Backend<Data: From<Bytes>>,
{
    let file = ModelFile::open(model)?;
    let mut decided = 0;
    for (line, transcript) in Transcript::all(transcripts)?.iter().take(lines).enumerate() {
        let prompt_len = transcript.prompt_tokens.len();
        let ids = [transcript.prompt_tokens.as_slice(), &transcript.tokens].concat();
        let logits = Runner::new(&file, make(), KvType::F16, 1, ids.len())?.extend(&ids)?;
        for (step, (&expected, &gap)) in transcript.tokens.iter().zip(&transcript.gap).enumerate() {
            let found = argmax(&logits[prompt_len - 1 + step]);
            ensure!(
                found == expected || gap < gap_min,
                "line {line}, step {step}: best token is {found}, recorded {expected} by a gap of {gap}"
            );
            decided += usize::from(gap >= gap_min);
        }
    }
    Ok(decided)
}
