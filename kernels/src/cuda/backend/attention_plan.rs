//! A step's attention plan on the device: made once per step and shape of items, at addresses that stay. Steps of
//! many rows have several plans, which share the memory of partial results one after the other.

use ops::OpError;

use super::plan::{Bounds, Item, Merge, Plan, Work};
use super::step::Rows;
use super::upload::Upload;
use super::usage::allocated;
use crate::cuda::attention::PlanAddress;
use crate::cuda::error::device_error;
use crate::cuda::{Buffer, Stream};

const OP: &str = "attention";
/// Partial results of a plan: 16 decode rows of 32 splits. Rows beyond it get a plan of their own, behind the first.
pub(super) const PARTIALS_MAX: u32 = 512;
/// Counts before the sections of a plan.
const HEADER_WORDS: usize = 4;

/// Everything that decides what a plan looks like and needs, beside the rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PlanShape {
    pub(super) split_tokens: usize,
    pub(super) chunk_tokens: usize,
    pub(super) heads: usize,
    pub(super) head_dim: usize,
}

pub(super) struct DevicePlan {
    shape: PlanShape,
    /// The step it was last made for.
    step: u64,
    plans: Vec<Plan>,
    upload: Upload,
    sums: Buffer<f32>,
    weights: Buffer<f32>,
    addresses: Vec<PlanAddress>,
}

impl DevicePlan {
    pub(super) fn new(stream: &Stream, shape: PlanShape) -> Result<Self, OpError> {
        let partials = |values: usize| {
            Buffer::new(stream.device(), PARTIALS_MAX as usize * shape.heads * values)
                .map_err(device_error(OP))
        };
        Ok(Self {
            shape,
            step: 0,
            plans: Vec::new(),
            upload: Upload::new(stream).map_err(device_error(OP))?,
            sums: partials(shape.head_dim)?,
            weights: partials(2)?,
            addresses: Vec::new(),
        })
    }

    pub(super) fn shape(&self) -> PlanShape {
        self.shape
    }

    /// Device memory for it.
    pub(super) fn bytes(&self) -> u64 {
        let partials =
            [self.sums.len(), self.weights.len()].map(|len| allocated((len * size_of::<f32>()) as u64));
        partials.iter().sum::<u64>() + self.upload.bytes()
    }

    /// The plans of step number `step`, each for other rows.
    pub(super) fn addresses(
        &mut self,
        stream: &Stream,
        step: u64,
        rows: &Rows,
    ) -> Result<&[PlanAddress], OpError> {
        if self.step != step {
            self.make(stream, rows)?;
            self.step = step;
        }
        Ok(&self.addresses)
    }

    fn make(&mut self, stream: &Stream, rows: &Rows) -> Result<(), OpError> {
        let PlanShape { split_tokens, chunk_tokens, .. } = self.shape;
        let bounds = Bounds { split_tokens, chunk_tokens, partials_max: PARTIALS_MAX };
        let (mut count, mut row) = (0, 0);
        while row < rows.len() {
            if count == self.plans.len() {
                self.plans.push(Plan::default());
            }
            row = self.plans[count].make(row, &rows.positions, &rows.table_starts, bounds);
            count += 1;
        }
        let plans = &self.plans[..count];
        let mut words = 0;
        let sections: Vec<Sections> = plans.iter().map(|plan| Sections::new(plan, &mut words)).collect();
        let fill = |to: &mut [u32]| {
            for (plan, sections) in plans.iter().zip(&sections) {
                sections.fill(plan, to);
            }
        };
        self.upload.send(stream, words, fill).map_err(device_error(OP))?;
        let at = |word: usize| self.upload.address() + (word * size_of::<u32>()) as u64;
        let address = |(plan, sections): (&Plan, &Sections)| PlanAddress {
            counts: at(sections.counts),
            works: at(sections.works),
            merges: at(sections.merges),
            chunks: at(sections.chunks),
            works_max: bound(plan.works.len()) as u32,
            merges_max: bound(plan.merges.len()) as u32,
            chunks_max: bound(plan.chunks.len()) as u32,
            long_splits: plan.long_splits,
            merges_all: count == 1 && plan.chunks.is_empty(),
            partial_sums: self.sums.view().address(),
            partial_weights: self.weights.view().address(),
        };
        self.addresses.clear();
        self.addresses.extend(plans.iter().zip(&sections).map(address));
        Ok(())
    }
}

/// Where the sections of a plan start, in words. They have room for a power of two, so that they stay where they are from
/// step to step.
struct Sections {
    counts: usize,
    works: usize,
    merges: usize,
    chunks: usize,
}

impl Sections {
    /// Behind `words` words, which then count these too.
    fn new(plan: &Plan, words: &mut usize) -> Self {
        let mut take = |count: usize, size: usize| {
            let start = *words;
            *words += count * size / size_of::<u32>();
            start
        };
        Self {
            counts: take(HEADER_WORDS, size_of::<u32>()),
            works: take(bound(plan.works.len()), size_of::<Work>()),
            merges: take(bound(plan.merges.len()), size_of::<Merge>()),
            // Sections are aligned for the largest of their structs: items are five words.
            chunks: take(bound(plan.chunks.len()).next_multiple_of(4), size_of::<Item>()),
        }
    }

    fn fill(&self, plan: &Plan, to: &mut [u32]) {
        let counts = [plan.works.len() as u32, plan.merges.len() as u32, plan.chunks.len() as u32, 0];
        let mut put = |at: usize, section: &[u32]| to[at..at + section.len()].copy_from_slice(section);
        put(self.counts, &counts);
        put(self.works, bytemuck::cast_slice(&plan.works));
        put(self.merges, bytemuck::cast_slice(&plan.merges));
        put(self.chunks, bytemuck::cast_slice(&plan.chunks));
    }
}

/// The count that launches are made for.
fn bound(count: usize) -> usize {
    if count == 0 { 0 } else { count.next_power_of_two() }
}
