//! One live request as the engine sees it: what to do with a row of logits, and when it ends.

use crate::request::input::{Request, RequestId, ScoreKind, ScoreRequest, StopConditions};
use crate::request::output::{FinishReason, Output, TokenOutput, Usage};
use crate::sample::constraint::{Allowed, Constraint, leaves_any};
use crate::sample::draw::Draw;
use crate::sample::error::SampleError;
use crate::sample::history::History;
use crate::sample::logprobs::LogProbs;
use crate::sample::output_rows::Row;
use crate::sample::params::SamplingParams;
use crate::sample::sampler::Sampler;
use std::time::Duration;

pub(crate) struct Task {
    pub(crate) id: RequestId,
    pub(crate) deadline: Option<Duration>,
    pub(crate) usage: Usage,
    /// The tenant for whom it stands in the queue, until it is first admitted.
    pub(crate) queued_for: Option<u64>,
    pub(crate) work: Work,
}

pub(crate) enum Work {
    Generate(Box<Generation>),
    Score(Scoring),
}

pub(crate) struct Generation {
    sampling: SamplingParams,
    stop: StopConditions,
    logprobs: Option<u8>,
    choice: u32,
    history: History,
    constraint: Option<Box<dyn Constraint>>,
    /// Length of the whole sequence at which it ends.
    tokens_max: usize,
}

pub(crate) struct Scoring {
    kind: ScoreKind,
    /// Position whose row is the next to be reported. A recomputed row is not reported twice.
    next: usize,
}

/// What a drawn token means for its sequence.
pub(crate) enum Drawn {
    /// It is to be computed.
    Continue(u32),
    Finished(FinishReason),
    /// Nothing was drawn: its constraint does not know yet what is allowed.
    Later,
}

impl Task {
    /// `history` is that of the request's prompt and prior output.
    pub(crate) fn generate(
        request: &Request,
        history: History,
        constraint: Option<Box<dyn Constraint>>,
        tokens_max: usize,
    ) -> Self {
        let prompt_tokens = request.prompt.len() - request.prior_output;
        let generation = Generation {
            sampling: request.sampling.clone(),
            stop: request.stop.clone(),
            logprobs: request.logprobs,
            choice: request.choice,
            history,
            constraint,
            tokens_max,
        };
        let usage = Usage { prompt_tokens, output_tokens: request.prior_output, cached_tokens: 0 };
        Self {
            id: request.id,
            deadline: request.deadline,
            usage,
            queued_for: None,
            work: Work::Generate(Box::new(generation)),
        }
    }

    /// Whether rows of drafted tokens may stand behind its last one.
    pub(crate) fn may_draft(&self) -> bool {
        // Masks along a draft would have to be computed one after the other, with nothing to hide them behind.
        matches!(&self.work, Work::Generate(generation) if generation.constraint.is_none())
    }

    /// The draw of the token after `position`, where it is all that is wanted of the row, with what it remembers. `drafted`: the
    /// row is behind guesses, which are not part of that yet.
    pub(crate) fn draw(&self, position: usize, drafted: bool) -> Option<(Draw<'_>, &History)> {
        match &self.work {
            Work::Generate(generation) => generation.next_draw(&self.usage, position + 1, drafted),
            Work::Score(_) => None,
        }
    }

    /// Whether its draw still has to wait for its constraint.
    pub(crate) fn is_late(&mut self) -> bool {
        let Work::Generate(generation) = &mut self.work else { return false };
        generation.constraint.as_mut().is_some_and(|constraint| constraint.allowed() == Ok(Allowed::Later))
    }

    pub(crate) fn score(request: &ScoreRequest) -> Self {
        let usage = Usage { prompt_tokens: request.tokens.len(), ..Usage::default() };
        let work = Work::Score(Scoring { kind: request.kind, next: 0 });
        Self { id: request.id, deadline: request.deadline, usage, queued_for: None, work }
    }
}

impl Generation {
    fn next_draw(&self, usage: &Usage, position: usize, drafted: bool) -> Option<(Draw<'_>, &History)> {
        let ruled_out: &[u32] = if self.is_early(usage) { &self.stop.stop_tokens } else { &[] };
        let Self { sampling: params, choice, history, .. } = self;
        let draw = Draw { params, choice: *choice, position, ruled_out, allowed: None };
        let alone = self.logprobs.is_none() && self.constraint.is_none();
        (alone && (!drafted || draw.is_plain(history))).then_some((draw, history))
    }

    /// Whether stop tokens cannot be drawn yet.
    fn is_early(&self, usage: &Usage) -> bool {
        usage.output_tokens < self.stop.min_tokens as usize
    }

    /// Draws the token at `position` from the logits after its predecessor, reports it unless it ends the output, and
    /// says how to go on.
    pub(crate) fn draw(
        &mut self,
        id: RequestId,
        usage: &mut Usage,
        position: usize,
        row: Row<'_>,
        sampler: &mut Sampler,
        out: &mut Vec<Output>,
    ) -> Result<Drawn, SampleError> {
        let early = self.is_early(usage);
        let ruled_out: &[u32] = if early { &self.stop.stop_tokens } else { &[] };
        let allowed = match self.constraint.as_mut().map(|constraint| constraint.allowed()) {
            None => None,
            // The end of the grammar comes before `min_tokens`: there is nothing else to draw.
            Some(Ok(Allowed::Tokens(allowed))) if leaves_any(allowed, ruled_out) => Some(allowed),
            Some(Ok(Allowed::Later)) => return Ok(Drawn::Later),
            Some(Ok(_)) => return Ok(Drawn::Finished(FinishReason::Complete)),
            Some(Err(error)) => return Ok(Drawn::Finished(FinishReason::Constraint(error))),
        };
        let draw = Draw { params: &self.sampling, choice: self.choice, position, ruled_out, allowed };
        let token = match row {
            Row::Logits(logits) => sampler.sample(logits, &draw, &mut self.history)?,
            Row::Drawn(token) => {
                self.history.push(token);
                token
            }
        };
        if self.stop.stop_tokens.contains(&token) {
            return Ok(Drawn::Finished(FinishReason::Stop(token)));
        }
        let (logprob, top) = match (self.logprobs, row) {
            (Some(count), Row::Logits(logits)) => {
                let row = LogProbs::new(logits)?;
                (Some(row.of(token)), row.top(usize::from(count)))
            }
            _ => (None, Vec::new()),
        };
        let sampler_state = self.history.state();
        out.push(Output::Token(TokenOutput { id, token, position, logprob, top, sampler_state }));
        usage.output_tokens += 1;
        if let Some(constraint) = &mut self.constraint {
            constraint.accept(token);
        }
        Ok(if position + 1 == self.tokens_max {
            Drawn::Finished(FinishReason::Length)
        } else {
            Drawn::Continue(token)
        })
    }
}

impl Scoring {
    /// Reports the row after `tokens[position]`, if it is wanted and was not reported before a preemption.
    pub(crate) fn report(
        &mut self,
        id: RequestId,
        tokens: &[u32],
        position: usize,
        logits: &[f32],
        out: &mut Vec<Output>,
    ) -> Result<(), SampleError> {
        if position < self.next {
            return Ok(());
        }
        self.next = position + 1;
        match self.kind {
            ScoreKind::Logits => out.push(Output::Logits { id, position, logits: logits.to_vec() }),
            ScoreKind::Logprobs { top } => {
                if let Some(&token) = tokens.get(position + 1) {
                    let row = LogProbs::new(logits)?;
                    let (logprob, top) = (row.of(token), row.top(usize::from(top)));
                    out.push(Output::Scored { id, position: position + 1, token, logprob, top });
                }
            }
        }
        Ok(())
    }
}
