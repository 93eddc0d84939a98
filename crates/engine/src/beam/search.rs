// SPDX-License-Identifier: Apache-2.0

//! [`BeamSearch`]: which beams continue with which tokens. A plain value without model or
//! sequences.
//!
//! The rules are those of vLLM, with the length of Wu et al. 2016 (arXiv:1609.08144):
//!
//! 1. Each beam may continue with the `2 * width` most probable tokens of its row.
//! 2. The most probable stop token among them ends a copy of the beam. Others would end it with the
//!    same output. All tokens that do not stop are candidates, of which the `width` with the
//!    highest sums of log probabilities continue.
//! 3. The score of a beam is that sum divided by `length ^ length_penalty`. The length counts
//!    output tokens without the stop token, and is at least 1. The sum counts the stop token.
//! 4. Among equal scores, the beam that ended earlier comes first, then the one whose parent ranks
//!    higher, then the more probable token.
//!
//! The search ends early if no running beam can enter the result any more, which changes nothing.
//! With `early_stopping` it ends, as in Hugging Face's transformers, once `width` beams have ended
//! with a stop token: running beams might have got a better score.

use super::tree::{NodeId, TokenTree};
use crate::request::input::{BeamParams, StopConditions};
use crate::request::output::{Beam, BeamToken};

/// Most probable tokens of a row with their log probabilities, in descending order.
pub type RankedTokens = Vec<(u32, f32)>;

/// How one of the next beams comes from one of the present beams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BeamContinuation {
    /// Index of the present beam.
    pub parent: usize,
    pub token: u32,
}

#[derive(Clone, Debug, PartialEq)]
pub enum SearchStep {
    /// The next beams, the most probable first.
    Continue(Vec<BeamContinuation>),
    /// The result, the highest score first.
    Done(Vec<Beam>),
}

/// A beam's last token, and the sum of its log probabilities.
#[derive(Clone, Copy, Debug)]
struct RunningBeam {
    end: Option<NodeId>,
    sum: f64,
}

#[derive(Clone, Copy, Debug)]
struct EndedBeam {
    end: Option<NodeId>,
    score: f64,
    stop_token: Option<u32>,
}

#[derive(Debug)]
pub struct BeamSearch {
    params: BeamParams,
    stop_tokens: Vec<u32>,
    min_tokens: usize,
    /// Output tokens at which every beam ends.
    max_tokens: usize,
    /// Alternatives that the result names for each token.
    alternatives: usize,
    tree: TokenTree,
    /// All have `length` tokens.
    running: Vec<RunningBeam>,
    length: usize,
    /// Tokens of all beams so far, also of those that were dropped.
    computed_tokens: u64,
    /// Beams that have ended with a stop token.
    stopped: usize,
    /// The best ones so far, at most as many as the result has, in order.
    ended: Vec<EndedBeam>,
}

impl BeamSearch {
    /// `max_tokens`: output tokens at which every beam ends, at least 1. `alternatives`: most
    /// probable tokens that the result names for each token.
    pub fn new(params: BeamParams, stop: StopConditions, max_tokens: usize, alternatives: usize) -> Self {
        assert!(max_tokens > 0 && params.choices > 0 && params.choices <= params.width);
        Self {
            params,
            stop_tokens: stop.stop_tokens,
            min_tokens: stop.min_tokens as usize,
            max_tokens,
            alternatives,
            tree: TokenTree::default(),
            running: vec![RunningBeam { end: None, sum: 0.0 }],
            length: 0,
            computed_tokens: 0,
            stopped: 0,
            ended: Vec::new(),
        }
    }

    /// Beams of the next step.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Tokens that each running beam has, and those of all beams so far.
    pub fn progress(&self) -> (usize, u64) {
        (self.length, self.computed_tokens)
    }

    /// How many of the most probable tokens of each row the next step needs.
    pub fn tokens_wanted(&self) -> usize {
        let forbidden = if self.may_stop() { 0 } else { self.stop_tokens.len() };
        (2 * self.params.width + forbidden).max(self.alternatives)
    }

    fn may_stop(&self) -> bool {
        self.length >= self.min_tokens
    }

    /// Chooses the next beams. `rows[i]` follows beam `i`, and has the [`Self::tokens_wanted`] most
    /// probable tokens, or all if the vocabulary has fewer.
    pub fn advance(&mut self, rows: &[RankedTokens]) -> SearchStep {
        assert_eq!(rows.len(), self.running.len(), "every running beam has one row");
        let chosen = self.choose(rows);
        let next = chosen.iter().map(|&(BeamContinuation { parent, token }, logprob)| {
            let top = rows[parent].iter().take(self.alternatives).copied().collect();
            let RunningBeam { end, sum } = self.running[parent];
            let end = Some(self.tree.push(end, BeamToken { token, logprob, top }));
            RunningBeam { end, sum: sum + f64::from(logprob) }
        });
        self.running = next.collect();
        self.length += 1;
        self.computed_tokens += rows.len() as u64;
        if self.params.early_stopping && self.stopped >= self.params.width {
            self.running.clear();
        }
        if self.length == self.max_tokens {
            for RunningBeam { end, sum } in std::mem::take(&mut self.running) {
                self.end_beam(end, sum, self.length, None);
            }
        }
        if self.running.is_empty() || self.is_decided() {
            return SearchStep::Done(self.result());
        }
        let ends = self.running.iter_mut().map(|beam| &mut beam.end);
        self.tree.compact(ends.chain(self.ended.iter_mut().map(|beam| &mut beam.end)));
        SearchStep::Continue(chosen.into_iter().map(|(continuation, _)| continuation).collect())
    }

    /// Ends beams at stop tokens, and returns how the others continue, with the log probability of
    /// the new token.
    fn choose(&mut self, rows: &[RankedTokens]) -> Vec<(BeamContinuation, f32)> {
        let (may_stop, considered) = (self.may_stop(), 2 * self.params.width);
        let mut candidates = Vec::with_capacity(rows.len() * considered);
        for (parent, row) in rows.iter().enumerate() {
            let RunningBeam { end, sum } = self.running[parent];
            let is_stop = |token: u32| self.stop_tokens.contains(&token);
            let mut best_stop = None;
            let possible = row.iter().filter(|&&(token, logprob)| {
                // A token without probability continues nothing.
                logprob > f32::NEG_INFINITY && (may_stop || !is_stop(token))
            });
            for &(token, logprob) in possible.take(considered) {
                match is_stop(token) {
                    true => _ = best_stop.get_or_insert((token, logprob)),
                    false => candidates.push((BeamContinuation { parent, token }, logprob)),
                }
            }
            if let Some((token, logprob)) = best_stop {
                self.stopped += 1;
                self.end_beam(end, sum + f64::from(logprob), self.length, Some(token));
            }
        }
        let sum = |&(continuation, logprob): &(BeamContinuation, f32)| {
            self.running[continuation.parent].sum + f64::from(logprob)
        };
        candidates.sort_by(|a, b| sum(b).total_cmp(&sum(a)));
        candidates.truncate(self.params.width);
        candidates
    }

    fn end_beam(&mut self, end: Option<NodeId>, sum: f64, length: usize, stop_token: Option<u32>) {
        let score = self.score(sum, length);
        let at = self.ended.partition_point(|better| better.score >= score);
        self.ended.insert(at, EndedBeam { end, score, stop_token });
        self.ended.truncate(self.params.choices);
    }

    fn score(&self, sum: f64, length: usize) -> f64 {
        sum / (length.max(1) as f64).powf(f64::from(self.params.length_penalty))
    }

    /// Whether no running beam can enter the result.
    fn is_decided(&self) -> bool {
        let Some(worst) = self.ended.get(self.params.choices - 1) else { return false };
        // More tokens never raise a sum of log probabilities. The score of a constant sum is
        // highest at one end of the lengths.
        let best = self.running.iter().map(|beam| beam.sum).fold(f64::NEG_INFINITY, f64::max);
        worst.score >= self.score(best, self.length).max(self.score(best, self.max_tokens))
    }

    fn result(&self) -> Vec<Beam> {
        let beam = |ended: &EndedBeam| Beam {
            tokens: self.tree.path(ended.end),
            stop_token: ended.stop_token,
            score: ended.score,
        };
        self.ended.iter().map(beam).collect()
    }
}
