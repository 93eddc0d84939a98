//! Logits that no token can be sampled from.

/// A row of logits that no token can be drawn from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SampleError {
    #[error("logit of token {token} is not a number or infinite: the model's weights or kernels are broken")]
    NotFinite { token: usize },
    #[error("every token is ruled out")]
    NothingLeft,
}

/// A model may rule a token out with -inf; NaN and +inf come from broken weights or kernels.
pub(super) fn check(logits: &[f32]) -> Result<(), SampleError> {
    // Without branches in the loop, so that it is vectorised: the row is looked through again only if it is bad.
    let bad = |logit: f32| logit.is_nan() || logit == f32::INFINITY;
    if !logits.iter().fold(false, |found, &logit| found | bad(logit)) {
        return Ok(());
    }
    let token = logits.iter().position(|&logit| bad(logit)).unwrap_or(0);
    Err(SampleError::NotFinite { token })
}
