// SPDX-License-Identifier: Apache-2.0

//! Builds the attention plans of a step and keeps them in device memory. It builds them once for
//! each step, attention span and shape of query tiles, at addresses that do not change. A
//! step of many rows has several plans, which use the buffer of partial results one after the
//! other.

use ops::{AttentionSpan, AttentionSpec, OpError};

use super::plan::{
    AttentionPlan, AttentionPlanLimits, KvSplits, PARTIALS_MAX, PartialMerge, PlannedRows, QueryTile,
    launch_bound,
};
use super::recorder::Recorder;
use super::step::StepRows;
use super::upload::StepUpload;
use super::usage::allocated;
use crate::cuda::Buffer;
use crate::cuda::attention::{AttentionPlanAddress, CLUSTERS, window_of};
use crate::cuda::error::device_error;

const OP: &str = "attention";
/// Words for the counts at the beginning of a plan.
const HEADER_WORDS: usize = 4;

/// All that decides a plan and its memory, besides the rows of the step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct AttentionPlanShape {
    pub(super) split_tokens: usize,
    pub(super) prefill_tokens: usize,
    pub(super) has_groups: bool,
    pub(super) spec: AttentionSpec,
    pub(super) block_tokens: usize,
    pub(super) span: AttentionSpan,
}

pub(super) struct DeviceAttentionPlan {
    shape: AttentionPlanShape,
    clusters: [u32; CLUSTERS.len()],
    /// The number of the step that `plans` belong to.
    step: u64,
    plans: Vec<AttentionPlan>,
    upload: StepUpload,
    sums: Buffer<f32>,
    weights: Buffer<f32>,
    addresses: Vec<AttentionPlanAddress>,
}

impl DeviceAttentionPlan {
    pub(super) fn new(recorder: &Recorder, shape: AttentionPlanShape) -> Result<Self, OpError> {
        let stream = recorder.stream();
        let partials = |values: usize| {
            Buffer::new(stream.device(), PARTIALS_MAX as usize * shape.spec.heads * values)
                .map_err(device_error(OP))
        };
        let clusters = match shape.has_groups {
            true => recorder.attentions().clusters(&shape.spec).map_err(device_error(OP))?,
            false => Default::default(),
        };
        Ok(Self {
            shape,
            clusters,
            step: 0,
            plans: Vec::new(),
            upload: StepUpload::new(stream).map_err(device_error(OP))?,
            sums: partials(shape.spec.head_dim)?,
            weights: partials(2)?,
            addresses: Vec::new(),
        })
    }

    pub(super) fn shape(&self) -> AttentionPlanShape {
        self.shape
    }

    /// Bytes of device memory.
    pub(super) fn bytes(&self) -> u64 {
        let partials =
            [self.sums.len(), self.weights.len()].map(|len| allocated((len * size_of::<f32>()) as u64));
        partials.iter().sum::<u64>() + self.upload.bytes()
    }

    /// Returns the addresses of the plans of step number `step`. Each plan covers other rows.
    /// `groups` are the KV cache groups of the plan's layers.
    pub(super) fn addresses(
        &mut self,
        recorder: &mut Recorder,
        step: u64,
        rows: &StepRows,
        groups: &[usize],
    ) -> Result<&[AttentionPlanAddress], OpError> {
        if self.step != step {
            self.build(recorder, rows, groups)?;
            self.step = step;
        }
        Ok(&self.addresses)
    }

    fn build(&mut self, recorder: &mut Recorder, rows: &StepRows, groups: &[usize]) -> Result<(), OpError> {
        let AttentionPlanShape { split_tokens, prefill_tokens, has_groups, spec, block_tokens, span, .. } =
            self.shape;
        let limits = AttentionPlanLimits {
            split_tokens,
            prefill_tokens,
            partials_max: PARTIALS_MAX,
            kv_heads: spec.kv_heads as u32,
            group: (spec.heads / spec.kv_heads.max(1)) as u32,
            multiprocessors: recorder.stream().device().multiprocessors(),
            has_groups,
            clusters: self.clusters,
        };
        let written = rows.blocks_written(block_tokens);
        let groups: Vec<&[u32]> = groups.iter().map(|&group| rows.blocks(group)).collect();
        let planned = PlannedRows {
            positions: &rows.positions,
            table_starts: &rows.table_starts,
            groups: &groups,
            block_tokens,
            written: &written,
            window: window_of(span),
        };
        let (mut count, mut row) = (0, 0);
        while row < rows.len() {
            if count == self.plans.len() {
                self.plans.push(AttentionPlan::default());
            }
            row = self.plans[count].build(row, planned, limits);
            count += 1;
        }
        let plans = &self.plans[..count];
        let mut words = 0;
        let sections: Vec<PlanSections> =
            plans.iter().map(|plan| PlanSections::new(plan, &mut words)).collect();
        let fill = |to: &mut [u32]| {
            for (plan, sections) in plans.iter().zip(&sections) {
                sections.fill(plan, to);
            }
        };
        self.upload.send(recorder, words, fill).map_err(device_error(OP))?;
        let at = |word: usize| self.upload.address() + (word * size_of::<u32>()) as u64;
        let address = |(plan, sections): (&AttentionPlan, &PlanSections)| AttentionPlanAddress {
            counts: at(sections.counts),
            splits: at(sections.splits),
            merges: at(sections.merges),
            prefill_tiles: at(sections.prefill_tiles),
            splits_max: launch_bound(plan.splits.len()) as u32,
            merges_max: launch_bound(plan.merges.len()) as u32,
            prefill_tiles_max: launch_bound(plan.prefill_tiles.len()) as u32,
            has_multi_tile_blocks: plan.has_multi_tile_blocks,
            merge: plan.merge,
            merges_all_rows: count == 1 && plan.prefill_tiles.is_empty(),
            prepares_heads: count == 1 && plan.prepares_heads(),
            partial_sums: self.sums.view().address(),
            partial_weights: self.weights.view().address(),
        };
        self.addresses.clear();
        self.addresses.extend(plans.iter().zip(&sections).map(address));
        Ok(())
    }
}

/// The offsets of a plan's sections, in words. Each section has room for [`launch_bound`] entries,
/// so its address stays the same from step to step.
struct PlanSections {
    counts: usize,
    splits: usize,
    merges: usize,
    prefill_tiles: usize,
}

impl PlanSections {
    /// Places the sections after the first `words` words, and adds their own words to `words`.
    fn new(plan: &AttentionPlan, words: &mut usize) -> Self {
        let mut take = |count: usize, size: usize| {
            let start = *words;
            *words += count * size / size_of::<u32>();
            start
        };
        Self {
            counts: take(HEADER_WORDS, size_of::<u32>()),
            splits: take(launch_bound(plan.splits.len()), size_of::<KvSplits>()),
            merges: take(launch_bound(plan.merges.len()), size_of::<PartialMerge>()),
            // A query tile has five words. Rounding their number up to a multiple of 4 keeps the
            // next plan's sections aligned for the largest struct.
            prefill_tiles: take(
                launch_bound(plan.prefill_tiles.len()).next_multiple_of(4),
                size_of::<QueryTile>(),
            ),
        }
    }

    fn fill(&self, plan: &AttentionPlan, to: &mut [u32]) {
        let counts = [plan.splits.len() as u32, plan.merges.len() as u32, plan.prefill_tiles.len() as u32, 0];
        let mut put = |at: usize, section: &[u32]| to[at..at + section.len()].copy_from_slice(section);
        put(self.counts, &counts);
        put(self.splits, bytemuck::cast_slice(&plan.splits));
        put(self.merges, bytemuck::cast_slice(&plan.merges));
        put(self.prefill_tiles, bytemuck::cast_slice(&plan.prefill_tiles));
    }
}
