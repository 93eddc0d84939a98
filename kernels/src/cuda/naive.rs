// SPDX-License-Identifier: Apache-2.0

//! Launcher of naive.cu: attention and matrix products in f64, without tiles. The GPU tests compare
//! the fast kernels with these.

use ops::AttentionSpec;

use super::abi::naive::{NAIVE_THREADS, NaiveAttention, NaiveMatmul};
use super::launch::{kernel_name, launch_kernel};
use super::module::image;
use super::norm::{count_rows, ensure_same_len};
use super::{CudaError, Device, DeviceView, DeviceViewMut, LaunchConfig, LazyModule, Stream};

pub struct NaiveKernels(LazyModule);

impl NaiveKernels {
    pub fn new(device: &Device) -> Self {
        Self(LazyModule::new(device, "naive", image!("naive")))
    }

    /// Computes attention for consecutive tokens of one sequence. The first token is at
    /// `first_position`. Row p of `keys` and `values` belongs to position p.
    #[expect(clippy::too_many_arguments, reason = "operands of one kernel, each of its own meaning")]
    pub fn attention(
        &self,
        stream: &Stream,
        spec: &AttentionSpec,
        queries: DeviceView<'_, f32>,
        keys: DeviceView<'_, f32>,
        values: DeviceView<'_, f32>,
        first_position: usize,
        out: &mut DeviceViewMut<'_, f32>,
    ) -> Result<(), CudaError> {
        let AttentionSpec { heads, kv_heads, head_dim, scale } = *spec;
        let rows = count_rows("queries of attention", queries.len(), heads * head_dim)?;
        let positions = count_rows("keys of attention", keys.len(), kv_heads * head_dim)?;
        ensure_same_len("values of attention", values.len(), keys.len())?;
        ensure_same_len("output of attention", out.len(), queries.len())?;
        ensure_same_len(
            "positions of attention",
            positions.min(first_position + rows),
            first_position + rows,
        )?;
        ensure_same_len("heads per KV head", heads % kv_heads.max(1), 0)?;
        if queries.is_empty() {
            return Ok(());
        }
        let launch = LaunchConfig {
            grid: (rows as u32, heads as u32, 1),
            block: NAIVE_THREADS,
            shared_bytes: 0,
            overlaps_predecessor: false,
            cluster: 1,
        };
        let arguments = NaiveAttention {
            queries: queries.address(),
            keys: keys.address(),
            values: values.address(),
            heads: heads as i32,
            kv_heads: kv_heads as i32,
            dim: head_dim as i32,
            first_position: first_position as i32,
            scale,
            out: out.address(),
        };
        // SAFETY: block (r, h) reads row r and the rows up to its position. It writes head h of row
        // r. All lengths were checked.
        unsafe {
            launch_kernel(&self.0, kernel_name!("naive", "naive_attention"), stream, launch, &arguments)
        }
    }

    /// Computes `out[t][r] = weights[r] . x[t] + bias[r]`. Rows have `cols` values.
    pub fn matmul(
        &self,
        stream: &Stream,
        weights: DeviceView<'_, f32>,
        x: DeviceView<'_, f32>,
        bias: Option<DeviceView<'_, f32>>,
        cols: usize,
        out: &mut DeviceViewMut<'_, f32>,
    ) -> Result<(), CudaError> {
        let rows = count_rows("weights of a product", weights.len(), cols)?;
        let tokens = count_rows("input of a product", x.len(), cols)?;
        ensure_same_len("output of a product", out.len(), tokens * rows)?;
        ensure_same_len("bias of a product", bias.map_or(rows, |bias| bias.len()), rows)?;
        if out.is_empty() {
            return Ok(());
        }
        let launch = LaunchConfig {
            grid: (rows.div_ceil(NAIVE_THREADS as usize) as u32, tokens as u32, 1),
            block: NAIVE_THREADS,
            shared_bytes: 0,
            overlaps_predecessor: false,
            cluster: 1,
        };
        let arguments = NaiveMatmul {
            weights: weights.address(),
            x: x.address(),
            bias: bias.map_or(0, |bias| bias.address()),
            cols: cols as i32,
            rows: rows as i32,
            out: out.address(),
        };
        // SAFETY: a thread reads one row of `weights` and one of `x` and writes one value, inside
        // lengths that were checked.
        unsafe { launch_kernel(&self.0, kernel_name!("naive", "naive_matmul"), stream, launch, &arguments) }
    }
}
