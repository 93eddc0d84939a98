//! A mixture of experts as commands: routing, two products, the gate between them, and the sum.

use std::sync::Arc;

use ops::{Activation, Experts, OpError};
use quant::DType;
use quant::layout::TILE_ROWS;

use super::command::{Command, Floats, Matrix, Panels, Range};
use super::step::Words;
use super::{Cuda, Tensor};
use crate::cuda::Buffer;
use crate::cuda::error::device_error;
use crate::cuda::experts::Routing;

const OP: &str = "experts";

/// Pairs of (row, rank) computed at once: bounds the scratch memory. Results do not depend on it.
pub(super) const PAIRS_MAX: usize = 2048;
/// Parts of the scratch memory start at multiples of this.
const ALIGN: usize = 256;

/// Scratch memory of so many pairs.
struct Scratch {
    experts: Words,
    shares: Floats,
    groups: Words,
    gate: Floats,
    up: Floats,
    contributions: Floats,
}

/// A pair's expert matrices, and what goes in and comes out.
#[derive(Clone, Copy)]
struct Products {
    pairs: usize,
    pairs_per_token: usize,
    count: usize,
    experts: Words,
    groups: Words,
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
            let scratch = self.expert_scratch(pairs, count, hidden, n_in)?;
            let Scratch { experts, shares, groups, contributions, .. } = scratch;
            let logits = part(router, count);
            self.push(Command::Route {
                logits,
                count: count as u32,
                used: used as u32,
                experts,
                shares,
                groups,
            });
            let of_rows = Products { pairs, pairs_per_token: used, count, experts, groups };
            let input = part(x, n_in);
            if gate.dtype == up.dtype {
                self.expert_products(input, n_in, of_rows, &[(gate, scratch.gate), (up, scratch.up)])?;
            } else {
                self.expert_products(input, n_in, of_rows, &[(gate, scratch.gate)])?;
                self.expert_products(input, n_in, of_rows, &[(up, scratch.up)])?;
            }
            match activation {
                // Value by value: in place.
                Activation::Silu => {
                    self.push(Command::Gated { gate: scratch.gate, up: scratch.up, out: scratch.gate });
                }
            }
            let of_pairs = Products { pairs_per_token: 1, ..of_rows };
            self.expert_products(scratch.gate, hidden, of_pairs, &[(down, contributions)])?;
            self.push(Command::Combine { contributions, shares, used: used as u32, out: part(out, n_in) });
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
        let plain = matches!(weight.dtype, DType::F32 | DType::F16 | DType::BF16);
        if !plain && !rows.is_multiple_of(TILE_ROWS) {
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
        let Products { pairs, pairs_per_token, count, experts, groups } = of;
        let (pairs32, per_token, count32) = (pairs as u32, pairs_per_token as u32, count as u32);
        if matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
            for &(stack, out) in stacks {
                self.push(Command::ExpertFloats {
                    x,
                    experts,
                    pairs_per_token: per_token,
                    count: count32,
                    stack,
                    out,
                });
            }
            return Ok(());
        }
        let format = dtype.activation().ok_or(OpError::Type { op: OP, dtype })?;
        let panels: Panels = self.panels(OP, format, pairs / pairs_per_token, cols)?;
        self.push(Command::Quantize { x, panels });
        let second = stacks.get(1).copied();
        self.push(Command::ExpertProduct {
            panels,
            pairs: pairs32,
            pairs_per_token: per_token,
            count: count32,
            groups,
            first: stacks[0],
            second,
        });
        Ok(())
    }

    fn expert_scratch(
        &mut self,
        pairs: usize,
        count: usize,
        hidden: usize,
        n_in: usize,
    ) -> Result<Scratch, OpError> {
        let values = scratch_values(pairs, count, hidden, n_in);
        let total = scratch_bytes(pairs, count, hidden, n_in);
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
            groups: words(next()),
            gate: floats(next()),
            up: floats(next()),
            contributions: floats(next()),
        })
    }
}

/// Words or floats of experts, shares, groups, gate, up and contributions.
fn scratch_values(pairs: usize, count: usize, hidden: usize, n_in: usize) -> [usize; 6] {
    [pairs, pairs, Routing::group_words(pairs, count), pairs * hidden, pairs * hidden, pairs * n_in]
}

fn part_bytes(values: usize) -> usize {
    (values * size_of::<f32>()).next_multiple_of(ALIGN)
}

pub(super) fn scratch_bytes(pairs: usize, count: usize, hidden: usize, n_in: usize) -> usize {
    scratch_values(pairs, count, hidden, n_in).into_iter().map(part_bytes).sum()
}
