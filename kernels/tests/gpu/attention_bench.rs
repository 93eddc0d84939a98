// SPDX-License-Identifier: Apache-2.0

//! Measures attention of one layer at the shapes of models.

use anyhow::Result;
use kernels::cuda::Cuda;
use ops::{AttentionSpan, Backend, KvLayer, KvLayout, KvType};

use crate::TestGpu;
use crate::attention::{begin, spec};
use crate::ops::filled;
use crate::random::TestRng;

pub(crate) fn bench(gpu: &TestGpu) -> Result<()> {
    for (name, heads, kv_heads, head_dim) in
        [("8B", 32, 8, 128), ("0.6B", 16, 8, 128), ("30B-A3B", 32, 4, 128), ("llama-1B", 32, 8, 64)]
    {
        let shapes = [
            (1, 190),
            (1, 512),
            (1, 1_000),
            (1, 2_000),
            (1, 16_000),
            (8, 190),
            (8, 512),
            (8, 1_000),
            (8, 2_000),
            (16, 190),
            (16, 512),
            (16, 1_000),
            (32, 512),
            (64, 256),
            (64, 512),
            (64, 1_000),
            (64, 16_000),
        ];
        for (rows, context) in shapes {
            for kind in [KvType::F16, KvType::Bf16, KvType::Q8_0] {
                let layer = KvLayer { kv_heads, head_dim, kind, span: AttentionSpan::Full };
                let seconds = measure(gpu, heads, layer, rows, context, 1)?;
                let bytes = rows * context * layer.token_bytes();
                println!(
                    "attention {name:8} {kind:4} {rows:3} rows at {context:6} {:8.1} us {:6.0} GB/s",
                    seconds * 1e6,
                    bytes as f64 / seconds / 1e9
                );
            }
        }
        for (context, chunk) in [(512, 512), (2_048, 2_048), (16_384, 2_048), (16_384, 512)] {
            for kind in [KvType::F16, KvType::Bf16, KvType::Q8_0] {
                let seconds = measure(
                    gpu,
                    heads,
                    KvLayer { kv_heads, head_dim, kind, span: AttentionSpan::Full },
                    1,
                    context,
                    chunk,
                )?;
                let keys = context as f64 - chunk as f64 / 2.0;
                let operations = 4.0 * chunk as f64 * keys * (heads * head_dim) as f64;
                println!(
                    "attention {name:8} {kind:4} chunk {chunk:5} at {context:6} {:8.1} us {:6.1} TFLOP/s",
                    seconds * 1e6,
                    operations / seconds / 1e12
                );
            }
        }
    }
    Ok(())
}

/// Returns the seconds of one layer's attention. There are `rows` sequences, each with the last
/// `chunk` tokens of `context`.
fn measure(
    gpu: &TestGpu,
    heads: usize,
    layer: KvLayer,
    rows: usize,
    context: usize,
    chunk: usize,
) -> Result<f64> {
    /// Several layers, so that the device's L2 cache does not hold them all.
    const LAYERS: usize = 16;
    const BLOCK_TOKENS: usize = 16;
    let KvLayer { kv_heads, head_dim, .. } = layer;
    let mut cuda = Cuda::new(&gpu.device)?;
    let table_len = context.div_ceil(BLOCK_TOKENS);
    let layers = if rows * context > 300_000 { 4 } else { LAYERS };
    let mut kv = cuda.kv(&KvLayout {
        block_tokens: BLOCK_TOKENS,
        blocks: rows * table_len + 1,
        layers: vec![layer; layers],
    })?;
    let tables: Vec<Vec<u32>> =
        (0..rows).map(|row| (0..table_len).map(|i| (1 + i * rows + row) as u32).collect()).collect();
    let tables: Vec<&[u32]> = tables.iter().map(Vec::as_slice).collect();
    let mut random = TestRng::new(16);
    let written =
        filled(&mut cuda, context, kv_heads * head_dim, &random.values(context * kv_heads * head_dim))?;
    for row in 0..rows {
        begin(&mut cuda, BLOCK_TOKENS, &tables, &[(row, 0..context)])?;
        for layer in 0..layers {
            cuda.kv_write(&mut kv, layer, &written, &written, context)?;
        }
    }
    let width = heads * head_dim;
    let queries = filled(&mut cuda, rows * chunk, width, &random.values(rows * chunk * width))?;
    let mut out = cuda.tensor(rows * chunk, width)?;
    let parts: Vec<_> = (0..rows).map(|row| (row, context - chunk..context)).collect();
    let spec = spec(heads, kv_heads, head_dim);
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        begin(&mut cuda, BLOCK_TOKENS, &tables, &parts)?;
        cuda.wait()?;
        for layer in 0..layers {
            cuda.attention(&kv, layer, &queries, &spec, &mut out, rows * chunk)?;
        }
        let start = std::time::Instant::now();
        cuda.wait()?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(best / layers as f64)
}
