// SPDX-License-Identifier: Apache-2.0

//! Launcher of linear_*.cu: multiplies weight matrices with activations, for any number of tokens.
//!
//! The result of a row depends neither on the kernel that computes it nor on the other tokens (I5).
//! Every kernel of a type computes the partial sum over 256 columns in the same way. It then adds
//! the partial sums in ascending order (for F32 see linear_f32.cu). So the choice of a
//! [`LinearMethod`] changes the speed alone.

use ops::OpError;
use quant::DType;
use quant::layout::{TILE_COLS, TILE_ROWS, Tiles};

use super::abi::float_linear::FloatMatmul;
use super::abi::linear::{
    LinearMatmul, LinearMatvec, LinearParams, LinearSkinny, LinearWgmma, MATVEC_TILES_PER_STAGE,
    MATVEC_WARPS, WGMMA_PRODUCT_SHARED_BYTES,
};
pub use super::abi::linear::{MATRICES_MAX, MatmulShape};
use super::error::device_error;
use super::float_linear::{FloatShape, STAGES_MIN, float_kernel_name, float_maps};
use super::launch::{KernelName, launch_kernel};
use super::linear_names::{matmul_name, matvec_name};
use super::module::image;
use super::quantize::{ACT_TILE_TOKENS, QuantizedActivations, act_row_bytes, activation_bytes};
pub use super::skinny_linear::SKINNY_TOKENS;
use super::skinny_linear::{self, skinny_name};
pub use super::wgmma_linear::{WgmmaShape, has_kernels as has_wgmma_kernels, takes_f16_sums};
use super::wgmma_linear::{f16_sums, wgmma_name};
use super::{CudaError, Device, DeviceView, DeviceViewMut, LaunchConfig, LazyModule, Stream, f32_linear};

pub(super) const OP: &str = "linear";

/// One matrix and the buffer for its product.
pub struct MatrixProduct<'a> {
    pub shape: Tiles,
    /// In layout 1. The weights must be written before the stream's last synchronisation, because
    /// kernels read weights before the previous kernel of the stream has ended.
    pub tiles: DeviceView<'a, u8>,
    /// `[rows]`.
    pub bias: Option<DeviceView<'a, f32>>,
    /// `[tokens, rows]`.
    pub out: DeviceViewMut<'a, f32>,
}

/// The kernel that computes a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinearMethod {
    /// linear/matvec.cuh, for one token. Each lane computes one row over 256 columns.
    Matvec,
    /// linear/skinny_matmul.cuh, for up to [`SKINNY_TOKENS`] tokens. Each multiplying warp computes
    /// 16 rows over 256 columns at a time.
    Skinny,
    /// linear/matmul.cuh, on the tensor cores.
    Matmul(MatmulShape),
    /// linear/wgmma_product.cuh, for many tokens and some types, on GPUs with wgmma. For Q4_K, the
    /// activations have f16 sums.
    Wgmma(WgmmaShape),
    /// linear/float_matmul.cuh, for weights of 16-bit floats.
    FloatMatmul(FloatShape),
    /// linear_f32.cu. Each warp computes one row.
    Scalar,
}

/// The kernel before a launch in the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Before {
    /// A product with the same input, whose kernel lets the launch run beside it
    /// (linear/params.cuh). It leaves this many multiprocessors free. If none, the launch gets all
    /// of them when the product ends.
    Product { free: usize },
    /// Any other.
    Other,
}

impl LinearMethod {
    /// Whether the kernels keep the rules of linear/params.cuh for products side by side.
    fn runs_side_by_side(self) -> bool {
        matches!(self, Self::Skinny | Self::Matmul(_) | Self::Wgmma(_))
    }
}

impl MatmulShape {
    /// All shapes, by ascending number of tokens.
    pub fn all() -> [Self; 4] {
        Self::QUANTS
    }

    /// Bytes of a pipeline stage.
    fn stage_bytes(&self, tile_bytes: usize, act_tile_bytes: usize) -> usize {
        self.depth() * (self.row_tiles() * tile_bytes + self.act_tiles() * act_tile_bytes)
    }

    /// Bytes of the partial sums that are not added yet: two buffers of f32.
    fn partial_sum_bytes(&self) -> usize {
        let depth = self.depth();
        if depth == 1 { 0 } else { 2 * depth * self.row_tiles() * self.act_tiles() * 128 * 4 }
    }
}

/// Bytes of the copies in flight. 40 KiB per multiprocessor hide the latency of an H200's memory,
/// and two blocks share a multiprocessor. Four times as many bytes changed no time by more than
/// 10%.
const PIPELINE_BYTES: usize = 64 << 10;
const PIPELINE_STAGES: (usize, usize) = (2, 6);
/// The static shared memory of a matvec kernel, at most: sums of a norm, or the chosen experts of a
/// row. What a block may have holds for static and dynamic memory together.
const MATVEC_STATIC_BYTES: usize = 256;
/// An mbarrier.
pub(super) const BARRIER_BYTES: usize = 8;
pub(super) const NO_SHARED_MEMORY: &str = "bytes of shared memory for a row this long";

/// The kernels of all weight types on one device.
pub struct LinearKernels {
    device: Device,
    families: Vec<(DType, LazyModule)>,
    /// Kernels for matrices of two types.
    pub(super) mixed: LazyModule,
}

impl LinearKernels {
    pub fn new(device: &Device) -> Self {
        let family = |dtype, name, image| (dtype, LazyModule::new(device, name, image));
        let families = vec![
            family(DType::F32, "linear_f32", image!("linear_f32")),
            family(DType::F16, "linear_f16", image!("linear_f16")),
            family(DType::BF16, "linear_bf16", image!("linear_bf16")),
            family(DType::Q8_0, "linear_q8_0", image!("linear_q8_0")),
            family(DType::Q4_0, "linear_q4_0", image!("linear_q4_0")),
            family(DType::Q4_1, "linear_q4_1", image!("linear_q4_1")),
            family(DType::Q5_0, "linear_q5_0", image!("linear_q5_0")),
            family(DType::Q5_1, "linear_q5_1", image!("linear_q5_1")),
            family(DType::Q2_K, "linear_q2_k", image!("linear_q2_k")),
            family(DType::Q3_K, "linear_q3_k", image!("linear_q3_k")),
            family(DType::Q4_K, "linear_q4_k", image!("linear_q4_k")),
            family(DType::Q5_K, "linear_q5_k", image!("linear_q5_k")),
            family(DType::Q6_K, "linear_q6_k", image!("linear_q6_k")),
        ];
        let mixed = LazyModule::new(device, "linear_mixed", image!("linear_mixed"));
        Self { device: device.clone(), families, mixed }
    }

    pub(super) fn family(&self, dtype: DType) -> Result<&LazyModule, OpError> {
        let family = self.families.iter().find(|family| family.0 == dtype);
        family.map(|(_, module)| module).ok_or(OpError::Type { op: OP, dtype })
    }

    /// The fastest method for a matrix and this many tokens.
    pub fn method(&self, shape: Tiles, tokens: usize) -> LinearMethod {
        self.method_on(self.multiprocessors(), shape, shape.row_tiles(), tokens)
    }

    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    pub(super) fn multiprocessors(&self) -> usize {
        (self.device.multiprocessors() as usize).max(1)
    }

    /// [`Self::method`] if this many multiprocessors are free, for matrices like `shape` that have
    /// `row_tiles` tiles of 16 rows together.
    fn method_on(
        &self,
        multiprocessors: usize,
        shape: Tiles,
        row_tiles: usize,
        tokens: usize,
    ) -> LinearMethod {
        let dtype = shape.dtype();
        if dtype == DType::F32 {
            return LinearMethod::Scalar;
        }
        if is_float16(dtype) {
            let rows = row_tiles * TILE_ROWS;
            return LinearMethod::FloatMatmul(FloatShape::fastest(&self.device, rows, tokens));
        }
        if tokens == 1 {
            return LinearMethod::Matvec;
        }
        if skinny_linear::is_fastest(shape, tokens) {
            return LinearMethod::Skinny;
        }
        if let Some(shape) = WgmmaShape::fastest(&self.device, multiprocessors, shape, row_tiles, tokens) {
            return LinearMethod::Wgmma(shape);
        }
        let [narrow @ .., wide, large] = &MatmulShape::QUANTS;
        // A large block does the most work per byte that it loads. Large blocks are faster if at
        // least half of the multiprocessors get a block and each block is at least half full.
        let blocks = row_tiles.div_ceil(large.row_tiles()) * tokens.div_ceil(large.tokens());
        if 2 * tokens > large.tokens() && 2 * blocks >= multiprocessors {
            return LinearMethod::Matmul(*large);
        }
        LinearMethod::Matmul(*narrow.iter().find(|shape| tokens <= shape.tokens()).unwrap_or(wide))
    }

    /// Computes `out[t] = matrix x[t] (+ bias)` for up to four matrices of one type that share
    /// their input. Returns what the next launch may run beside.
    ///
    /// `before` is what the previous kernel in the stream is. [`Before::Product`] must be what the
    /// launch of that kernel returned, for the same `x`.
    pub fn launch(
        &self,
        stream: &Stream,
        before: Before,
        x: QuantizedActivations<'_>,
        products: &mut [MatrixProduct<'_>],
    ) -> Result<Before, OpError> {
        let Some(first) = products.first() else { return Ok(Before::Other) };
        let row_tiles = products.iter().map(|product| product.shape.row_tiles()).sum();
        let multiprocessors = match before {
            Before::Product { free } if free > 0 => free,
            _ => self.multiprocessors(),
        };
        let mut method = self.method_on(multiprocessors, first.shape, row_tiles, x.tokens);
        let mut launched = self.launch_after(stream, before, method, x, products);
        // If rows are too long for the device's shared memory: the memory of these shapes does not
        // depend on the rows. The second one needs less than the first.
        for shape in &MatmulShape::QUANTS[usize::from(x.tokens > ACT_TILE_TOKENS)..2] {
            if let Err(OpError::Shape { what: NO_SHARED_MEMORY, .. }) = launched {
                method = LinearMethod::Matmul(*shape);
                launched = self.launch_after(stream, before, method, x, products);
            }
        }
        let blocks = launched?;
        if blocks == 0 || !method.runs_side_by_side() {
            return Ok(Before::Other);
        }
        Ok(Before::Product { free: self.multiprocessors().saturating_sub(blocks as usize) })
    }

    /// Computes [`Self::launch`] with a given method, for tests and benches.
    pub fn launch_with(
        &self,
        stream: &Stream,
        method: LinearMethod,
        x: QuantizedActivations<'_>,
        products: &mut [MatrixProduct<'_>],
    ) -> Result<(), OpError> {
        self.launch_after(stream, Before::Other, method, x, products).map(|_| ())
    }

    /// Returns the number of blocks; 0 if there is nothing to compute, or for F32.
    fn launch_after(
        &self,
        stream: &Stream,
        before: Before,
        method: LinearMethod,
        x: QuantizedActivations<'_>,
        products: &mut [MatrixProduct<'_>],
    ) -> Result<u32, OpError> {
        let Some(first) = products.first() else { return Ok(0) };
        let shape = first.shape;
        let dtype = shape.dtype();
        let family = self.family(dtype)?;
        check_products(x, products)?;
        if x.tokens == 0 || shape.col_tiles() == 0 {
            return Ok(0);
        }
        let mut params = linear_params(x, products);
        let is_beside = before != Before::Other && method.runs_side_by_side();
        params.runs_beside_previous = i32::from(is_beside);
        match method {
            LinearMethod::Scalar => {
                products.iter_mut().try_for_each(|product| f32_linear::launch(family, stream, x, product))?;
                Ok(0)
            }
            LinearMethod::Matvec => {
                let name = matvec_name(dtype).filter(|_| x.tokens == 1).ok_or_else(|| no_kernel(x.tokens))?;
                let (launch, stages) = self.matvec_launch(family, name, x, products).map_err(in_op)?;
                let arguments = LinearMatvec { params, residual: 0, stages };
                // SAFETY: tiles, activation tiles and outputs have the lengths that the kernel
                // derives from rows, col_tiles and tokens: `check_products` compared them. The
                // kernel lays out shared memory as in linear/matvec.cuh, from the same numbers.
                unsafe { launch_kernel(family, name, stream, launch, &arguments) }
                    .map_err(device_error(OP))?;
                Ok(launch.grid.0)
            }
            LinearMethod::Skinny => {
                let name = skinny_name(dtype, skinny_linear::capacity(x.tokens))
                    .ok_or_else(|| no_kernel(x.tokens))?;
                let (launch, stages) = self.skinny_launch(family, name, x, products).map_err(in_op)?;
                // SAFETY: as above, for linear/skinny_matmul.cuh.
                unsafe { launch_kernel(family, name, stream, launch, &LinearSkinny { params, stages }) }
                    .map_err(device_error(OP))?;
                Ok(launch.grid.0)
            }
            LinearMethod::Matmul(shape) => {
                let name = matmul_name(dtype, shape).ok_or_else(|| no_kernel(shape.tokens()))?;
                let (launch, stages) = self.matmul_launch(family, name, shape, x, products).map_err(in_op)?;
                // SAFETY: as above, for linear/matmul.cuh.
                unsafe { launch_kernel(family, name, stream, launch, &LinearMatmul { params, stages }) }
                    .map_err(device_error(OP))?;
                Ok(launch.grid.0)
            }
            LinearMethod::Wgmma(shape) => self.launch_wgmma(family, stream, shape, x, params, products),
            LinearMethod::FloatMatmul(shape) => {
                let name = float_kernel_name(dtype, shape).ok_or_else(|| no_kernel(shape.tokens()))?;
                let (stages, shared_bytes) = shape.pipeline(self.device.shared_bytes_max(), x.tokens);
                if stages < STAGES_MIN {
                    let (found, expected) = (stages.max(0) as usize, STAGES_MIN as usize);
                    return Err(OpError::Shape { op: OP, what: "pipeline stages", found, expected });
                }
                let rows = products.iter().map(|product| product.shape.rows());
                let output_tiles = shape.count_tiles(rows, x.tokens);
                let launch = self
                    .persistent_launch(family, name, output_tiles, shape.warps(), shared_bytes)
                    .map_err(device_error(OP))?;
                let maps = float_maps(&self.device, shape, x, products).map_err(device_error(OP))?;
                let token_rows = shape.token_rows(x.tokens) as i32;
                let arguments = FloatMatmul { params, maps, stages, token_rows };
                // SAFETY: as above, for linear/float_matmul.cuh. The maps cover whole weights and
                // activation tiles.
                unsafe { launch_kernel(family, name, stream, launch, &arguments) }
                    .map_err(device_error(OP))?;
                Ok(launch.grid.0)
            }
        }
    }

    /// `params` are those of the products, which `check_products` has checked.
    fn launch_wgmma(
        &self,
        family: &LazyModule,
        stream: &Stream,
        shape: WgmmaShape,
        x: QuantizedActivations<'_>,
        params: LinearParams,
        products: &[MatrixProduct<'_>],
    ) -> Result<u32, OpError> {
        let dtype = products[0].shape.dtype();
        let Some(sums) = f16_sums(dtype, &x) else {
            return Err(OpError::Type { op: OP, dtype });
        };
        let name = wgmma_name(dtype, shape).ok_or_else(|| no_kernel(shape.tokens))?;
        let row_tiles = products.iter().map(|product| product.shape.row_tiles());
        let tiles: usize = row_tiles.map(|tiles| shape.output_tiles(tiles, x.tokens)).sum();
        let workers = tiles.min(shape.workers(self.multiprocessors()));
        let launch = LaunchConfig {
            grid: ((workers * shape.blocks) as u32, 1, 1),
            block: 32 * shape.warps() as u32,
            shared_bytes: WGMMA_PRODUCT_SHARED_BYTES as u32,
            overlaps_predecessor: true,
            cluster: shape.blocks as u32,
        };
        // SAFETY: as in `launch_with`, for linear/wgmma_product.cuh. Activation tiles and sums
        // beyond the tokens are not read, and `check_products` compared the length of the
        // activations.
        unsafe { launch_kernel(family, name, stream, launch, &LinearWgmma { params, sums }) }
            .map_err(device_error(OP))?;
        Ok(launch.grid.0)
    }

    /// The launch of a matvec kernel and its number of pipeline stages.
    pub(super) fn matvec_launch<A>(
        &self,
        family: &LazyModule,
        name: KernelName<A>,
        x: QuantizedActivations<'_>,
        products: &[MatrixProduct<'_>],
    ) -> Result<(LaunchConfig, i32), LaunchError> {
        let shape = products[0].shape;
        let (tile_bytes, col_tiles) = (shape.tile_bytes(), shape.col_tiles());
        let (stages, shared_bytes) = matvec_pipeline(&self.device, tile_bytes, col_tiles, x.layout.format)?;
        let row_tiles: usize = products.iter().map(|product| product.shape.row_tiles()).sum();
        let launch = self.persistent_launch(family, name, row_tiles, MATVEC_WARPS, shared_bytes)?;
        Ok((launch, stages))
    }

    fn skinny_launch(
        &self,
        family: &LazyModule,
        name: KernelName<LinearSkinny>,
        x: QuantizedActivations<'_>,
        products: &[MatrixProduct<'_>],
    ) -> Result<(LaunchConfig, i32), LaunchError> {
        let row_tiles = products.iter().map(|product| product.shape.row_tiles()).sum();
        let tokens = skinny_linear::capacity(x.tokens);
        let (stages, shared_bytes) =
            skinny_linear::pipeline(&self.device, products[0].shape, tokens, x.layout.format)?;
        let launch = self.persistent_launch(family, name, row_tiles, skinny_linear::WARPS, shared_bytes)?;
        Ok((launch, stages))
    }

    /// The launch of a matmul kernel and its number of pipeline stages. linear/matmul.cuh divides
    /// shared memory in the same way.
    fn matmul_launch(
        &self,
        family: &LazyModule,
        name: KernelName<LinearMatmul>,
        matmul: MatmulShape,
        x: QuantizedActivations<'_>,
        products: &[MatrixProduct<'_>],
    ) -> Result<(LaunchConfig, i32), LaunchError> {
        let shape = products[0].shape;
        let act_tile = activation_bytes(x.layout.format, 1, 1).unwrap_or(0);
        let stage_bytes = matmul.stage_bytes(shape.tile_bytes(), act_tile);
        let (stages, shared_bytes) = pipeline(
            self.device.shared_bytes_max() as usize,
            stage_bytes,
            matmul.partial_sum_bytes() + PIPELINE_STAGES.1 * BARRIER_BYTES,
        )?;
        let row_tiles = products.iter().map(|product| product.shape.row_tiles());
        let groups: usize = row_tiles.map(|row_tiles| row_tiles.div_ceil(matmul.row_tiles())).sum();
        let output_tiles = groups * x.tokens.div_ceil(matmul.tokens());
        let launch = self.persistent_launch(family, name, output_tiles, matmul.warps(), shared_bytes)?;
        Ok((launch, stages))
    }

    /// A launch of at most as many blocks as run at once. Each block loops over its share of
    /// `work_items`.
    fn persistent_launch<A>(
        &self,
        family: &LazyModule,
        name: KernelName<A>,
        work_items: usize,
        warps: usize,
        shared_bytes: u32,
    ) -> Result<LaunchConfig, CudaError> {
        let block = 32 * warps as u32;
        let resident = family.kernel(name.as_c_str())?.blocks_per_multiprocessor(block, shared_bytes)?;
        let blocks = (work_items as u32).min(resident.max(1) * self.device.multiprocessors());
        Ok(LaunchConfig { grid: (blocks, 1, 1), block, shared_bytes, overlaps_predecessor: true, cluster: 1 })
    }
}

/// The number of pipeline stages of a matvec kernel, and its bytes of shared memory. Its values are
/// sums over `col_tiles` tiles of `tile_bytes` bytes. linear/matvec.cuh and experts/row_matvec.cuh
/// divide shared memory in the same way.
pub(super) fn matvec_pipeline(
    device: &Device,
    tile_bytes: usize,
    col_tiles: usize,
    format: DType,
) -> Result<(i32, u32), OpError> {
    let stage_bytes = MATVEC_WARPS * MATVEC_TILES_PER_STAGE * tile_bytes;
    let batch = MATVEC_WARPS.div_ceil(col_tiles.div_ceil(MATVEC_TILES_PER_STAGE).max(1));
    let act_rows = col_tiles * act_row_bytes(format);
    let values = 2 * batch * col_tiles * TILE_ROWS * 4;
    let barriers = MATVEC_WARPS * PIPELINE_STAGES.1 * BARRIER_BYTES;
    let available = (device.shared_bytes_max() as usize).saturating_sub(MATVEC_STATIC_BYTES);
    pipeline(available, stage_bytes, act_rows + values + barriers)
}

/// The number of pipeline stages, and the bytes of shared memory for these stages and for `rest`.
/// `available` are all that a block may have.
fn pipeline(available: usize, stage_bytes: usize, rest: usize) -> Result<(i32, u32), OpError> {
    let (least, most) = PIPELINE_STAGES;
    let fitting = available.saturating_sub(rest) / stage_bytes;
    let stages = (PIPELINE_BYTES / stage_bytes).clamp(least, most).min(fitting);
    if stages == 0 {
        let found = stage_bytes + rest;
        return Err(OpError::Shape { op: OP, what: NO_SHARED_MEMORY, found, expected: available });
    }
    Ok((stages as i32, (stages * stage_bytes + rest) as u32))
}

/// The reason why a launch could not be prepared.
pub(super) enum LaunchError {
    Op(OpError),
    Cuda(CudaError),
}

impl From<OpError> for LaunchError {
    fn from(error: OpError) -> Self {
        Self::Op(error)
    }
}

impl From<CudaError> for LaunchError {
    fn from(error: CudaError) -> Self {
        Self::Cuda(error)
    }
}

pub(super) fn in_op(error: LaunchError) -> OpError {
    match error {
        LaunchError::Op(error) => error,
        LaunchError::Cuda(error) => device_error(OP)(error),
    }
}

/// The kernels' parameters for at most MATRICES_MAX products.
pub(super) fn linear_params(x: QuantizedActivations<'_>, products: &[MatrixProduct<'_>]) -> LinearParams {
    let mut params = LinearParams {
        weights: [0; MATRICES_MAX],
        out: [0; MATRICES_MAX],
        bias: [0; MATRICES_MAX],
        rows: [0; MATRICES_MAX],
        matrices: products.len() as i32,
        cols: x.cols as i32,
        col_tiles: x.cols.div_ceil(TILE_COLS) as i32,
        tokens: x.tokens as i32,
        runs_beside_previous: 0,
        unused: 0,
        act_tiles: x.data.address(),
    };
    for (at, product) in products.iter().enumerate() {
        params.weights[at] = product.tiles.address();
        params.out[at] = product.out.address();
        params.bias[at] = product.bias.map_or(0, |bias| bias.address());
        params.rows[at] = product.shape.rows() as i32;
    }
    params
}

fn is_float16(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}

pub(super) fn check_products(
    x: QuantizedActivations<'_>,
    products: &[MatrixProduct<'_>],
) -> Result<(), OpError> {
    let fail = |what, found, expected| Err(OpError::Shape { op: OP, what, found, expected });
    if products.len() > MATRICES_MAX {
        return fail("matrices of one launch", products.len(), MATRICES_MAX);
    }
    let bytes = x.layout.bytes(x.tokens, x.cols).unwrap_or(usize::MAX);
    if x.data.len() < bytes {
        return fail("bytes of the activations", x.data.len(), bytes);
    }
    for product in products {
        let dtype = product.shape.dtype();
        if dtype != products[0].shape.dtype() || dtype.activation() != Some(x.layout.format) {
            return Err(OpError::Type { op: OP, dtype });
        }
        let (rows, cols) = (product.shape.rows(), product.shape.cols());
        let pairs = [
            ("row length", cols, x.cols),
            ("bytes of the weight", product.tiles.len(), product.shape.bytes()),
            ("misalignment of the weight", (product.tiles.address() % 16) as usize, 0),
            ("values of the bias", product.bias.map_or(rows, |bias| bias.len()), rows),
        ];
        if let Some((what, found, expected)) =
            pairs.into_iter().find(|(_, found, expected)| found != expected)
        {
            return fail(what, found, expected);
        }
        if product.out.len() < x.tokens * rows {
            return fail("values of the output", product.out.len(), x.tokens * rows);
        }
        // The kernels count rows and tokens in 32 bits.
        if rows > i32::MAX as usize / 2 || x.tokens > i32::MAX as usize / 2 {
            return fail("rows or tokens", rows.max(x.tokens), i32::MAX as usize / 2);
        }
    }
    Ok(())
}

pub(super) fn no_kernel(tokens: usize) -> OpError {
    OpError::Shape { op: OP, what: "tokens of a matrix-vector kernel", found: tokens, expected: 4 }
}
