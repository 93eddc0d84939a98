// SPDX-License-Identifier: Apache-2.0

//! Launcher of experts/row_matvec.cuh: a mixture of experts for one row.

use ops::OpError;
use quant::DType;
use quant::layout::Tiles;

use super::abi::experts::{
    EXPERT_ROUTE_THREADS, EXPERT_ROW_USED_MAX, EXPERT_STACKS_MAX, EXPERTS_MAX, ExpertRouteRow, ExpertRow,
    ExpertRowParams,
};
use super::abi::linear::MATVEC_WARPS;
use super::error::device_error;
use super::experts::{ExpertKernels, ExpertWeights, OP, ensure_equal};
use super::launch::{KernelName, kernel_name, launch_kernel, launch_spread};
use super::linear::matvec_pipeline;
use super::linear_names::quant_types;
use super::quantize::QuantizedActivations;
use super::quantized_output::QuantizedOutput;
use super::{DeviceView, DeviceViewMut, LaunchConfig, Stream};

/// The experts of a row, by rank, and the weights of their outputs in its sum.
#[derive(Clone, Copy)]
pub struct RowChoice<'a> {
    pub experts: DeviceView<'a, u32>,
    pub weights: DeviceView<'a, f32>,
    /// The number of experts of the layer.
    pub count: usize,
}

/// Which of a layer's products.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RowProduct {
    GateAndUp,
    Down,
}

impl RowProduct {
    /// Tiles of 256 columns whose values make one value of an item (experts/row_matvec.cuh).
    fn columns(self, shape: Tiles, used: usize) -> usize {
        match self {
            Self::GateAndUp => shape.col_tiles(),
            Self::Down => used * shape.col_tiles(),
        }
    }
}

impl ExpertKernels {
    /// Whether the kernels for one row compute a layer that uses this many experts, whose matrices
    /// have the shapes of `gate`, which is that of `up`, and `down`.
    pub fn takes_row(&self, gate: Tiles, up: Tiles, down: Tiles, used: usize) -> bool {
        let fits = |shape: Tiles, product: RowProduct| {
            let Some(format) = shape.dtype().activation() else { return false };
            let columns = product.columns(shape, used);
            row_name(shape.dtype(), product).is_some()
                && matvec_pipeline(&self.device, shape.tile_bytes(), columns, format).is_ok()
        };
        gate == up
            && used <= EXPERT_ROW_USED_MAX
            && fits(gate, RowProduct::GateAndUp)
            && fits(down, RowProduct::Down)
    }

    /// Routes the only row through its best experts by its `logits`, `[count]`, and quantizes the
    /// row `x`.
    pub fn route_row(
        &self,
        stream: &Stream,
        logits: DeviceView<'_, f32>,
        experts: &mut DeviceViewMut<'_, u32>,
        weights: &mut DeviceViewMut<'_, f32>,
        x: DeviceView<'_, f32>,
        quantized: &QuantizedOutput<'_>,
    ) -> Result<(), OpError> {
        let (count, used, cols) = (logits.len(), experts.len(), x.len());
        ensure_equal("experts", count.min(EXPERTS_MAX), count)?;
        ensure_equal("experts of a row", used.min(count), used)?;
        ensure_equal("weights of pairs", weights.len(), used)?;
        ensure_equal("misalignment of the input", (x.address() % 16) as usize, 0)?;
        let rows = quantized.rows(1, cols).map_err(device_error(OP))?;
        let arguments = ExpertRouteRow {
            logits: logits.address(),
            count: count as i32,
            used: used as i32,
            experts: experts.address(),
            expert_weights: weights.address(),
            x: x.address(),
            cols: cols as i32,
            quantized: rows,
        };
        let names = [
            kernel_name!("experts", "expert_route_row_q8_0"),
            kernel_name!("experts", "expert_route_row_q8_1"),
            kernel_name!("experts", "expert_route_row_q8_k"),
        ];
        let dtype = quantized.layout.format;
        let name = quantized.select_quants(names).ok_or(OpError::Type { op: OP, dtype })?;
        let launch = LaunchConfig {
            grid: (1, 1, 1),
            block: EXPERT_ROUTE_THREADS,
            shared_bytes: 0,
            overlaps_predecessor: true,
            cluster: 1,
        };
        // SAFETY: the block reads `count` logits and `cols` values, writes `used` experts below
        // `count` with their weights, and the row's activation tiles.
        unsafe { launch_spread(&self.routing_kernels, name, stream, launch, &arguments) }
            .map_err(device_error(OP))
    }

    /// Computes `stack.out[rank] = matrix of the rank's expert times x`, for one or two stacks of
    /// one shape. `x` is one row, and `stack.out` is `[used, rows]`.
    ///
    /// # Safety
    /// [`Self::route_row`] wrote `choice`.
    pub unsafe fn row_gate_and_up(
        &self,
        stream: &Stream,
        x: QuantizedActivations<'_>,
        choice: RowChoice<'_>,
        stacks: &[ExpertWeights<'_>],
    ) -> Result<(), OpError> {
        ensure_equal("rows of the input", x.tokens, 1)?;
        for stack in stacks {
            ensure_equal("values of the output", stack.out.len(), choice.experts.len() * stack.shape.rows())?;
        }
        // SAFETY: this function's contract.
        unsafe { self.launch_row(stream, x, choice, stacks, RowProduct::GateAndUp, 0) }
    }

    /// Computes `stack.out = sum over ranks of weight times (matrix of the rank's expert times row
    /// `rank` of x)`, and adds it to `residual`. `stack.out` and `residual` are `[rows]`.
    ///
    /// # Safety
    /// As [`Self::row_gate_and_up`]. The kernel reads `choice` before its predecessor has ended. So
    /// a launch lies between gate and up and this one, and it waits before it lets this one start
    /// ([`QuantizedOutput::is_before_product`] is false).
    pub unsafe fn row_down(
        &self,
        stream: &Stream,
        x: QuantizedActivations<'_>,
        choice: RowChoice<'_>,
        stack: &ExpertWeights<'_>,
        residual: Option<DeviceViewMut<'_, f32>>,
    ) -> Result<(), OpError> {
        ensure_equal("rows of the input", x.tokens, choice.experts.len())?;
        ensure_equal("values of the output", stack.out.len(), stack.shape.rows())?;
        if let Some(residual) = &residual {
            ensure_equal("values of the residual stream", residual.len(), stack.shape.rows())?;
        }
        let (stacks, residual) = (std::slice::from_ref(stack), residual.map_or(0, |to| to.address()));
        // SAFETY: this function's contract.
        unsafe { self.launch_row(stream, x, choice, stacks, RowProduct::Down, residual) }
    }

    /// `residual` is an address or 0.
    ///
    /// # Safety
    /// As [`Self::row_gate_and_up`] and [`Self::row_down`], which have checked lengths of outputs.
    unsafe fn launch_row(
        &self,
        stream: &Stream,
        x: QuantizedActivations<'_>,
        choice: RowChoice<'_>,
        stacks: &[ExpertWeights<'_>],
        product: RowProduct,
        residual: u64,
    ) -> Result<(), OpError> {
        let kernels = self.check_stacks(x, choice.count, stacks)?;
        let (shape, used) = (stacks[0].shape, choice.experts.len());
        ensure_equal("experts of a row", used.min(EXPERT_ROW_USED_MAX), used)?;
        ensure_equal("weights of pairs", choice.weights.len(), used)?;
        let (dtype, columns) = (shape.dtype(), product.columns(shape, used));
        let items = match product {
            RowProduct::GateAndUp => stacks.len() * used * shape.row_tiles(),
            RowProduct::Down => shape.row_tiles(),
        };
        let (stages, shared_bytes) =
            matvec_pipeline(&self.device, shape.tile_bytes(), columns, x.layout.format)?;
        let name = row_name(dtype, product).ok_or(OpError::Type { op: OP, dtype })?;
        let block = 32 * MATVEC_WARPS as u32;
        let kernel = kernels.family.kernel(name.as_c_str()).map_err(device_error(OP))?;
        let resident = kernel.blocks_per_multiprocessor(block, shared_bytes).map_err(device_error(OP))?;
        let blocks = (items as u32).min(resident.max(1) * self.device.multiprocessors());
        if blocks == 0 {
            return Ok(());
        }
        let mut params = ExpertRowParams {
            weights: [0; EXPERT_STACKS_MAX],
            out: [0; EXPERT_STACKS_MAX],
            act_tiles: x.data.address(),
            experts: choice.experts.address(),
            pair_weights: choice.weights.address(),
            residual,
            rows: shape.rows() as i32,
            col_tiles: shape.col_tiles() as i32,
            used: used as i32,
            stacks: stacks.len() as i32,
            stages,
            unused: 0,
        };
        for ((weights, out), stack) in params.weights.iter_mut().zip(&mut params.out).zip(stacks) {
            (*weights, *out) = (stack.tiles.address(), stack.out.address());
        }
        let launch = LaunchConfig {
            grid: (blocks, 1, 1),
            block,
            shared_bytes,
            overlaps_predecessor: true,
            cluster: 1,
        };
        // SAFETY: by this function's contract experts are below `count`. So the kernel reads and
        // writes tiles, activation tiles, outputs and the residual stream inside the lengths that
        // were checked. It divides shared memory as `matvec_pipeline` does.
        unsafe { launch_kernel(&kernels.family, name, stream, launch, &ExpertRow { params }) }
            .map_err(device_error(OP))
    }
}

fn row_name(dtype: DType, product: RowProduct) -> Option<KernelName<ExpertRow>> {
    macro_rules! names {
        ($($dtype:ident = $type:literal),*) => {
            match (dtype, product) {
                $(
                    (DType::$dtype, RowProduct::GateAndUp) => Some(kernel_name!(
                        concat!("experts_", $type),
                        concat!("expert_row_gate_up_", $type)
                    )),
                    (DType::$dtype, RowProduct::Down) => Some(kernel_name!(
                        concat!("experts_", $type),
                        concat!("expert_row_down_", $type)
                    )),
                )*
                _ => None,
            }
        };
    }
    quant_types!(names)
}
