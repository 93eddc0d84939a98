// SPDX-License-Identifier: Apache-2.0

//! A compiled grammar, and the matcher that follows one output through it.

use llguidance::TokenParser;
use llguidance::api::StopReason;

use crate::grammar_source::{CompileError, GrammarSource};
use crate::vocabulary::GrammarVocabulary;

/// A client sees at most this many characters of the compiler's message.
const REASON_CHARS_MAX: usize = 400;

/// A grammar from which matchers start.
pub struct CompiledGrammar {
    start: TokenParser,
}

/// The state of one output in its grammar.
pub struct Matcher {
    inner: TokenParser,
}

/// Whether an output may continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatcherStatus {
    /// The tokens of the mask may follow. Where the grammar may end, the mask includes the
    /// end-of-generation tokens.
    Active,
    /// The output is complete: no token may follow.
    Finished,
}

/// Why a matcher cannot continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MatchError {
    #[error("the grammar does not allow token {token}")]
    Token { token: u32 },
    #[error("the grammar is too complex: it exceeds the limits on states or on work for a token")]
    TooComplex,
    #[error("the grammar allows no token of this vocabulary here")]
    DeadEnd,
}

impl CompiledGrammar {
    /// Uses stack in proportion to the source's nesting: a few MiB at the limit.
    pub fn compile(source: &GrammarSource, vocabulary: &GrammarVocabulary) -> Result<Self, CompileError> {
        let mut start = vocabulary
            .factory
            .create_parser(source.to_top_level_grammar()?)
            .map_err(|error| compiler_error(&error))?;
        start.start_without_prompt();
        let grammar = Self { start };
        match grammar.matcher().compute_mask(&mut Vec::new()) {
            Ok(_) => Ok(grammar),
            Err(MatchError::TooComplex) => {
                Err(CompileError::Refused { reason: MatchError::TooComplex.to_string() })
            }
            Err(_) => Err(CompileError::NothingMatches),
        }
    }

    /// Creates a matcher. Matchers share no state, so the cost of one output does not depend on
    /// another.
    pub fn matcher(&self) -> Matcher {
        Matcher { inner: self.start.deep_clone() }
    }
}

impl Matcher {
    /// Fills `mask`. Bit `t % 32` of word `t / 32` says whether token `t` may follow.
    pub fn compute_mask(&mut self, mask: &mut Vec<u32>) -> Result<MatcherStatus, MatchError> {
        mask.clear();
        match self.inner.stop_reason() {
            StopReason::NotStopped => {}
            StopReason::EndOfSentence | StopReason::NoExtension => return Ok(MatcherStatus::Finished),
            _ => return Err(self.limit_error_or(MatchError::DeadEnd)),
        }
        match self.inner.compute_mask() {
            Ok(tokens) => {
                mask.extend_from_slice(tokens.as_slice());
                Ok(MatcherStatus::Active)
            }
            Err(_) => Err(self.limit_error_or(MatchError::DeadEnd)),
        }
    }

    /// Advances by a sampled token.
    pub fn accept(&mut self, token: u32) -> Result<(), MatchError> {
        let accepted = self.inner.consume_token(token).and_then(|_| self.inner.check_stop());
        accepted.map(drop).map_err(|_| self.limit_error_or(MatchError::Token { token }))
    }

    /// Returns `TooComplex` if llguidance reached a limit, else `otherwise`. After a limit, its
    /// other answers are unreliable.
    fn limit_error_or(&self, otherwise: MatchError) -> MatchError {
        if self.inner.parser.get_error().is_some() { MatchError::TooComplex } else { otherwise }
    }
}

/// Shortens the compiler's message to one line, because it quotes the source at length.
fn compiler_error(error: &dyn std::fmt::Display) -> CompileError {
    let text = error.to_string();
    let text = text.split("<backtrace>").next().unwrap_or_default();
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    CompileError::Refused { reason: lines.join("; ").chars().take(REASON_CHARS_MAX).collect() }
}

const _: fn() = || {
    fn moves_between_threads<T: Send>() {}
    moves_between_threads::<Matcher>();
    moves_between_threads::<CompiledGrammar>();
};
