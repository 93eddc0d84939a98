// SPDX-License-Identifier: Apache-2.0

//! Kernel fusion: decides which successive commands become one launch. A launch costs more than a
//! microsecond in which the device is otherwise idle, and a decode step has hundreds of launches.
//!
//! ```text
//! products of one type with the same input            one launch of linear_*.cu
//! norm, gate or attention, then quantize              the kernel that also writes activation tiles
//! [2 norms of heads,] 2 rotations, write to the cache norm_rope_kv.cu
//! ```
//!
//! A fused launch writes the same bits to the same places as its commands would one by one.
//! [`count_fusible`] decides what is fused. [`KernelSet::enqueue_fused`] must handle every
//! combination that [`count_fusible`] returns.

use ops::{OpError, RopePairing};

use super::command::{ActivationTiles, KernelCommand, KernelSet};
use crate::cuda::Stream;
use crate::cuda::attention::{AttentionKernels, AttentionPlanAddress};
use crate::cuda::error::device_error;
use crate::cuda::linear::MATRICES_MAX;
use crate::cuda::norm::NormKernels;
use crate::cuda::norm_rope_kv::{NormRopeKvKernels, NormRopeKvOperands};
use crate::cuda::quantized_output::QuantizedOutput;
use crate::cuda::rope::RopeAngles;

/// Returns the number of commands at the beginning of `list` that one launch computes. `list` is
/// not empty.
pub(super) fn count_fusible(list: &[KernelCommand], plans: &[AttentionPlanAddress]) -> usize {
    if let Some(KernelCommand::Product { activation_tiles, matrix, .. }) = list.first() {
        let together = |other: &&KernelCommand| matches!(other, KernelCommand::Product { activation_tiles: p, matrix: m, .. } if p == activation_tiles && m.dtype == matrix.dtype);
        return list.iter().take(MATRICES_MAX).take_while(together).count();
    }
    if is_norm_rope_kv(list) {
        return if matches!(list[0], KernelCommand::Rope { .. }) { 3 } else { 5 };
    }
    if let [first, KernelCommand::Quantize { x, activation_tiles }, ..] = list
        && QuantizedOutput::supports(activation_tiles.format)
    {
        let cols = activation_tiles.cols as usize;
        let made = match *first {
            KernelCommand::Norm { out, .. } | KernelCommand::AddNorm { out, .. } => {
                NormKernels::can_quantize(cols).then_some(out)
            }
            KernelCommand::Gated { out, .. } => Some(out),
            KernelCommand::AttentionPaged { operands, plan } => {
                let plan = &plans[plan as usize];
                AttentionKernels::can_quantize(&operands.shape.spec(), plan).then_some(operands.out)
            }
            _ => None,
        };
        if made == Some(*x) {
            return 2;
        }
    }
    1
}

/// Whether `list` begins with `[norm of queries, norm of keys,] rotation of queries, rotation of
/// keys, write to the cache` of the same heads.
fn is_norm_rope_kv(list: &[KernelCommand]) -> bool {
    let (normed, rest) = match list {
        [
            KernelCommand::NormHeads { x: queries, eps: first, weight: query_weight },
            KernelCommand::NormHeads { x: keys, eps: second, weight: key_weight },
            rest @ ..,
        ] if first == second && query_weight.len == key_weight.len => {
            (Some((queries, keys, query_weight.len)), rest)
        }
        rest => (None, rest),
    };
    let [
        KernelCommand::Rope { x: queries, positions, adjacent, frequencies, magnitude, head_dim },
        KernelCommand::Rope {
            x: other,
            positions: other_positions,
            adjacent: other_adjacent,
            frequencies: other_frequencies,
            magnitude: other_magnitude,
            head_dim: other_dim,
        },
        KernelCommand::KvWrite { keys, head_dim: kv_dim, .. },
        ..,
    ] = rest
    else {
        return false;
    };
    let same_turn = (positions, adjacent, frequencies, magnitude, head_dim)
        == (other_positions, other_adjacent, other_frequencies, other_magnitude, other_dim);
    let same_heads = other == keys && head_dim == kv_dim && NormRopeKvKernels::supports(*head_dim as usize);
    let norms_fit = normed.is_none_or(|normed| normed == (queries, keys, *head_dim as usize));
    same_turn && same_heads && norms_fit && queries != keys
}

impl KernelSet {
    /// Enqueues the commands that [`count_fusible`] put together. On any other combination, the
    /// function panics, because a dropped command would give wrong text.
    ///
    /// # Safety
    /// As [`Self::enqueue`].
    pub(super) unsafe fn enqueue_fused(
        &self,
        stream: &Stream,
        commands: &[KernelCommand],
        plans: &[AttentionPlanAddress],
    ) -> Result<(), OpError> {
        // SAFETY: for all calls and views below, this function's contract.
        unsafe {
            match commands {
                [KernelCommand::Product { activation_tiles, .. }, ..] => {
                    self.enqueue_products(stream, *activation_tiles, commands)
                }
                [one] => self.enqueue_one(stream, one, plans),
                [first, KernelCommand::Quantize { activation_tiles, .. }] => {
                    self.enqueue_quantized(stream, first, *activation_tiles, plans)
                }
                [
                    KernelCommand::NormHeads { weight: query, eps, .. },
                    KernelCommand::NormHeads { weight: key, .. },
                    KernelCommand::Rope { .. },
                    ..,
                ] => {
                    let norms = Some((query.view(), key.view(), eps.value()));
                    self.enqueue_norm_rope_kv(stream, &commands[2..], norms)
                }
                [KernelCommand::Rope { .. }, ..] => self.enqueue_norm_rope_kv(stream, commands, None),
                other => unreachable!("count_fusible put together {other:?}"),
            }
        }
    }

    /// # Safety
    /// As [`Self::enqueue`].
    unsafe fn enqueue_quantized(
        &self,
        stream: &Stream,
        command: &KernelCommand,
        activation_tiles: ActivationTiles,
        plans: &[AttentionPlanAddress],
    ) -> Result<(), OpError> {
        // SAFETY: for all calls and views below, this function's contract.
        unsafe {
            let quantized = QuantizedOutput {
                format: activation_tiles.format,
                act_tiles: activation_tiles.range.view_mut(),
            };
            match *command {
                KernelCommand::Norm { x, weight, eps, out } => self
                    .norms
                    .rows(stream, x.view(), weight.view(), eps.value(), &mut out.view_mut(), Some(quantized))
                    .map_err(device_error("rms_norm")),
                KernelCommand::AddNorm { x, y, weight, eps, out } => self
                    .norms
                    .add_rows(
                        stream,
                        &mut x.view_mut(),
                        y.view(),
                        weight.view(),
                        eps.value(),
                        &mut out.view_mut(),
                        Some(quantized),
                    )
                    .map_err(device_error("add_rms_norm")),
                KernelCommand::Gated { gate, up, out } => self
                    .gates
                    .silu_quantized(
                        stream,
                        gate.view(),
                        up.view(),
                        activation_tiles.cols as usize,
                        &mut out.view_mut(),
                        &quantized,
                    )
                    .map_err(device_error("gated")),
                KernelCommand::AttentionPaged { operands, plan } => self
                    .attentions
                    .paged(
                        stream,
                        &operands.inputs(),
                        &plans[plan as usize],
                        &mut operands.out.view_mut(),
                        Some(quantized),
                    )
                    .map_err(device_error("attention")),
                ref other => unreachable!("count_fusible gave {other:?} a quantized output"),
            }
        }
    }

    /// Enqueues two rotations and the write to the cache. If there are `norms`, the same launch
    /// first applies them to the heads.
    ///
    /// # Safety
    /// As [`Self::enqueue`].
    unsafe fn enqueue_norm_rope_kv(
        &self,
        stream: &Stream,
        commands: &[KernelCommand],
        norms: Option<(crate::cuda::DeviceView<'_, f32>, crate::cuda::DeviceView<'_, f32>, f32)>,
    ) -> Result<(), OpError> {
        let [
            KernelCommand::Rope { x: queries, positions, adjacent, frequencies, magnitude, head_dim },
            KernelCommand::Rope { .. },
            KernelCommand::KvWrite { layer, kind, keys, values, slots, kv_heads, .. },
        ] = *commands
        else {
            unreachable!("count_fusible took {commands:?} for the rotations and the KV write of a step");
        };
        let pairing = if adjacent { RopePairing::Adjacent } else { RopePairing::Halves };
        // SAFETY: this function's contract.
        unsafe {
            let angles =
                RopeAngles { pairing, inverse_frequencies: frequencies.view(), magnitude: magnitude.value() };
            let mut rows = NormRopeKvOperands {
                queries: queries.view_mut(),
                keys: keys.view_mut(),
                values: values.view(),
                norms,
                positions: positions.view(),
                slots: slots.view(),
                angles,
                head_dim: head_dim as usize,
                kv_heads: kv_heads as usize,
            };
            self.heads.launch(stream, layer, kind, &mut rows).map_err(device_error("kv_write"))
        }
    }
}
