//! A mixture of experts as commands: routing, two products, the gate between them, and the sum.

use std::sync::Arc;

use ops::{Activation, Experts, OpError};
use quant::DType;
use quant::layout::TILE_ROWS;

use super::command::{Command, Floats, Matrix, Panels, Range};
use super::expert_command::{ExpertCommand, Groups};
use super::step::Words;
use super::vocabulary::silu_only;
use super::{Cuda, Tensor};
use crate::cuda::Buffer;
use crate::cuda::error::device_error;
use crate::cuda::experts::Grouping;

const OP: &str = "experts";

/// Pairs of (row, rank) computed at once: bounds the scratch memory. Results do not depend on it. With 8 experts a row it is
/// as many rows as a model computes at once at most; half as many would read the weights of 128 experts twice as often.
pub(super) const PAIRS_MAX: usize = 4096;
/// Parts of the scratch memory start at multiples of this.
const ALIGN: usize = 256;

/// Scratch memory of so many pairs.
struct Scratch {
    experts: Words,
    shares: Floats,
    /// Of groups.
    words: Words,
    gate: Floats,
    up: Floats,
    contributions: Floats,
}

/// A pair's expert matrices, and what goes in and comes out.
#[derive(Clone, Copy)]
struct Products {
    groups: Groups,
    experts: Words,
    side: Side,
}

/// Which of a layer's products.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    /// From rows to pairs, of which a row has so many.
    In { used: usize },
    /// From pairs to pairs.
    Out,
}

impl Cuda {
    pub(super) fn experts_on_device(
        &mut self,
        layer: &Experts<Self>,
        activation: Activation,
        router: &Tensor,
        x: &Tensor,
        out: &mut Tensor,
        rows: usize,
    ) -> Result<(), OpError> {
        silu_only(OP, activation)?;
        let (n_in, hidden, count, used) = (layer.n_in(), layer.hidden(), layer.count(), layer.used);
        router.check(OP, "columns of router", rows, count)?;
        x.check(OP, "columns of x", rows, n_in)?;
        out.check(OP, "columns of out", rows, n_in)?;
        if rows == 0 || used == 0 {
            return Ok(());
        }
        let gate = self.stack(&layer.gate, n_in, hidden, count)?;
        let up = self.stack(&layer.up, n_in, hidden, count)?;
        let down = self.stack(&layer.down, hidden, n_in, count)?;
        let (router, x, out) =
            (self.use_tensor(router, rows), self.use_tensor(x, rows), self.use_tensor(out, rows));
        let rows_max = (PAIRS_MAX / used).clamp(1, rows);
        for first in (0..rows).step_by(rows_max) {
            let rows = rows_max.min(rows - first);
            let pairs = rows * used;
            let part = |floats: Floats, cols: usize| floats.part(first * cols, rows * cols);
            // Products of floats take pairs in their own order.
            let floats = [gate, up, down].iter().any(|stack| is_float(stack.dtype));
            let grouping = if floats { Grouping::Few } else { Grouping::of(pairs, count) };
            let scratch = self.expert_scratch(pairs, count, grouping, hidden, n_in)?;
            let Scratch { experts, shares, words, contributions, .. } = scratch;
            let groups = Groups { pairs: pairs as u32, count: count as u32, grouping, words };
            let logits = part(router, count);
            self.push(Command::Experts(ExpertCommand::Route {
                logits,
                used: used as u32,
                experts,
                shares,
                groups,
            }));
            let of_rows = Products { groups, experts, side: Side::In { used } };
            let input = part(x, n_in);
            if gate.dtype == up.dtype {
                self.expert_products(input, n_in, of_rows, &[(gate, scratch.gate), (up, scratch.up)])?;
            } else {
                self.expert_products(input, n_in, of_rows, &[(gate, scratch.gate)])?;
                self.expert_products(input, n_in, of_rows, &[(up, scratch.up)])?;
            }
            // Value by value: in place. Slots that no pair has hold what they held.
            self.push(Command::Gated { gate: scratch.gate, up: scratch.up, out: scratch.gate });
            let of_pairs = Products { side: Side::Out, ..of_rows };
            self.expert_products(scratch.gate, hidden, of_pairs, &[(down, contributions)])?;
            let combine =
                ExpertCommand::Combine { contributions, shares, used: used as u32, out: part(out, n_in) };
            self.push(Command::Experts(combine));
        }
        Ok(())
    }

    /// All experts' matrices of `[cols, rows]`, as one matrix.
    fn stack(
        &mut self,
        weight: &ops::Weight<Self>,
        cols: usize,
        rows: usize,
        count: usize,
    ) -> Result<Matrix, OpError> {
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
            // A tile would hold rows of two experts.
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

    /// Products of `x`, rows of `cols` values, with one or two stacks of one type.
    fn expert_products(
        &mut self,
        x: Floats,
        cols: usize,
        of: Products,
        stacks: &[(Matrix, Floats)],
    ) -> Result<(), OpError> {
        let Some((first, _)) = stacks.first() else { return Ok(()) };
        let dtype = first.dtype;
        let Products { groups, experts, side } = of;
        let pairs_per_token = match side {
            Side::In { used } => used,
            Side::Out => 1,
        };
        let (pairs, per_token) = (groups.pairs as usize, pairs_per_token as u32);
        if is_float(dtype) {
            for &(stack, out) in stacks {
                let count = groups.count;
                let floats =
                    ExpertCommand::Floats { x, experts, pairs_per_token: per_token, count, stack, out };
                self.push(Command::Experts(floats));
            }
            return Ok(());
        }
        let format = dtype.activation().ok_or(OpError::Type { op: OP, dtype })?;
        let (first, second) = (stacks[0], stacks.get(1).copied());
        match groups.grouping {
            Grouping::Few => {
                let panels = self.panels(OP, format, pairs / pairs_per_token, cols)?;
                self.push(Command::Quantize { x, panels });
                let product =
                    ExpertCommand::Product { panels, pairs_per_token: per_token, groups, first, second };
                self.push(Command::Experts(product));
            }
            Grouping::Many => {
                let slots = Grouping::Many.slots(pairs, groups.count as usize);
                let panels: Panels = self.panels(OP, format, slots, cols)?;
                self.push(match side {
                    Side::In { .. } => Command::Experts(ExpertCommand::Round {
                        x,
                        pairs_per_token: per_token,
                        groups,
                        panels,
                    }),
                    // In order of slots since the products before.
                    Side::Out => Command::Quantize { x, panels },
                });
                let by_pair = side == Side::Out;
                let tiles = ExpertCommand::Tiles { panels, groups, by_pair, first, second };
                self.push(Command::Experts(tiles));
            }
        }
        Ok(())
    }

    fn expert_scratch(
        &mut self,
        pairs: usize,
        count: usize,
        grouping: Grouping,
        hidden: usize,
        n_in: usize,
    ) -> Result<Scratch, OpError> {
        let values = scratch_values(pairs, count, grouping, hidden, n_in);
        let total = values.into_iter().map(part_bytes).sum();
        if total > self.expert_scratch.len() {
            let buffer = Buffer::new(self.device(), total).map_err(device_error(OP))?;
            self.expert_scratch = Arc::new(buffer);
        }
        self.recorder.keep(self.expert_scratch.clone());
        let mut address = self.expert_scratch.view().address();
        let mut parts = values.iter().map(|&len| {
            let part = Range { address, len };
            address += part_bytes(len) as u64;
            part
        });
        let mut next = || parts.next().unwrap_or(Range { address: 0, len: 0 });
        let words = |part: Range| Words { address: part.address, len: part.len };
        let floats = |part: Range| Floats { address: part.address, len: part.len };
        Ok(Scratch {
            experts: words(next()),
            shares: floats(next()),
            words: words(next()),
            gate: floats(next()),
            up: floats(next()),
            contributions: floats(next()),
        })
    }
}

fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}

/// Words or floats of experts, shares, groups, gate, up and contributions.
fn scratch_values(pairs: usize, count: usize, grouping: Grouping, hidden: usize, n_in: usize) -> [usize; 6] {
    let slots = grouping.slots(pairs, count);
    [pairs, pairs, grouping.words(pairs, count), slots * hidden, slots * hidden, pairs * n_in]
}

fn part_bytes(values: usize) -> usize {
    (values * size_of::<f32>()).next_multiple_of(ALIGN)
}

/// Scratch memory for experts of quantised matrices.
pub(super) fn scratch_bytes(pairs: usize, count: usize, hidden: usize, n_in: usize) -> usize {
    let values = scratch_values(pairs, count, Grouping::of(pairs, count), hidden, n_in);
    values.into_iter().map(part_bytes).sum()
}
