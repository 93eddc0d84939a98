// SPDX-License-Identifier: Apache-2.0

//! Compares checksum.cu and `sum_all`, which uses it for many ranges, with xxhash on the host.

use std::time::Instant;

use anyhow::{Context, ensure};
use kernels::cuda::Buffer;
use kernels::cuda::checksum::{ChecksumKernels, PIECE_BYTES};
use kernels::cuda::loading::sum_all;
use quant::DType;
use quant::layout::Tiles;
use xxhash_rust::xxh3::xxh3_128;

use crate::TestGpu;
use crate::bench::time;
use crate::random::TestRng;

pub(crate) fn pieces_hash_as_on_the_host(gpu: &TestGpu) -> anyhow::Result<()> {
    let checksums = ChecksumKernels::new(&gpu.device);
    let lengths = [
        0,
        1,
        16,
        240,
        241,
        256,
        1000,
        1024,
        1025,
        1088,
        1089,
        2048,
        65_536,
        65_600,
        70_001,
        PIECE_BYTES - 1,
        PIECE_BYTES,
        PIECE_BYTES + 240,
        PIECE_BYTES + 241,
        3 * PIECE_BYTES + 12_345,
    ];
    let contents = lengths.map(|len| TestRng::new(len as u64).bytes(len));
    let buffers: Vec<Buffer<u8>> =
        contents.iter().map(|bytes| Buffer::from_host(&gpu.stream, bytes)).collect::<Result<_, _>>()?;
    let views: Vec<_> = buffers.iter().map(Buffer::view).collect();
    let found = sum_all(&checksums, &gpu.device, &views)?;
    ensure!(found.len() == contents.len(), "{} of {} ranges", found.len(), contents.len());
    for (bytes, found) in contents.iter().zip(found) {
        let expected: Vec<u128> = bytes.chunks(PIECE_BYTES).map(xxh3_128).collect();
        ensure!(found == expected, "{} bytes: {found:x?}, expected {expected:x?}", bytes.len());
    }
    Ok(())
}

pub(crate) fn bench(gpu: &TestGpu) -> anyhow::Result<()> {
    let checksums = ChecksumKernels::new(&gpu.device);
    for mib in [64, 1024] {
        let mut bytes = Buffer::<u8>::new(&gpu.device, mib << 20)?;
        bytes.view_mut().fill_bytes(&gpu.stream, 0x5A)?;
        let mut out = Buffer::new(&gpu.device, mib)?;
        let seconds =
            time(gpu, 4, |_| Ok(checksums.launch(&gpu.stream, bytes.view(), &mut out.view_mut())?))?;
        println!(
            "checksum {mib:5} MiB {:8.1} us {:7.0} GB/s",
            seconds * 1e6,
            (mib << 20) as f64 / seconds / 1e9
        );
    }
    whole_model(gpu, &checksums)
}

/// Measures the checksums of all tensors of qwen3-8b in Q4_K_M as a verifier computes them: from
/// its first call until it has the sums.
fn whole_model(gpu: &TestGpu, checksums: &ChecksumKernels) -> anyhow::Result<()> {
    const LAYERS: usize = 36;
    /// The alignment of a tensor in the model's memory.
    const ALIGNMENT: usize = 256;
    let of = |dtype, rows, cols| Tiles::new(dtype, cols, rows).map(|shape| shape.bytes());
    let mut sizes = vec![of(DType::Q4_K, 151_936, 4096)?, of(DType::Q6_K, 151_936, 4096)?, 4 * 4096];
    for layer in 0..LAYERS {
        let finer = if layer % 2 == 0 { DType::Q6_K } else { DType::Q4_K };
        for (dtype, rows, cols) in [
            (DType::Q4_K, 4096, 4096),
            (DType::Q4_K, 1024, 4096),
            (finer, 1024, 4096),
            (DType::Q4_K, 4096, 4096),
            (DType::Q4_K, 12_288, 4096),
            (DType::Q4_K, 12_288, 4096),
            (finer, 4096, 12_288),
        ] {
            sizes.push(of(dtype, rows, cols)?);
        }
        sizes.extend([4096, 4096, 128, 128].map(|values| 4 * values));
    }
    let all: usize = sizes.iter().map(|bytes| bytes.next_multiple_of(ALIGNMENT)).sum();
    let mut memory = Buffer::<u8>::new(&gpu.device, all)?;
    memory.view_mut().fill_bytes(&gpu.stream, 0x5A)?;
    gpu.stream.synchronize()?;
    let mut at = 0;
    let mut views = Vec::with_capacity(sizes.len());
    for &bytes in &sizes {
        views.push(memory.view().slice(at, bytes).context("a tensor beyond the memory")?);
        at += bytes.next_multiple_of(ALIGNMENT);
    }
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        let start = Instant::now();
        let sums = sum_all(checksums, &gpu.device, &views)?;
        best = best.min(start.elapsed().as_secs_f64());
        ensure!(sums.len() == sizes.len(), "{} of {} tensors", sums.len(), sizes.len());
    }
    println!(
        "checksum of {} tensors, {:.2} GB: {:.2} ms {:7.0} GB/s",
        sizes.len(),
        all as f64 / 1e9,
        best * 1e3,
        all as f64 / best / 1e9
    );
    Ok(())
}
