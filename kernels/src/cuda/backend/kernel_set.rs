// SPDX-License-Identifier: Apache-2.0

//! [`KernelSet`] owns the launchers of all kernels and enqueues single commands.

use ops::{OpError, RopePairing};

use super::command::KernelCommand;
use super::fusion::split_types;
use super::operand::{ActivationTiles, AttentionOperands, F32Bits, FloatRange};
use crate::cuda::act_and_mul::ActAndMulKernels;
use crate::cuda::argmax::ArgmaxKernels;
use crate::cuda::attention::{AttentionKernels, AttentionPlanAddress};
use crate::cuda::embed::EmbedKernels;
use crate::cuda::error::device_error;
use crate::cuda::experts::ExpertKernels;
use crate::cuda::gather::GatherKernels;
use crate::cuda::kv_write::KvWriteKernels;
use crate::cuda::linear::{Before, LinearKernels, MatrixProduct};
use crate::cuda::norm::NormKernels;
use crate::cuda::norm_rope_kv::{NormRopeKvKernels, NormRopeKvOperands};
use crate::cuda::quantize::QuantizeKernels;
use crate::cuda::quantized_output::QuantizedOutput;
use crate::cuda::rope::{RopeAngles, RopeKernels};
use crate::cuda::shortlist::ShortlistKernels;
use crate::cuda::{Device, DeviceViewMut, Stream};

/// The launchers of all kernels.
pub(super) struct KernelSet {
    pub(super) norms: NormKernels,
    ropes: RopeKernels,
    kv_writes: KvWriteKernels,
    pub(super) attentions: AttentionKernels,
    pub(super) gates: ActAndMulKernels,
    pub(super) heads: NormRopeKvKernels,
    gathers: GatherKernels,
    argmaxes: ArgmaxKernels,
    shortlists: ShortlistKernels,
    embed: EmbedKernels,
    quantize: QuantizeKernels,
    pub(super) linear: LinearKernels,
    pub(super) experts: ExpertKernels,
}

impl KernelSet {
    pub(super) fn new(device: &Device) -> Self {
        Self {
            norms: NormKernels::new(device),
            ropes: RopeKernels::new(device),
            kv_writes: KvWriteKernels::new(device),
            attentions: AttentionKernels::new(device),
            gates: ActAndMulKernels::new(device),
            heads: NormRopeKvKernels::new(device),
            gathers: GatherKernels::new(device),
            argmaxes: ArgmaxKernels::new(device),
            shortlists: ShortlistKernels::new(device),
            embed: EmbedKernels::new(device),
            quantize: QuantizeKernels::new(device),
            linear: LinearKernels::new(device),
            experts: ExpertKernels::new(device),
        }
    }

    /// Enqueues products of one or two types. `before` and the result are as in
    /// [`LinearKernels::launch`].
    ///
    /// # Safety
    /// As [`Self::enqueue`].
    pub(super) unsafe fn enqueue_products(
        &self,
        stream: &Stream,
        before: Before,
        activation_tiles: ActivationTiles,
        commands: &[KernelCommand],
    ) -> Result<Before, OpError> {
        let (first, second) = split_types(commands);
        // SAFETY: the caller's contract.
        let (mut first, mut second) = unsafe { (matrix_products(first)?, matrix_products(second)?) };
        // SAFETY: as above.
        let x = unsafe { activation_tiles.activations() };
        if second.is_empty() {
            return self.linear.launch(stream, before, x, &mut first);
        }
        if self.linear.launch_both(stream, x, &first, &second)? {
            return Ok(Before::Other);
        }
        let before = self.linear.launch(stream, before, x, &mut first)?;
        self.linear.launch(stream, before, x, &mut second)
    }

    /// # Safety
    /// As [`Self::enqueue`].
    pub(super) unsafe fn enqueue_one(
        &self,
        stream: &Stream,
        command: &KernelCommand,
        plans: &[AttentionPlanAddress],
    ) -> Result<(), OpError> {
        // SAFETY: for all views below, the caller's contract.
        unsafe {
            match *command {
                KernelCommand::Norm { .. }
                | KernelCommand::AddNorm { .. }
                | KernelCommand::AttentionPaged { .. } => {
                    self.enqueue_quantizable(stream, command, plans, None)
                }
                KernelCommand::NormHeads { x, weight, eps } => self
                    .norms
                    .heads(stream, &mut x.view_mut(), weight.view(), eps.value())
                    .map_err(device_error("rms_norm_heads")),
                KernelCommand::Add { x, y } => {
                    self.norms.add(stream, &mut x.view_mut(), y.view()).map_err(device_error("add"))
                }
                KernelCommand::Embed { table, tokens, drawn, out } => self.embed.launch(
                    stream,
                    &table.tiles()?,
                    table.range.view(),
                    tokens.view(),
                    drawn.view(),
                    &mut out.view_mut(),
                ),
                KernelCommand::Quantize { x, activation_tiles } => {
                    let (tokens, cols) = (activation_tiles.tokens as usize, activation_tiles.cols as usize);
                    let mut out = activation_tiles.range.view_mut();
                    self.quantize
                        .launch(stream, activation_tiles.layout, x.view(), tokens, cols, &mut out)
                        .map(|_activations| ())
                }
                KernelCommand::Product { activation_tiles, .. } => self
                    .enqueue_products(stream, Before::Other, activation_tiles, std::slice::from_ref(command))
                    .map(|_| ()),
                KernelCommand::Rope { .. }
                | KernelCommand::KvWrite { .. }
                | KernelCommand::AttentionScalar { .. } => self.enqueue_attention_part(stream, command),
                KernelCommand::Scale { x, factor } => {
                    self.norms.scale(stream, &mut x.view_mut(), factor.value()).map_err(device_error("scale"))
                }
                KernelCommand::Gated { activation, gate, up, .. } => self
                    .gates
                    .values(stream, activation, &mut gate.view_mut(), up.view())
                    .map_err(device_error("gated")),
                KernelCommand::Experts(command) => command.enqueue(&self.experts, stream),
                KernelCommand::Gather { x, rows, cols, out } => self
                    .gathers
                    .rows(stream, x.view(), rows.view(), cols as usize, &mut out.view_mut())
                    .map_err(device_error("gather_outputs")),
                KernelCommand::Argmax { x, cols, out } => self
                    .argmaxes
                    .rows(stream, x.view(), cols as usize, &mut out.view_mut())
                    .map_err(device_error("argmax")),
                KernelCommand::Shortlist { x, cols, draw_params, work, tokens } => {
                    let mut work = DeviceViewMut::from_raw(work.address, work.len / size_of::<u64>());
                    let tokens = tokens.map(|tokens| tokens.view_mut());
                    self.shortlists
                        .rows(stream, x.view(), cols as usize, draw_params.view(), &mut work, tokens)
                        .map_err(device_error("shortlists"))
                }
            }
        }
    }

    /// Enqueues a rotation, a write to the KV cache, or scalar attention.
    ///
    /// # Safety
    /// As [`Self::enqueue`].
    unsafe fn enqueue_attention_part(&self, stream: &Stream, command: &KernelCommand) -> Result<(), OpError> {
        // SAFETY: for all views below, the caller's contract.
        unsafe {
            match *command {
                KernelCommand::Rope { x, positions, adjacent, frequencies, magnitude, head_dim } => {
                    let angles = rope_angles(adjacent, frequencies, magnitude);
                    self.ropes
                        .launch(stream, &mut x.view_mut(), positions.view(), angles, head_dim as usize)
                        .map_err(device_error("rope"))
                }
                KernelCommand::KvWrite { layer, kind, keys, values, slots, kv_heads, head_dim } => self
                    .kv_writes
                    .launch(
                        stream,
                        layer,
                        kind,
                        keys.view(),
                        values.view(),
                        slots.view(),
                        kv_heads as usize,
                        head_dim as usize,
                    )
                    .map_err(device_error("kv_write")),
                KernelCommand::AttentionScalar { operands, table_starts, positions } => self
                    .attentions
                    .scalar(
                        stream,
                        &operands.inputs(),
                        table_starts.view(),
                        positions.view(),
                        &mut operands.out.view_mut(),
                    )
                    .map_err(device_error("attention")),
                ref other => unreachable!("{other:?} is not a part of attention"),
            }
        }
    }

    /// Enqueues a command whose kernel can also write its output as activation tiles. It does so if
    /// there is a `quantized` output.
    ///
    /// # Safety
    /// As [`Self::enqueue`].
    pub(super) unsafe fn enqueue_quantizable(
        &self,
        stream: &Stream,
        command: &KernelCommand,
        plans: &[AttentionPlanAddress],
        quantized: Option<QuantizedOutput<'_>>,
    ) -> Result<(), OpError> {
        // SAFETY: for all views below, the caller's contract.
        unsafe {
            match *command {
                KernelCommand::Norm { x, weight, eps, out } => self
                    .norms
                    .rows(stream, x.view(), weight.view(), eps.value(), &mut out.view_mut(), quantized)
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
                        quantized,
                    )
                    .map_err(device_error("add_rms_norm")),
                KernelCommand::AttentionPaged { ref operands, plan } => {
                    self.enqueue_attention(stream, operands, &plans[plan as usize], None, quantized)
                }
                ref other => unreachable!("the kernel of {other:?} writes no activation tiles"),
            }
        }
    }

    /// # Safety
    /// As [`Self::enqueue`].
    pub(super) unsafe fn enqueue_attention(
        &self,
        stream: &Stream,
        operands: &AttentionOperands,
        plan: &AttentionPlanAddress,
        raw_heads: Option<&NormRopeKvOperands<'_>>,
        quantized: Option<QuantizedOutput<'_>>,
    ) -> Result<(), OpError> {
        // SAFETY: for all views below, the caller's contract.
        unsafe {
            let mut out = operands.out.view_mut();
            self.attentions
                .paged(stream, &operands.inputs(), plan, raw_heads, &mut out, quantized)
                .map_err(device_error("attention"))
        }
    }
}

/// Panics if the command is no product, because a dropped command would give wrong text.
///
/// # Safety
/// As [`KernelSet::enqueue`].
pub(super) unsafe fn matrix_product<'a>(command: &KernelCommand) -> Result<MatrixProduct<'a>, OpError> {
    let KernelCommand::Product { matrix, bias, out, .. } = *command else {
        unreachable!("{command:?} is among the products of one launch");
    };
    // SAFETY: for all views below, the caller's contract.
    unsafe {
        Ok(MatrixProduct {
            shape: matrix.tiles()?,
            tiles: matrix.range.view(),
            bias: bias.map(|bias| bias.view()),
            out: out.view_mut(),
        })
    }
}

/// # Safety
/// As [`KernelSet::enqueue`].
pub(super) unsafe fn matrix_products<'a>(
    commands: &[KernelCommand],
) -> Result<Vec<MatrixProduct<'a>>, OpError> {
    // SAFETY: the caller's contract.
    commands.iter().map(|command| unsafe { matrix_product(command) }).collect()
}

/// # Safety
/// As [`KernelSet::enqueue`].
pub(super) unsafe fn rope_angles<'a>(
    adjacent: bool,
    frequencies: FloatRange,
    magnitude: F32Bits,
) -> RopeAngles<'a> {
    let pairing = if adjacent { RopePairing::Adjacent } else { RopePairing::Halves };
    // SAFETY: the caller's contract.
    let inverse_frequencies = unsafe { frequencies.view() };
    RopeAngles { pairing, inverse_frequencies, magnitude: magnitude.value() }
}
