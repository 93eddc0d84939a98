//! Launcher of linear_*.cu: products of weight matrices with activations in the weights' form, for any number of tokens.
//!
//! The result of a row does not depend on which kernel computes it, nor on the other tokens (I5): every kernel of a type
//! forms the value of 256 columns alike and adds them in ascending order (F32: linear_f32.cu). So the choice of a
//! [`LinearMethod`] is about speed only.

use std::ffi::CStr;

use ops::OpError;
use quant::DType;
use quant::layout::{TILE_COLS, TILE_ROWS, Tiles};

use super::error::device_error;
use super::module::{arguments, image};
use super::quantize::{ACT_TILE_TOKENS, QuantizedActivations, activation_bytes};
use super::{Device, Family, Launch, Stream, View, ViewMut};

const OP: &str = "linear";

/// As MATRICES_MAX in linear/params.cuh.
pub const MATRICES_MAX: usize = 4;

/// One matrix and where its product goes.
pub struct MatrixProduct<'a> {
    pub shape: Tiles,
    /// In layout 1, written before the stream's last synchronisation: kernels read weights before their predecessor in the
    /// stream has ended.
    pub tiles: View<'a, u8>,
    /// `[rows]`.
    pub bias: Option<View<'a, f32>>,
    /// `[tokens, rows]`.
    pub out: ViewMut<'a, f32>,
}

/// As `LinearParams` in linear/params.cuh.
#[derive(Clone, Copy)]
#[repr(C)]
struct LinearParams {
    weights: [u64; MATRICES_MAX],
    out: [u64; MATRICES_MAX],
    bias: [u64; MATRICES_MAX],
    rows: [i32; MATRICES_MAX],
    matrices: i32,
    cols: i32,
    col_tiles: i32,
    tokens: i32,
    act_tiles: u64,
}

/// Which kernel computes a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinearMethod {
    /// One to four tokens: a lane per row and 256 columns.
    Matvec(usize),
    /// Tensor cores.
    Matmul(MatmulShape),
    /// F32 weights: one warp per row.
    Scalar,
}

/// Warps of a tensor-core block, and what each computes at a time: as in linear/kernels.cuh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatmulShape {
    /// Tokens of a block, and the kernel's name.
    pub tokens: usize,
    row_tiles: usize,
    warps: u32,
    /// Runs of 256 columns that a block computes at once.
    depth: usize,
}

impl MatmulShape {
    const QUANTS: [Self; 4] = [
        Self { tokens: 8, row_tiles: 2, warps: 16, depth: 8 },
        Self { tokens: 16, row_tiles: 2, warps: 16, depth: 4 },
        Self { tokens: 32, row_tiles: 2, warps: 16, depth: 4 },
        Self { tokens: 128, row_tiles: 8, warps: 16, depth: 1 },
    ];
    const FLOATS: [Self; 4] = [
        Self { tokens: 8, row_tiles: 2, warps: 4, depth: 2 },
        Self { tokens: 16, row_tiles: 2, warps: 4, depth: 2 },
        Self { tokens: 32, row_tiles: 4, warps: 4, depth: 1 },
        Self { tokens: 64, row_tiles: 4, warps: 8, depth: 1 },
    ];

    /// Of BF16, whose act_tiles are so large that one block of the for_type shape fills a multiprocessor: three of these fit. On an
    /// H200, 8 tokens: 4096 x 151936 takes 318 us by these and 445 by the for_type, 4096 x 12288 28 and 41, and 4096 x 4096,
    /// where most would find no params, 26 and 15.
    const BF16_SMALL: Self = Self { tokens: 8, row_tiles: 2, warps: 2, depth: 1 };

    /// All kernels of a type.
    pub fn all(dtype: DType) -> Vec<Self> {
        let short = (dtype == DType::BF16).then_some(Self::BF16_SMALL);
        Self::for_type(dtype).iter().copied().chain(short).collect()
    }

    /// By ascending number of tokens.
    fn for_type(dtype: DType) -> &'static [Self; 4] {
        if is_float16(dtype) { &Self::FLOATS } else { &Self::QUANTS }
    }

    /// Bytes of a stage of the pipeline; `tile_bytes` is 0 for rows of halves, which stand 16 bytes apart.
    fn stage_bytes(&self, tile_bytes: usize, panel_bytes: usize) -> usize {
        let tiles = match tile_bytes {
            0 => TILE_ROWS * (self.depth * TILE_COLS * 2 + 16),
            tile_bytes => self.depth * tile_bytes,
        };
        self.row_tiles * tiles + self.act_tiles() * self.depth * panel_bytes
    }

    fn act_tiles(&self) -> usize {
        self.tokens / ACT_TILE_TOKENS
    }

    /// Values that wait for their sum: two buffers of f32.
    fn partial_sum_bytes(&self) -> usize {
        if self.depth == 1 { 0 } else { 2 * self.depth * self.row_tiles * self.act_tiles() * 128 * 4 }
    }
}

/// As in linear/matvec.cuh.
const MATVEC_WARPS: usize = 8;
const MATVEC_TILES_PER_STAGE: usize = 2;
/// More tokens than this go to the tensor cores. On an H200, Q4_K 4096 x 12288: two tokens take 10.3 us by vectors and
/// 12.6 by tiles, four 12.6 and 12.6; 12288 x 4096: 12.0 and 12.1, 15.8 and 12.1.
const MATVEC_TOKENS_MAX: usize = 3;
/// Copies in flight: 40 KiB per multiprocessor hide the latency of an H200's memory; two blocks share one. Four times as
/// much changed no time by more than 10%.
const PIPELINE_BYTES: usize = 64 << 10;
const PIPELINE_STAGES: (usize, usize) = (2, 6);
const NO_SHARED_MEMORY: &str = "bytes of shared memory for a row this long";

/// The kernels of all weight types on one device.
pub struct LinearKernels {
    device: Device,
    families: Vec<(DType, &'static str, Family)>,
}

impl LinearKernels {
    pub fn new(device: &Device) -> Self {
        let family = |dtype, name, image| (dtype, name, Family::new(device, name, image));
        let families = vec![
            family(DType::F32, "f32", image!("linear_f32")),
            family(DType::F16, "f16", image!("linear_f16")),
            family(DType::BF16, "bf16", image!("linear_bf16")),
            family(DType::Q8_0, "q8_0", image!("linear_q8_0")),
            family(DType::Q4_0, "q4_0", image!("linear_q4_0")),
            family(DType::Q4_1, "q4_1", image!("linear_q4_1")),
            family(DType::Q5_0, "q5_0", image!("linear_q5_0")),
            family(DType::Q5_1, "q5_1", image!("linear_q5_1")),
            family(DType::Q2_K, "q2_k", image!("linear_q2_k")),
            family(DType::Q3_K, "q3_k", image!("linear_q3_k")),
            family(DType::Q4_K, "q4_k", image!("linear_q4_k")),
            family(DType::Q5_K, "q5_k", image!("linear_q5_k")),
            family(DType::Q6_K, "q6_k", image!("linear_q6_k")),
        ];
        Self { device: device.clone(), families }
    }

    /// The fastest method for `row_tiles` groups of 16 rows and this many tokens.
    pub fn method(&self, dtype: DType, row_tiles: usize, tokens: usize) -> LinearMethod {
        if dtype == DType::F32 {
            return LinearMethod::Scalar;
        }
        if tokens <= MATVEC_TOKENS_MAX && !is_float16(dtype) {
            return LinearMethod::Matvec(tokens);
        }
        let multiprocessors = self.device.multiprocessors() as usize;
        let short = MatmulShape::BF16_SMALL;
        let short_blocks = row_tiles.div_ceil(short.row_tiles);
        if dtype == DType::BF16 && tokens <= short.tokens && short_blocks >= 2 * multiprocessors {
            return LinearMethod::Matmul(short);
        }
        let [small @ .., wide, large] = MatmulShape::for_type(dtype);
        // Large blocks do the most with what they load, but half of the device must have one, and not half empty.
        let blocks = row_tiles.div_ceil(large.row_tiles) * tokens.div_ceil(large.tokens);
        if 2 * tokens > large.tokens && 2 * blocks >= multiprocessors {
            return LinearMethod::Matmul(*large);
        }
        LinearMethod::Matmul(*small.iter().find(|shape| tokens <= shape.tokens).unwrap_or(wide))
    }

    /// `out[t] = matrix x[t] (+ bias)` for up to four matrices of one type that share their input.
    pub fn launch(
        &self,
        stream: &Stream,
        x: QuantizedActivations<'_>,
        products: &mut [MatrixProduct<'_>],
    ) -> Result<(), OpError> {
        let Some(first) = products.first() else { return Ok(()) };
        let row_tiles = products.iter().map(|product| product.shape.row_tiles()).sum();
        let first_dtype = first.shape.dtype();
        let method = self.method(first_dtype, row_tiles, x.tokens);
        match self.launch_with(stream, method, x, products) {
            // Smaller blocks for longer rows, or a device with less shared memory.
            Err(OpError::Shape { what: NO_SHARED_MEMORY, .. }) => {
                let smaller = LinearMethod::Matmul(MatmulShape::for_type(first_dtype)[1]);
                self.launch_with(stream, smaller, x, products)
            }
            result => result,
        }
    }

    /// For tests and measurements: with a given method. A vector method must have the tokens of `x`.
    pub fn launch_with(
        &self,
        stream: &Stream,
        method: LinearMethod,
        x: QuantizedActivations<'_>,
        products: &mut [MatrixProduct<'_>],
    ) -> Result<(), OpError> {
        let Some(first) = products.first() else { return Ok(()) };
        let shape = first.shape;
        let dtype = shape.dtype();
        let Some((_, name, family)) = self.families.iter().find(|family| family.0 == dtype) else {
            return Err(OpError::Type { op: OP, dtype });
        };
        check(x, products)?;
        if x.tokens == 0 || shape.col_tiles() == 0 {
            return Ok(());
        }
        if method == LinearMethod::Scalar {
            return products.iter_mut().try_for_each(|product| launch_scalar(family, stream, x, product));
        }
        let params = linear_params(x, products);
        let grid = self.grid(method, x, products)?;
        let kernel = family.kernel(select_kernel(name, method)?).map_err(device_error(OP))?;
        let (block, shared_bytes) = (32 * grid.warps, grid.shared_bytes);
        let at_once = kernel.blocks_per_multiprocessor(block, shared_bytes).map_err(device_error(OP))?;
        let blocks = (grid.blocks as u32).min(at_once.max(1) * self.device.multiprocessors());
        let launch = Launch { grid: (blocks, 1, 1), block, shared_bytes, overlaps_predecessor: true };
        let stages = grid.stages as i32;
        // SAFETY: (LinearParams, int). Tiles, act_tiles and outputs have the lengths that the kernel derives from rows, col_tiles and
        // tokens: `check` compared them. Shared memory is laid out as in the .cuh files from the ensure_same_len numbers.
        unsafe { kernel.launch(stream, launch, arguments![params, stages]) }.map_err(device_error(OP))
    }

    /// LinearParams items, warps per block and shared memory, laid out as in the .cuh files.
    fn grid(
        &self,
        method: LinearMethod,
        x: QuantizedActivations<'_>,
        products: &[MatrixProduct<'_>],
    ) -> Result<LaunchShape, OpError> {
        let shape = products[0].shape;
        let row_tiles = products.iter().map(|product| product.shape.row_tiles());
        let act_tile = activation_bytes(x.format, 1, 1).unwrap_or(0);
        Ok(match method {
            LinearMethod::Matvec(tokens) => {
                let stage_bytes = MATVEC_WARPS * MATVEC_TILES_PER_STAGE * shape.tile_bytes();
                let units = shape.col_tiles().div_ceil(MATVEC_TILES_PER_STAGE);
                let batch = MATVEC_WARPS.div_ceil(units);
                let act_rows = tokens * shape.col_tiles() * act_row_bytes(x.format);
                let values = 2 * batch * shape.col_tiles() * TILE_ROWS * tokens * 4;
                let rest = act_rows + values + MATVEC_WARPS * PIPELINE_STAGES.1 * 8;
                let (stages, shared_bytes) = self.pipeline(stage_bytes, rest)?;
                LaunchShape { blocks: row_tiles.sum(), warps: MATVEC_WARPS as u32, stages, shared_bytes }
            }
            LinearMethod::Matmul(tiles) => {
                let stage = tiles.stage_bytes(shape.tile_bytes(), act_tile);
                let (stages, shared_bytes) =
                    self.pipeline(stage, tiles.partial_sum_bytes() + PIPELINE_STAGES.1 * 8)?;
                let groups: usize = row_tiles.map(|row_tiles| row_tiles.div_ceil(tiles.row_tiles)).sum();
                let blocks = groups * x.tokens.div_ceil(tiles.tokens);
                LaunchShape { blocks, warps: tiles.warps, stages, shared_bytes }
            }
            LinearMethod::Scalar => LaunchShape { blocks: 0, warps: 0, stages: 0, shared_bytes: 0 },
        })
    }

    /// Slots of a pipeline of copies and the shared memory with `rest` beside it.
    fn pipeline(&self, stage_bytes: usize, rest: usize) -> Result<(usize, u32), OpError> {
        let available = (self.device.shared_bytes_max() as usize).saturating_sub(rest);
        let stages = (PIPELINE_BYTES / stage_bytes)
            .clamp(PIPELINE_STAGES.0, PIPELINE_STAGES.1)
            .min(available / stage_bytes);
        if stages == 0 {
            let (found, expected) = (stage_bytes + rest, self.device.shared_bytes_max() as usize);
            return Err(OpError::Shape { op: OP, what: NO_SHARED_MEMORY, found, expected });
        }
        Ok((stages, (stages * stage_bytes + rest) as u32))
    }
}

struct LaunchShape {
    blocks: usize,
    warps: u32,
    stages: usize,
    shared_bytes: u32,
}

/// At most MATRICES_MAX products.
fn linear_params(x: QuantizedActivations<'_>, products: &[MatrixProduct<'_>]) -> LinearParams {
    let mut params = LinearParams {
        weights: [0; MATRICES_MAX],
        out: [0; MATRICES_MAX],
        bias: [0; MATRICES_MAX],
        rows: [0; MATRICES_MAX],
        matrices: products.len() as i32,
        cols: x.cols as i32,
        col_tiles: x.cols.div_ceil(TILE_COLS) as i32,
        tokens: x.tokens as i32,
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

/// As linear_f32.cu.
const SCALAR_WARPS: usize = 8;
const SCALAR_TOKENS: usize = 4;

fn launch_scalar(
    family: &Family,
    stream: &Stream,
    x: QuantizedActivations<'_>,
    product: &mut MatrixProduct<'_>,
) -> Result<(), OpError> {
    let rows = product.shape.rows();
    let kernel = family.kernel(c"linear_f32").map_err(device_error(OP))?;
    let launch = Launch {
        grid: (rows.div_ceil(SCALAR_WARPS) as u32, x.tokens.div_ceil(SCALAR_TOKENS) as u32, 1),
        block: 32 * SCALAR_WARPS as u32,
        shared_bytes: 0,
        overlaps_predecessor: true,
    };
    if launch.grid.0 == 0 {
        return Ok(());
    }
    let (weights, act_tiles, out) = (product.tiles.address(), x.data.address(), product.out.address());
    let bias = product.bias.map_or(0, |bias| bias.address());
    let (cols, rows, tokens) = (x.cols as i32, rows as i32, x.tokens as i32);
    // SAFETY: (const float *, const float *, const float *, float *, int, int, int); a warp reads one row and four tokens
    // and writes four values, all inside lengths that `check` compared.
    unsafe { kernel.launch(stream, launch, arguments![weights, act_tiles, bias, out, cols, rows, tokens]) }
        .map_err(device_error(OP))
}

/// As act_row_bytes in linear/tile.cuh.
pub(super) fn act_row_bytes(format: DType) -> usize {
    match format {
        DType::Q8_K => 256 + 16 + 32,
        DType::Q8_1 => 256 + 32 + 32,
        _ => 256 + 32,
    }
}

fn check(x: QuantizedActivations<'_>, products: &[MatrixProduct<'_>]) -> Result<(), OpError> {
    let fail = |what, found, expected| Err(OpError::Shape { op: OP, what, found, expected });
    if products.len() > MATRICES_MAX {
        return fail("matrices of one launch", products.len(), MATRICES_MAX);
    }
    for product in products {
        let dtype = product.shape.dtype();
        if dtype != products[0].shape.dtype() || dtype.activation() != Some(x.format) {
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
        // Rows and tokens are counted in 32 bits on the device.
        if rows > i32::MAX as usize / 2 || x.tokens > i32::MAX as usize / 2 {
            return fail("rows or tokens", rows.max(x.tokens), i32::MAX as usize / 2);
        }
    }
    Ok(())
}

/// The names that linear/kernels.cuh makes.
fn select_kernel(name: &str, method: LinearMethod) -> Result<&'static CStr, OpError> {
    macro_rules! names {
        ($($name:literal),*) => {
            match (name, method) {
                ("bf16", LinearMethod::Matmul(MatmulShape::BF16_SMALL)) => Some("matmul_bf16_8_short\0"),
                $(
                    ($name, LinearMethod::Matvec(1)) => Some(concat!("matvec_", $name, "_1\0")),
                    ($name, LinearMethod::Matvec(2)) => Some(concat!("matvec_", $name, "_2\0")),
                    ($name, LinearMethod::Matvec(3)) => Some(concat!("matvec_", $name, "_3\0")),
                    ($name, LinearMethod::Matvec(4)) => Some(concat!("matvec_", $name, "_4\0")),
                    ($name, LinearMethod::Matmul(MatmulShape { tokens: 8, .. })) => Some(concat!("matmul_", $name, "_8\0")),
                    ($name, LinearMethod::Matmul(MatmulShape { tokens: 16, .. })) => Some(concat!("matmul_", $name, "_16\0")),
                    ($name, LinearMethod::Matmul(MatmulShape { tokens: 32, .. })) => Some(concat!("matmul_", $name, "_32\0")),
                    ($name, LinearMethod::Matmul(MatmulShape { tokens: 64, .. })) => Some(concat!("matmul_", $name, "_64\0")),
                    ($name, LinearMethod::Matmul(MatmulShape { tokens: 128, .. })) => Some(concat!("matmul_", $name, "_128\0")),
                )*
                _ => None,
            }
        };
    }
    let found =
        names!("f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k");
    found.and_then(|name| CStr::from_bytes_with_nul(name.as_bytes()).ok()).ok_or(OpError::Shape {
        op: OP,
        what: "tokens of a matrix-vector kernel",
        found: match method {
            LinearMethod::Matvec(tokens) => tokens,
            LinearMethod::Matmul(shape) => shape.tokens,
            LinearMethod::Scalar => 0,
        },
        expected: 4,
    })
}
