//! A step's attention plan on the device: made once per step and shape of items, at addresses that stay.

use ops::OpError;

use super::plan::{Bounds, Item, Merge, Plan, Work};
use super::step::Rows;
use super::upload::Upload;
use crate::cuda::attention::PlanAddress;
use crate::cuda::error::device_error;
use crate::cuda::{Buffer, Stream};

const OP: &str = "attention";
/// Partial results of a plan: 64 decode rows of 32 splits. Rows beyond it go through the chunk kernel.
const PARTIALS_MAX: u32 = 2048;
/// Counts before the sections.
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
    plan: Plan,
    upload: Upload,
    sums: Buffer<f32>,
    weights: Buffer<f32>,
    address: PlanAddress,
}

impl DevicePlan {
    pub(super) fn new(stream: &Stream, shape: PlanShape) -> Result<Self, OpError> {
        let empty = || Buffer::new(stream.device(), 0).map_err(device_error(OP));
        let address = PlanAddress {
            counts: 0,
            works: 0,
            merges: 0,
            chunks: 0,
            works_max: 0,
            merges_max: 0,
            chunks_max: 0,
            long_splits: false,
            partial_sums: 0,
            partial_weights: 0,
        };
        Ok(Self {
            shape,
            step: 0,
            plan: Plan::default(),
            upload: Upload::new(stream).map_err(device_error(OP))?,
            sums: empty()?,
            weights: empty()?,
            address,
        })
    }

    pub(super) fn shape(&self) -> PlanShape {
        self.shape
    }

    /// The plan of step number `step`.
    pub(super) fn address(
        &mut self,
        stream: &Stream,
        step: u64,
        rows: &Rows,
    ) -> Result<PlanAddress, OpError> {
        if self.step != step {
            self.make(stream, rows)?;
            self.step = step;
        }
        Ok(self.address)
    }

    fn make(&mut self, stream: &Stream, rows: &Rows) -> Result<(), OpError> {
        let PlanShape { split_tokens, chunk_tokens, heads, head_dim } = self.shape;
        let bounds = Bounds { split_tokens, chunk_tokens, partials_max: PARTIALS_MAX };
        self.plan.make(&rows.positions, &rows.table_starts, bounds);
        let partials = (self.plan.partials as usize).next_power_of_two();
        for (buffer, values) in
            [(&mut self.sums, partials * heads * head_dim), (&mut self.weights, partials * heads * 2)]
        {
            if buffer.len() < values {
                *buffer = Buffer::new(stream.device(), values).map_err(device_error(OP))?;
            }
        }
        let Plan { works, merges, chunks, long_splits, .. } = &self.plan;
        // Sections have room for a power of two, so that they stay where they are from step to step.
        let (works_max, merges_max, chunks_max) =
            (bound(works.len()), bound(merges.len()), bound(chunks.len()));
        let words = |count: usize, size: usize| count * size / size_of::<u32>();
        let works_at = HEADER_WORDS;
        let merges_at = works_at + words(works_max, size_of::<Work>());
        let chunks_at = merges_at + words(merges_max, size_of::<Merge>());
        let end = chunks_at + words(chunks_max, size_of::<Item>());
        let fill = |to: &mut [u32]| {
            let counts = [works.len() as u32, merges.len() as u32, chunks.len() as u32, 0];
            to[..HEADER_WORDS].copy_from_slice(&counts);
            let mut put = |at: usize, section: &[u32]| to[at..at + section.len()].copy_from_slice(section);
            put(works_at, bytemuck::cast_slice(works));
            put(merges_at, bytemuck::cast_slice(merges));
            put(chunks_at, bytemuck::cast_slice(chunks));
        };
        self.upload.send(stream, end, fill).map_err(device_error(OP))?;
        let at = |word: usize| self.upload.address() + (word * size_of::<u32>()) as u64;
        self.address = PlanAddress {
            counts: at(0),
            works: at(works_at),
            merges: at(merges_at),
            chunks: at(chunks_at),
            works_max: works_max as u32,
            merges_max: merges_max as u32,
            chunks_max: chunks_max as u32,
            long_splits: *long_splits,
            partial_sums: self.sums.view().address(),
            partial_weights: self.weights.view().address(),
        };
        Ok(())
    }
}

/// The count that launches are made for.
fn bound(count: usize) -> usize {
    if count == 0 { 0 } else { count.next_power_of_two() }
}
