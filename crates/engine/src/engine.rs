// SPDX-License-Identifier: Apache-2.0

//! [`Engine`]: owns the model and joins admission, scheduler, drafts, batch, sampler and outputs.

mod beams;
mod launched;
mod maintenance;
mod submit;

use crate::beam::group::BeamGroup;
use crate::config::{EngineConfig, EngineConfigError, check_draft};
use crate::draft::drafter::Drafter;
use crate::draft::speculation::Speculation;
use crate::engine::launched::{LaunchedStep, StepsInFlight};
use crate::error::{EngineStartError, StepError};
use crate::kv::block_key::BlockId;
use crate::kv::group::KvGroupKind;
use crate::request::input::RequestId;
use crate::request::output::{EngineOutput, FinishReason};
use crate::request::state::{ActiveRequest, RequestWork, SampleOutcome};
use crate::request::validate::RequestLimits;
use crate::sample::deferred_logits::DeferredLogits;
use crate::sample::output_rows::{OutputRows, RowOutput};
use crate::sample::sampler::Sampler;
use crate::schedule::admission::{AdmissionControl, QueueLimits};
use crate::schedule::batch::{Batch, OutputRow};
use crate::schedule::launch_timer::LaunchTimer;
use crate::schedule::prefill_rate::PrefillRateEstimator;
use crate::schedule::scheduler::Scheduler;
use crate::schedule::sequence_id::SequenceId;
use crate::schedule::step_plan::SchedulerLimits;
use crate::stats::{EngineStats, StepReport};
use models::{Model, OutputKind};
use ops::{Backend, KvLayout, OpError};
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::time::Duration;

pub struct Engine<B: Backend> {
    model: Box<dyn Model<B>>,
    backend: B,
    kv: B::Kv,
    block_tokens: usize,
    capacity: RequestLimits,
    admission: AdmissionControl,
    scheduler: Scheduler,
    sampler: Sampler,
    /// Set if the engine uses draft tokens.
    drafting: Option<Drafting<B>>,
    batch: Batch,
    max_prefill_stall: Duration,
    prefill_rate: PrefillRateEstimator,
    /// Tokens and logits of the current step on the host.
    rows: OutputRows,
    /// What the model computes for each output of the current step.
    output_kinds: Vec<OutputKind>,
    deferred: DeferredLogits,
    in_flight: StepsInFlight,
    /// By sequence id.
    requests: Vec<Option<ActiveRequest>>,
    sequence_ids: HashMap<RequestId, SequenceId>,
    deadlines: BTreeSet<(Duration, SequenceId)>,
    /// Beam searches. `sequence_ids` has one sequence of each.
    beam_groups: HashMap<RequestId, BeamGroup>,
    /// Beam searches of which this step has computed the last row.
    complete_groups: Vec<RequestId>,
    draining: bool,
    stats: EngineStats,
}

struct Drafting<B: Backend> {
    drafter: Box<dyn Drafter<B>>,
    speculation: Speculation,
}

impl<B: Backend> Engine<B> {
    /// `model` was built with at least [`EngineConfig::model_limits`].
    pub fn new(
        model: Box<dyn Model<B>>,
        backend: B,
        config: &EngineConfig,
    ) -> Result<Self, EngineStartError> {
        Self::start(model, None, backend, config)
    }

    /// An engine with speculative decoding: `drafter` proposes up to `draft_depth_max` tokens.
    pub fn with_drafter(
        model: Box<dyn Model<B>>,
        drafter: Box<dyn Drafter<B>>,
        backend: B,
        config: &EngineConfig,
    ) -> Result<Self, EngineStartError> {
        let drafter = (config.draft_depth_max > 0).then_some(drafter);
        Self::start(model, drafter, backend, config)
    }

    fn start(
        model: Box<dyn Model<B>>,
        mut drafter: Option<Box<dyn Drafter<B>>>,
        mut backend: B,
        config: &EngineConfig,
    ) -> Result<Self, EngineStartError> {
        config.check()?;
        // The model and its drafter share one KV budget and one block table.
        let own_layers = model.kv_layers(&config.kv_types);
        config.kv_types.check(own_layers.len()).map_err(EngineConfigError::from)?;
        let draft_kind = config.kv_types.rest();
        let draft_layers = drafter.as_ref().map_or(Vec::new(), |drafter| drafter.kv_layers(draft_kind));
        let mut drafts = KvLayout { block_tokens: config.block_tokens, blocks: 0, layers: draft_layers };
        let layout = config.kv_layout_with_drafts(own_layers, drafts.block_bytes())?;
        drafts.blocks = layout.blocks;
        check_draft(&layout.layers, &drafts.layers)?;
        let groups: Vec<KvGroupKind> = layout.groups().iter().map(|group| group.span.into()).collect();
        // A fork would have to copy the draft model's keys and values too.
        let can_fork = drafts.layers.is_empty();
        let block_bytes = layout.block_bytes() + drafts.block_bytes();
        let bytes = layout.blocks as u64 * block_bytes as u64;
        let no_room = |source| EngineStartError::Kv { blocks: layout.blocks, bytes, source };
        let kv = backend.kv(&layout).map_err(no_room)?;
        if let Some(drafter) = &mut drafter {
            drafter.start(&mut backend, &drafts).map_err(no_room)?;
        }
        let usable = layout.blocks - 1;
        let vocab_size = model.vocab_size();
        let context = model.context_length();
        let limits = SchedulerLimits {
            block_tokens: layout.block_tokens,
            step_tokens: config.step_tokens,
            running_max: config.running_max,
            score_rows_max: config.score_rows_max(vocab_size),
            draft_rows_max: config.draft_rows_max(vocab_size),
            prefix_cache: config.prefix_cache,
            can_fork,
        };
        Ok(Self {
            capacity: RequestLimits {
                vocab_size,
                context_tokens: config.context_tokens.map_or(context, |cut| cut.min(context)),
                block_tokens: layout.block_tokens,
                blocks: usable,
                groups: groups.clone(),
                step_tokens: config.step_tokens,
            },
            stats: EngineStats {
                kv_blocks: usable,
                kv_block_tokens: layout.block_tokens,
                kv_block_bytes: block_bytes,
                kv_groups: groups.len(),
                ..EngineStats::default()
            },
            scheduler: Scheduler::with_groups(limits, usable, groups),
            model,
            backend,
            kv,
            block_tokens: layout.block_tokens,
            admission: AdmissionControl::new(QueueLimits::for_queue(config.queue_max)),
            sampler: Sampler::default(),
            drafting: drafter.map(|drafter| Drafting {
                drafter,
                speculation: Speculation::new(config.draft_depth_max, vocab_size),
            }),
            batch: Batch::default(),
            max_prefill_stall: config.max_prefill_stall,
            prefill_rate: PrefillRateEstimator::default(),
            rows: OutputRows::default(),
            output_kinds: Vec::new(),
            deferred: DeferredLogits::default(),
            in_flight: StepsInFlight::default(),
            requests: Vec::new(),
            sequence_ids: HashMap::new(),
            deadlines: BTreeSet::new(),
            beam_groups: HashMap::new(),
            complete_groups: Vec::new(),
            draining: false,
        })
    }

    /// Ends a request and releases its blocks. Returns `false` for an unknown id.
    pub fn cancel(&mut self, id: RequestId, out: &mut Vec<EngineOutput>) -> bool {
        match self.sequence_ids.get(&id) {
            Some(&sequence_id) => {
                self.finish(sequence_id, FinishReason::Cancelled, out);
                true
            }
            None => false,
        }
    }

    /// Pauses a request whose client reads too slowly. A paused request gets no rows, and keeps its
    /// blocks until another request needs them.
    pub fn set_paused(&mut self, id: RequestId, is_paused: bool) -> bool {
        let sequence_id = self.sequence_ids.get(&id).copied();
        // A beam search sends nothing before its end, so its client reads nothing too slowly.
        if let Some(sequence_id) = sequence_id.filter(|_| !self.beam_groups.contains_key(&id)) {
            self.scheduler.set_paused(sequence_id, is_paused);
        }
        sequence_id.is_some()
    }

    /// Refuses all further requests. Accepted requests run to their end.
    pub fn drain(&mut self) {
        self.draining = true;
    }

    /// Whether requests wait or run, or a step is in flight. A step may have no rows even so, if
    /// all requests are paused.
    pub fn has_work(&self) -> bool {
        !self.sequence_ids.is_empty() || self.in_flight.ahead.is_some()
    }

    /// The earliest deadline. The caller must call `step` then, even if no request has rows.
    pub fn next_deadline(&self) -> Option<Duration> {
        self.deadlines.first().map(|&(deadline, _)| deadline)
    }

    /// Ends requests whose deadline is not after `now`, computes one step and reports its outputs.
    /// The device may already compute the next step when this function returns.
    pub fn step(&mut self, now: Duration, out: &mut Vec<EngineOutput>) -> Result<StepReport, StepError> {
        let ended_before = self.stats.finished;
        while let Some(&(deadline, sequence_id)) = self.deadlines.first()
            && deadline <= now
        {
            self.finish(sequence_id, FinishReason::Deadline, out);
        }
        let outputs_before = out.len();
        self.sample_deferred(out);
        let sampled_deferred = tokens(&out[outputs_before..]);
        self.stats.output_tokens += sampled_deferred as u64;
        let launched = match self.in_flight.ahead.take() {
            Some(launched) => launched,
            None => {
                let report = self.plan(now, out);
                let may_leave_tokens = self.may_leave_tokens();
                self.launch(report, may_leave_tokens).map_err(|source| self.fail_step(source, out))?
            }
        };
        let outputs_before = out.len();
        let mut next = Ok(());
        if launched.is_drawn_on_device {
            next = self.launch_ahead(&launched, now, out);
            let read = self.report_drawn(&launched, out);
            read.map_err(|source| self.fail_launched(&launched, source, out))?;
        } else if launched.report.rows > 0 {
            self.report_rows(&launched, out);
            self.advance_beams(out);
        }
        let drawn = tokens(&out[outputs_before..]);
        self.stats.output_tokens += drawn as u64;
        self.stats.steps += u64::from(launched.report.rows > 0);
        self.in_flight.spare_outputs = launched.outputs;
        next.map_err(|source| self.fail_step(source, out))?;
        Ok(StepReport {
            tokens_sampled: sampled_deferred + drawn,
            finished: (self.stats.finished - ended_before) as usize,
            ..launched.report
        })
    }

    /// Plans a step, and reports the requests that are admitted.
    fn plan(&mut self, now: Duration, out: &mut Vec<EngineOutput>) -> StepReport {
        self.admission.start_step(now);
        let plan = self.scheduler.schedule(self.prefill_rate.prefill_row_limit(self.max_prefill_stall));
        let report = StepReport {
            rows: plan.rows,
            decode_rows: plan.decode_rows,
            sequences: plan.chunks.len(),
            admitted: plan.admitted.len(),
            preempted: plan.preempted,
            ..StepReport::default()
        };
        self.stats.preemptions += plan.preempted as u64;
        for &(sequence_id, cached_tokens) in &plan.admitted {
            let Some(request_state) = &mut self.requests[sequence_id.index()] else {
                panic!("{sequence_id:?} is admitted but has no request")
            };
            request_state.usage.cached_tokens = cached_tokens;
            if let Some(tenant) = request_state.queued_tenant.take() {
                self.admission.admitted(tenant, now);
            }
            self.stats.prompt_tokens_cached += cached_tokens as u64;
            out.push(EngineOutput::Admitted { id: request_state.id, cached_tokens });
        }
        self.stats.prompt_tokens_computed += (report.rows - report.decode_rows) as u64;
        report
    }

    /// Computes the planned step, or lets the device compute it if the tokens can stay there.
    fn launch(&mut self, mut report: StepReport, may_leave_tokens: bool) -> Result<LaunchedStep, OpError> {
        let mut outputs = std::mem::take(&mut self.in_flight.spare_outputs);
        outputs.clear();
        if report.rows == 0 {
            return Ok(LaunchedStep { outputs, report, is_drawn_on_device: false });
        }
        self.draft()?;
        let is_drawn_on_device = self.compute(may_leave_tokens)?;
        let plan = self.scheduler.plan();
        (report.rows, report.draft_rows) = (plan.rows, plan.draft_rows);
        self.scheduler.commit();
        outputs.extend(self.batch.output_rows().iter().copied().map(Some));
        Ok(LaunchedStep { outputs, report, is_drawn_on_device })
    }

    /// Records the duration of the last step, from which the engine derives the draft depth and the
    /// prefill row limit. It never changes a token.
    pub fn observe(&mut self, report: &StepReport, took: Duration) {
        let others = report.decode_rows + report.draft_rows;
        self.prefill_rate.observe(others, report.rows - others, took);
        // A step with prefill says little about small steps.
        if let Some(drafting) = &mut self.drafting
            && report.rows > 0
            && report.rows == others
        {
            drafting.speculation.observe(report.rows, took);
        }
    }

    /// Adds draft tokens to the plan.
    fn draft(&mut self) -> Result<(), OpError> {
        let Some(Drafting { drafter, speculation }) = &mut self.drafting else { return Ok(()) };
        let requests = &self.requests;
        let may = |sequence_id: SequenceId| {
            requests[sequence_id.index()].as_ref().is_some_and(ActiveRequest::may_draft)
        };
        speculation.draft(&mut **drafter, &mut self.backend, &mut self.scheduler, may)
    }

    /// Runs the model over the plan. Copies the needed tokens and logits to the host, or leaves the
    /// tokens on the device, which then draws all of them. Returns whether they stay there.
    fn compute(&mut self, may_leave_tokens: bool) -> Result<bool, OpError> {
        let mut is_drawn_on_device = false;
        let drafts = self.drafting.iter().flat_map(|drafting| drafting.speculation.drafts());
        self.batch.fill(&self.scheduler, self.block_tokens, drafts);
        let copies = &self.scheduler.plan().copies;
        if !copies.is_empty() {
            let copies: Vec<_> = copies.iter().map(|copy| (copy.from, copy.to)).collect();
            self.model.copy_blocks(&mut self.backend, &mut self.kv, &copies)?;
        }
        let chunks = self.scheduler.plan().chunks.iter();
        let sequences = chunks.filter_map(|chunk| self.scheduler.sequence(chunk.sequence_id));
        let count = self.scheduler.plan().chunks.len() * self.capacity.groups.len();
        let mut tables: Vec<&[BlockId]> = Vec::with_capacity(count);
        tables.extend(sequences.flat_map(|sequence| sequence.blocks().tables()));
        assert_eq!(tables.len(), count, "every chunk of the plan has a sequence");
        let (wanted, vocab_size) = (self.batch.output_rows(), self.capacity.vocab_size);
        let (requests, scheduler) = (&self.requests, &self.scheduler);
        let draw = |row: &OutputRow| {
            // Followers may sample from a leader's logits with other parameters, so the host needs
            // them.
            let leads = scheduler.sequence(row.sequence_id).is_some_and(|sequence| sequence.followers > 0);
            let request_state = requests[row.sequence_id.index()].as_ref().filter(|_| !leads);
            request_state.and_then(|request_state| request_state.draw(row.position, row.drafted.is_some()))
        };
        let rows = &mut self.rows;
        rows.start(wanted.len());
        self.output_kinds.clear();
        self.output_kinds.extend(wanted.iter().map(|row| {
            let request_state = requests[row.sequence_id.index()].as_ref();
            request_state.map_or(OutputKind::Logits, ActiveRequest::output_kind)
        }));
        let (kinds, sampler) = (&self.output_kinds, &mut self.sampler);
        let [state_width, labels] =
            [OutputKind::HiddenState, OutputKind::Labels].map(|kind| self.model.output_width(kind));
        let mut take = |backend: &mut B, run: Range<usize>, values: &B::Tensor| match kinds
            .get(run.start)
            .copied()
            .unwrap_or_default()
        {
            OutputKind::Logits => {
                if may_leave_tokens && run.start == 0 {
                    is_drawn_on_device = rows.can_start_draws(vocab_size, wanted.iter().map(draw));
                }
                if is_drawn_on_device {
                    return rows.start_draws(backend, vocab_size, run, values);
                }
                rows.take(backend, sampler, vocab_size, run.clone(), values, wanted[run].iter().map(draw))
            }
            OutputKind::HiddenState => rows.take_states(backend, state_width, run, values),
            OutputKind::Labels => rows.take_states(backend, labels, run, values),
        };
        self.model.forward(&mut self.backend, &mut self.kv, &self.batch.step(&tables), kinds, &mut take)?;
        Ok(is_drawn_on_device)
    }

    /// Samples from deferred logits whose token mask is ready now.
    fn sample_deferred(&mut self, out: &mut Vec<EngineOutput>) {
        let mut index = 0;
        loop {
            let requests = &mut self.requests;
            let is_mask_pending = |sequence_id: SequenceId| {
                requests[sequence_id.index()].as_mut().is_some_and(ActiveRequest::is_mask_pending)
            };
            let Some(row) = self.deferred.take_ready(&mut index, is_mask_pending) else { return };
            self.report_row_and_end(row.sequence_id, row.position, RowOutput::Logits(&row.logits), out);
            self.deferred.recycle(row);
        }
    }

    /// Passes every output row to its request.
    fn report_rows(&mut self, launched: &LaunchedStep, out: &mut Vec<EngineOutput>) {
        let rows = std::mem::take(&mut self.rows);
        for (index, wanted) in launched.outputs.iter().enumerate() {
            let Some(wanted) = wanted.filter(|wanted| self.is_valid_row(wanted)) else { continue };
            let row = rows.row(index, self.capacity.vocab_size);
            self.report_row_and_end(wanted.sequence_id, wanted.position, row, out);
            if wanted.drafted.is_none() {
                let forked =
                    self.scheduler.plan().forked.iter().filter(|fork| fork.leader == wanted.sequence_id);
                let followers: Vec<SequenceId> = forked.map(|fork| fork.follower).collect();
                for sequence_id in followers {
                    self.report_row_and_end(sequence_id, wanted.position, row, out);
                }
            }
        }
        self.rows = rows;
        if let Some(Drafting { speculation, .. }) = &mut self.drafting {
            self.scheduler.release_rejected_drafts();
            speculation.record_acceptance();
        }
    }

    /// Whether the row was computed from its sequence's tokens. A draft row is valid if the rows
    /// before it sampled its token.
    fn is_valid_row(&mut self, row: &OutputRow) -> bool {
        let Some(drafted) = row.drafted else { return true };
        let right = self.scheduler.accept_draft(row.sequence_id, row.position, drafted);
        if right && let Some(Drafting { speculation, .. }) = &mut self.drafting {
            speculation.accept(row.sequence_id);
        }
        right
    }

    fn report_row_and_end(
        &mut self,
        sequence_id: SequenceId,
        position: usize,
        row: RowOutput<'_>,
        out: &mut Vec<EngineOutput>,
    ) {
        if let Some(reason) = self.report_row(sequence_id, position, row, out) {
            self.finish(sequence_id, reason, out);
        }
    }

    fn report_row(
        &mut self,
        sequence_id: SequenceId,
        position: usize,
        row: RowOutput<'_>,
        out: &mut Vec<EngineOutput>,
    ) -> Option<FinishReason> {
        let ActiveRequest { id, usage, work, .. } = self.requests[sequence_id.index()].as_mut()?;
        match work {
            RequestWork::Generate(generation) => {
                match generation.draw(*id, usage, position + 1, row, &mut self.sampler, out) {
                    Ok(SampleOutcome::Continue(token)) => {
                        // A preempted sequence may compute a row again while its logits are still
                        // deferred.
                        self.deferred.remove(sequence_id);
                        self.scheduler.push_token(sequence_id, token);
                        None
                    }
                    Ok(SampleOutcome::Finished(reason)) => Some(reason),
                    Ok(SampleOutcome::Pending) => {
                        // A request with a constraint always gets its logits.
                        let RowOutput::Logits(logits) = row else {
                            panic!("{id}: a request with a constraint gets no token from the device")
                        };
                        self.stats.deferred_rows += 1;
                        self.deferred.insert(sequence_id, position, logits);
                        None
                    }
                    Err(error) => Some(FinishReason::BadLogits(error)),
                }
            }
            RequestWork::Score(scoring) => {
                let RowOutput::Logits(row) = row else {
                    panic!("{id}: a scored request gets no token from the device")
                };
                let Some(sequence) = self.scheduler.sequence(sequence_id) else {
                    panic!("{id} has no sequence")
                };
                let tokens = sequence.tokens();
                match scoring.report(*id, tokens, position, row, out) {
                    Ok(()) => (position + 1 == tokens.len()).then_some(FinishReason::Scored),
                    Err(error) => Some(FinishReason::BadLogits(error)),
                }
            }
            RequestWork::Beam => {
                let RowOutput::Logits(row) = row else {
                    panic!("{id}: a beam search gets no token from the device")
                };
                let id = *id;
                self.take_beam_row(id, sequence_id, row)
            }
            RequestWork::Embed(embedding) => {
                let (RowOutput::State(row), Some(sequence)) = (row, self.scheduler.sequence(sequence_id))
                else {
                    panic!("{id}: a request for an embedding has a sequence and gets hidden states")
                };
                match embedding.add(position, sequence.tokens().len(), row) {
                    Ok(None) => None,
                    Ok(Some(values)) => {
                        out.push(EngineOutput::Embedding { id: *id, values });
                        Some(FinishReason::Embedded)
                    }
                    Err(error) => Some(FinishReason::BadLogits(error)),
                }
            }
        }
    }

    fn fail_step(&mut self, source: OpError, out: &mut Vec<EngineOutput>) -> StepError {
        self.in_flight.timer = LaunchTimer::default();
        self.scheduler.abandon();
        let plan = self.scheduler.plan();
        let rows = plan.rows;
        let sequence_ids: Vec<SequenceId> = plan.chunks.iter().map(|chunk| chunk.sequence_id).collect();
        for &sequence_id in &sequence_ids {
            // The sequences of a beam search end together.
            if self.requests[sequence_id.index()].is_some() {
                self.finish(sequence_id, FinishReason::StepFailed, out);
            }
        }
        StepError { rows, requests: sequence_ids.len(), source }
    }

    /// Ends the requests of a step that the device could not compute, and of the step behind it. A
    /// read fails only with the device, so the process ends: neither the tokens of the step behind
    /// nor the prefix cache are used again.
    fn fail_launched(
        &mut self,
        launched: &LaunchedStep,
        source: OpError,
        out: &mut Vec<EngineOutput>,
    ) -> StepError {
        let behind = self.in_flight.ahead.take();
        let outputs = launched.outputs.iter().chain(behind.iter().flat_map(|behind| &behind.outputs));
        let mut requests = 0;
        for &OutputRow { sequence_id, .. } in outputs.flatten() {
            if self.requests[sequence_id.index()].is_some() {
                self.finish(sequence_id, FinishReason::StepFailed, out);
                requests += 1;
            }
        }
        StepError { rows: launched.report.rows, requests, source }
    }

    fn finish(&mut self, sequence_id: SequenceId, reason: FinishReason, out: &mut Vec<EngineOutput>) {
        let sequence_id = self.end_other_beams(sequence_id);
        let Some(request_state) = self.requests[sequence_id.index()].take() else {
            panic!("{sequence_id:?} ends but has no request")
        };
        self.scheduler.remove(sequence_id);
        self.deferred.remove(sequence_id);
        if let Some(ahead) = &mut self.in_flight.ahead {
            ahead.forget(sequence_id);
        }
        if let Some(tenant) = request_state.queued_tenant {
            self.admission.leave(tenant);
        }
        if let Some(Drafting { drafter, .. }) = &mut self.drafting {
            drafter.forget(sequence_id);
        }
        self.sequence_ids.remove(&request_state.id);
        if let Some(deadline) = request_state.deadline {
            self.deadlines.remove(&(deadline, sequence_id));
        }
        self.stats.finished += 1;
        out.push(EngineOutput::Finished { id: request_state.id, reason, usage: request_state.usage });
    }
}

fn tokens(outputs: &[EngineOutput]) -> usize {
    outputs.iter().filter(|output| matches!(output, EngineOutput::Token(_))).count()
}
