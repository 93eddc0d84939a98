// SPDX-License-Identifier: Apache-2.0

//! A grammar of fixed texts, of which the output is one.
//!
//! The texts are sorted. So those that begin with the output so far are a range, and a token makes
//! the range smaller:
//!
//! ```text
//! no    <- start: all of them, depth 0
//! yes   <- after "y": this range, depth 1
//! yet   <-
//! ```
//!
//! A parser for the same alternatives needs an item for each of them in every state.

use std::sync::Arc;

use llguidance::toktrie::{TokEnv, TokTrie, TrieNode};

use crate::grammar_source::CompileError;
use crate::matcher::{MatchError, MatcherStatus};

/// Sorted, without duplicates.
type SortedTexts = Arc<[Box<[u8]>]>;

/// The state of one output.
#[derive(Clone)]
pub(crate) struct ChoiceMatcher {
    tokens: TokEnv,
    texts: SortedTexts,
    state: ChoiceState,
}

#[derive(Clone, Copy)]
enum ChoiceState {
    /// The texts that begin with the output.
    Open(TextRange),
    /// An end-of-generation token was accepted.
    Ended,
}

#[derive(Clone, Copy)]
struct TextRange {
    start: usize,
    end: usize,
    /// Bytes of the output. All texts of the range have them in common.
    depth: usize,
}

impl ChoiceMatcher {
    pub(crate) fn compile(choices: &[String], tokens: &TokEnv) -> Result<Self, CompileError> {
        if choices.is_empty() {
            return Err(CompileError::Empty);
        }
        let mut texts: Vec<Box<[u8]>> = choices.iter().map(|choice| choice.as_bytes().into()).collect();
        texts.sort_unstable();
        texts.dedup();
        let whole = TextRange { start: 0, end: texts.len(), depth: 0 };
        Ok(Self { tokens: tokens.clone(), texts: texts.into(), state: ChoiceState::Open(whole) })
    }

    pub(crate) fn compute_mask(&self, mask: &mut Vec<u32>) -> Result<MatcherStatus, MatchError> {
        let ChoiceState::Open(range) = self.state else { return Ok(MatcherStatus::Finished) };
        let is_complete = self.is_complete(range);
        if is_complete && range.end - range.start == 1 {
            return Ok(MatcherStatus::Finished);
        }
        let trie = self.tokens.tok_trie();
        mask.resize(trie.vocab_size().div_ceil(32), 0);
        self.allow_tokens(trie, trie.root(), range, mask);
        if is_complete {
            trie.eos_tokens().iter().for_each(|&token| allow(mask, token));
        }
        if mask.iter().all(|&word| word == 0) { Err(MatchError::DeadEnd) } else { Ok(MatcherStatus::Active) }
    }

    pub(crate) fn accept(&mut self, token: u32) -> Result<(), MatchError> {
        let refused = MatchError::Token { token };
        let ChoiceState::Open(mut range) = self.state else { return Err(refused) };
        let trie = self.tokens.tok_trie();
        if trie.eos_tokens().contains(&token) && self.is_complete(range) {
            self.state = ChoiceState::Ended;
            return Ok(());
        }
        let bytes = if (token as usize) < trie.vocab_size() { trie.token(token) } else { &[] };
        if bytes.is_empty() {
            return Err(refused);
        }
        for &byte in bytes {
            range = self.narrowed(range, byte).ok_or(refused)?;
        }
        self.state = ChoiceState::Open(range);
        Ok(())
    }

    /// A text that equals its common beginning is the first of its range.
    fn is_complete(&self, range: TextRange) -> bool {
        self.texts[range.start].len() == range.depth
    }

    /// The texts of the range that go on with `byte`.
    fn narrowed(&self, range: TextRange, byte: u8) -> Option<TextRange> {
        let texts = &self.texts[range.start..range.end];
        let before = texts.partition_point(|text| text.get(range.depth).is_none_or(|&next| next < byte));
        let with = texts[before..].partition_point(|text| text[range.depth] == byte);
        let start = range.start + before;
        (with > 0).then_some(TextRange { start, end: start + with, depth: range.depth + 1 })
    }

    /// Allows the tokens below `node`. `range` has the texts that begin with the output and the
    /// bytes of `node`. The depth of this recursion is the length of a token.
    fn allow_tokens(&self, trie: &TokTrie, node: &TrieNode, range: TextRange, mask: &mut [u32]) {
        for child in trie.node_children(node) {
            let Some(range) = self.narrowed(range, child.byte()) else { continue };
            if let Some(token) = child.token_id() {
                allow(mask, token);
            }
            self.allow_tokens(trie, child, range, mask);
        }
    }
}

fn allow(mask: &mut [u32], token: u32) {
    if let Some(word) = mask.get_mut(token as usize / 32) {
        *word |= 1 << (token % 32);
    }
}
