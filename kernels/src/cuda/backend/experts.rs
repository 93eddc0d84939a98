// SPDX-License-Identifier: Apache-2.0

//! Turns a mixture-of-experts layer into commands: routing, the gate and up products, the
//! activation, the down product, and the weighted sum.

use std::sync::Arc;

use ops::{Activation, Experts, OpError};
use quant::DType;
use quant::layout::TILE_ROWS;

use super::command::KernelCommand;
use super::expert_command::{ExpertCommand, ExpertGroups, RowChoiceRange};
use super::operand::{ByteRange, FloatRange, WeightMatrix};
use super::step::WordRange;
use super::{Cuda, CudaTensor};
use crate::cuda::Buffer;
use crate::cuda::error::device_error;
use crate::cuda::experts::{ExpertLayer, ExpertProduct, FINISHED_WORDS, PairGrouping};

const OP: &str = "experts";

/// The number of (row, rank) pairs computed at once. It bounds the scratch memory and does not
/// change results. With 8 experts for each row, this covers the largest number of rows that a model
/// computes at once. Half as many pairs would read the weights of 128 experts twice as often.
pub(super) const PAIRS_MAX: usize = 16_384;
/// Parts of the scratch memory begin at multiples of this.
const ALIGN: usize = 256;

/// The scratch memory for a range of rows.
struct ExpertScratch {
    experts: WordRange,
    pair_weights: FloatRange,
    /// The sorted pairs and the groups.
    words: WordRange,
    gate: FloatRange,
    up: FloatRange,
    contributions: FloatRange,
}

/// The inputs of a product: its pairs, and the product of the layer that they are for.
#[derive(Clone, Copy)]
struct ProductInputs {
    groups: ExpertGroups,
    experts: WordRange,
    /// Whether the values between the layer's products are in the order of slots, not of pairs.
    is_by_slot: bool,
    side: ProductSide,
}

/// Which of a layer's products.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ProductSide {
    /// Gate and up: from rows to pairs. Each row has `used` pairs.
    In { used: usize },
    /// Down: from pairs to pairs.
    Out,
}

impl Cuda {
    pub(super) fn experts_on_device(
        &mut self,
        layer: &Experts<Self>,
        activation: Activation,
        router: &CudaTensor,
        x: &CudaTensor,
        out: &mut CudaTensor,
        rows: usize,
    ) -> Result<(), OpError> {
        let (n_in, hidden, count, used) = (layer.n_in(), layer.hidden(), layer.count(), layer.used);
        router.check(OP, "columns of router", rows, count)?;
        x.check(OP, "columns of x", rows, n_in)?;
        out.check(OP, "columns of out", rows, n_in)?;
        if rows == 0 || used == 0 {
            return Ok(());
        }
        let gate = self.expert_weights(&layer.gate, n_in, hidden, count)?;
        let up = self.expert_weights(&layer.up, n_in, hidden, count)?;
        let down = self.expert_weights(&layer.down, hidden, n_in, count)?;
        let (router, x, out) =
            (self.use_tensor(router, rows), self.use_tensor(x, rows), self.use_tensor(out, rows));
        if rows == 1 && self.takes_row([gate, up, down], layer)? {
            return self.row_of_experts([gate, up, down], layer, activation, router, x, out);
        }
        if activation == Activation::Silu && self.can_fuse([gate, up, down], layer, rows)? {
            return self.fused_experts([gate, up, down], layer, router, x, out, rows);
        }
        let rows_max = (PAIRS_MAX / used).clamp(1, rows);
        for first in (0..rows).step_by(rows_max) {
            let rows = rows_max.min(rows - first);
            let pairs = rows * used;
            let part = |floats: FloatRange, cols: usize| floats.part(first * cols, rows * cols);
            let quantized = quantized_products([gate, up, down], count)?;
            let grouping = if quantized.is_empty() {
                PairGrouping::ByPair
            } else {
                PairGrouping::fastest(self.device(), &quantized, pairs, count)
            };
            // Products of float weights take and make pairs in their own order.
            let is_by_slot = ![gate, up, down].into_iter().any(|matrix| is_float(matrix.dtype));
            let mut scratch = self.expert_scratch(pairs, count, grouping, hidden, n_in)?;
            if !is_by_slot {
                scratch.gate = scratch.gate.part(0, pairs * hidden);
                scratch.up = scratch.up.part(0, pairs * hidden);
            }
            let ExpertScratch { experts, pair_weights, words, contributions, .. } = scratch;
            let groups = ExpertGroups { pairs: pairs as u32, count: count as u32, grouping, words };
            let logits = part(router, count);
            self.push(KernelCommand::Experts(ExpertCommand::Route {
                logits,
                used: used as u32,
                experts,
                pair_weights,
                groups,
            }));
            let of_rows = ProductInputs { groups, experts, is_by_slot, side: ProductSide::In { used } };
            let input = part(x, n_in);
            if gate.dtype == up.dtype {
                self.expert_products(input, n_in, of_rows, &[(gate, scratch.gate), (up, scratch.up)])?;
            } else {
                self.expert_products(input, n_in, of_rows, &[(gate, scratch.gate)])?;
                self.expert_products(input, n_in, of_rows, &[(up, scratch.up)])?;
            }
            // Slots without a pair keep their old contents, so their gates are not computed.
            let pairs_of_rows = is_by_slot.then(|| groups.sorted_pairs());
            self.push(KernelCommand::Gated { activation, gate: scratch.gate, up: scratch.up, pairs_of_rows });
            let of_pairs = ProductInputs { side: ProductSide::Out, ..of_rows };
            self.expert_products(scratch.gate, hidden, of_pairs, &[(down, contributions)])?;
            let combine = ExpertCommand::Combine {
                contributions,
                pair_weights,
                used: used as u32,
                out: part(out, n_in),
            };
            self.push(KernelCommand::Experts(combine));
        }
        Ok(())
    }

    /// Whether the kernels for one row compute this layer.
    fn takes_row(&self, matrices: [WeightMatrix; 3], layer: &Experts<Self>) -> Result<bool, OpError> {
        let Some(ExpertLayer { gate, up, down, used, .. }) = quantized_layer(matrices, layer)? else {
            return Ok(false);
        };
        Ok(self.recorder.experts().takes_row(gate, up, down, used))
    }

    /// Whether one launch computes this layer.
    fn can_fuse(
        &self,
        matrices: [WeightMatrix; 3],
        layer: &Experts<Self>,
        rows: usize,
    ) -> Result<bool, OpError> {
        let shapes = quantized_layer(matrices, layer)?;
        Ok(shapes.is_some_and(|shapes| self.recorder.experts().can_fuse(shapes, rows)))
    }

    /// A layer for one row.
    fn row_of_experts(
        &mut self,
        [gate, up, down]: [WeightMatrix; 3],
        layer: &Experts<Self>,
        activation: Activation,
        logits: FloatRange,
        x: FloatRange,
        out: FloatRange,
    ) -> Result<(), OpError> {
        let (n_in, hidden, count, used) = (layer.n_in(), layer.hidden(), layer.count(), layer.used);
        let scratch = self.expert_scratch(used, count, PairGrouping::ByPair, hidden, n_in)?;
        let choice =
            RowChoiceRange { experts: scratch.experts, weights: scratch.pair_weights, count: count as u32 };
        let tiles_for = |cuda: &mut Self, dtype: DType, rows: usize, cols: usize| {
            let layout = PairGrouping::ByPair.layout(dtype).ok_or(OpError::Type { op: OP, dtype })?;
            cuda.activation_tiles(OP, layout, rows, cols)
        };
        let activation_tiles = tiles_for(self, gate.dtype, 1, n_in)?;
        let of_pairs = tiles_for(self, down.dtype, used, hidden)?;
        let (gate, up) = ((gate, scratch.gate), (up, scratch.up));
        for command in [
            KernelCommand::Experts(ExpertCommand::RouteRow { logits, choice, x, activation_tiles }),
            KernelCommand::Experts(ExpertCommand::RowGateAndUp { activation_tiles, choice, gate, up }),
            KernelCommand::Gated { activation, gate: scratch.gate, up: scratch.up, pairs_of_rows: None },
            KernelCommand::Quantize { x: scratch.gate, activation_tiles: of_pairs },
            KernelCommand::Experts(ExpertCommand::RowDown { activation_tiles: of_pairs, choice, down, out }),
        ] {
            self.push(command);
        }
        Ok(())
    }

    /// A layer for a few rows.
    fn fused_experts(
        &mut self,
        [gate, up, down]: [WeightMatrix; 3],
        layer: &Experts<Self>,
        logits: FloatRange,
        x: FloatRange,
        out: FloatRange,
        rows: usize,
    ) -> Result<(), OpError> {
        let (n_in, hidden, count, used) = (layer.n_in(), layer.hidden(), layer.count(), layer.used);
        let scratch = self.expert_scratch(rows * used, count, PairGrouping::ByPair, hidden, n_in)?;
        let dtype = gate.dtype;
        let layout = PairGrouping::ByPair.layout(dtype).ok_or(OpError::Type { op: OP, dtype })?;
        let activation_tiles = self.activation_tiles(OP, layout, rows, n_in)?;
        let fused = ExpertCommand::Fused {
            logits,
            count: count as u32,
            used: used as u32,
            activation_tiles,
            gate: (gate, scratch.gate),
            up: (up, scratch.up),
            down: (down, scratch.contributions),
            pair_weights: scratch.pair_weights,
            finished: self.finished_groups()?,
            out,
        };
        self.push(KernelCommand::Quantize { x, activation_tiles });
        self.push(KernelCommand::Experts(fused));
        Ok(())
    }

    /// The counts of [`ExpertCommand::Fused`]. One layer at a time uses them, and leaves zeros.
    fn finished_groups(&mut self) -> Result<WordRange, OpError> {
        let counts = match &self.finished_groups {
            Some(counts) => counts.clone(),
            None => {
                let zeros = Buffer::from_host(self.recorder.stream(), &[0; FINISHED_WORDS]);
                self.finished_groups.insert(Arc::new(zeros.map_err(device_error(OP))?)).clone()
            }
        };
        let view = counts.view();
        let words = WordRange { address: view.address(), len: view.len() };
        self.recorder.keep(counts);
        Ok(words)
    }

    /// Returns the matrices of all experts, `[cols, rows]` each, as one matrix.
    fn expert_weights(
        &mut self,
        weight: &ops::Weight<Self>,
        cols: usize,
        rows: usize,
        count: usize,
    ) -> Result<WeightMatrix, OpError> {
        let matrix = self.matrix(OP, weight)?;
        for (what, found, expected) in [
            ("columns of an expert", matrix.cols as usize, cols),
            ("rows of all experts", matrix.rows as usize, rows * count),
        ] {
            if found != expected {
                return Err(OpError::Shape { op: OP, what, found, expected });
            }
        }
        if !is_float(weight.dtype) && !rows.is_multiple_of(TILE_ROWS) {
            // Otherwise a tile would hold rows of two experts.
            let found = rows % TILE_ROWS;
            return Err(OpError::Shape {
                op: OP,
                what: "rows of an expert beyond whole tiles",
                found,
                expected: 0,
            });
        }
        Ok(matrix)
    }

    /// Enqueues products of `x`, rows of `cols` values, with one or two stacks of one type.
    fn expert_products(
        &mut self,
        x: FloatRange,
        cols: usize,
        of: ProductInputs,
        expert_weight_list: &[(WeightMatrix, FloatRange)],
    ) -> Result<(), OpError> {
        let Some((first, _)) = expert_weight_list.first() else { return Ok(()) };
        let dtype = first.dtype;
        let ProductInputs { groups, experts, is_by_slot, side } = of;
        let pairs_per_token = match side {
            ProductSide::In { used } => used,
            ProductSide::Out => 1,
        };
        let (pairs, per_token) = (groups.pairs as usize, pairs_per_token as u32);
        if is_float(dtype) {
            for &(expert_weights, out) in expert_weight_list {
                let count = groups.count;
                let floats = ExpertCommand::Floats {
                    x,
                    experts,
                    pairs_per_token: per_token,
                    count,
                    expert_weights,
                    out,
                };
                self.push(KernelCommand::Experts(floats));
            }
            return Ok(());
        }
        let layout = groups.grouping.layout(dtype).ok_or(OpError::Type { op: OP, dtype })?;
        let (first, second) = (expert_weight_list[0], expert_weight_list.get(1).copied());
        let slots = groups.grouping.slots(pairs, groups.count as usize);
        let activation_tiles = self.activation_tiles(OP, layout, slots, cols)?;
        self.push(if is_by_slot && side == ProductSide::Out {
            // The gate and up products wrote these rows.
            KernelCommand::Quantize { x, activation_tiles }
        } else {
            let pairs_per_token = per_token;
            KernelCommand::Experts(ExpertCommand::Quantize { x, pairs_per_token, groups, activation_tiles })
        });
        let by_pair = !is_by_slot || side == ProductSide::Out;
        let product = ExpertCommand::Matmul { activation_tiles, groups, by_pair, first, second };
        self.push(KernelCommand::Experts(product));
        Ok(())
    }

    fn expert_scratch(
        &mut self,
        pairs: usize,
        count: usize,
        grouping: PairGrouping,
        hidden: usize,
        n_in: usize,
    ) -> Result<ExpertScratch, OpError> {
        let values = scratch_values(pairs, count, grouping, hidden, n_in);
        let total = values.into_iter().map(part_bytes).sum();
        if total > self.expert_scratch.len() {
            let buffer = Buffer::new(self.device(), total).map_err(device_error(OP))?;
            self.expert_scratch = Arc::new(buffer);
        }
        self.recorder.keep(self.expert_scratch.clone());
        let mut address = self.expert_scratch.view().address();
        let mut parts = values.iter().map(|&len| {
            let part = ByteRange { address, len };
            address += part_bytes(len) as u64;
            part
        });
        let mut next = || parts.next().unwrap_or(ByteRange { address: 0, len: 0 });
        let words = |part: ByteRange| WordRange { address: part.address, len: part.len };
        let floats = |part: ByteRange| FloatRange { address: part.address, len: part.len };
        Ok(ExpertScratch {
            experts: words(next()),
            pair_weights: floats(next()),
            words: words(next()),
            gate: floats(next()),
            up: floats(next()),
            contributions: floats(next()),
        })
    }
}

/// None if a weight is not quantized.
fn quantized_layer(
    matrices: [WeightMatrix; 3],
    layer: &Experts<Cuda>,
) -> Result<Option<ExpertLayer>, OpError> {
    if matrices.into_iter().any(|matrix| is_float(matrix.dtype)) {
        return Ok(None);
    }
    let (count, used) = (layer.count(), layer.used);
    let [gate, up, down] = matrices.map(|matrix| matrix.of_expert(count as u32).tiles());
    Ok(Some(ExpertLayer { gate: gate?, up: up?, down: down?, count, used }))
}

/// The products of a layer with `count` experts whose weights are quantized.
fn quantized_products(matrices: [WeightMatrix; 3], count: usize) -> Result<Vec<ExpertProduct>, OpError> {
    let [gate, up, down] = matrices;
    let is_one = gate.dtype == up.dtype;
    let launches: &[(WeightMatrix, usize)] =
        if is_one { &[(gate, 2), (down, 1)] } else { &[(gate, 1), (up, 1), (down, 1)] };
    let quantized = launches.iter().filter(|(matrix, _)| !is_float(matrix.dtype));
    quantized
        .map(|&(matrix, stacks)| Ok(ExpertProduct { shape: matrix.of_expert(count as u32).tiles()?, stacks }))
        .collect()
}

fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}

/// Lengths of the scratch parts in 4-byte words: experts, pair weights, groups, gate, up,
/// contributions.
fn scratch_values(
    pairs: usize,
    count: usize,
    grouping: PairGrouping,
    hidden: usize,
    n_in: usize,
) -> [usize; 6] {
    let slots = grouping.slots(pairs, count);
    [pairs, pairs, grouping.words(pairs, count), slots * hidden, slots * hidden, pairs * n_in]
}

fn part_bytes(values: usize) -> usize {
    (values * size_of::<f32>()).next_multiple_of(ALIGN)
}

/// Bytes of scratch memory for experts with quantized matrices. The grouping is the one that takes
/// the most.
pub(super) fn scratch_bytes(pairs: usize, count: usize, hidden: usize, n_in: usize) -> usize {
    let values = scratch_values(pairs, count, PairGrouping::Skinny, hidden, n_in);
    let parts: usize = values.into_iter().map(part_bytes).sum();
    parts + FINISHED_WORDS * size_of::<u32>()
}
