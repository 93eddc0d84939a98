//! What a request may draw, decided outside the engine: a grammar's masks. The engine asks before each draw of the request
//! and tells each drawn token; preemption, batch and company change nothing in that sequence.

/// One request's output so far, as its grammar sees it. Prior output was accepted before the engine got it.
pub trait Constraint: Send {
    /// What may be drawn next. Never waits: what the last `accept` began may be [`TokenMask::Pending`], until a bound of the
    /// constraint's own makes an error of that; any other answer stays the same until the next `accept`.
    fn token_mask(&mut self) -> Result<TokenMask<'_>, ConstraintError>;
    /// The token was drawn and reported. Must not wait: the next mask is computed beside the next step.
    fn accept(&mut self, token: u32);
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenMask<'a> {
    /// Bit `t % 32` of word `t / 32`: whether token `t` may be drawn.
    Allowed(&'a [u32]),
    /// The output is whole.
    Complete,
    /// Not known yet. The engine asks again before each step; others go on meanwhile.
    Pending,
}

/// Why nobody can say what may be drawn.
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

/// Whether any token that is not `ruled_out` may be drawn.
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
