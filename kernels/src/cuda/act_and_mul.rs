// SPDX-License-Identifier: Apache-2.0

//! Launcher of act_and_mul.cu: the gated activation of a feed-forward layer.

use ops::Activation;
use quant::layout::TILE_COLS;

use super::abi::elementwise::{
    ACT_AND_MUL_THREADS, ACT_AND_MUL_WARPS, ActAndMul, ActAndMulQuantized, ActAndMulScalar,
};
use super::launch::{kernel_name, launch_spread};
use super::module::image;
use super::norm::{count_rows, ensure_same_len};
use super::quantized_output::QuantizedOutput;
use super::{CudaError, Device, DeviceView, DeviceViewMut, LaunchConfig, LazyModule, Stream};

/// The number of values in a float4.
const VECTOR: usize = 4;

pub struct ActAndMulKernels(LazyModule);

/// The kernels of an activation that quantize, as in [`QuantizedOutput::select`].
macro_rules! names {
    ($name:literal) => {
        [
            kernel_name!("act_and_mul", concat!($name, "_q8_0")),
            kernel_name!("act_and_mul", concat!($name, "_q8_1")),
            kernel_name!("act_and_mul", concat!($name, "_q8_k")),
            kernel_name!("act_and_mul", concat!($name, "_f16")),
            kernel_name!("act_and_mul", concat!($name, "_bf16")),
        ]
    };
}

impl ActAndMulKernels {
    pub fn new(device: &Device) -> Self {
        Self(LazyModule::new(device, "act_and_mul", image!("act_and_mul")))
    }

    /// Computes `gate = activation(gate) * up`.
    pub fn values(
        &self,
        stream: &Stream,
        activation: Activation,
        gate: &mut DeviceViewMut<'_, f32>,
        up: DeviceView<'_, f32>,
    ) -> Result<(), CudaError> {
        ensure_same_len("up of a gate", up.len(), gate.len())?;
        if gate.is_empty() {
            return Ok(());
        }
        let launch = |threads: usize| LaunchConfig {
            grid: (threads.div_ceil(ACT_AND_MUL_THREADS as usize) as u32, 1, 1),
            block: ACT_AND_MUL_THREADS,
            shared_bytes: 0,
            overlaps_predecessor: true,
            cluster: 1,
        };
        let values = gate.len();
        let (gate, up) = (gate.address(), up.address());
        if values.is_multiple_of(VECTOR) {
            let vectors = values / VECTOR;
            let arguments = ActAndMul { gate, up, vectors: vectors as u64 };
            let name = match activation {
                Activation::Silu => kernel_name!("act_and_mul", "silu_and_mul"),
                Activation::GeluTanh => kernel_name!("act_and_mul", "gelu_and_mul"),
            };
            // SAFETY: a thread reads and writes one vector below `vectors`. Tensors begin at
            // multiples of 256 bytes.
            unsafe { launch_spread(&self.0, name, stream, launch(vectors), &arguments) }
        } else {
            let arguments = ActAndMulScalar { gate, up, values: values as u64 };
            let name = match activation {
                Activation::Silu => kernel_name!("act_and_mul", "silu_and_mul_scalar"),
                Activation::GeluTanh => kernel_name!("act_and_mul", "gelu_and_mul_scalar"),
            };
            // SAFETY: a thread reads and writes one value below `values`.
            unsafe { launch_spread(&self.0, name, stream, launch(values), &arguments) }
        }
    }

    /// Computes [`Self::values`] over rows of `cols` values, and also quantizes the rows. Values
    /// that `quantized` does not need are not written. Rows whose word in `pairs_of_rows` is
    /// `NO_PAIR` (`u32::MAX`) are left out.
    #[expect(clippy::too_many_arguments, reason = "operands of one kernel, each of its own meaning")]
    pub fn rows_quantized(
        &self,
        stream: &Stream,
        activation: Activation,
        gate: &mut DeviceViewMut<'_, f32>,
        up: DeviceView<'_, f32>,
        cols: usize,
        pairs_of_rows: Option<DeviceView<'_, u32>>,
        quantized: &QuantizedOutput<'_>,
    ) -> Result<(), CudaError> {
        ensure_same_len("up of a gate", up.len(), gate.len())?;
        let tokens = count_rows("rows of a gate", gate.len(), cols)?;
        let pairs_len = pairs_of_rows.as_ref().map_or(tokens, DeviceView::len);
        ensure_same_len("pairs of a gate's rows", pairs_len, tokens)?;
        let rows = quantized.rows(tokens, cols)?;
        if gate.is_empty() {
            return Ok(());
        }
        let warps = tokens * cols.div_ceil(TILE_COLS);
        let launch = LaunchConfig {
            grid: (warps.div_ceil(ACT_AND_MUL_WARPS) as u32, 1, 1),
            block: 32 * ACT_AND_MUL_WARPS as u32,
            shared_bytes: 0,
            overlaps_predecessor: true,
            cluster: 1,
        };
        let arguments = ActAndMulQuantized {
            gate: gate.address(),
            up: up.address(),
            needs_values: i32::from(quantized.needs_values),
            tokens: tokens as i32,
            cols: cols as i32,
            pairs_of_rows: pairs_of_rows.map_or(0, |pairs| pairs.address()),
            quantized: rows,
            launches_early: QuantizedOutput::launches_early(Some(quantized)),
        };
        let name = quantized.select(match activation {
            Activation::Silu => names!("silu_and_mul"),
            Activation::GeluTanh => names!("gelu_and_mul"),
        });
        // SAFETY: a warp reads and writes 256 columns of one token, and writes its part of an
        // activation tile.
        unsafe { launch_spread(&self.0, name, stream, launch, &arguments) }
    }
}
