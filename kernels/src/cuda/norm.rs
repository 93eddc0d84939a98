// SPDX-License-Identifier: Apache-2.0

//! Launcher of norm.cu: RMS norms of rows and of heads, the residual sum, and products with a
//! factor.

use super::abi::elementwise::{
    ADD_THREADS, AddNormedRmsNorm, AddResidual, AddRmsNorm, NORM_HEADS, NORM_QUANTIZED_COLS_MAX,
    NORM_SHORT_COLS_MAX, NORM_THREADS, RmsNorm, RmsNormHeads, Scale,
};
use super::abi::tiles::QuantizedRows;
use super::launch::{KernelName, kernel_name, launch_spread};
use super::module::image;
use super::quantized_output::QuantizedOutput;
use super::{CudaError, Device, DeviceView, DeviceViewMut, LaunchConfig, LazyModule, Stream};

/// Values of a vector, which one thread loads.
const VECTOR: usize = 8;

pub struct NormKernels(LazyModule);

/// The kernels of a norm: [for long rows, for short ones], each [without quantized rows, then as in
/// [`QuantizedOutput::select`]].
macro_rules! names {
    ($name:literal) => {
        [names!(@of $name ""), names!(@of $name "_short")]
    };
    (@of $name:literal $length:literal) => {
        [
            kernel_name!("norm", concat!($name, $length)),
            kernel_name!("norm", concat!($name, $length, "_q8_0")),
            kernel_name!("norm", concat!($name, $length, "_q8_1")),
            kernel_name!("norm", concat!($name, $length, "_q8_k")),
            kernel_name!("norm", concat!($name, $length, "_f16")),
            kernel_name!("norm", concat!($name, $length, "_bf16")),
        ]
    };
}

impl NormKernels {
    pub fn new(device: &Device) -> Self {
        Self(LazyModule::new(device, "norm", image!("norm")))
    }

    /// Whether the kernels can also quantize rows of this length.
    pub(super) fn can_quantize(cols: usize) -> bool {
        cols.is_multiple_of(32) && cols <= NORM_QUANTIZED_COLS_MAX
    }

    /// Computes `out = norm(x)` over rows of `weight.len()` values. `out` may be `x`.
    pub fn rows(
        &self,
        stream: &Stream,
        x: DeviceView<'_, f32>,
        weight: DeviceView<'_, f32>,
        eps: f32,
        out: &mut DeviceViewMut<'_, f32>,
        quantized: Option<QuantizedOutput<'_>>,
    ) -> Result<(), CudaError> {
        let rows = count_rows("input of a norm", x.len(), weight.len())?;
        let rounded = quantized_rows(quantized.as_ref(), rows, weight.len())?;
        ensure_same_len("output of a norm", out.len(), x.len())?;
        if rows == 0 {
            return Ok(());
        }
        let arguments = RmsNorm {
            x: x.address(),
            weight: weight.address(),
            eps,
            out: address_of_values(quantized.as_ref(), out),
            cols: weight.len() as i32,
            quantized: rounded,
            launches_early: QuantizedOutput::launches_early(quantized.as_ref()),
        };
        let name = kernel_for(quantized.as_ref(), weight.len(), names!("rms_norm"));
        // SAFETY: block r reads and writes `cols` values at r * cols, inside `x` and `out` by the
        // checks above. It also writes its token's part of the activation tiles. `out` may be `x`:
        // a thread writes values that it has read itself.
        unsafe { launch_spread(&self.0, name, stream, one_block_per_row(rows), &arguments) }
    }

    /// Computes `x += y; out = norm(x)`.
    #[expect(clippy::too_many_arguments, reason = "operands of one kernel, each of its own meaning")]
    pub fn add_rows(
        &self,
        stream: &Stream,
        x: &mut DeviceViewMut<'_, f32>,
        y: DeviceView<'_, f32>,
        weight: DeviceView<'_, f32>,
        eps: f32,
        out: &mut DeviceViewMut<'_, f32>,
        quantized: Option<QuantizedOutput<'_>>,
    ) -> Result<(), CudaError> {
        let (rows, rounded) = check_added_rows(x, y, weight, out, quantized.as_ref())?;
        if rows == 0 {
            return Ok(());
        }
        let arguments = AddRmsNorm {
            x: x.address(),
            y: y.address(),
            weight: weight.address(),
            eps,
            out: address_of_values(quantized.as_ref(), out),
            cols: weight.len() as i32,
            quantized: rounded,
            launches_early: QuantizedOutput::launches_early(quantized.as_ref()),
        };
        let name = kernel_for(quantized.as_ref(), weight.len(), names!("add_rms_norm"));
        // SAFETY: as for `rows`, except that the kernel also writes `x`.
        unsafe { launch_spread(&self.0, name, stream, one_block_per_row(rows), &arguments) }
    }

    /// Computes `x += norm(y); out = norm(x)`. The norm of y has the weight `y_weight`.
    #[expect(clippy::too_many_arguments, reason = "operands of one kernel, each of its own meaning")]
    pub fn add_normed_rows(
        &self,
        stream: &Stream,
        x: &mut DeviceViewMut<'_, f32>,
        y: DeviceView<'_, f32>,
        y_weight: DeviceView<'_, f32>,
        weight: DeviceView<'_, f32>,
        eps: f32,
        out: &mut DeviceViewMut<'_, f32>,
        quantized: Option<QuantizedOutput<'_>>,
    ) -> Result<(), CudaError> {
        let (rows, rounded) = check_added_rows(x, y, weight, out, quantized.as_ref())?;
        ensure_same_len("weight of the second input", y_weight.len(), weight.len())?;
        if rows == 0 {
            return Ok(());
        }
        let arguments = AddNormedRmsNorm {
            x: x.address(),
            y: y.address(),
            y_weight: y_weight.address(),
            weight: weight.address(),
            eps,
            out: address_of_values(quantized.as_ref(), out),
            cols: weight.len() as i32,
            quantized: rounded,
            launches_early: QuantizedOutput::launches_early(quantized.as_ref()),
        };
        let name = kernel_for(quantized.as_ref(), weight.len(), names!("add_normed_rms_norm"));
        // SAFETY: as for `add_rows`.
        unsafe { launch_spread(&self.0, name, stream, one_block_per_row(rows), &arguments) }
    }

    /// Normalises every head of `weight.len()` values in place.
    pub fn heads(
        &self,
        stream: &Stream,
        x: &mut DeviceViewMut<'_, f32>,
        weight: DeviceView<'_, f32>,
        eps: f32,
    ) -> Result<(), CudaError> {
        let heads = count_rows("input of a norm of heads", x.len(), weight.len())?;
        if heads == 0 {
            return Ok(());
        }
        let launch = LaunchConfig {
            grid: (heads.div_ceil(NORM_HEADS) as u32, 1, 1),
            block: 32 * NORM_HEADS as u32,
            shared_bytes: 0,
            overlaps_predecessor: true,
            cluster: 1,
        };
        let arguments = RmsNormHeads {
            x: x.address(),
            weight: weight.address(),
            eps,
            heads: heads as i32,
            head_dim: weight.len() as i32,
        };
        // SAFETY: warp h reads and writes `head_dim` values at h * head_dim, and h < heads.
        unsafe { launch_spread(&self.0, kernel_name!("norm", "rms_norm_heads"), stream, launch, &arguments) }
    }

    /// Computes `x += y`.
    pub fn add(
        &self,
        stream: &Stream,
        x: &mut DeviceViewMut<'_, f32>,
        y: DeviceView<'_, f32>,
    ) -> Result<(), CudaError> {
        ensure_same_len("second input of a sum", y.len(), x.len())?;
        if x.is_empty() {
            return Ok(());
        }
        let launch = launch_of_values(x.len());
        let arguments = AddResidual { x: x.address(), y: y.address(), values: x.len() as u64 };
        // SAFETY: a thread reads and writes one value below `values`.
        unsafe { launch_spread(&self.0, kernel_name!("norm", "add_residual"), stream, launch, &arguments) }
    }

    /// Computes `x *= factor`.
    pub fn scale(
        &self,
        stream: &Stream,
        x: &mut DeviceViewMut<'_, f32>,
        factor: f32,
    ) -> Result<(), CudaError> {
        if x.is_empty() {
            return Ok(());
        }
        let launch = launch_of_values(x.len());
        let arguments = Scale { x: x.address(), factor, values: x.len() as u64 };
        // SAFETY: a thread reads and writes one value below `values`.
        unsafe { launch_spread(&self.0, kernel_name!("norm", "scale"), stream, launch, &arguments) }
    }
}

/// Checks the lengths of a sum and its norm. Returns the number of rows, and where a kernel writes
/// the quantized ones.
fn check_added_rows(
    x: &DeviceViewMut<'_, f32>,
    y: DeviceView<'_, f32>,
    weight: DeviceView<'_, f32>,
    out: &DeviceViewMut<'_, f32>,
    quantized: Option<&QuantizedOutput<'_>>,
) -> Result<(usize, QuantizedRows), CudaError> {
    let rows = count_rows("input of a norm", x.len(), weight.len())?;
    ensure_same_len("second input of a norm", y.len(), x.len())?;
    ensure_same_len("output of a norm", out.len(), x.len())?;
    Ok((rows, quantized_rows(quantized, rows, weight.len())?))
}

/// A thread for each of `values` values.
fn launch_of_values(values: usize) -> LaunchConfig {
    LaunchConfig {
        grid: (values.div_ceil(ADD_THREADS as usize) as u32, 1, 1),
        block: ADD_THREADS,
        shared_bytes: 0,
        overlaps_predecessor: true,
        cluster: 1,
    }
}

/// Selects the kernel for rows of `cols` values.
fn kernel_for<A: Copy>(
    quantized: Option<&QuantizedOutput<'_>>,
    cols: usize,
    [long, short]: [[KernelName<A>; 6]; 2],
) -> KernelName<A> {
    let is_short = cols <= NORM_SHORT_COLS_MAX && cols.is_multiple_of(VECTOR);
    let [plain, quantizing @ ..] = if is_short { short } else { long };
    quantized.map_or(plain, |quantized| quantized.select(quantizing))
}

/// Where a kernel writes its values. 0 if it quantizes them and nothing reads the values.
fn address_of_values(quantized: Option<&QuantizedOutput<'_>>, out: &DeviceViewMut<'_, f32>) -> u64 {
    if quantized.is_none_or(|quantized| quantized.needs_values) { out.address() } else { 0 }
}

/// The addresses of the activation tiles, or zeros if there are none.
fn quantized_rows(
    quantized: Option<&QuantizedOutput<'_>>,
    rows: usize,
    cols: usize,
) -> Result<QuantizedRows, CudaError> {
    if quantized.is_some() && !NormKernels::can_quantize(cols) {
        return Err(CudaError::Length {
            what: "row to be quantized",
            found: 4 * cols,
            expected: 4 * NORM_QUANTIZED_COLS_MAX,
        });
    }
    let none = QuantizedRows { act_tiles: 0, f16_sums: 0, f16_groups: 0 };
    quantized.map_or(Ok(none), |quantized| quantized.rows(rows, cols))
}

fn one_block_per_row(rows: usize) -> LaunchConfig {
    LaunchConfig {
        grid: (rows as u32, 1, 1),
        block: NORM_THREADS,
        shared_bytes: 0,
        overlaps_predecessor: true,
        cluster: 1,
    }
}

/// Returns the number of rows of `cols` values in `len` values.
pub(super) fn count_rows(what: &'static str, len: usize, cols: usize) -> Result<usize, CudaError> {
    let rows = len / cols.max(1);
    ensure_same_len(what, len, rows * cols)?;
    Ok(rows)
}

/// Compares two lengths, given in f32 values.
pub(super) fn ensure_same_len(what: &'static str, found: usize, expected: usize) -> Result<(), CudaError> {
    if found == expected {
        return Ok(());
    }
    Err(CudaError::Length { what, found: found * size_of::<f32>(), expected: expected * size_of::<f32>() })
}
