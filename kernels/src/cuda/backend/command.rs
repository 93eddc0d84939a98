// SPDX-License-Identifier: Apache-2.0

//! [`KernelCommand`] describes one op by device addresses. The recorder collects commands and
//! enqueues them together. If a list of commands repeats, the recorder replays it as a CUDA graph.

use ops::{AttentionSpec, KvType, RopePairing};
use quant::DType;
use quant::layout::Tiles;

use super::expert_command::ExpertCommand;
use super::fusion::count_fusible;
use super::step::WordRange;
use crate::cuda::argmax::ArgmaxKernels;
use crate::cuda::attention::{self, AttentionKernels, AttentionPlanAddress};
use crate::cuda::embed::EmbedKernels;
use crate::cuda::error::device_error;
use crate::cuda::experts::ExpertKernels;
use crate::cuda::gather::GatherKernels;
use crate::cuda::kv_write::{KvLayerAddress, KvWriteKernels};
use crate::cuda::linear::{LinearKernels, MATRICES_MAX, MatrixProduct};
use crate::cuda::norm::NormKernels;
use crate::cuda::norm_rope_kv::NormRopeKvKernels;
use crate::cuda::quantize::{QuantizeKernels, QuantizedActivations};
use crate::cuda::rope::{RopeAngles, RopeKernels};
use crate::cuda::shortlist::ShortlistKernels;
use crate::cuda::silu_and_mul::SiluKernels;
use crate::cuda::{Device, DeviceView, DeviceViewMut, Stream};
use ops::OpError;

/// A range of bytes in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ByteRange {
    pub(super) address: u64,
    pub(super) len: usize,
}

/// A range of f32 values in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct FloatRange {
    pub(super) address: u64,
    pub(super) len: usize,
}

/// An f32 that is compared and hashed by its bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct F32Bits(u32);

impl From<f32> for F32Bits {
    fn from(value: f32) -> Self {
        Self(value.to_bits())
    }
}

impl F32Bits {
    pub(super) fn value(self) -> f32 {
        f32::from_bits(self.0)
    }
}

/// A weight matrix in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct WeightMatrix {
    pub(super) dtype: DType,
    pub(super) range: ByteRange,
    pub(super) cols: u32,
    pub(super) rows: u32,
}

/// Quantised activations in scratch memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ActivationTiles {
    pub(super) format: DType,
    pub(super) range: ByteRange,
    pub(super) tokens: u32,
    pub(super) cols: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct AttentionShape {
    pub(super) heads: u32,
    pub(super) kv_heads: u32,
    pub(super) head_dim: u32,
    pub(super) scale: F32Bits,
}

impl AttentionShape {
    pub(super) fn spec(self) -> AttentionSpec {
        AttentionSpec {
            heads: self.heads as usize,
            kv_heads: self.kv_heads as usize,
            head_dim: self.head_dim as usize,
            scale: self.scale.value(),
        }
    }
}

/// The operands of both attention commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct AttentionOperands {
    pub(super) layer: KvLayerAddress,
    pub(super) kind: KvType,
    pub(super) shape: AttentionShape,
    pub(super) queries: FloatRange,
    pub(super) tables: u64,
    pub(super) out: FloatRange,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum KernelCommand {
    Norm {
        x: FloatRange,
        weight: FloatRange,
        eps: F32Bits,
        out: FloatRange,
    },
    AddNorm {
        x: FloatRange,
        y: FloatRange,
        weight: FloatRange,
        eps: F32Bits,
        out: FloatRange,
    },
    NormHeads {
        x: FloatRange,
        weight: FloatRange,
        eps: F32Bits,
    },
    Add {
        x: FloatRange,
        y: FloatRange,
    },
    Embed {
        table: WeightMatrix,
        tokens: WordRange,
        out: FloatRange,
    },
    Quantize {
        x: FloatRange,
        activation_tiles: ActivationTiles,
    },
    Product {
        activation_tiles: ActivationTiles,
        matrix: WeightMatrix,
        bias: Option<FloatRange>,
        out: FloatRange,
    },
    Rope {
        x: FloatRange,
        positions: WordRange,
        adjacent: bool,
        frequencies: FloatRange,
        magnitude: F32Bits,
        head_dim: u32,
    },
    KvWrite {
        layer: KvLayerAddress,
        kind: KvType,
        keys: FloatRange,
        values: FloatRange,
        slots: WordRange,
        kv_heads: u32,
        head_dim: u32,
    },
    /// `plan` is an index into [`CommandList::plans`].
    AttentionPaged {
        operands: AttentionOperands,
        plan: u32,
    },
    AttentionScalar {
        operands: AttentionOperands,
        table_starts: WordRange,
        positions: WordRange,
    },
    Gated {
        gate: FloatRange,
        up: FloatRange,
        out: FloatRange,
    },
    Gather {
        x: FloatRange,
        rows: WordRange,
        cols: u32,
        out: FloatRange,
    },
    Argmax {
        x: FloatRange,
        cols: u32,
        out: WordRange,
    },
    /// `work` holds u64 words.
    Shortlist {
        x: FloatRange,
        cols: u32,
        draw_params: WordRange,
        work: ByteRange,
    },
    Experts(ExpertCommand),
}

/// A list of commands, and the attention plans that its commands name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct CommandList {
    pub(super) list: Vec<KernelCommand>,
    pub(super) plans: Vec<AttentionPlanAddress>,
}

/// The launchers of all kernels.
pub(super) struct KernelSet {
    pub(super) norms: NormKernels,
    ropes: RopeKernels,
    kv_writes: KvWriteKernels,
    pub(super) attentions: AttentionKernels,
    pub(super) gates: SiluKernels,
    pub(super) heads: NormRopeKvKernels,
    gathers: GatherKernels,
    argmaxes: ArgmaxKernels,
    shortlists: ShortlistKernels,
    embed: EmbedKernels,
    quantize: QuantizeKernels,
    linear: LinearKernels,
    experts: ExpertKernels,
}

impl KernelSet {
    pub(super) fn new(device: &Device) -> Self {
        Self {
            norms: NormKernels::new(device),
            ropes: RopeKernels::new(device),
            kv_writes: KvWriteKernels::new(device),
            attentions: AttentionKernels::new(device),
            gates: SiluKernels::new(device),
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

    /// # Safety
    /// As [`Self::enqueue`].
    pub(super) unsafe fn enqueue_products(
        &self,
        stream: &Stream,
        activation_tiles: ActivationTiles,
        commands: &[KernelCommand],
    ) -> Result<(), OpError> {
        let mut products = Vec::with_capacity(MATRICES_MAX);
        for command in commands {
            let KernelCommand::Product { matrix, bias, out, .. } = *command else {
                unreachable!("{command:?} is among the products of one launch");
            };
            products.push(MatrixProduct {
                shape: matrix.tiles()?,
                // SAFETY: the caller's contract.
                tiles: unsafe { matrix.range.view() },
                // SAFETY: as above.
                bias: bias.map(|bias| unsafe { bias.view() }),
                // SAFETY: as above.
                out: unsafe { out.view_mut() },
            });
        }
        // SAFETY: as above.
        let x = unsafe { activation_tiles.activations() };
        self.linear.launch(stream, x, &mut products)
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
                KernelCommand::Norm { x, weight, eps, out } => self
                    .norms
                    .rows(stream, x.view(), weight.view(), eps.value(), &mut out.view_mut(), None)
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
                        None,
                    )
                    .map_err(device_error("add_rms_norm")),
                KernelCommand::NormHeads { x, weight, eps } => self
                    .norms
                    .heads(stream, &mut x.view_mut(), weight.view(), eps.value())
                    .map_err(device_error("rms_norm_heads")),
                KernelCommand::Add { x, y } => {
                    self.norms.add(stream, &mut x.view_mut(), y.view()).map_err(device_error("add"))
                }
                KernelCommand::Embed { table, tokens, out } => self.embed.launch(
                    stream,
                    &table.tiles()?,
                    table.range.view(),
                    tokens.view(),
                    &mut out.view_mut(),
                ),
                KernelCommand::Quantize { x, activation_tiles } => {
                    let (tokens, cols) = (activation_tiles.tokens as usize, activation_tiles.cols as usize);
                    let mut out = activation_tiles.range.view_mut();
                    self.quantize
                        .launch(stream, activation_tiles.format, x.view(), tokens, cols, &mut out)
                        .map(|_activations| ())
                }
                KernelCommand::Product { activation_tiles, .. } => {
                    self.enqueue_products(stream, activation_tiles, std::slice::from_ref(command))
                }
                KernelCommand::Rope { x, positions, adjacent, frequencies, magnitude, head_dim } => {
                    let pairing = if adjacent { RopePairing::Adjacent } else { RopePairing::Halves };
                    let angles = RopeAngles {
                        pairing,
                        inverse_frequencies: frequencies.view(),
                        magnitude: magnitude.value(),
                    };
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
                KernelCommand::AttentionPaged { operands, plan } => self
                    .attentions
                    .paged(
                        stream,
                        &operands.inputs(),
                        &plans[plan as usize],
                        &mut operands.out.view_mut(),
                        None,
                    )
                    .map_err(device_error("attention")),
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
                KernelCommand::Gated { gate, up, out } => self
                    .gates
                    .silu(stream, gate.view(), up.view(), &mut out.view_mut())
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
                KernelCommand::Shortlist { x, cols, draw_params, work } => {
                    let mut work = DeviceViewMut::from_raw(work.address, work.len / size_of::<u64>());
                    self.shortlists
                        .rows(stream, x.view(), cols as usize, draw_params.view(), &mut work)
                        .map_err(device_error("shortlists"))
                }
            }
        }
    }
}

impl WeightMatrix {
    pub(super) fn tiles(&self) -> Result<Tiles, OpError> {
        // `push` received the same numbers from a valid shape, so this cannot fail.
        Tiles::new(self.dtype, self.cols as usize, self.rows as usize)
            .map_err(|_| OpError::Type { op: "linear", dtype: self.dtype })
    }
}

impl ActivationTiles {
    /// # Safety
    /// As [`KernelSet::enqueue`].
    pub(super) unsafe fn activations<'a>(&self) -> QuantizedActivations<'a> {
        QuantizedActivations {
            format: self.format,
            tokens: self.tokens as usize,
            cols: self.cols as usize,
            // SAFETY: the caller's contract.
            data: unsafe { self.range.view() },
        }
    }
}

impl AttentionOperands {
    /// # Safety
    /// As [`KernelSet::enqueue`].
    pub(super) unsafe fn inputs<'a>(&self) -> attention::AttentionInputs<'a> {
        attention::AttentionInputs {
            layer: self.layer,
            kind: self.kind,
            spec: self.shape.spec(),
            // SAFETY: the caller's contract.
            queries: unsafe { self.queries.view() },
            // SAFETY: as above. The launcher uses the address alone.
            tables: unsafe { DeviceView::from_raw(self.tables, 0) },
        }
    }
}

impl ByteRange {
    /// # Safety
    /// As [`DeviceView::from_raw`].
    pub(super) unsafe fn view<'a>(self) -> DeviceView<'a, u8> {
        // SAFETY: the caller's contract.
        unsafe { DeviceView::from_raw(self.address, self.len) }
    }

    /// # Safety
    /// As [`DeviceViewMut::from_raw`].
    pub(super) unsafe fn view_mut<'a>(self) -> DeviceViewMut<'a, u8> {
        // SAFETY: the caller's contract.
        unsafe { DeviceViewMut::from_raw(self.address, self.len) }
    }
}

impl FloatRange {
    /// # Safety
    /// As [`DeviceView::from_raw`].
    pub(super) unsafe fn view<'a>(self) -> DeviceView<'a, f32> {
        // SAFETY: the caller's contract.
        unsafe { DeviceView::from_raw(self.address, self.len) }
    }

    /// # Safety
    /// As [`DeviceViewMut::from_raw`].
    pub(super) unsafe fn view_mut<'a>(self) -> DeviceViewMut<'a, f32> {
        // SAFETY: the caller's contract.
        unsafe { DeviceViewMut::from_raw(self.address, self.len) }
    }
}

impl FloatRange {
    /// The `len` values from `start` on. They lie inside the range.
    pub(super) fn part(self, start: usize, len: usize) -> Self {
        debug_assert!(start + len <= self.len);
        Self { address: self.address + (start * size_of::<f32>()) as u64, len }
    }
}

impl WordRange {
    /// # Safety
    /// As [`DeviceViewMut::from_raw`].
    pub(super) unsafe fn view_mut<'a>(self) -> DeviceViewMut<'a, u32> {
        // SAFETY: the caller's contract.
        unsafe { DeviceViewMut::from_raw(self.address, self.len) }
    }

    /// # Safety
    /// As [`DeviceView::from_raw`].
    pub(super) unsafe fn view<'a>(self) -> DeviceView<'a, u32> {
        // SAFETY: the caller's contract.
        unsafe { DeviceView::from_raw(self.address, self.len) }
    }
}
