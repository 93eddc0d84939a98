// SPDX-License-Identifier: Apache-2.0

//! Structured output: token masks that a grammar outside the engine computes. Before each token of
//! a request the engine asks for the mask, and then reports the sampled token. Preemption and batch
//! neighbours do not change that sequence of calls.

/// The grammar state of one request. It has accepted prior output before the engine gets it.
pub trait Constraint: Send {
    /// The mask for the next token. Must not block: while the mask is being computed, the result is
    /// [`TokenMask::Pending`], and after the constraint's own time limit an error. Any other result
    /// stays the same until the next `accept`.
    fn token_mask(&mut self) -> Result<TokenMask<'_>, ConstraintError>;
    /// The token was sampled and reported. Must not block: the next mask is computed while the next
    /// step runs.
    fn accept(&mut self, token: u32);
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenMask<'a> {
    /// Bit `t % 32` of word `t / 32` allows token `t`.
    Allowed(&'a [u32]),
    /// The output is complete: no further token is allowed.
    Complete,
    /// The mask is not ready. The engine asks again before each step; other requests continue.
    Pending,
}

/// Why a constraint cannot give a token mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConstraintError {
    #[error("the grammar is too complex: its bounds on states or work for a token are reached")]
    TooComplex,
    #[error("the grammar allows no token of this vocabulary here")]
    DeadEnd,
    #[error("the mask of the next token was not computed in time")]
    MaskTimeout,
    #[error("following the grammar failed, which is a mistake of this program and not of the grammar")]
    Internal,
}

/// Whether the mask allows a token that is not `forbidden`.
pub(crate) fn leaves_any(allowed: &[u32], forbidden: &[u32]) -> bool {
    allowed.iter().enumerate().any(|(word, &bits)| {
        let here = forbidden.iter().filter(|&&token| token as usize / 32 == word);
        here.fold(bits, |bits, token| bits & !(1 << (token % 32))) != 0
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ruled_out_tokens_do_not_count() {
        assert!(leaves_any(&[0b1010], &[1]));
        assert!(!leaves_any(&[0b1010], &[1, 3]));
        assert!(leaves_any(&[0b1010, 1], &[1, 3, 64]));
        assert!(!leaves_any(&[0, 2], &[33]));
        assert!(!leaves_any(&[], &[]));
    }
}
