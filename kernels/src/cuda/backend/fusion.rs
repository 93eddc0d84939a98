//! Which commands become one launch. A launch costs more than a microsecond of an otherwise idle device, and a decode step has
//! hundreds, so commands that follow each other in every model are given to kernels that do all of them. Those write the same
//! bits to the same places as one command after the other.

use ops::{OpError, RopePairing};

use super::command::{Command, Kernels, Panels};
use crate::cuda::Stream;
use crate::cuda::attention::{Attentions, PlanAddress};
use crate::cuda::error::device_error;
use crate::cuda::heads::{HeadRows, HeadsToCache};
use crate::cuda::linear::MATRICES_MAX;
use crate::cuda::norm::Norms;
use crate::cuda::rope::Turn;
use crate::cuda::rounded::Rounded;

/// How many commands at the start of `list`, which is not empty, one launch does.
pub(super) fn fused(list: &[Command], plans: &[PlanAddress]) -> usize {
    if let Some(Command::Product { panels, matrix, .. }) = list.first() {
        let together = |other: &&Command| matches!(other, Command::Product { panels: p, matrix: m, .. } if p == panels && m.dtype == matrix.dtype);
        return list.iter().take(MATRICES_MAX).take_while(together).count();
    }
    if is_head_rows(list) {
        return if matches!(list[0], Command::Rope { .. }) { 3 } else { 5 };
    }
    if let [first, Command::Quantize { x, panels }, ..] = list
        && Rounded::has(panels.format)
    {
        let cols = panels.cols as usize;
        let made = match *first {
            Command::Norm { out, .. } | Command::AddNorm { out, .. } => Norms::can_round(cols).then_some(out),
            Command::Gated { out, .. } => Some(out),
            Command::AttentionTiles { operands, plan } => {
                let plan = &plans[plan as usize];
                Attentions::can_round(&operands.shape.spec(), plan).then_some(operands.out)
            }
            _ => None,
        };
        if made == Some(*x) {
            return 2;
        }
    }
    1
}

/// `[norm of queries, norm of keys,] rotation of queries, rotation of keys, cache` of one step's heads.
fn is_head_rows(list: &[Command]) -> bool {
    let (normed, rest) = match list {
        [
            Command::NormHeads { x: queries, eps: first, weight: query_weight },
            Command::NormHeads { x: keys, eps: second, weight: key_weight },
            rest @ ..,
        ] if first == second && query_weight.len == key_weight.len => {
            (Some((queries, keys, query_weight.len)), rest)
        }
        rest => (None, rest),
    };
    let [
        Command::Rope { x: queries, positions, adjacent, frequencies, magnitude, head_dim },
        Command::Rope {
            x: other,
            positions: other_positions,
            adjacent: other_adjacent,
            frequencies: other_frequencies,
            magnitude: other_magnitude,
            head_dim: other_dim,
        },
        Command::KvWrite { keys, head_dim: kv_dim, .. },
        ..,
    ] = rest
    else {
        return false;
    };
    let same_turn = (positions, adjacent, frequencies, magnitude, head_dim)
        == (other_positions, other_adjacent, other_frequencies, other_magnitude, other_dim);
    let same_heads = other == keys && head_dim == kv_dim && HeadsToCache::has(*head_dim as usize);
    let norms_fit = normed.is_none_or(|normed| normed == (queries, keys, *head_dim as usize));
    same_turn && same_heads && norms_fit && queries != keys
}

impl Kernels {
    /// Gives commands that [`fused`] found to belong together.
    ///
    /// # Safety
    /// As [`Self::give`].
    pub(super) unsafe fn give_fused(
        &self,
        stream: &Stream,
        commands: &[Command],
        plans: &[PlanAddress],
    ) -> Result<(), OpError> {
        // SAFETY: for all calls and views below, this function's contract.
        unsafe {
            match commands {
                [Command::Product { panels, .. }, ..] => self.products(stream, *panels, commands),
                [one] => self.give_one(stream, one, plans),
                [first, Command::Quantize { panels, .. }] => self.give_rounded(stream, first, *panels, plans),
                [
                    Command::NormHeads { weight: query, eps, .. },
                    Command::NormHeads { weight: key, .. },
                    Command::Rope { .. },
                    ..,
                ] => {
                    let norms = Some((query.view(), key.view(), eps.value()));
                    self.give_head_rows(stream, &commands[2..], norms)
                }
                _ => self.give_head_rows(stream, commands, None),
            }
        }
    }

    /// # Safety
    /// As [`Self::give`].
    unsafe fn give_rounded(
        &self,
        stream: &Stream,
        command: &Command,
        panels: Panels,
        plans: &[PlanAddress],
    ) -> Result<(), OpError> {
        // SAFETY: for all calls and views below, this function's contract.
        unsafe {
            let rounded = Rounded { format: panels.format, panels: panels.range.view_mut() };
            match *command {
                Command::Norm { x, weight, eps, out } => self
                    .norms
                    .rows(stream, x.view(), weight.view(), eps.value(), &mut out.view_mut(), Some(rounded))
                    .map_err(device_error("rms_norm")),
                Command::AddNorm { x, y, weight, eps, out } => self
                    .norms
                    .sum_rows(
                        stream,
                        &mut x.view_mut(),
                        y.view(),
                        weight.view(),
                        eps.value(),
                        &mut out.view_mut(),
                        Some(rounded),
                    )
                    .map_err(device_error("add_rms_norm")),
                Command::Gated { gate, up, out } => self
                    .gates
                    .silu_rounded(
                        stream,
                        gate.view(),
                        up.view(),
                        panels.cols as usize,
                        &mut out.view_mut(),
                        &rounded,
                    )
                    .map_err(device_error("gated")),
                Command::AttentionTiles { operands, plan } => self
                    .attentions
                    .tiles(
                        stream,
                        &operands.call(),
                        &plans[plan as usize],
                        &mut operands.out.view_mut(),
                        Some(rounded),
                    )
                    .map_err(device_error("attention")),
                ref other => self.give_one(stream, other, plans),
            }
        }
    }

    /// Two rotations and the cache.
    ///
    /// # Safety
    /// As [`Self::give`].
    unsafe fn give_head_rows(
        &self,
        stream: &Stream,
        commands: &[Command],
        norms: Option<(crate::cuda::View<'_, f32>, crate::cuda::View<'_, f32>, f32)>,
    ) -> Result<(), OpError> {
        let [
            Command::Rope { x: queries, positions, adjacent, frequencies, magnitude, head_dim },
            Command::Rope { .. },
            Command::KvWrite { layer, kind, keys, values, slots, kv_heads, .. },
        ] = *commands
        else {
            return Ok(());
        };
        let pairing = if adjacent { RopePairing::Adjacent } else { RopePairing::Halves };
        // SAFETY: this function's contract.
        unsafe {
            let turn =
                Turn { pairing, inverse_frequencies: frequencies.view(), magnitude: magnitude.value() };
            let mut rows = HeadRows {
                queries: queries.view_mut(),
                keys: keys.view_mut(),
                values: values.view(),
                norms,
                positions: positions.view(),
                slots: slots.view(),
                turn,
                head_dim: head_dim as usize,
                kv_heads: kv_heads as usize,
            };
            self.heads.launch(stream, layer, kind, &mut rows).map_err(device_error("kv_write"))
        }
    }
}
