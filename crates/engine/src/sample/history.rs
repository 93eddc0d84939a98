// SPDX-License-Identifier: Apache-2.0

//! What the sampler remembers of earlier tokens of a request. It is a function of prompt, output
//! and the sampler state in the last token frame, so a resumed request continues with the same
//! tokens.

use crate::sample::params::{MirostatParams, SamplingParamError, SamplingParams};
use crate::sample::penalties::TokenCounts;
use crate::sample::sampler_state::SamplerState;

/// Each field is kept only if a parameter needs it.
#[derive(Clone, Debug, Default)]
pub struct History {
    pub(super) counts: Option<TokenCounts>,
    /// Prompt and output, for DRY.
    pub(super) tokens: Option<Vec<u32>>,
    /// Mirostat's bound on surprise in bits.
    pub(super) mu: Option<f32>,
}

impl History {
    /// `state` is that of the last token of `output`, or empty without output.
    pub fn new(
        params: &SamplingParams,
        prompt: &[u32],
        output: &[u32],
        state: &SamplerState,
    ) -> Result<Self, SamplingParamError> {
        let mu = match (params.mirostat, state.as_bytes()) {
            (None, []) => None,
            (Some(MirostatParams { tau, .. }), []) if output.is_empty() => Some(2.0 * tau),
            (Some(_), &[a, b, c, d]) => Some(f32::from_le_bytes([a, b, c, d])).filter(|mu| mu.is_finite()),
            (_, other) => return Err(SamplingParamError::SamplerState { bytes: other.len() }),
        };
        if params.mirostat.is_some() && mu.is_none() {
            return Err(SamplingParamError::SamplerState { bytes: state.as_bytes().len() });
        }
        let looks_back = params.mirostat.is_none();
        Ok(Self {
            counts: (looks_back && params.has_penalties()).then(|| TokenCounts::new(prompt, output)),
            tokens: (looks_back && params.dry.is_some()).then(|| [prompt, output].concat()),
            mu,
        })
    }

    /// The state to pass to a request that resumes after the last token.
    pub fn state(&self) -> SamplerState {
        self.mu.and_then(|mu| SamplerState::from_bytes(&mu.to_le_bytes())).unwrap_or_default()
    }

    /// Whether no earlier token changes the logits.
    pub(crate) fn uses_raw_logits(&self) -> bool {
        self.counts.is_none() && self.tokens.is_none()
    }

    /// Appends an output token.
    pub(crate) fn push(&mut self, token: u32) {
        if let Some(counts) = &mut self.counts {
            counts.push(token);
        }
        if let Some(tokens) = &mut self.tokens {
            tokens.push(token);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::params::MirostatVersion;

    fn mirostat() -> SamplingParams {
        let mirostat = MirostatParams { version: MirostatVersion::Two, tau: 3.0, eta: 0.1 };
        SamplingParams { mirostat: Some(mirostat), ..SamplingParams::default() }
    }

    #[test]
    fn the_state_survives_its_way_through_a_frame() {
        let mut history = History::new(&mirostat(), &[1], &[], &SamplerState::default()).unwrap();
        assert_eq!(history.mu, Some(6.0));
        history.mu = Some(4.321);
        let resumed = History::new(&mirostat(), &[1], &[2], &history.state()).unwrap();
        assert_eq!(resumed.mu, Some(4.321));
        let plain = SamplingParams::default();
        let nothing = History::new(&plain, &[1], &[2], &SamplerState::default()).unwrap();
        assert!(nothing.state().as_bytes().is_empty());
    }

    #[test]
    fn a_state_that_no_frame_carried_is_refused() {
        let state = |bytes: &[u8]| SamplerState::from_bytes(bytes).unwrap();
        let refused = |params: &SamplingParams, output: &[u32], bytes: &[u8]| {
            History::new(params, &[1], output, &state(bytes)).is_err()
        };
        assert!(refused(&mirostat(), &[2], &[]), "output without a state");
        assert!(refused(&mirostat(), &[2], &[1, 2, 3]));
        assert!(refused(&mirostat(), &[2], &f32::NAN.to_le_bytes()));
        assert!(refused(&SamplingParams::default(), &[2], &[0; 4]));
    }
}
