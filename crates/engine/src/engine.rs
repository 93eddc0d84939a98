//! [`Engine`]: requests in, steps of the model, outputs out.

use crate::config::{ConfigError, EngineConfig, check_draft};
use crate::draft::drafter::Drafter;
use crate::draft::speculation::{DraftStats, Speculation};
use crate::error::{StartError, StepError};
use crate::integrity::Books;
use crate::kv::block_key::BlockId;
use crate::kv::events::Update;
use crate::kv::group::GroupKind;
use crate::request::input::{Request, RequestId, ScoreRequest};
use crate::request::output::{FinishReason, Output};
use crate::request::refusal::{Queued, RefuseReason};
use crate::request::state::{Drawn, Task, Work};
use crate::request::validate::Capacity;
use crate::sample::constraint::Constraint;
use crate::sample::deferred_logits::LateRows;
use crate::sample::output_rows::{OutputRows, Row};
use crate::sample::sampler::Sampler;
use crate::schedule::admission::{Admission, Bounds};
use crate::schedule::batch::{Batch, OutputRow};
use crate::schedule::integrity::IntegrityError;
use crate::schedule::prefill_rate::RowTime;
use crate::schedule::scheduler::Scheduler;
use crate::schedule::sequence::{Kind, NewSequence};
use crate::schedule::sequence_id::Slot;
use crate::schedule::step_plan::Limits;
use crate::stats::{EngineStats, KvUse, StepReport};
use models::Model;
use ops::{Backend, KvLayout, OpError};
use prefix::Scope;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::time::Duration;

/// Of requests that name none.
const NO_TENANT: u64 = 0;

pub struct Engine<B: Backend> {
    model: Box<dyn Model<B>>,
    backend: B,
    kv: B::Kv,
    block_tokens: usize,
    capacity: Capacity,
    admission: Admission,
    scheduler: Scheduler,
    sampler: Sampler,
    /// Set if tokens are drafted.
    drafting: Option<Drafting<B>>,
    batch: Batch,
    prompt_pause: Duration,
    row_time: RowTime,
    /// What the step brought to the host.
    rows: OutputRows,
    late: LateRows,
    /// By slot of the scheduler.
    tasks: Vec<Option<Task>>,
    slots: HashMap<RequestId, Slot>,
    deadlines: BTreeSet<(Duration, Slot)>,
    draining: bool,
    stats: EngineStats,
}

struct Drafting<B: Backend> {
    drafter: Box<dyn Drafter<B>>,
    speculation: Speculation,
}

impl<B: Backend> Engine<B> {
    /// `model` was built with at least [`EngineConfig::model_limits`].
    pub fn new(model: Box<dyn Model<B>>, backend: B, config: &EngineConfig) -> Result<Self, StartError> {
        Self::start(model, None, backend, config)
    }

    /// The same engine with tokens drafted by `drafter`, to the depth that the configuration allows.
    pub fn drafting(
        model: Box<dyn Model<B>>,
        drafter: Box<dyn Drafter<B>>,
        backend: B,
        config: &EngineConfig,
    ) -> Result<Self, StartError> {
        let drafter = (config.draft_depth_max > 0).then_some(drafter);
        Self::start(model, drafter, backend, config)
    }

    fn start(
        model: Box<dyn Model<B>>,
        mut drafter: Option<Box<dyn Drafter<B>>>,
        mut backend: B,
        config: &EngineConfig,
    ) -> Result<Self, StartError> {
        config.check()?;
        // One budget and one table of blocks for both.
        let own_layers = model.kv_layers(&config.kv_types);
        config.kv_types.check(own_layers.len()).map_err(ConfigError::from)?;
        let draft_kind = config.kv_types.rest();
        let draft_layers = drafter.as_ref().map_or(Vec::new(), |drafter| drafter.kv_layers(draft_kind));
        let mut drafts = KvLayout { block_tokens: config.block_tokens, blocks: 0, layers: draft_layers };
        let layout = config.kv_layout_beside(own_layers, drafts.block_bytes())?;
        drafts.blocks = layout.blocks;
        check_draft(&layout.layers, &drafts.layers)?;
        let groups: Vec<GroupKind> = layout.groups().iter().map(|group| group.span.into()).collect();
        // A draft's keys and values would have to be copied too.
        let forks = drafts.layers.is_empty();
        let block_bytes = layout.block_bytes() + drafts.block_bytes();
        let bytes = layout.blocks as u64 * block_bytes as u64;
        let no_room = |source| StartError::Kv { blocks: layout.blocks, bytes, source };
        let kv = backend.kv(&layout).map_err(no_room)?;
        if let Some(drafter) = &mut drafter {
            drafter.start(&mut backend, &drafts).map_err(no_room)?;
        }
        let usable = layout.blocks - 1;
        let vocab_size = model.vocab_size();
        let context = model.context_length();
        let limits = Limits {
            block_tokens: layout.block_tokens,
            step_tokens: config.step_tokens,
            running_max: config.running_max,
            score_rows_max: config.score_rows_max(vocab_size),
            draft_rows_max: config.draft_rows_max(vocab_size),
            prefix_cache: config.prefix_cache,
            forks,
        };
        Ok(Self {
            capacity: Capacity {
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
            admission: Admission::new(Bounds::of_queue(config.queue_max)),
            sampler: Sampler::default(),
            drafting: drafter.map(|drafter| Drafting {
                drafter,
                speculation: Speculation::new(config.draft_depth_max, vocab_size),
            }),
            batch: Batch::default(),
            prompt_pause: config.prompt_pause,
            row_time: RowTime::default(),
            rows: OutputRows::default(),
            late: LateRows::default(),
            tasks: Vec::new(),
            slots: HashMap::new(),
            deadlines: BTreeSet::new(),
            draining: false,
        })
    }

    /// Checks and queues a request. An error leaves no trace of it.
    pub fn submit(&mut self, request: Request) -> Result<Queued, RefuseReason> {
        self.submit_constrained(request, None)
    }

    /// As `submit`; only what `constraint` allows is drawn. It has accepted the request's prior output.
    pub fn submit_constrained(
        &mut self,
        request: Request,
        constraint: Option<Box<dyn Constraint>>,
    ) -> Result<Queued, RefuseReason> {
        let checked = self.capacity.check(&request).and_then(|checked| {
            self.take_place(request.id, request.priority, request.tenant).map(|()| checked)
        });
        let (tokens_max, history) = self.count_refusal(checked)?;
        let task = Task::generate(&request, history, constraint, tokens_max);
        Ok(self.queue(
            task,
            NewSequence {
                kind: Kind::Generate,
                priority: request.priority,
                tenant: request.tenant,
                tokens: request.prompt,
                tokens_max,
                scope: &request.scope,
            },
        ))
    }

    /// As `submit`, for tokens that are given and to be scored.
    pub fn submit_score(&mut self, request: ScoreRequest) -> Result<Queued, RefuseReason> {
        let checked = self
            .capacity
            .check_score(&request)
            .and_then(|()| self.take_place(request.id, request.priority, NO_TENANT));
        self.count_refusal(checked)?;
        let task = Task::score(&request);
        Ok(self.queue(
            task,
            NewSequence {
                kind: Kind::Score,
                priority: request.priority,
                tenant: NO_TENANT,
                tokens_max: request.tokens.len(),
                tokens: request.tokens,
                scope: &Scope::default(),
            },
        ))
    }

    /// Ends a request; its blocks are free when this returns. `false`: there is none of that id.
    pub fn cancel(&mut self, id: RequestId, out: &mut Vec<Output>) -> bool {
        match self.slots.get(&id) {
            Some(&slot) => {
                self.finish(slot, FinishReason::Cancelled, out);
                true
            }
            None => false,
        }
    }

    /// While held, a request gets no rows beyond those of its admission: its reader is behind. It keeps its blocks.
    pub fn hold(&mut self, id: RequestId, held: bool) -> bool {
        let slot = self.slots.get(&id).copied();
        slot.inspect(|&slot| self.scheduler.hold(slot, held)).is_some()
    }

    /// From now on requests are refused; those there are run to their end.
    pub fn drain(&mut self) {
        self.draining = true;
    }

    /// Requests wait or run. A step may still have no rows, when all of them are held.
    pub fn has_work(&self) -> bool {
        !self.slots.is_empty()
    }

    /// When the next request's time is up: a step is due then even if none has rows.
    pub fn next_deadline(&self) -> Option<Duration> {
        self.deadlines.first().map(|&(deadline, _)| deadline)
    }

    /// Ends what is overdue at `now`, computes one batch and reports what came of it.
    pub fn step(&mut self, now: Duration, out: &mut Vec<Output>) -> Result<StepReport, StepError> {
        let ended_before = self.stats.finished;
        while let Some(&(deadline, slot)) = self.deadlines.first()
            && deadline <= now
        {
            self.finish(slot, FinishReason::Deadline, out);
        }
        let outputs_before = out.len();
        self.draw_late(out);
        let drawn_late = tokens(&out[outputs_before..]);
        self.stats.output_tokens += drawn_late as u64;
        self.admission.passed(now);
        let plan = self.scheduler.schedule(self.row_time.beside(self.prompt_pause));
        let mut report = StepReport {
            rows: plan.rows,
            decode_rows: plan.decode_rows,
            draft_rows: 0,
            sequences: plan.chunks.len(),
            admitted: plan.admitted.len(),
            preempted: plan.preempted,
            tokens_sampled: drawn_late,
            ..StepReport::default()
        };
        self.stats.preemptions += plan.preempted as u64;
        for &(slot, cached_tokens) in &plan.admitted {
            if let Some(task) = &mut self.tasks[slot.0 as usize] {
                task.usage.cached_tokens = cached_tokens;
                if let Some(tenant) = task.queued_for.take() {
                    self.admission.admitted(tenant, now);
                }
                self.stats.prompt_tokens_cached += cached_tokens as u64;
                out.push(Output::Admitted { id: task.id, cached_tokens });
            }
        }
        if report.rows > 0 {
            self.stats.prompt_tokens_computed += (report.rows - report.decode_rows) as u64;
            self.draft().and_then(|()| self.compute()).map_err(|source| self.lose_step(source, out))?;
            let plan = self.scheduler.plan();
            (report.rows, report.draft_rows) = (plan.rows, plan.draft_rows);
            self.scheduler.commit();
            self.stats.steps += 1;
            let outputs_before = out.len();
            self.report_rows(out);
            let drawn = tokens(&out[outputs_before..]);
            self.stats.output_tokens += drawn as u64;
            report.tokens_sampled += drawn;
        }
        report.finished = (self.stats.finished - ended_before) as usize;
        Ok(report)
    }

    /// The last step took so long: what the depth of drafts and the rows of prompts beside decodes follow. Never changes what
    /// is put out.
    pub fn observe(&mut self, report: &StepReport, took: Duration) {
        let others = report.decode_rows + report.draft_rows;
        self.row_time.observe(others, report.rows - others, took);
        // Steps with prompts in them say little about small steps.
        if let Some(drafting) = &mut self.drafting
            && report.rows > 0
            && report.rows == others
        {
            drafting.speculation.observe(report.rows, took);
        }
    }

    /// What computes: for whoever accounts for the memory of the device.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    pub fn stats(&self) -> EngineStats {
        let pool = self.scheduler.pool();
        EngineStats {
            running: self.scheduler.running(),
            waiting: self.scheduler.waiting(),
            kv_blocks_used: pool.used(),
            kv_blocks_free: pool.free(),
            kv_blocks_cached: pool.cached(),
            evictions: pool.evictions(),
            kv_events: pool.next_event(),
            forks: self.scheduler.forks(),
            drafts: self.drafting.as_ref().map_or_else(DraftStats::default, |now| now.speculation.stats()),
            ..self.stats
        }
    }

    /// What the cache takes and how well it is filled: looks at every running sequence, so not for every step.
    pub fn kv_use(&self) -> KvUse {
        let (places, unfilled) = self.scheduler.unfilled();
        let drafts = self.drafting.as_ref().map_or(0, |now| now.drafter.kv_bytes(&self.backend));
        KvUse { bytes: self.backend.kv_bytes(&self.kv) + drafts, places, unfilled }
    }

    /// What became findable in the cache, and ceased to be, from event `from` on. Between steps.
    pub fn kv_events(&self, from: u64) -> Update {
        self.scheduler.pool().events_since(from)
    }

    /// Gives back memory behind the last block that is held or can be found, and that of logits. Between steps.
    pub fn release_memory(&mut self) -> Result<(), OpError> {
        self.rows.release();
        self.late.release();
        let blocks = self.scheduler.pool().tail() as usize;
        if let Some(Drafting { drafter, .. }) = &mut self.drafting {
            drafter.trim(&mut self.backend, blocks)?;
        }
        self.backend.trim(&mut self.kv, blocks)
    }

    /// Forgets cached prefixes that no request has found since the last call. Between steps.
    pub fn forget_unused_prefixes(&mut self) {
        self.scheduler.forget_unused_prefixes();
    }

    /// Forgets all cached prefixes. `false`, and nothing is done, while any request holds blocks.
    pub fn reset_prefix_cache(&mut self) -> bool {
        self.scheduler.reset_prefix_cache()
    }

    /// Checks every block against the sequences that hold it, and every list of requests and sequences against the others. For
    /// an idle moment: it looks at the whole pool.
    pub fn check_integrity(&self) -> Result<(), IntegrityError> {
        let Self { tasks, slots, deadlines, admission, scheduler, .. } = self;
        scheduler.check_integrity()?;
        Books { tasks, slots, deadlines, admission, scheduler }.check()
    }

    /// The last of all checks: from here on the request is in the queue.
    fn take_place(&mut self, id: RequestId, priority: i32, tenant: u64) -> Result<(), RefuseReason> {
        if self.draining {
            Err(RefuseReason::Draining)
        } else if self.slots.contains_key(&id) {
            Err(RefuseReason::DuplicateId(id))
        } else {
            Ok(self.admission.enter(priority, tenant)?)
        }
    }

    fn count_refusal<T>(&mut self, checked: Result<T, RefuseReason>) -> Result<T, RefuseReason> {
        self.stats.refused += u64::from(checked.is_err());
        checked
    }

    fn queue(&mut self, mut task: Task, new: NewSequence<'_>) -> Queued {
        task.queued_for = Some(new.tenant);
        let slot = self.scheduler.add(new);
        self.slots.insert(task.id, slot);
        if let Some(deadline) = task.deadline {
            self.deadlines.insert((deadline, slot));
        }
        if self.tasks.len() <= slot.0 as usize {
            self.tasks.resize_with(slot.0 as usize + 1, || None);
        }
        self.tasks[slot.0 as usize] = Some(task);
        if let Some(Drafting { speculation, .. }) = &mut self.drafting {
            speculation.begin(slot);
        }
        Queued { ahead: self.scheduler.ahead(slot) }
    }

    /// Extends the plan by guesses at what its sequences go on with.
    fn draft(&mut self) -> Result<(), OpError> {
        let Some(Drafting { drafter, speculation }) = &mut self.drafting else { return Ok(()) };
        let tasks = &self.tasks;
        let may = |slot: Slot| tasks[slot.0 as usize].as_ref().is_some_and(Task::may_draft);
        speculation.draft(&mut **drafter, &mut self.backend, &mut self.scheduler, may)
    }

    /// Runs the model over the plan and brings to the host what its requests need of the logits.
    fn compute(&mut self) -> Result<(), OpError> {
        let drafts = self.drafting.iter().flat_map(|drafting| drafting.speculation.drafts());
        self.batch.fill(&self.scheduler, self.block_tokens, drafts);
        let copies = &self.scheduler.plan().copies;
        if !copies.is_empty() {
            let copies: Vec<_> = copies.iter().map(|copy| (copy.from, copy.to)).collect();
            self.model.copy_blocks(&mut self.backend, &mut self.kv, &copies)?;
        }
        let chunks = self.scheduler.plan().chunks.iter();
        let sequences = chunks.filter_map(|chunk| self.scheduler.sequence(chunk.slot));
        let count = self.scheduler.plan().chunks.len() * self.capacity.groups.len();
        let mut tables: Vec<&[BlockId]> = Vec::with_capacity(count);
        tables.extend(sequences.flat_map(|sequence| sequence.blocks().tables()));
        let (wanted, vocab_size) = (self.batch.wanted(), self.capacity.vocab_size);
        let (tasks, scheduler) = (&self.tasks, &self.scheduler);
        let draw = |row: &OutputRow| {
            // Others may sample from a leader's row in other ways.
            let leads = scheduler.sequence(row.slot).is_some_and(|sequence| sequence.followers > 0);
            let task = tasks[row.slot.0 as usize].as_ref().filter(|_| !leads);
            task.and_then(|task| task.draw(row.position, row.drafted.is_some()))
        };
        let rows = &mut self.rows;
        rows.start(wanted.len());
        let sampler = &mut self.sampler;
        let mut take = |backend: &mut B, run: Range<usize>, logits: &B::Tensor| {
            rows.take(backend, sampler, vocab_size, run.clone(), logits, wanted[run].iter().map(draw))
        };
        self.model.forward(&mut self.backend, &mut self.kv, &self.batch.step(&tables), &mut take)
    }

    /// Rows that waited for their constraint and need not any more.
    fn draw_late(&mut self, out: &mut Vec<Output>) {
        let mut index = 0;
        loop {
            let tasks = &mut self.tasks;
            let is_late = |slot: Slot| tasks[slot.0 as usize].as_mut().is_some_and(Task::is_late);
            let Some(row) = self.late.take(&mut index, is_late) else { return };
            self.report_row_and_end(row.slot, row.position, Row::Logits(&row.logits), out);
            self.late.give_back(row);
        }
    }

    /// Hands every row of logits to its request.
    fn report_rows(&mut self, out: &mut Vec<Output>) {
        let rows = std::mem::take(&mut self.rows);
        for index in 0..self.batch.wanted().len() {
            let wanted = self.batch.wanted()[index];
            if !self.counts(&wanted) {
                continue;
            }
            let row = rows.row(index, self.capacity.vocab_size);
            self.report_row_and_end(wanted.slot, wanted.position, row, out);
            if wanted.drafted.is_none() {
                let forked = self.scheduler.plan().forked.iter().filter(|fork| fork.leader == wanted.slot);
                let followers: Vec<Slot> = forked.map(|fork| fork.follower).collect();
                for slot in followers {
                    self.report_row_and_end(slot, wanted.position, row, out);
                }
            }
        }
        self.rows = rows;
        if let Some(Drafting { speculation, .. }) = &mut self.drafting {
            self.scheduler.settle();
            speculation.settle();
        }
    }

    /// Whether a row was computed from its sequence's tokens: a drafted one is if the rows before it gave its token.
    fn counts(&mut self, row: &OutputRow) -> bool {
        let Some(drafted) = row.drafted else { return true };
        let right = self.scheduler.accept(row.slot, row.position, drafted);
        if right && let Some(Drafting { speculation, .. }) = &mut self.drafting {
            speculation.accept(row.slot);
        }
        right
    }

    fn report_row_and_end(&mut self, slot: Slot, position: usize, row: Row<'_>, out: &mut Vec<Output>) {
        if let Some(reason) = self.report_row(slot, position, row, out) {
            self.finish(slot, reason, out);
        }
    }

    fn report_row(
        &mut self,
        slot: Slot,
        position: usize,
        row: Row<'_>,
        out: &mut Vec<Output>,
    ) -> Option<FinishReason> {
        let Task { id, usage, work, .. } = self.tasks[slot.0 as usize].as_mut()?;
        match work {
            Work::Generate(generation) => {
                match generation.draw(*id, usage, position + 1, row, &mut self.sampler, out) {
                    Ok(Drawn::Continue(token)) => {
                        // A preempted one may get its row a second time before it has drawn from the first.
                        self.late.forget(slot);
                        self.scheduler.push_token(slot, token);
                        None
                    }
                    Ok(Drawn::Finished(reason)) => Some(reason),
                    Ok(Drawn::Later) => {
                        // Whole rows come for whoever has a constraint.
                        let Row::Logits(logits) = row else { return None };
                        self.stats.late_rows += 1;
                        self.late.keep(slot, position, logits);
                        None
                    }
                    Err(error) => Some(FinishReason::BadLogits(error)),
                }
            }
            Work::Score(scoring) => {
                let Row::Logits(row) = row else { return None };
                let tokens = self.scheduler.sequence(slot)?.tokens();
                match scoring.report(*id, tokens, position, row, out) {
                    Ok(()) => (position + 1 == tokens.len()).then_some(FinishReason::Scored),
                    Err(error) => Some(FinishReason::BadLogits(error)),
                }
            }
        }
    }

    fn lose_step(&mut self, source: OpError, out: &mut Vec<Output>) -> StepError {
        self.scheduler.abandon();
        let plan = self.scheduler.plan();
        let rows = plan.rows;
        let slots: Vec<Slot> = plan.chunks.iter().map(|chunk| chunk.slot).collect();
        for &slot in &slots {
            self.finish(slot, FinishReason::StepFailed, out);
        }
        StepError { rows, requests: slots.len(), source }
    }

    fn finish(&mut self, slot: Slot, reason: FinishReason, out: &mut Vec<Output>) {
        let Some(task) = self.tasks[slot.0 as usize].take() else { return };
        self.scheduler.remove(slot);
        self.late.forget(slot);
        if let Some(tenant) = task.queued_for {
            self.admission.leave(tenant);
        }
        if let Some(Drafting { drafter, .. }) = &mut self.drafting {
            drafter.forget(slot);
        }
        self.slots.remove(&task.id);
        if let Some(deadline) = task.deadline {
            self.deadlines.remove(&(deadline, slot));
        }
        self.stats.finished += 1;
        out.push(Output::Finished { id: task.id, reason, usage: task.usage });
    }
}

fn tokens(outputs: &[Output]) -> usize {
    outputs.iter().filter(|output| matches!(output, Output::Token(_))).count()
}
