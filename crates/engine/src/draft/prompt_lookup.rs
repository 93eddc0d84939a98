// SPDX-License-Identifier: Apache-2.0

//! Prompt lookup: proposes what followed the last occurrence of the sequence's final tokens in its
//! prompt or output.
//!
//! Among earlier positions with the same last [`MATCH_MIN`] tokens, the longest match wins, the
//! latest among equals. The draft has as many tokens as matched: a chance match risks little, and a
//! long copy runs far. There are no weights; a token costs a few hundred nanoseconds.

use crate::draft::depth::DraftingCost;
use crate::draft::draft_tokens::DraftTokens;
use crate::draft::drafter::{DraftRequest, Drafter};
use crate::schedule::scheduler::Scheduler;
use crate::schedule::sequence::Sequence;
use crate::schedule::sequence_id::SequenceId;
use ops::{Backend, OpError};

/// Fewest equal tokens that make a match. Shorter matches are right too seldom.
const MATCH_MIN: usize = 3;
/// Longer matches count the same.
const MATCH_MAX: usize = 32;
/// Earlier positions that are compared.
const PLACES_MAX: usize = 24;
/// Tokens indexed per step, so that a long prompt does not delay other sequences.
const INDEXED_MAX: usize = 8192;
/// Bits of the hash table: a few pages for a short text, 256 KiB for the longest.
const TABLE_BITS: std::ops::RangeInclusive<u32> = 8..=16;

/// Drafter that copies from the sequence itself.
#[derive(Debug, Default)]
pub struct PromptLookup {
    /// By sequence id.
    texts: Vec<Option<NgramIndex>>,
}

impl<B: Backend> Drafter<B> for PromptLookup {
    fn propose(
        &mut self,
        _: &mut B,
        scheduler: &Scheduler,
        wanted: &[DraftRequest],
        drafts: &mut [DraftTokens],
    ) -> Result<DraftingCost, OpError> {
        for (wanted, draft) in wanted.iter().zip(drafts) {
            if let Some(sequence) = scheduler.sequence(wanted.sequence_id) {
                self.text(wanted.sequence_id, sequence).propose(sequence.tokens(), wanted.depth, draft);
            }
        }
        Ok(DraftingCost::default())
    }

    fn forget(&mut self, sequence_id: SequenceId) {
        if let Some(text) = self.texts.get_mut(sequence_id.index()) {
            *text = None;
        }
    }
}

impl PromptLookup {
    fn text(&mut self, sequence_id: SequenceId, sequence: &Sequence) -> &mut NgramIndex {
        let index = sequence_id.index();
        if self.texts.len() <= index {
            self.texts.resize_with(index + 1, || None);
        }
        let new = || NgramIndex::new(sequence.tokens().len(), sequence.tokens_max());
        self.texts[index].get_or_insert_with(new)
    }
}

/// Index of the last and earlier positions of each n-gram of [`MATCH_MIN`] tokens.
#[derive(Debug)]
struct NgramIndex {
    /// Position + 1 of the last n-gram with this hash; 0 if none.
    last: Vec<u32>,
    /// For each position, position + 1 of the previous n-gram with the same hash.
    previous: Vec<u32>,
}

impl NgramIndex {
    /// An index for a text that has `tokens` tokens now. It allocates nothing until `tokens_max`.
    fn new(tokens: usize, tokens_max: usize) -> Self {
        let bits = tokens.next_power_of_two().ilog2().clamp(*TABLE_BITS.start(), *TABLE_BITS.end());
        Self { last: vec![0; 1 << bits], previous: Vec::with_capacity(tokens_max) }
    }

    fn propose(&mut self, tokens: &[u32], depth: usize, draft: &mut DraftTokens) {
        // The last token is not indexed yet: the lookup is for it.
        let known = tokens.len().saturating_sub(1);
        self.index(&tokens[..known]);
        let Some(found) = self.find(tokens) else { return };
        // A match that reaches the end of the text repeats itself.
        for step in 0..depth.min(found.agreed) {
            draft.push(match tokens.get(found.next + step) {
                Some(&token) => token,
                None => draft.tokens()[step - (tokens.len() - found.next)],
            });
        }
    }

    fn index(&mut self, tokens: &[u32]) {
        let from = self.previous.len();
        for place in from..tokens.len().min(from + INDEXED_MAX) {
            let before = match self.bucket(&tokens[..=place]) {
                Some(bucket) => std::mem::replace(&mut self.last[bucket], place as u32 + 1),
                None => 0,
            };
            self.previous.push(before);
        }
    }

    fn find(&self, tokens: &[u32]) -> Option<NgramMatch> {
        let mut best: Option<NgramMatch> = None;
        let mut at = self.last[self.bucket(tokens)?] as usize;
        for _ in 0..PLACES_MAX {
            let Some(place) = at.checked_sub(1) else { break };
            let agreed = agreed(&tokens[..=place], tokens);
            if agreed >= MATCH_MIN && best.is_none_or(|best| agreed > best.agreed) {
                best = Some(NgramMatch { next: place + 1, agreed });
            }
            if agreed == MATCH_MAX {
                break;
            }
            at = self.previous[place] as usize;
        }
        best
    }

    /// Hash bucket of the last n-gram of `tokens`.
    fn bucket(&self, tokens: &[u32]) -> Option<usize> {
        let (_, run) = tokens.split_last_chunk::<MATCH_MIN>()?;
        let hash = run.iter().fold(0u64, |hash, &token| {
            (hash ^ u64::from(token)).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29)
        });
        Some((hash.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (64 - self.last.len().ilog2())) as usize)
    }
}

#[derive(Clone, Copy, Debug)]
struct NgramMatch {
    /// Position of the token after the match.
    next: usize,
    /// Length of the match.
    agreed: usize,
}

/// Length of the common suffix.
fn agreed(earlier: &[u32], all: &[u32]) -> usize {
    let pairs = earlier.iter().rev().zip(all.iter().rev());
    pairs.take(MATCH_MAX).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn propose(tokens: &[u32], depth: usize) -> Vec<u32> {
        let mut draft = DraftTokens::default();
        NgramIndex::new(tokens.len(), tokens.len()).propose(tokens, depth, &mut draft);
        draft.tokens().to_vec()
    }

    #[test]
    fn what_followed_last_time_is_proposed_as_far_as_the_match_is_long() {
        let text = [9, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2, 3];
        assert_eq!(propose(&text, 8), [4, 5, 6]);
        assert_eq!(propose(&text, 2), [4, 5]);
        assert_eq!(propose(&text[..12], 8), [0; 0], "two tokens are no match");
        assert_eq!(propose(&[], 8), [0; 0]);
        assert_eq!(propose(&[1, 1], 8), [0; 0]);
    }

    #[test]
    fn the_longest_match_wins_and_then_the_latest() {
        let longest = [5, 1, 2, 3, 7, 7, 6, 1, 2, 3, 8, 8, 5, 1, 2, 3];
        assert_eq!(propose(&longest, 2), [7, 7]);
        let latest = [5, 1, 2, 3, 7, 7, 6, 1, 2, 3, 8, 8, 4, 1, 2, 3];
        assert_eq!(propose(&latest, 2), [8, 8]);
    }

    #[test]
    fn a_run_that_reaches_the_end_repeats_itself() {
        assert_eq!(propose(&[1, 2, 1, 2, 1, 2, 1, 2], 5), [1, 2, 1, 2, 1]);
        assert_eq!(propose(&[4; 10], 16), [4; 9]);
    }

    #[test]
    fn an_index_that_grows_proposes_what_a_fresh_one_does() {
        let text: Vec<u32> = (0..4000u32).map(|i| i.wrapping_mul(i) / 7 % 5).collect();
        let mut grown = NgramIndex::new(1, 1);
        for end in 0..text.len() {
            let mut draft = DraftTokens::default();
            grown.propose(&text[..end], 8, &mut draft);
            assert!(draft.tokens().len() <= 8);
            if end % 97 == 0 {
                // The tables differ in size, so other positions may be compared first. A match
                // exists in both or in none.
                assert_eq!(draft.tokens().is_empty(), propose(&text[..end], 8).is_empty(), "{end}");
            }
        }
        assert_eq!(grown.previous.len(), text.len() - 2);
    }

    #[test]
    fn a_long_prompt_is_indexed_in_pieces() {
        let text: Vec<u32> = (0..3 * INDEXED_MAX as u32 + 5).collect();
        let mut index = NgramIndex::new(text.len(), text.len());
        for done in 1..5 {
            index.propose(&text, 4, &mut DraftTokens::default());
            assert_eq!(index.previous.len(), (done * INDEXED_MAX).min(text.len() - 1));
        }
    }
}
