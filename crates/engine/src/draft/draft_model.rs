//! Drafts from a smaller model of the same vocabulary: its most probable continuation, token by token.
//!
//! Its keys and values stand in a cache of its own with as many blocks as the model's, in the same places: a sequence's
//! block table serves both, and so do allocation, sharing, preemption and eviction. What differs is which places are
//! filled: a sequence is fed to the draft model only when tokens are wanted for it, from where its filled prefix ends.
//! For each place a hash of the tokens up to it says what stands there, so a prefix that another sequence left in a
//! shared block is found, and one that was overwritten is not.

use crate::draft::depth::DraftingCost;
use crate::draft::draft_tokens::{DRAFT_DEPTH_MAX, DraftTokens};
use crate::draft::drafter::{DraftRequest, Drafter};
use crate::kv::block_key::BlockId;
use crate::schedule::scheduler::Scheduler;
use crate::schedule::sequence::Sequence;
use crate::schedule::sequence_id::SequenceId;
use models::Model;
use ops::{Backend, KvLayer, KvLayout, KvType, NO_ARGMAX, OpError, Step};
use std::ops::Range;

pub struct DraftModel<B: Backend> {
    model: Box<dyn Model<B>>,
    /// Set by `start`.
    kv: Option<B::Kv>,
    block_tokens: usize,
    /// DraftBatch that its steps may have.
    rows_max: usize,
    share: f64,
    /// By KV slot: hash of the tokens up to the one whose keys and values stand there; 0: nothing does.
    filled: Vec<u64>,
    /// By slot: what was filled with the sequence's own tokens, and in which of its tables.
    prefixes: Vec<(u32, FilledPrefix)>,
    /// The same with drafts, for each sequence of the step under way.
    heads: Vec<FilledPrefix>,
    rows: DraftBatch,
    best: Vec<u32>,
}

/// Tokens of a sequence whose places are filled.
#[derive(Clone, Copy, Debug, Default)]
struct FilledPrefix {
    len: usize,
    /// Of these tokens.
    hash: u64,
}

/// Row data of one of its steps.
#[derive(Debug, Default)]
struct DraftBatch {
    tokens: Vec<u32>,
    positions: Vec<u32>,
    sequences: Vec<u32>,
    kv_slots: Vec<u32>,
    outputs: Vec<u32>,
    /// Index in `wanted` for each output.
    owners: Vec<usize>,
}

/// DraftBatch of one sequence that a step feeds: a long prompt is fed in pieces, beside which others decode.
const FED_MAX: usize = 256;

impl<B: Backend> DraftModel<B> {
    /// `share` is the cost of its step as a share of the model's own; it was built for steps of `rows_max` rows, with as
    /// many outputs as sequences run.
    pub fn new(model: Box<dyn Model<B>>, rows_max: usize, share: f64) -> Self {
        Self {
            model,
            kv: None,
            block_tokens: 1,
            rows_max,
            share,
            filled: Vec::new(),
            prefixes: Vec::new(),
            heads: Vec::new(),
            rows: DraftBatch::default(),
            best: Vec::new(),
        }
    }

    /// How much of the sequence is filled, as its table stands now: drafts that were right among it.
    fn prefix(&mut self, sequence_id: SequenceId, sequence: &Sequence) -> FilledPrefix {
        let index = sequence_id.index();
        if self.prefixes.len() <= index {
            self.prefixes.resize(index + 1, Default::default());
        }
        let (tokens, table) = (sequence.tokens(), sequence.table());
        let mut prefix = match self.prefixes[index] {
            (of_table, prefix) if of_table == sequence.table_version() => prefix,
            // It was preempted: any of its blocks may be another one now.
            _ => FilledPrefix::default(),
        };
        // The last token's row is what is asked for.
        while prefix.len + 1 < tokens.len() {
            let next = prefix.next(tokens[prefix.len]);
            if self.filled[self.kv_slot(table, prefix.len)] != next.hash {
                break;
            }
            prefix = next;
        }
        prefix
    }

    fn kv_slot(&self, table: &[BlockId], position: usize) -> usize {
        table[position / self.block_tokens] as usize * self.block_tokens + position % self.block_tokens
    }

    /// One more row of the sequence `wanted[index]`.
    fn feed(&mut self, index: usize, table: &[BlockId], token: u32) {
        let head = self.heads[index];
        let kv_slot = self.kv_slot(table, head.len);
        self.rows.tokens.push(token);
        self.rows.positions.push(head.len as u32);
        self.rows.sequences.push(index as u32);
        self.rows.kv_slots.push(kv_slot as u32);
        self.heads[index] = head.next(token);
        self.filled[kv_slot] = self.heads[index].hash;
    }

    /// The last row fed is one whose successor is wanted.
    fn ask(&mut self, index: usize) {
        self.rows.outputs.push(self.rows.tokens.len() as u32 - 1);
        self.rows.owners.push(index);
    }

    /// Computes the rows; the most probable token of each output goes to its draft.
    fn step(
        &mut self,
        backend: &mut B,
        tables: &[&[BlockId]],
        drafts: &mut [DraftTokens],
    ) -> Result<(), OpError> {
        let Self { model, kv, rows, best, .. } = self;
        let Some(kv) = kv else { panic!("the draft model proposes tokens before `start`") };
        let step = Step {
            tokens: &rows.tokens,
            positions: &rows.positions,
            sequences: &rows.sequences,
            kv_slots: &rows.kv_slots,
            tables,
            outputs: &rows.outputs,
        };
        best.clear();
        best.resize(rows.outputs.len(), NO_ARGMAX);
        let vocab_size = model.vocab_size();
        let mut take = |backend: &mut B, run: Range<usize>, logits: &B::Tensor| {
            backend.argmax(logits, run.len(), vocab_size, &mut best[run])
        };
        model.forward(backend, kv, &step, &mut take)?;
        for (&owner, &token) in rows.owners.iter().zip(&self.best) {
            if token != NO_ARGMAX {
                drafts[owner].push(token);
            }
        }
        Ok(())
    }

    /// First each sequence's own tokens as far as they are not filled, then draft after draft.
    fn draft(
        &mut self,
        backend: &mut B,
        scheduler: &Scheduler,
        wanted: &[DraftRequest],
        drafts: &mut [DraftTokens],
    ) -> Result<DraftingCost, OpError> {
        let sequence = |wanted: &DraftRequest| scheduler.sequence(wanted.sequence_id);
        let tables: Vec<&[BlockId]> =
            wanted.iter().map(|wanted| sequence(wanted).map_or(&[][..], Sequence::table)).collect();
        let mut work = DraftingCost { share: self.share, ..DraftingCost::default() };
        let vocab_size = self.model.vocab_size() as u32;
        self.rows.clear();
        self.heads.clear();
        self.heads.resize(wanted.len(), FilledPrefix::default());
        for (index, wanted) in wanted.iter().enumerate() {
            let Some(sequence) = sequence(wanted) else { panic!("{wanted:?} has no sequence") };
            self.heads[index] = self.prefix(wanted.sequence_id, sequence);
            let room = (self.rows_max - self.rows.tokens.len()).min(FED_MAX);
            let missing = &sequence.tokens()[self.heads[index].len..];
            for &token in missing.iter().take(room).take_while(|&&token| token < vocab_size) {
                self.feed(index, tables[index], token);
            }
            self.prefixes[wanted.sequence_id.index()] = (sequence.table_version(), self.heads[index]);
            if self.heads[index].len == sequence.tokens().len() {
                self.ask(index);
            }
        }
        for place in 0..DRAFT_DEPTH_MAX {
            if self.rows.tokens.is_empty() {
                break;
            }
            work.steps += 1;
            work.rows += self.rows.tokens.len();
            self.step(backend, &tables, drafts)?;
            self.rows.clear();
            for (index, wanted) in wanted.iter().enumerate() {
                if place + 1 < wanted.depth
                    && let Some(&token) = drafts[index].tokens().get(place)
                {
                    self.feed(index, tables[index], token);
                    self.ask(index);
                }
            }
        }
        Ok(work)
    }
}

impl<B: Backend> Drafter<B> for DraftModel<B> {
    fn kv_layers(&self, kind: KvType) -> Vec<KvLayer> {
        self.model.kv_layers(&kind.into())
    }

    fn start(&mut self, backend: &mut B, layout: &KvLayout) -> Result<(), OpError> {
        self.kv = Some(backend.kv(layout)?);
        self.block_tokens = layout.block_tokens;
        self.filled = vec![0; layout.blocks * layout.block_tokens];
        Ok(())
    }

    fn propose(
        &mut self,
        backend: &mut B,
        scheduler: &Scheduler,
        wanted: &[DraftRequest],
        drafts: &mut [DraftTokens],
    ) -> Result<DraftingCost, OpError> {
        let drafted = self.draft(backend, scheduler, wanted, drafts);
        if drafted.is_err() {
            // DraftBatch that were to be filled may not be.
            self.filled.fill(0);
            self.prefixes.fill(Default::default());
        }
        drafted
    }

    fn kv_bytes(&self, backend: &B) -> u64 {
        self.kv.as_ref().map_or(0, |kv| backend.kv_bytes(kv))
    }

    fn trim(&mut self, backend: &mut B, blocks: usize) -> Result<(), OpError> {
        let Some(kv) = &mut self.kv else { return Ok(()) };
        self.filled.iter_mut().skip(blocks * self.block_tokens).for_each(|filled| *filled = 0);
        backend.trim(kv, blocks)
    }

    fn forget(&mut self, sequence_id: SequenceId) {
        if let Some(prefix) = self.prefixes.get_mut(sequence_id.index()) {
            *prefix = Default::default();
        }
    }

    fn share(&self) -> f64 {
        self.share
    }
}

impl DraftBatch {
    fn clear(&mut self) {
        let Self { tokens, positions, sequences, kv_slots, outputs, owners } = self;
        [tokens, positions, sequences, kv_slots, outputs].into_iter().for_each(Vec::clear);
        owners.clear();
    }
}

impl FilledPrefix {
    /// With one token more. The hash is never 0; equal ones of unequal tokens would cost an acceptance, no more.
    fn next(self, token: u32) -> Self {
        let mixed = (self.hash ^ (u64::from(token) + 1)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mixed = (mixed ^ mixed >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        Self { len: self.len + 1, hash: (mixed ^ mixed >> 32) | 1 }
    }
}
