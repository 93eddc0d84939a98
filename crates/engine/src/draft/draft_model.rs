// SPDX-License-Identifier: Apache-2.0

//! Draft tokens from a smaller model with the same vocabulary: its most probable continuation,
//! token by token.
//!
//! The draft model has its own KV cache with as many blocks as the model's, and uses the same block
//! ids. One block table thus serves both, and allocation, sharing, preemption and eviction apply to
//! both. Only the filled slots differ: the draft model computes a sequence's tokens when drafts are
//! wanted, from the end of the filled prefix. Each slot records a hash of the tokens up to it. The
//! drafter thus reuses a prefix that another sequence left in a shared block, and notices a slot
//! that was overwritten.

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
    /// Most rows of a draft model step.
    rows_max: usize,
    share: f64,
    /// By KV slot: hash of the tokens up to the slot's token; 0 if the slot is empty.
    filled: Vec<u64>,
    /// By sequence id: the block table version, and the prefix filled with the sequence's own
    /// tokens.
    prefixes: Vec<(u32, FilledPrefix)>,
    /// The prefix with draft tokens, for each sequence of the current step.
    heads: Vec<FilledPrefix>,
    rows: DraftBatch,
    best: Vec<u32>,
}

/// Tokens of a sequence whose slots are filled.
#[derive(Clone, Copy, Debug, Default)]
struct FilledPrefix {
    len: usize,
    /// Hash of these tokens.
    hash: u64,
}

/// The rows of a draft model step.
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

/// Most rows of one sequence in a draft model step. A long prompt is fed in chunks, with decodes of
/// other sequences between.
const FED_MAX: usize = 256;

impl<B: Backend> DraftModel<B> {
    /// `share` is the cost of a draft model step as a share of the model's own. `model` was built
    /// for steps of `rows_max` rows, with one output for each running sequence.
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

    /// The filled prefix of a sequence with its present block table, accepted drafts included.
    fn prefix(&mut self, sequence_id: SequenceId, sequence: &Sequence) -> FilledPrefix {
        let index = sequence_id.index();
        if self.prefixes.len() <= index {
            self.prefixes.resize(index + 1, Default::default());
        }
        let (tokens, table) = (sequence.tokens(), sequence.table());
        let mut prefix = match self.prefixes[index] {
            (of_table, prefix) if of_table == sequence.table_version() => prefix,
            // A preemption has released the blocks.
            _ => FilledPrefix::default(),
        };
        // The last token's row is computed in any case, for its logits.
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

    /// Adds one row of the sequence `wanted[index]`.
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

    /// Requests the logits of the row added last.
    fn ask(&mut self, index: usize) {
        self.rows.outputs.push(self.rows.tokens.len() as u32 - 1);
        self.rows.owners.push(index);
    }

    /// Computes the rows, and appends the most probable token of each output to its draft.
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
        model.forward(backend, kv, &step, &[], &mut take)?;
        for (&owner, &token) in rows.owners.iter().zip(&self.best) {
            if token != NO_ARGMAX {
                drafts[owner].push(token);
            }
        }
        Ok(())
    }

    /// First computes the missing tokens of each sequence, then one draft token after another.
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
            // Slots that this step marked as filled may be empty.
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
    /// Appends a token. The hash is never 0. A collision costs a rejected draft, no more.
    fn next(self, token: u32) -> Self {
        let mixed = (self.hash ^ (u64::from(token) + 1)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mixed = (mixed ^ mixed >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        Self { len: self.len + 1, hash: (mixed ^ mixed >> 32) | 1 }
    }
}
