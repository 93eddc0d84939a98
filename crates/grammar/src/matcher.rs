// SPDX-License-Identifier: Apache-2.0

//! A compiled grammar, and the matcher that follows one output through it.

use llguidance::TokenParser;
use llguidance::api::StopReason;
use llguidance::earley::ParserError;

use crate::choice::ChoiceMatcher;
use crate::grammar_source::{CompileError, GrammarSource};
use crate::probe;
use crate::vocabulary::GrammarVocabulary;

/// A client sees at most this many characters of the compiler's message.
const REASON_CHARS_MAX: usize = 400;
/// Part of llguidance's message for a row with too many items. A test notices if it changes.
const ROW_FULL: &str = "items; max is";

/// A grammar from which matchers start.
pub struct CompiledGrammar {
    start: MatcherKind,
}

/// The state of one output in its grammar.
pub struct Matcher {
    kind: MatcherKind,
}

enum MatcherKind {
    Parser(Box<TokenParser>),
    Choice(ChoiceMatcher),
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
        source.check_length()?;
        let start = match (source, source.to_top_level_grammar()?) {
            (GrammarSource::Choice(choices), _) => {
                MatcherKind::Choice(ChoiceMatcher::compile(choices, vocabulary.factory.tok_env())?)
            }
            (_, None) => return Err(CompileError::Empty),
            (_, Some(grammar)) => {
                let parser = vocabulary.factory.create_parser(grammar);
                let mut parser = parser.map_err(|error| compiler_error(&error))?;
                parser.start_without_prompt();
                MatcherKind::Parser(Box::new(parser))
            }
        };
        let grammar = Self { start };
        probe::walk(&grammar)?;
        Ok(grammar)
    }

    /// Creates a matcher. Matchers share no state, so the cost of one output does not depend on
    /// another.
    pub fn matcher(&self) -> Matcher {
        let kind = match &self.start {
            MatcherKind::Parser(parser) => MatcherKind::Parser(Box::new(parser.deep_clone())),
            MatcherKind::Choice(choice) => MatcherKind::Choice(choice.clone()),
        };
        Matcher { kind }
    }
}

impl Matcher {
    /// Fills `mask`. Bit `t % 32` of word `t / 32` says whether token `t` may follow.
    pub fn compute_mask(&mut self, mask: &mut Vec<u32>) -> Result<MatcherStatus, MatchError> {
        mask.clear();
        let parser = match &mut self.kind {
            MatcherKind::Choice(choice) => return choice.compute_mask(mask),
            MatcherKind::Parser(parser) => parser,
        };
        match parser.stop_reason() {
            StopReason::NotStopped => {}
            StopReason::EndOfSentence | StopReason::NoExtension => return Ok(MatcherStatus::Finished),
            _ => return Err(limit_error_or(parser, MatchError::DeadEnd)),
        }
        match parser.compute_mask() {
            Ok(tokens) => {
                mask.extend_from_slice(tokens.as_slice());
                Ok(MatcherStatus::Active)
            }
            Err(_) => Err(limit_error_or(parser, MatchError::DeadEnd)),
        }
    }

    /// Advances by a sampled token.
    pub fn accept(&mut self, token: u32) -> Result<(), MatchError> {
        let parser = match &mut self.kind {
            MatcherKind::Choice(choice) => return choice.accept(token),
            MatcherKind::Parser(parser) => parser,
        };
        let accepted = parser.consume_token(token).and_then(|_| parser.check_stop());
        accepted.map(drop).map_err(|_| limit_error_or(parser, MatchError::Token { token }))
    }

    /// The limit that a [`MatchError::TooComplex`] met, in llguidance's words, and whether it is a
    /// limit on states of the lexer. Those depend on the text more than on the grammar.
    pub(crate) fn limit_met(&self) -> Option<(String, bool)> {
        let MatcherKind::Parser(parser) = &self.kind else { return None };
        let of_lexer = matches!(parser.parser.get_error(), Some(ParserError::LexerError(_)));
        Some((parser.error_message()?, of_lexer))
    }
}

/// Returns `TooComplex` if llguidance reached a limit, else `otherwise`. After a limit, its other
/// answers are unreliable.
fn limit_error_or(parser: &TokenParser, otherwise: MatchError) -> MatchError {
    // llguidance reports a row with too many items like a token that the grammar does not allow.
    let is_row_full = || parser.error_message().is_some_and(|text| text.contains(ROW_FULL));
    if parser.parser.get_error().is_some() || is_row_full() { MatchError::TooComplex } else { otherwise }
}

/// Shortens the compiler's message to one line, because it quotes the source at length.
pub(crate) fn compiler_error(error: &dyn std::fmt::Display) -> CompileError {
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
