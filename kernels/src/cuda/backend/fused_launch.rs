// SPDX-License-Identifier: Apache-2.0

//! Enqueues a list of commands, with one launch for the commands that [`count_fusible`] puts
//! together.

use ops::OpError;

use super::command::{CommandList, KernelCommand};
use super::fusion::{count_fusible, divide_sums, quantize_behind_norms, split_types};
use super::kernel_set::{KernelSet, matrix_product, matrix_products, rope_angles};
use super::liveness::are_overwritten_unread;
use super::operand::{ActivationTiles, FloatRange};
use crate::cuda::Stream;
use crate::cuda::attention::AttentionPlanAddress;
use crate::cuda::error::device_error;
use crate::cuda::fused_linear::NormInput;
use crate::cuda::linear::Before;
use crate::cuda::norm_rope_kv::NormRopeKvOperands;
use crate::cuda::quantized_output::QuantizedOutput;

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
        let mut list = divide_sums(&commands.list);
        quantize_behind_norms(&mut list);
        let mut rest = list.as_slice();
        // The input of the launch before, if it is one of products.
        let mut products_before = None;
        while !rest.is_empty() {
            let taken = count_fusible(rest, &commands.plans);
            let (these, behind) = rest.split_at(taken);
            rest = behind;
            if let [KernelCommand::Product { activation_tiles, .. }, ..] = these
                && !matches!(these, [.., KernelCommand::Add { .. }])
            {
                let before = match products_before {
                    Some((input, before)) if input == *activation_tiles => before,
                    _ => Before::Other,
                };
                // SAFETY: this function's contract.
                let launched = unsafe { self.enqueue_products(stream, before, *activation_tiles, these)? };
                products_before = Some((*activation_tiles, launched));
            } else {
                // SAFETY: as above.
                unsafe { self.enqueue_fused(stream, these, behind, &commands.plans)? };
                products_before = None;
            }
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
        behind: &[KernelCommand],
        plans: &[AttentionPlanAddress],
    ) -> Result<(), OpError> {
        // SAFETY: for all calls and views below, this function's contract.
        unsafe {
            match commands {
                [KernelCommand::Experts(down), KernelCommand::Add { x, .. }] => {
                    down.enqueue_row_down(&self.experts, stream, Some(*x))
                }
                [product @ KernelCommand::Product { .. }, KernelCommand::Add { x, .. }] => {
                    self.enqueue_added_product(stream, product, &commands[1], *x)
                }
                [
                    norm @ KernelCommand::Norm { .. },
                    KernelCommand::Quantize { activation_tiles, .. },
                    KernelCommand::Product { .. },
                    ..,
                ] => self.enqueue_normed_products(stream, norm, *activation_tiles, &commands[2..], plans),
                [
                    KernelCommand::Norm { weight: own, .. },
                    KernelCommand::AddNorm { x, y, weight, eps, out },
                    quantize @ ..,
                ] => {
                    let quantized = quantized_behind(quantize, behind);
                    let (mut x, mut out) = (x.view_mut(), out.view_mut());
                    let (y, own, weight) = (y.view(), own.view(), weight.view());
                    self.norms
                        .add_normed_rows(stream, &mut x, y, own, weight, eps.value(), &mut out, quantized)
                        .map_err(device_error("add_rms_norm"))
                }
                [one] => self.enqueue_one(stream, one, plans),
                [first, KernelCommand::Quantize { activation_tiles, .. }] => {
                    let Some(output) = quantized_behind(&commands[1..], behind) else {
                        unreachable!("{first:?} is before a command that quantizes");
                    };
                    self.enqueue_quantized(stream, first, activation_tiles.cols, output, plans)
                }
                [KernelCommand::NormHeads { .. } | KernelCommand::Rope { .. }, ..] => {
                    self.enqueue_heads(stream, commands, behind, plans)
                }
                other => unreachable!("count_fusible put together {other:?}"),
            }
        }
    }

    /// # Safety
    /// As [`Self::enqueue`].
    unsafe fn enqueue_added_product(
        &self,
        stream: &Stream,
        product: &KernelCommand,
        sum: &KernelCommand,
        residual: FloatRange,
    ) -> Result<(), OpError> {
        let KernelCommand::Product { activation_tiles, .. } = *product else {
            unreachable!("count_fusible took {product:?} for a product");
        };
        // SAFETY: for all calls and views below, this function's contract.
        unsafe {
            let x = activation_tiles.activations();
            let computed =
                self.linear.launch_added(stream, x, &matrix_product(product)?, &mut residual.view_mut())?;
            if !computed {
                self.enqueue_one(stream, product, &[])?;
                self.enqueue_one(stream, sum, &[])?;
            }
        }
        Ok(())
    }

    /// # Safety
    /// As [`Self::enqueue`].
    unsafe fn enqueue_normed_products(
        &self,
        stream: &Stream,
        norm: &KernelCommand,
        activation_tiles: ActivationTiles,
        products: &[KernelCommand],
        plans: &[AttentionPlanAddress],
    ) -> Result<(), OpError> {
        let KernelCommand::Norm { x, weight, eps, out } = *norm else {
            unreachable!("count_fusible took {norm:?} for a norm");
        };
        // SAFETY: for all calls and views below, this function's contract.
        unsafe {
            let mut rows =
                NormInput { x: x.view(), weight: weight.view(), eps: eps.value(), out: out.view_mut() };
            let (first, second) = split_types(products);
            let (one, other) = (matrix_products(first)?, matrix_products(second)?);
            let input = activation_tiles.activations();
            let is_launched = if second.is_empty() {
                self.linear.launch_normed(stream, &mut rows, input, &one)?
            } else {
                self.linear.launch_normed_both(stream, &mut rows, input, &one, &other)?
            };
            if !is_launched {
                let mut output = activation_tiles.quantized_output(true);
                output.is_before_product = true;
                self.enqueue_quantized(stream, norm, activation_tiles.cols, output, plans)?;
                self.enqueue_products(stream, Before::Other, activation_tiles, products)?;
            }
        }
        Ok(())
    }

    /// # Safety
    /// As [`Self::enqueue`].
    unsafe fn enqueue_quantized(
        &self,
        stream: &Stream,
        command: &KernelCommand,
        cols: u32,
        quantized: QuantizedOutput<'_>,
        plans: &[AttentionPlanAddress],
    ) -> Result<(), OpError> {
        // SAFETY: for all calls and views below, this function's contract.
        unsafe {
            match *command {
                KernelCommand::Gated { activation, gate, up, pairs_of_rows } => {
                    let pairs_of_rows = pairs_of_rows.map(|words| words.view());
                    let (mut gate, cols) = (gate.view_mut(), cols as usize);
                    self.gates
                        .rows_quantized(
                            stream,
                            activation,
                            &mut gate,
                            up.view(),
                            cols,
                            pairs_of_rows,
                            &quantized,
                        )
                        .map_err(device_error("gated"))
                }
                _ => self.enqueue_quantizable(stream, command, plans, Some(quantized)),
            }
        }
    }

    /// Enqueues two rotations and the write to the cache. Norms of the heads may be before them,
    /// and attention behind them, which may be quantized.
    ///
    /// # Safety
    /// As [`Self::enqueue`].
    unsafe fn enqueue_heads(
        &self,
        stream: &Stream,
        commands: &[KernelCommand],
        behind: &[KernelCommand],
        plans: &[AttentionPlanAddress],
    ) -> Result<(), OpError> {
        // SAFETY: for all views below, this function's contract.
        let (norms, commands) = unsafe {
            match commands {
                [
                    KernelCommand::NormHeads { weight: query, eps, .. },
                    KernelCommand::NormHeads { weight: key, .. },
                    rest @ ..,
                ] => (Some((query.view(), key.view(), eps.value())), rest),
                rest => (None, rest),
            }
        };
        let [
            KernelCommand::Rope { x: queries, positions, adjacent, frequencies, magnitude, head_dim },
            KernelCommand::Rope { .. },
            KernelCommand::KvWrite { layer, kind, keys, values, slots, kv_heads, .. },
            attention @ ..,
        ] = commands
        else {
            unreachable!("count_fusible took {commands:?} for the rotations and the KV write of a step");
        };
        // SAFETY: this function's contract.
        unsafe {
            let heads = NormRopeKvOperands {
                queries: queries.view_mut(),
                keys: keys.view_mut(),
                values: values.view(),
                norms,
                positions: positions.view(),
                slots: slots.view(),
                angles: rope_angles(*adjacent, *frequencies, *magnitude),
                head_dim: *head_dim as usize,
                kv_heads: *kv_heads as usize,
            };
            match attention {
                [] => self.heads.launch(stream, *layer, *kind, &heads).map_err(device_error("kv_write")),
                [KernelCommand::AttentionPaged { operands, plan }, quantize @ ..] => {
                    let quantized = match quantize {
                        [] => None,
                        [KernelCommand::Quantize { x, activation_tiles }] => {
                            Some(activation_tiles.quantized_output(!are_overwritten_unread(*x, behind)))
                        }
                        other => unreachable!("count_fusible put {other:?} behind attention"),
                    };
                    self.enqueue_attention(stream, operands, &plans[*plan as usize], Some(&heads), quantized)
                }
                other => unreachable!("count_fusible put {other:?} behind a write to the cache"),
            }
        }
    }
}

/// The output of a kernel that also quantizes, if the command `quantize` follows it. `behind` comes
/// next.
///
/// # Safety
/// As [`KernelSet::enqueue`].
unsafe fn quantized_behind<'a>(
    quantize: &[KernelCommand],
    behind: &[KernelCommand],
) -> Option<QuantizedOutput<'a>> {
    match quantize {
        [] => None,
        [KernelCommand::Quantize { x, activation_tiles }] => {
            // SAFETY: the caller's contract.
            let mut output =
                unsafe { activation_tiles.quantized_output(!are_overwritten_unread(*x, behind)) };
            output.is_before_product = match behind {
                [KernelCommand::Product { activation_tiles: input, .. }, ..] => input == activation_tiles,
                [KernelCommand::Experts(product), ..] => product.gains_by_early_start(),
                _ => false,
            };
            Some(output)
        }
        other => unreachable!("count_fusible put {other:?} behind a kernel that quantizes"),
    }
}
