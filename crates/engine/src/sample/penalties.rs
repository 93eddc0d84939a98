// SPDX-License-Identifier: Apache-2.0

//! Repetition, presence and frequency penalties.
//!
//! The repetition penalty covers prompt and output; presence and frequency cover the output only,
//! as in the OpenAI API and vLLM. In llama.cpp all three cover the last tokens of either. Prior
//! output of a resumed request counts as output.

use crate::sample::params::SamplingParams;
use std::collections::HashMap;

/// Tokens of a sequence, and their counts in its output. Kept only if a penalty needs it.
#[derive(Clone, Debug, Default)]
pub(super) struct TokenCounts {
    output: HashMap<u32, u32>,
}

impl TokenCounts {
    pub(super) fn new(prompt: &[u32], output: &[u32]) -> Self {
        let mut counts = Self { output: prompt.iter().map(|&token| (token, 0)).collect() };
        output.iter().for_each(|&token| counts.push(token));
        counts
    }

    /// Appends an output token.
    pub(super) fn push(&mut self, token: u32) {
        *self.output.entry(token).or_insert(0) += 1;
    }

    /// Each entry changes only its own logit, so the order of the map does not matter.
    pub(super) fn apply(&self, params: &SamplingParams, logits: &mut [f32]) {
        for (&token, &count) in &self.output {
            let logit = &mut logits[token as usize];
            *logit = penalised(params, count, *logit);
        }
    }

    /// The logit of one token after `apply`.
    pub(super) fn applied(&self, params: &SamplingParams, token: u32, logit: f32) -> f32 {
        self.output.get(&token).map_or(logit, |&count| penalised(params, count, logit))
    }
}

fn penalised(params: &SamplingParams, count: u32, logit: f32) -> f32 {
    let logit = match logit {
        // A tiny penalty must not make the logit infinite.
        positive if positive > 0.0 => (positive / params.repetition_penalty).min(f32::MAX),
        other => other * params.repetition_penalty,
    };
    match count {
        0 => logit,
        count => logit - (count as f32 * params.frequency_penalty + params.presence_penalty),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repetition_sees_the_prompt_presence_and_frequency_do_not() {
        let counts = TokenCounts::new(&[0, 1], &[1, 2, 2, 3]);
        let params = SamplingParams {
            repetition_penalty: 2.0,
            presence_penalty: 0.5,
            frequency_penalty: 0.25,
            ..SamplingParams::default()
        };
        let mut logits = [4.0, 4.0, 4.0, -4.0, 4.0];
        counts.apply(&params, &mut logits);
        assert_eq!(logits, [2.0, 2.0 - 0.75, 2.0 - 1.0, -8.0 - 0.75, 4.0]);
    }

    #[test]
    fn resumed_counts_equal_grown_counts() {
        let mut grown = TokenCounts::new(&[5, 6], &[]);
        [6, 7, 7].into_iter().for_each(|token| grown.push(token));
        assert_eq!(grown.output, TokenCounts::new(&[5, 6], &[6, 7, 7]).output);
    }
}
