// SPDX-License-Identifier: Apache-2.0

//! The parameters of a beam search.

use super::{CheckedParams, RequestParamError, RequestParams};

/// vLLM's. The worker has the same range.
const LENGTH_PENALTY_DEFAULT: f64 = 1.0;
const LENGTH_PENALTY_MAX: f64 = 10.0;

/// A beam search, which finds all `n` choices of a prompt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct CheckedBeams {
    /// Sequences that the worker runs at once. At least `n`.
    pub(crate) width: u32,
    pub(crate) length_penalty: f32,
    /// The search ends as soon as `width` outputs have ended with a stop token.
    pub(crate) early_stopping: bool,
}

impl CheckedParams {
    /// Choices that one call of a worker generates.
    pub(crate) fn choices_per_call(&self) -> u32 {
        if self.beams.is_some() { self.n } else { 1 }
    }

    /// Sequences that one call of a worker runs.
    pub(crate) fn streams_per_call(&self) -> u32 {
        self.beams.map_or(1, |beams| beams.width)
    }
}

impl RequestParams {
    /// Refuses parameters that change what a beam search finds. Those of random draws, such as the
    /// temperature, have no effect on it.
    pub(crate) fn check_beams(&self) -> Result<(), RequestParamError> {
        if !self.beam_search {
            let is_alone = self.length_penalty.is_some_and(|penalty| penalty != LENGTH_PENALTY_DEFAULT);
            if self.early_stopping {
                return Err(RequestParamError::EarlyStoppingAlone);
            }
            return if is_alone { Err(RequestParamError::LengthPenaltyAlone) } else { Ok(()) };
        }
        let differs = |value: Option<f64>, neutral: f64| value.is_some_and(|value| value != neutral);
        let conflicts = [
            (self.grammar.is_some(), self.grammar.as_ref().map_or("grammar", |grammar| grammar.param)),
            (!self.stop.is_empty(), "stop"),
            (!self.logit_bias.is_empty(), "logit_bias"),
            (!self.allowed_tokens.is_empty(), "allowed_token_ids"),
            (!self.bad_words.is_empty(), "bad_words"),
            (differs(self.repetition_penalty, 1.0), "repetition_penalty"),
            (differs(self.presence_penalty, 0.0), "presence_penalty"),
            (differs(self.frequency_penalty, 0.0), "frequency_penalty"),
            (differs(self.dry_multiplier, 0.0), "dry_multiplier"),
            (self.mirostat.is_some_and(|version| version != 0), "mirostat"),
        ];
        match conflicts.into_iter().find(|(is_given, _)| *is_given) {
            Some((_, param)) => Err(RequestParamError::NotWithBeams { param }),
            None => Ok(()),
        }
    }

    /// `width`: sequences that run at once.
    pub(super) fn beams(&self, width: i64) -> Result<Option<CheckedBeams>, RequestParamError> {
        if !self.beam_search {
            return Ok(None);
        }
        let length_penalty = self.length_penalty.unwrap_or(LENGTH_PENALTY_DEFAULT);
        if length_penalty.abs() <= LENGTH_PENALTY_MAX {
            let length_penalty = length_penalty as f32;
            let early_stopping = self.early_stopping;
            return Ok(Some(CheckedBeams { width: width as u32, length_penalty, early_stopping }));
        }
        Err(RequestParamError::OutOfRange {
            param: "length_penalty",
            value: length_penalty.to_string(),
            allowed: format!("-{LENGTH_PENALTY_MAX} to {LENGTH_PENALTY_MAX}"),
        })
    }
}
