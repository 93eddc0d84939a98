// SPDX-License-Identifier: Apache-2.0

//! DRY ("don't repeat yourself"): a penalty on tokens that would prolong a repetition.
//!
//! As in llama.cpp, a token that followed an earlier occurrence of the last n tokens is lowered by
//! `multiplier * base^(n - allowed_length)`. n is the longest such match, counted back to the last
//! sequence breaker at most.

use crate::sample::params::DryParams;
use std::collections::BTreeMap;

/// Buffers, reused between tokens.
#[derive(Debug, Default)]
pub(super) struct DryRepetitions {
    /// By distance from the end: the number of tokens up to there that equal the last tokens.
    matched: Vec<usize>,
    /// By token: the longest repetition that it would prolong.
    longest: BTreeMap<u32, usize>,
}

impl DryRepetitions {
    /// `tokens` are prompt and output so far.
    pub(super) fn apply(&mut self, dry: &DryParams, tokens: &[u32], logits: &mut [f32]) {
        self.find(dry, tokens);
        for &token in self.longest.keys() {
            let logit = &mut logits[token as usize];
            *logit = self.applied(dry, token, *logit);
        }
    }

    /// The logit of one token after `apply`. Call `find` before.
    pub(super) fn applied(&self, dry: &DryParams, token: u32, logit: f32) -> f32 {
        match self.longest.get(&token) {
            Some(length) if !dry.breakers.is_single(token) => {
                logit - penalty(dry, length - dry.allowed_length as usize)
            }
            _ => logit,
        }
    }

    /// Finds the repetitions that tokens would prolong. `tokens` are prompt and output so far.
    pub(super) fn find(&mut self, dry: &DryParams, tokens: &[u32]) {
        self.longest.clear();
        let allowed = dry.allowed_length as usize;
        let seen = dry.last_n.map_or(tokens.len(), |last_n| tokens.len().min(last_n as usize));
        let tokens = &tokens[tokens.len() - seen..];
        if dry.multiplier == 0.0 || tokens.len() <= allowed {
            return;
        }
        let limit = since_breaker(dry, tokens);
        if limit < allowed {
            return;
        }
        self.match_backwards(tokens, limit);
        for (distance, &length) in self.matched.iter().enumerate().skip(1) {
            if length >= allowed {
                let follower = tokens[tokens.len() - distance];
                let longest = self.longest.entry(follower).or_insert(length);
                *longest = length.max(*longest);
            }
        }
    }

    /// The Z-function of the reversed tokens, capped at `limit`.
    fn match_backwards(&mut self, tokens: &[u32], limit: usize) {
        let len = tokens.len();
        let back = |distance: usize| tokens[len - 1 - distance];
        self.matched.clear();
        self.matched.resize(len, 0);
        // `[left, right)` is the match that reaches furthest.
        let (mut left, mut right) = (0, 0);
        for at in 1..len {
            let mut length = if at < right { self.matched[at - left].min(right - at) } else { 0 };
            while at + length < len && back(length) == back(at + length) {
                length += 1;
            }
            self.matched[at] = length;
            if at + length > right {
                (left, right) = (at, at + length);
            }
        }
        self.matched.iter_mut().for_each(|length| *length = (*length).min(limit));
    }
}

/// Number of tokens after the last breaker.
fn since_breaker(dry: &DryParams, tokens: &[u32]) -> usize {
    for (distance, &token) in tokens.iter().rev().enumerate() {
        let after = &tokens[tokens.len() - distance..];
        let single = dry.breakers.is_single(token).then_some(0);
        let longer = dry.breakers.starting_with(token).iter().map(|sequence| &sequence[1..]);
        let matching = longer.filter(|rest| after.starts_with(rest)).map(<[u32]>::len);
        if let Some(length) = matching.chain(single).max() {
            return distance - length;
        }
    }
    tokens.len()
}

/// Finite for any length of repetition.
fn penalty(dry: &DryParams, beyond: usize) -> f32 {
    let mut penalty = dry.multiplier;
    for _ in 0..beyond {
        let next = penalty * dry.base;
        if !next.is_finite() || next == penalty {
            break;
        }
        penalty = next;
    }
    penalty
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::params::DryBreakers;
    use proptest::prelude::*;
    use std::collections::HashMap;

    fn dry(breakers: &[&[u32]]) -> DryParams {
        DryParams {
            multiplier: 1.0,
            base: 2.0,
            allowed_length: 2,
            last_n: None,
            breakers: DryBreakers::new(breakers.iter().map(|sequence| sequence.to_vec())),
        }
    }

    fn lowered(dry: &DryParams, tokens: &[u32]) -> Vec<(u32, f32)> {
        let mut logits = [0.0; 12];
        DryRepetitions::default().apply(dry, tokens, &mut logits);
        let lowered = logits.iter().enumerate().filter(|(_, logit)| **logit != 0.0);
        lowered.map(|(token, &logit)| (token as u32, -logit)).collect()
    }

    #[test]
    fn a_token_that_prolongs_a_repetition_is_lowered_by_its_length() {
        // 1 2 3 occurred before, followed by 4; 2 3 also occurred before, followed by 5.
        assert_eq!(lowered(&dry(&[]), &[1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3]), [(4, 2.0), (5, 1.0)]);
        assert_eq!(lowered(&dry(&[]), &[7, 3, 4, 8, 3]), [], "one repeated token is allowed");
    }

    #[test]
    fn repetitions_do_not_reach_across_breakers() {
        let tokens = [1, 2, 3, 4, 9, 1, 2, 3];
        assert_eq!(lowered(&dry(&[]), &tokens), [(4, 2.0)]);
        assert_eq!(lowered(&dry(&[&[1]]), &tokens), [(4, 1.0)]);
        assert_eq!(lowered(&dry(&[&[2]]), &tokens), []);
        assert_eq!(lowered(&dry(&[&[1, 2]]), &tokens), [], "one token after the breaker");
        assert_eq!(lowered(&dry(&[&[9, 1]]), &tokens), [(4, 1.0)]);
        assert_eq!(lowered(&dry(&[&[9, 2]]), &tokens), [(4, 2.0)], "a breaker that is not there");
        assert_eq!(lowered(&dry(&[&[4]]), &tokens), [], "a breaker itself is not lowered");
    }

    #[test]
    fn only_the_last_tokens_are_looked_at() {
        let tokens = [1, 2, 3, 4, 9, 1, 2, 3];
        let last = |last_n| lowered(&DryParams { last_n: Some(last_n), ..dry(&[]) }, &tokens);
        assert_eq!((last(8), last(7), last(6)), (vec![(4, 2.0)], vec![(4, 1.0)], vec![]));
        assert_eq!(last(0), []);
    }

    #[test]
    fn the_penalty_of_an_endless_repetition_is_finite() {
        let mut logits = [0.0; 2];
        DryRepetitions::default().apply(&dry(&[]), &[1; 5000], &mut logits);
        assert!(logits[1].is_finite() && logits[1] < -1e38 && logits[0] == 0.0);
    }

    proptest! {
        /// Compares with the definition: every earlier position, token by token.
        #[test]
        fn the_longest_match_of_every_follower_is_found(
            tokens in prop::collection::vec(0..4_u32, 0..60), breaker in 0..6_u32, last_n in 0..70_u32,
        ) {
            let dry = DryParams { last_n: Some(last_n), ..dry(&[&[breaker]]) };
            let seen = &tokens[tokens.len().saturating_sub(last_n as usize)..];
            let limit = seen.iter().rev().take_while(|&&token| token != breaker).count();
            let mut expected: HashMap<u32, f32> = HashMap::new();
            for end in 1..seen.len() {
                let pairs = seen[..end].iter().rev().zip(seen.iter().rev());
                let length = pairs.take_while(|(a, b)| a == b).count().min(limit);
                if length >= 2 && seen[end] != breaker {
                    let cost = 2.0_f32.powi(length as i32 - 2);
                    let longest = expected.entry(seen[end]).or_insert(cost);
                    *longest = longest.max(cost);
                }
            }
            let found: HashMap<u32, f32> = lowered(&dry, &tokens).into_iter().collect();
            prop_assert_eq!(found, expected);
        }
    }
}
