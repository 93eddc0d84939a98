// SPDX-License-Identifier: Apache-2.0

//! Compares repack.cu with quant::layout.

use anyhow::ensure;
use kernels::cuda::Buffer;
use kernels::cuda::repack::RepackKernels;
use quant::DType;
use quant::layout::{Tiles, planes};

use crate::TestGpu;
use crate::bench::time;
use crate::random::TestRng;

pub(crate) fn tiles_are_those_of_the_host(gpu: &TestGpu) -> anyhow::Result<()> {
    let repack = RepackKernels::new(&gpu.device);
    let mut random = TestRng::new(3);
    for dtype in DType::ALL.into_iter().filter(|&dtype| planes(dtype).is_some()) {
        for (blocks, rows) in [(1, 1), (3, 17), (8, 16), (9, 50), (32, 33)] {
            let shape = Tiles::new(dtype, blocks * dtype.block_len(), rows)?;
            let raw = random.bytes(shape.raw_bytes());
            let mut expected = vec![0; shape.bytes()];
            shape.repack(&raw, &mut expected)?;
            let device_raw = Buffer::from_host(&gpu.stream, &raw)?;
            let mut tiles = Buffer::<u8>::new(&gpu.device, shape.bytes())?;
            tiles.view_mut().fill_bytes(&gpu.stream, 0xAA)?;
            repack.repack(&gpu.stream, &shape, device_raw.view(), &mut tiles.view_mut())?;
            ensure!(tiles.to_host(&gpu.stream)? == expected, "tiles of {dtype} {blocks} blocks x {rows}");
            let mut back = Buffer::<u8>::new(&gpu.device, raw.len())?;
            back.view_mut().fill_bytes(&gpu.stream, 0xAA)?;
            repack.restore(&gpu.stream, &shape, tiles.view(), &mut back.view_mut())?;
            ensure!(back.to_host(&gpu.stream)? == raw, "rows of {dtype} {blocks} blocks x {rows}");
        }
    }
    Ok(())
}

pub(crate) fn bench(gpu: &TestGpu) -> anyhow::Result<()> {
    let repack = RepackKernels::new(&gpu.device);
    for dtype in [DType::Q8_0, DType::Q4_0, DType::Q4_K, DType::Q6_K] {
        let shape = Tiles::new(dtype, 4096, 12_288)?;
        let mut raw = Buffer::<u8>::new(&gpu.device, shape.raw_bytes())?;
        raw.view_mut().fill_bytes(&gpu.stream, 0x5A)?;
        let mut tiles = Buffer::new(&gpu.device, shape.bytes())?;
        let seconds =
            time(gpu, 8, |_| Ok(repack.repack(&gpu.stream, &shape, raw.view(), &mut tiles.view_mut())?))?;
        println!(
            "repack {dtype} 4096x12288 {:8.1} us {:7.0} GB/s of file bytes",
            seconds * 1e6,
            shape.raw_bytes() as f64 / seconds / 1e9
        );
    }
    Ok(())
}
