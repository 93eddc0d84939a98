// SPDX-License-Identifier: Apache-2.0

//! Enqueues a list of commands, with one launch for the commands that [`count_fusible`] puts
//! together.

use ops::OpError;

use super::command::{CommandList, KernelCommand};
use super::fusion::count_fusible;
use super::kernel_set::{KernelSet, rope_angles};
use super::operand::ActivationTiles;
use crate::cuda::attention::AttentionPlanAddress;
use crate::cuda::error::device_error;
use crate::cuda::norm_rope_kv::NormRopeKvOperands;
use crate::cuda::{DeviceView, Stream};

impl KernelSet {
    /// Enqueues all commands on the stream.
    ///
    /// # Safety
    /// 1. Every range of the commands is device memory of its type that lives until the work has
    ///    ended.
    /// 2. A range that a command writes does not overlap another range of that command, unless the
    ///    op works in place.
    /// 3. Indices among a step's words are below the lengths of what they index.
    pub(super) unsafe fn enqueue(&self, stream: &Stream, commands: &CommandList) -> Result<(), OpError> {
        let mut rest = commands.list.as_slice();
        while !rest.is_empty() {
            let taken = count_fusible(rest, &commands.plans);
            let (these, behind) = rest.split_at(taken);
            // SAFETY: this function's contract.
            unsafe { self.enqueue_fused(stream, these, &commands.plans)? };
            rest = behind;
        }
        Ok(())
    }

    /// Enqueues the commands that [`count_fusible`] put together. On any other combination, the
    /// function panics, because a dropped command would give wrong text.
    ///
    /// # Safety
    /// As [`Self::enqueue`].
    unsafe fn enqueue_fused(
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
            let quantized = activation_tiles.quantized_output();
            match *command {
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
                _ => self.enqueue_quantizable(stream, command, plans, Some(quantized)),
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
        norms: Option<(DeviceView<'_, f32>, DeviceView<'_, f32>, f32)>,
    ) -> Result<(), OpError> {
        let [
            KernelCommand::Rope { x: queries, positions, adjacent, frequencies, magnitude, head_dim },
            KernelCommand::Rope { .. },
            KernelCommand::KvWrite { layer, kind, keys, values, slots, kv_heads, .. },
        ] = *commands
        else {
            unreachable!("count_fusible took {commands:?} for the rotations and the KV write of a step");
        };
        // SAFETY: this function's contract.
        unsafe {
            let angles = rope_angles(adjacent, frequencies, magnitude);
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
