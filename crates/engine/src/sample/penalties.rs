//! Penalties on tokens that were there before.
//!
//! Repetition looks at prompt and output, presence and frequency at the output only (as OpenAI and vLLM have it; in
//! llama.cpp all three look at the last tokens of either). What is output of a resumed request was output before.

use crate::sample::params::SamplingParams;
use std::collections::HashMap;

/// Which tokens a sequence has, and how often its output has them. Kept only where a penalty asks for it.
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

    /// One more output token.
    pub(super) fn push(&mut self, token: u32) {
        *self.output.entry(token).or_insert(0) += 1;
    }

    /// Each entry changes its own logit only: the order of the map does not matter.
    pub(super) fn apply(&self, params: &SamplingParams, logits: &mut [f32]) {
        for (&token, &count) in &self.output {
            let logit = &mut logits[token as usize];
            *logit = penalised(params, count, *logit);
        }
    }

    /// What `apply` makes of the logit of one token.
    pub(super) fn applied(&self, params: &SamplingParams, token: u32, logit: f32) -> f32 {
        self.output.get(&token).map_or(logit, |&count| penalised(params, count, logit))
    }
}

fn penalised(params: &SamplingParams, count: u32, logit: f32) -> f32 {
    let logit = match logit {
        // A tiny penalty must not make it infinite.
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
