//! [`Command`]: one op as the device will run it, by addresses. Commands are collected first and given to the device
//! together, so that a list that comes again and again can be replayed as a graph.

use ops::{AttentionSpec, KvType, RopePairing};
use quant::DType;
use quant::layout::Tiles;

use super::expert_command::ExpertCommand;
use super::fusion::fused;
use super::step::Words;
use crate::cuda::argmax::Argmaxes;
use crate::cuda::attention::{self, Attentions, PlanAddress};
use crate::cuda::embed::Embed;
use crate::cuda::error::device_error;
use crate::cuda::experts::ExpertKernels;
use crate::cuda::gated::Gates;
use crate::cuda::gather::Gathers;
use crate::cuda::heads::HeadsToCache;
use crate::cuda::kv_write::{KvLayerAddress, KvWrites};
use crate::cuda::linear::{Linear, MATRICES_MAX, Product};
use crate::cuda::norm::Norms;
use crate::cuda::quantize::{Activations, Quantize};
use crate::cuda::rope::{Ropes, Turn};
use crate::cuda::shortlist::Shortlists;
use crate::cuda::{Device, Stream, View, ViewMut};
use ops::OpError;

/// Bytes on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Range {
    pub(super) address: u64,
    pub(super) len: usize,
}

/// f32 values on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Floats {
    pub(super) address: u64,
    pub(super) len: usize,
}

/// An f32 that is compared and hashed by its bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Bits(u32);

impl From<f32> for Bits {
    fn from(value: f32) -> Self {
        Self(value.to_bits())
    }
}

impl Bits {
    pub(super) fn value(self) -> f32 {
        f32::from_bits(self.0)
    }
}

/// A matrix of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Matrix {
    pub(super) dtype: DType,
    pub(super) range: Range,
    pub(super) cols: u32,
    pub(super) rows: u32,
}

/// Quantised activations in scratch memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Panels {
    pub(super) format: DType,
    pub(super) range: Range,
    pub(super) tokens: u32,
    pub(super) cols: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    pub(super) heads: u32,
    pub(super) kv_heads: u32,
    pub(super) head_dim: u32,
    pub(super) scale: Bits,
}

impl Shape {
    pub(super) fn spec(self) -> AttentionSpec {
        AttentionSpec {
            heads: self.heads as usize,
            kv_heads: self.kv_heads as usize,
            head_dim: self.head_dim as usize,
            scale: self.scale.value(),
        }
    }
}

/// The operands of attention that both of its methods have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct AttentionOperands {
    pub(super) layer: KvLayerAddress,
    pub(super) kind: KvType,
    pub(super) shape: Shape,
    pub(super) queries: Floats,
    pub(super) tables: u64,
    pub(super) out: Floats,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Command {
    Norm {
        x: Floats,
        weight: Floats,
        eps: Bits,
        out: Floats,
    },
    AddNorm {
        x: Floats,
        y: Floats,
        weight: Floats,
        eps: Bits,
        out: Floats,
    },
    NormHeads {
        x: Floats,
        weight: Floats,
        eps: Bits,
    },
    Add {
        x: Floats,
        y: Floats,
    },
    Embed {
        table: Matrix,
        tokens: Words,
        out: Floats,
    },
    Quantize {
        x: Floats,
        panels: Panels,
    },
    Product {
        panels: Panels,
        matrix: Matrix,
        bias: Option<Floats>,
        out: Floats,
    },
    Rope {
        x: Floats,
        positions: Words,
        adjacent: bool,
        frequencies: Floats,
        magnitude: Bits,
        head_dim: u32,
    },
    KvWrite {
        layer: KvLayerAddress,
        kind: KvType,
        keys: Floats,
        values: Floats,
        slots: Words,
        kv_heads: u32,
        head_dim: u32,
    },
    /// `plan` is an index into the list's plans.
    AttentionTiles {
        operands: AttentionOperands,
        plan: u32,
    },
    AttentionPlain {
        operands: AttentionOperands,
        table_starts: Words,
        positions: Words,
    },
    Gated {
        gate: Floats,
        up: Floats,
        out: Floats,
    },
    Gather {
        x: Floats,
        rows: Words,
        cols: u32,
        out: Floats,
    },
    Argmax {
        x: Floats,
        cols: u32,
        out: Words,
    },
    /// `work` is of u64 words.
    Shortlist {
        x: Floats,
        cols: u32,
        draw_params: Words,
        work: Range,
    },
    Experts(ExpertCommand),
}

/// Commands with what they refer to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Commands {
    pub(super) list: Vec<Command>,
    pub(super) plans: Vec<PlanAddress>,
}

/// The launchers.
pub(super) struct Kernels {
    pub(super) norms: Norms,
    ropes: Ropes,
    kv_writes: KvWrites,
    pub(super) attentions: Attentions,
    pub(super) gates: Gates,
    pub(super) heads: HeadsToCache,
    gathers: Gathers,
    argmaxes: Argmaxes,
    shortlists: Shortlists,
    embed: Embed,
    quantize: Quantize,
    linear: Linear,
    experts: ExpertKernels,
}

impl Kernels {
    pub(super) fn new(device: &Device) -> Self {
        Self {
            norms: Norms::new(device),
            ropes: Ropes::new(device),
            kv_writes: KvWrites::new(device),
            attentions: Attentions::new(device),
            gates: Gates::new(device),
            heads: HeadsToCache::new(device),
            gathers: Gathers::new(device),
            argmaxes: Argmaxes::new(device),
            shortlists: Shortlists::new(device),
            embed: Embed::new(device),
            quantize: Quantize::new(device),
            linear: Linear::new(device),
            experts: ExpertKernels::new(device),
        }
    }

    /// Gives all commands to the stream.
    ///
    /// # Safety
    /// Every range of the commands is device memory of its type that lives until the work has ended; ranges that a command
    /// writes do not overlap others of it, except where an op works in place; indices among a step's words are below the
    /// lengths of what they index.
    pub(super) unsafe fn give(&self, stream: &Stream, commands: &Commands) -> Result<(), OpError> {
        let mut rest = commands.list.as_slice();
        while !rest.is_empty() {
            let taken = fused(rest, &commands.plans);
            let (these, behind) = rest.split_at(taken);
            // SAFETY: this function's contract.
            unsafe { self.give_fused(stream, these, &commands.plans)? };
            rest = behind;
        }
        Ok(())
    }

    /// # Safety
    /// As [`Self::give`].
    pub(super) unsafe fn products(
        &self,
        stream: &Stream,
        panels: Panels,
        commands: &[Command],
    ) -> Result<(), OpError> {
        let mut products = Vec::with_capacity(MATRICES_MAX);
        for command in commands {
            if let Command::Product { matrix, bias, out, .. } = *command {
                products.push(Product {
                    shape: matrix.tiles()?,
                    // SAFETY: the caller's contract.
                    tiles: unsafe { matrix.range.view() },
                    // SAFETY: as above.
                    bias: bias.map(|bias| unsafe { bias.view() }),
                    // SAFETY: as above.
                    out: unsafe { out.view_mut() },
                });
            }
        }
        // SAFETY: as above.
        let x = unsafe { panels.activations() };
        self.linear.launch(stream, x, &mut products)
    }

    /// # Safety
    /// As [`Self::give`].
    pub(super) unsafe fn give_one(
        &self,
        stream: &Stream,
        command: &Command,
        plans: &[PlanAddress],
    ) -> Result<(), OpError> {
        // SAFETY: for all views below, the caller's contract.
        unsafe {
            match *command {
                Command::Norm { x, weight, eps, out } => self
                    .norms
                    .rows(stream, x.view(), weight.view(), eps.value(), &mut out.view_mut(), None)
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
                        None,
                    )
                    .map_err(device_error("add_rms_norm")),
                Command::NormHeads { x, weight, eps } => self
                    .norms
                    .heads(stream, &mut x.view_mut(), weight.view(), eps.value())
                    .map_err(device_error("rms_norm_heads")),
                Command::Add { x, y } => {
                    self.norms.add(stream, &mut x.view_mut(), y.view()).map_err(device_error("add"))
                }
                Command::Embed { table, tokens, out } => self.embed.launch(
                    stream,
                    &table.tiles()?,
                    table.range.view(),
                    tokens.view(),
                    &mut out.view_mut(),
                ),
                Command::Quantize { x, panels } => {
                    let (tokens, cols) = (panels.tokens as usize, panels.cols as usize);
                    let mut out = panels.range.view_mut();
                    self.quantize
                        .launch(stream, panels.format, x.view(), tokens, cols, &mut out)
                        .map(|_activations| ())
                }
                Command::Product { panels, .. } => {
                    self.products(stream, panels, std::slice::from_ref(command))
                }
                Command::Rope { x, positions, adjacent, frequencies, magnitude, head_dim } => {
                    let pairing = if adjacent { RopePairing::Adjacent } else { RopePairing::Halves };
                    let turn = Turn {
                        pairing,
                        inverse_frequencies: frequencies.view(),
                        magnitude: magnitude.value(),
                    };
                    self.ropes
                        .launch(stream, &mut x.view_mut(), positions.view(), turn, head_dim as usize)
                        .map_err(device_error("rope"))
                }
                Command::KvWrite { layer, kind, keys, values, slots, kv_heads, head_dim } => self
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
                Command::AttentionTiles { operands, plan } => self
                    .attentions
                    .tiles(
                        stream,
                        &operands.call(),
                        &plans[plan as usize],
                        &mut operands.out.view_mut(),
                        None,
                    )
                    .map_err(device_error("attention")),
                Command::AttentionPlain { operands, table_starts, positions } => self
                    .attentions
                    .plain(
                        stream,
                        &operands.call(),
                        table_starts.view(),
                        positions.view(),
                        &mut operands.out.view_mut(),
                    )
                    .map_err(device_error("attention")),
                Command::Gated { gate, up, out } => self
                    .gates
                    .silu(stream, gate.view(), up.view(), &mut out.view_mut())
                    .map_err(device_error("gated")),
                Command::Experts(command) => command.give(&self.experts, stream),
                Command::Gather { x, rows, cols, out } => self
                    .gathers
                    .rows(stream, x.view(), rows.view(), cols as usize, &mut out.view_mut())
                    .map_err(device_error("gather_outputs")),
                Command::Argmax { x, cols, out } => self
                    .argmaxes
                    .rows(stream, x.view(), cols as usize, &mut out.view_mut())
                    .map_err(device_error("argmax")),
                Command::Shortlist { x, cols, draw_params, work } => {
                    let mut work = ViewMut::from_raw(work.address, work.len / size_of::<u64>());
                    self.shortlists
                        .rows(stream, x.view(), cols as usize, draw_params.view(), &mut work)
                        .map_err(device_error("shortlists"))
                }
            }
        }
    }
}

impl Matrix {
    pub(super) fn tiles(&self) -> Result<Tiles, OpError> {
        // The same numbers made a valid shape when the command was.
        Tiles::new(self.dtype, self.cols as usize, self.rows as usize)
            .map_err(|_| OpError::Type { op: "linear", dtype: self.dtype })
    }
}

impl Panels {
    /// # Safety
    /// As [`Kernels::give`].
    pub(super) unsafe fn activations<'a>(&self) -> Activations<'a> {
        Activations {
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
    /// As [`Kernels::give`].
    pub(super) unsafe fn call<'a>(&self) -> attention::Call<'a> {
        attention::Call {
            layer: self.layer,
            kind: self.kind,
            spec: self.shape.spec(),
            // SAFETY: the caller's contract.
            queries: unsafe { self.queries.view() },
            // SAFETY: as above; the launcher takes the address alone.
            tables: unsafe { View::from_raw(self.tables, 0) },
        }
    }
}

impl Range {
    /// # Safety
    /// As [`View::from_raw`].
    pub(super) unsafe fn view<'a>(self) -> View<'a, u8> {
        // SAFETY: the caller's contract.
        unsafe { View::from_raw(self.address, self.len) }
    }

    /// # Safety
    /// As [`ViewMut::from_raw`].
    pub(super) unsafe fn view_mut<'a>(self) -> ViewMut<'a, u8> {
        // SAFETY: the caller's contract.
        unsafe { ViewMut::from_raw(self.address, self.len) }
    }
}

impl Floats {
    /// # Safety
    /// As [`View::from_raw`].
    pub(super) unsafe fn view<'a>(self) -> View<'a, f32> {
        // SAFETY: the caller's contract.
        unsafe { View::from_raw(self.address, self.len) }
    }

    /// # Safety
    /// As [`ViewMut::from_raw`].
    pub(super) unsafe fn view_mut<'a>(self) -> ViewMut<'a, f32> {
        // SAFETY: the caller's contract.
        unsafe { ViewMut::from_raw(self.address, self.len) }
    }
}

impl Floats {
    /// `len` values from `start` on, which lie in the range.
    pub(super) fn part(self, start: usize, len: usize) -> Self {
        debug_assert!(start + len <= self.len);
        Self { address: self.address + (start * size_of::<f32>()) as u64, len }
    }
}

impl Words {
    /// # Safety
    /// As [`ViewMut::from_raw`].
    pub(super) unsafe fn view_mut<'a>(self) -> ViewMut<'a, u32> {
        // SAFETY: the caller's contract.
        unsafe { ViewMut::from_raw(self.address, self.len) }
    }

    /// # Safety
    /// As [`View::from_raw`].
    pub(super) unsafe fn view<'a>(self) -> View<'a, u32> {
        // SAFETY: the caller's contract.
        unsafe { View::from_raw(self.address, self.len) }
    }
}
