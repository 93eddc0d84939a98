// SPDX-License-Identifier: Apache-2.0

//! Logits from which no token can be sampled.

/// Why no token can be sampled from a row of logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SampleError {
    #[error("logit of token {token} is not a number or infinite: the model's weights or kernels are broken")]
    NotFinite { token: usize },
    #[error(
        "value {index} of the hidden state is not a number or infinite: the model's weights or kernels are broken"
    )]
    HiddenState { index: usize },
    #[error("every token is ruled out")]
    NothingLeft,
    #[error("no logit is the largest finite one: the model's weights or kernels are broken")]
    NoMaximum,
}

/// A model may remove a token with -inf. NaN and +inf come from broken weights or kernels.
pub(super) fn check(logits: &[f32]) -> Result<(), SampleError> {
    // The loop has no branches, so that it vectorises. Only a bad row is searched a second time.
    let bad = |logit: f32| logit.is_nan() || logit == f32::INFINITY;
    if !logits.iter().fold(false, |found, &logit| found | bad(logit)) {
        return Ok(());
    }
    let token = logits.iter().position(|&logit| bad(logit)).unwrap_or(0);
    Err(SampleError::NotFinite { token })
}
