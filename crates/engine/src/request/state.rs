// SPDX-License-Identifier: Apache-2.0

//! The engine's state of one active request: how to turn logits into outputs, and when the request
//! ends.

use crate::request::embedding::EmbeddingState;
use crate::request::input::{
    BeamRequest, EmbedRequest, Request, RequestId, ScoreKind, ScoreRequest, StopConditions,
};
use crate::request::output::{EngineOutput, FinishReason, TokenOutput, TokenUsage};
use crate::sample::constraint::{Constraint, TokenMask, leaves_any};
use crate::sample::draw::SampleContext;
use crate::sample::error::SampleError;
use crate::sample::history::History;
use crate::sample::logprobs::LogProbs;
use crate::sample::output_rows::{DeviceDraw, RowOutput};
use crate::sample::params::SamplingParams;
use crate::sample::sampler::Sampler;
use models::OutputKind;
use std::time::Duration;

pub(crate) struct ActiveRequest {
    pub(crate) id: RequestId,
    pub(crate) deadline: Option<Duration>,
    pub(crate) usage: TokenUsage,
    /// The request's tenant while the request waits for its first admission.
    pub(crate) queued_tenant: Option<u64>,
    pub(crate) work: RequestWork,
}

pub(crate) enum RequestWork {
    Generate(Box<GenerationState>),
    Score(ScoringState),
    Embed(EmbeddingState),
    /// One sequence of a beam search, whose state is in its group.
    Beam,
}

pub(crate) struct GenerationState {
    sampling: SamplingParams,
    stop: StopConditions,
    logprobs: Option<u8>,
    choice: u32,
    history: History,
    constraint: Option<Box<dyn Constraint>>,
    /// Length of the whole sequence at which the request ends with `Length`.
    tokens_max: usize,
}

pub(crate) struct ScoringState {
    kind: ScoreKind,
    /// Next position to report. A row that is recomputed after a preemption is not reported twice.
    next: usize,
}

/// What the engine does next with the sequence.
pub(crate) enum SampleOutcome {
    /// The next step computes this token.
    Continue(u32),
    Finished(FinishReason),
    /// No token was sampled, because the token mask is not ready.
    Pending,
}

impl ActiveRequest {
    /// `history` covers the request's prompt and prior output.
    pub(crate) fn generate(
        request: &Request,
        history: History,
        constraint: Option<Box<dyn Constraint>>,
        tokens_max: usize,
    ) -> Self {
        let prompt_tokens = request.prompt.len() - request.prior_output;
        let generation = GenerationState {
            sampling: request.sampling.clone(),
            stop: request.stop.clone(),
            logprobs: request.logprobs,
            choice: request.choice,
            history,
            constraint,
            tokens_max,
        };
        let usage = TokenUsage { prompt_tokens, output_tokens: request.prior_output, cached_tokens: 0 };
        Self {
            id: request.id,
            deadline: request.deadline,
            usage,
            queued_tenant: None,
            work: RequestWork::Generate(Box::new(generation)),
        }
    }

    /// Whether the request may have draft tokens.
    pub(crate) fn may_draft(&self) -> bool {
        // The token masks along a draft depend on each other, and no model step would hide their
        // latency.
        matches!(&self.work, RequestWork::Generate(generation) if generation.constraint.is_none())
    }

    /// How to sample the token after `position` on the device. None if the host needs the logits.
    /// `drafted`: the row follows draft tokens, which the history does not have yet.
    pub(crate) fn draw(&self, position: usize, drafted: bool) -> Option<DeviceDraw<'_>> {
        match &self.work {
            RequestWork::Generate(generation) => generation.next_draw(&self.usage, position + 1, drafted),
            RequestWork::Score(_) | RequestWork::Embed(_) | RequestWork::Beam => None,
        }
    }

    /// What the model computes for each output row of the request.
    pub(crate) fn output_kind(&self) -> OutputKind {
        match &self.work {
            RequestWork::Generate(_) | RequestWork::Score(_) | RequestWork::Beam => OutputKind::Logits,
            RequestWork::Embed(embedding) => embedding.output_kind(),
        }
    }

    /// Whether the request's constraint has no token mask yet.
    pub(crate) fn is_mask_pending(&mut self) -> bool {
        let RequestWork::Generate(generation) = &mut self.work else { return false };
        generation
            .constraint
            .as_mut()
            .is_some_and(|constraint| constraint.token_mask() == Ok(TokenMask::Pending))
    }

    pub(crate) fn score(request: &ScoreRequest) -> Self {
        let usage = TokenUsage { prompt_tokens: request.tokens.len(), ..TokenUsage::default() };
        let work = RequestWork::Score(ScoringState { kind: request.kind, next: 0 });
        Self { id: request.id, deadline: request.deadline, usage, queued_tenant: None, work }
    }

    pub(crate) fn embed(request: &EmbedRequest) -> Self {
        let usage = TokenUsage { prompt_tokens: request.tokens.len(), ..TokenUsage::default() };
        let work = RequestWork::Embed(EmbeddingState::new(request));
        Self { id: request.id, deadline: request.deadline, usage, queued_tenant: None, work }
    }

    pub(crate) fn beams(request: &BeamRequest) -> Self {
        let usage = TokenUsage { prompt_tokens: request.prompt.len(), ..TokenUsage::default() };
        Self { deadline: request.deadline, usage, ..Self::further_beam(request.id) }
    }

    /// A sequence of a beam search to which the request itself does not belong.
    pub(crate) fn further_beam(id: RequestId) -> Self {
        let usage = TokenUsage::default();
        Self { id, deadline: None, usage, queued_tenant: None, work: RequestWork::Beam }
    }
}

impl GenerationState {
    fn next_draw(&self, usage: &TokenUsage, position: usize, drafted: bool) -> Option<DeviceDraw<'_>> {
        let forbidden: &[u32] = if self.is_below_min_tokens(usage) { &self.stop.stop_tokens } else { &[] };
        let Self { sampling: params, choice, history, .. } = self;
        let context = SampleContext { params, choice: *choice, position, forbidden, allowed: None };
        let is_possible = self.constraint.is_none() && (!drafted || context.uses_raw_logits(history));
        is_possible.then_some(DeviceDraw { context, history, logprobs: self.logprobs })
    }

    /// Whether stop tokens are forbidden.
    fn is_below_min_tokens(&self, usage: &TokenUsage) -> bool {
        usage.output_tokens < self.stop.min_tokens as usize
    }

    /// Samples the token at `position` from the logits of its predecessor. Reports the token unless
    /// it ends the output.
    pub(crate) fn draw(
        &mut self,
        id: RequestId,
        usage: &mut TokenUsage,
        position: usize,
        row: RowOutput<'_>,
        sampler: &mut Sampler,
        out: &mut Vec<EngineOutput>,
    ) -> Result<SampleOutcome, SampleError> {
        let early = self.is_below_min_tokens(usage);
        let forbidden: &[u32] = if early { &self.stop.stop_tokens } else { &[] };
        let allowed = match self.constraint.as_mut().map(|constraint| constraint.token_mask()) {
            None => None,
            // The end of the grammar overrides `min_tokens`: no other token is allowed.
            Some(Ok(TokenMask::Allowed(allowed))) if leaves_any(allowed, forbidden) => Some(allowed),
            Some(Ok(TokenMask::Pending)) => return Ok(SampleOutcome::Pending),
            Some(Ok(_)) => return Ok(SampleOutcome::Finished(FinishReason::Complete)),
            Some(Err(error)) => return Ok(SampleOutcome::Finished(FinishReason::Constraint(error))),
        };
        let draw =
            SampleContext { params: &self.sampling, choice: self.choice, position, forbidden, allowed };
        let token = match row {
            RowOutput::Logits(logits) => sampler.sample(logits, &draw, &mut self.history)?,
            RowOutput::Token(token, _) => {
                self.history.push(token);
                token
            }
            RowOutput::NoToken => return Err(SampleError::NoMaximum),
            RowOutput::State(_) => panic!("{id}: a request that generates gets no hidden state"),
        };
        if self.stop.stop_tokens.contains(&token) {
            return Ok(SampleOutcome::Finished(FinishReason::Stop(token)));
        }
        let logprobs = match (self.logprobs, row) {
            (Some(top), RowOutput::Logits(logits)) => Some(LogProbs::new(logits)?.of_token(token, top)),
            (_, RowOutput::Token(_, logprobs)) => logprobs.cloned(),
            _ => None,
        };
        let (logprob, top) =
            logprobs.map_or((None, Vec::new()), |logprobs| (Some(logprobs.logprob), logprobs.top));
        let sampler_state = self.history.state();
        out.push(EngineOutput::Token(TokenOutput { id, token, position, logprob, top, sampler_state }));
        usage.output_tokens += 1;
        if let Some(constraint) = &mut self.constraint {
            constraint.accept(token);
        }
        Ok(if position + 1 == self.tokens_max {
            SampleOutcome::Finished(FinishReason::Length)
        } else {
            SampleOutcome::Continue(token)
        })
    }
}

impl ScoringState {
    /// Reports the row after `tokens[position]`, unless it was reported before a preemption.
    pub(crate) fn report(
        &mut self,
        id: RequestId,
        tokens: &[u32],
        position: usize,
        logits: &[f32],
        out: &mut Vec<EngineOutput>,
    ) -> Result<(), SampleError> {
        if position < self.next {
            return Ok(());
        }
        self.next = position + 1;
        match self.kind {
            ScoreKind::Logits => out.push(EngineOutput::Logits { id, position, logits: logits.to_vec() }),
            ScoreKind::Logprobs { top } => {
                if let Some(&token) = tokens.get(position + 1) {
                    let row = LogProbs::new(logits)?;
                    let (logprob, top) = (row.of(token), row.top(usize::from(top)));
                    out.push(EngineOutput::Scored { id, position: position + 1, token, logprob, top });
                }
            }
        }
        Ok(())
    }
}
