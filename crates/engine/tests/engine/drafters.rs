// SPDX-License-Identifier: Apache-2.0

//! Drafters for tests. [`Scripted`] knows the answers and proposes what a test wants.

use crate::fake::{FakeModel, VOCAB, oracle};
use engine::draft::depth::DraftingCost;
use engine::draft::draft_tokens::DraftTokens;
use engine::draft::drafter::DraftRequest;
use engine::schedule::scheduler::Scheduler;
use engine::schedule::sequence_id::SequenceId;
use engine::{DraftModel, Drafter, EngineConfig, PromptLookup, Request};
use ops::{Backend, OpError, Reference};

/// What a [`Scripted`] drafter proposes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Guess {
    /// The tokens that the sampler will draw.
    Right,
    /// Never the tokens that the sampler will draw.
    Wrong,
    /// Right tokens up to a place that changes from draft to draft.
    RightUntil,
    /// Right tokens except the last.
    RightButLast,
    /// Any token of the vocabulary, and some beyond it.
    Anything,
    /// Nothing: the drafter fails.
    Nothing,
}

/// Proposes draft tokens from the known answers.
pub(crate) struct Scripted {
    guess: Guess,
    /// Prompt and output of each request.
    answers: Vec<Vec<u32>>,
    random: u64,
}

impl Scripted {
    pub(crate) fn new(guess: Guess, requests: &[Request]) -> Self {
        let whole = |request: &Request| [&request.prompt[..], &oracle(request).tokens].concat();
        Self { guess, answers: requests.iter().map(whole).collect(), random: 1 }
    }

    fn below(&mut self, end: usize) -> usize {
        self.random = self.random.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (self.random >> 33) as usize % end
    }
}

impl<B: Backend> Drafter<B> for Scripted {
    fn propose(
        &mut self,
        _: &mut B,
        scheduler: &Scheduler,
        wanted: &[DraftRequest],
        drafts: &mut [DraftTokens],
    ) -> Result<DraftingCost, OpError> {
        if self.guess == Guess::Nothing {
            return Err(OpError::Memory { op: "fake", what: "a failure on purpose", bytes: 1, free: None });
        }
        for (wanted, draft) in wanted.iter().zip(drafts) {
            let tokens = scheduler.sequence(wanted.sequence_id).map_or(&[][..], |sequence| sequence.tokens());
            let rest = self.answers.iter().find_map(|answer| answer.strip_prefix(tokens));
            let rest = rest.unwrap_or(&[]).to_vec();
            let until = self.below(wanted.depth + 1);
            for place in 0..wanted.depth {
                let right = match self.guess {
                    Guess::Right => true,
                    Guess::Wrong | Guess::Anything | Guess::Nothing => false,
                    Guess::RightUntil => place < until,
                    Guess::RightButLast => place + 1 < wanted.depth,
                };
                let Some(&token) = rest.get(place) else { break };
                draft.push(match self.guess {
                    Guess::Anything => self.below(VOCAB + 5) as u32,
                    _ if right => token,
                    _ => (token + 1 + self.below(VOCAB - 1) as u32) % VOCAB as u32,
                });
            }
        }
        Ok(DraftingCost::default())
    }

    fn forget(&mut self, _: SequenceId) {}
}

/// Creates a drafter of the kind with this number.
pub(crate) fn drafter(
    kind: usize,
    config: &EngineConfig,
    requests: &[Request],
) -> Box<dyn Drafter<Reference>> {
    let guess = match kind {
        0 => return Box::new(PromptLookup::default()),
        // The fake model as draft model checks each step. Its drafts are right wherever a request
        // is greedy.
        1 => return Box::new(DraftModel::new(Box::new(FakeModel::new(config)), config.step_tokens, 0.2)),
        2 => Guess::Right,
        3 => Guess::Wrong,
        4 => Guess::RightUntil,
        5 => Guess::RightButLast,
        6 => Guess::Anything,
        _ => Guess::Nothing,
    };
    Box::new(Scripted::new(guess, requests))
}

/// Number of kinds that [`drafter`] creates.
pub(crate) const KINDS: usize = 8;
