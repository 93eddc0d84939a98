// SPDX-License-Identifier: Apache-2.0

//! Compares the results of `loading` with quant::layout and xxhash on the host. The bench measures
//! the rate at which the device takes parts.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use cuda::{Device, HostPages, PinnedBuffer};
use kernels::cuda::checksum::PIECE_BYTES;
use kernels::cuda::loading::{
    ModelUpload, PART_BYTES, StagingRing, TensorDestination, TensorPart, ring_bytes,
};
use memory::device::WritableModel;
use memory::pack::{PackPlan, Packing};
use quant::DType;
use quant::layout::{TILE_ROWS, Tiles};
use xxhash_rust::xxh3::xxh3_128;

use crate::TestGpu;
use crate::random::TestRng;

const NO_PATIENCE: Duration = Duration::ZERO;

fn pinned(gpu: &TestGpu) -> anyhow::Result<PinnedBuffer<u8>> {
    Ok(PinnedBuffer::pin(&gpu.device, HostPages::new(ring_bytes(u64::MAX))?)?)
}

fn ring(gpu: &TestGpu) -> anyhow::Result<StagingRing> {
    Ok(StagingRing::new(&gpu.device, pinned(gpu)?)?)
}

fn plan(device: &Device, tensors: &[Tiles]) -> anyhow::Result<(PackPlan, Vec<TensorDestination>)> {
    let sizes: Vec<u64> = tensors.iter().map(|tiles| tiles.bytes() as u64).collect();
    let mut plan = PackPlan::new(&sizes, Packing::Slabs)?;
    for bytes in &mut plan.allocations {
        *bytes = device.allocated_bytes(*bytes).context("too large")?;
    }
    let destination = |(place, tiles): (&memory::pack::TensorPlacement, &Tiles)| TensorDestination {
        allocation: place.allocation,
        offset: place.offset,
        tiles: *tiles,
    };
    let destinations = plan.placements.iter().zip(tensors).map(destination).collect();
    Ok((plan, destinations))
}

/// Divides a tensor into parts of at most `limit` bytes.
fn parts(tensor: usize, tiles: &Tiles, limit: usize, alignment: usize) -> Vec<TensorPart> {
    let step = match tiles.tile_bytes() {
        0 => PIECE_BYTES,
        // A tensor without rows has no parts.
        _ => (TILE_ROWS * tiles.raw_bytes() / tiles.rows().max(1)).max(1),
    };
    let length = (limit / step).max(1) * step;
    let part = |start: usize| TensorPart {
        tensor,
        start: start as u64,
        bytes: length.min(tiles.raw_bytes() - start),
        // Any aligned offset in the slot is possible, as after a direct read of whole blocks.
        at: (start % 4096 + alignment) & !(alignment - 1),
    };
    (0..tiles.raw_bytes()).step_by(length).map(part).collect()
}

pub(crate) fn parts_become_tensors_and_their_checksums(gpu: &TestGpu) -> anyhow::Result<()> {
    transfer_parts(gpu, &ring(gpu)?)
}

/// A GPU with memory of its own reads pinned host memory at the host's address too.
pub(crate) fn parts_that_kernels_read_in_place_become_the_same(gpu: &TestGpu) -> anyhow::Result<()> {
    let ring = StagingRing::in_place(&gpu.device, pinned(gpu)?)?;
    ensure!(ring.staging_bytes() == 0, "staging buffers beside the slots");
    transfer_parts(gpu, &ring)
}

fn transfer_parts(gpu: &TestGpu, ring: &StagingRing) -> anyhow::Result<()> {
    let context = gpu.device.context()?;
    let shapes = [
        (DType::Q4_K, 4096, 3001),
        (DType::F32, 777, 1),
        (DType::Q6_K, 2560, 1025),
        (DType::Q8_0, 32, 30841),
        (DType::BF16, 1024, 1500),
        (DType::Q5_1, 96, 17),
        (DType::Q2_K, 768, 0),
        (DType::Q3_K, 512, 4000),
    ];
    let tensors: Vec<Tiles> = shapes
        .into_iter()
        .map(|(dtype, cols, rows)| Tiles::new(dtype, cols, rows))
        .collect::<Result<_, _>>()?;
    // Some parts are smaller than a piece. Such a piece is carried over several times.
    for (limit, alignment) in [(PART_BYTES, 32), (3 << 20, 32), (200_000, 2)] {
        let (plan, destinations) = plan(&gpu.device, &tensors)?;
        let mut model = WritableModel::allocate(&context, &plan.allocations, NO_PATIENCE)?;
        let mut upload = ModelUpload::new(&gpu.device, ring, &mut model, &destinations)?;
        let mut raws = Vec::new();
        for (index, tiles) in tensors.iter().enumerate() {
            let raw = TestRng::new(index as u64 + 7).bytes(tiles.raw_bytes());
            for part in parts(index, tiles, limit, alignment) {
                let mut slot = ring.take()?.context("a closed ring")?;
                let source = &raw[part.start as usize..][..part.bytes];
                slot.bytes_mut()[part.at..part.at + part.bytes].copy_from_slice(source);
                upload.submit(slot, part)?;
            }
            raws.push(raw);
        }
        let sums = upload.finish()?;
        let pieces = |bytes: &[u8]| bytes.chunks(PIECE_BYTES).map(xxh3_128).collect::<Vec<u128>>();
        for (index, (tiles, raw)) in tensors.iter().zip(&raws).enumerate() {
            let mut laid_out = vec![0; tiles.bytes()];
            tiles.repack(raw, &mut laid_out)?;
            ensure!(sums.raw[index] == pieces(raw), "{limit}: file bytes of tensor {index}");
            ensure!(sums.laid_out[index] == pieces(&laid_out), "{limit}: tiles of tensor {index}");
        }
        model.finish()?;
    }
    Ok(())
}

pub(crate) fn parts_out_of_turn_and_out_of_place_are_refused(gpu: &TestGpu) -> anyhow::Result<()> {
    let context = gpu.device.context()?;
    let tensors = [Tiles::new(DType::Q8_0, 1024, 64)?];
    let (plan, destinations) = plan(&gpu.device, &tensors)?;
    let mut model = WritableModel::allocate(&context, &plan.allocations, NO_PATIENCE)?;
    let ring = ring(gpu)?;
    let outside = TensorDestination { offset: plan.allocations[0], ..destinations[0] };
    ensure!(
        ModelUpload::new(&gpu.device, &ring, &mut model, &[outside]).is_err(),
        "outside of the allocation"
    );
    let mut upload = ModelUpload::new(&gpu.device, &ring, &mut model, &destinations)?;
    let rows = |rows: usize| rows * tensors[0].raw_bytes() / 64;
    let wrong = [
        TensorPart { tensor: 0, start: rows(16) as u64, bytes: rows(16), at: 0 },
        TensorPart { tensor: 0, start: 0, bytes: rows(15), at: 0 },
        TensorPart { tensor: 0, start: 0, bytes: rows(80), at: 0 },
        TensorPart { tensor: 0, start: 0, bytes: 0, at: 0 },
        TensorPart { tensor: 0, start: 0, bytes: rows(16), at: PART_BYTES + 8192 },
        TensorPart { tensor: 1, start: 0, bytes: rows(16), at: 0 },
    ];
    for part in wrong {
        let slot = ring.take()?.context("a closed ring")?;
        ensure!(upload.submit(slot, part).is_err(), "{part:?}");
    }
    ensure!(upload.finish().is_err(), "a tensor that never came");
    Ok(())
}

/// Submits slots that are already full, to measure the device without readers.
pub(crate) fn bench(gpu: &TestGpu) -> anyhow::Result<()> {
    let context = gpu.device.context()?;
    for dtype in [DType::Q4_K, DType::Q8_0, DType::F16] {
        // Each tensor has the size of an 8B model's matrix.
        let tensors = vec![Tiles::new(dtype, 4096, 12_288)?; 96];
        let bytes: usize = tensors.iter().map(Tiles::raw_bytes).sum();
        let (plan, destinations) = plan(&gpu.device, &tensors)?;
        let started = Instant::now();
        let ring = ring(gpu)?;
        let pinned = started.elapsed();
        let mut model = WritableModel::allocate(&context, &plan.allocations, NO_PATIENCE)?;
        let mut upload = ModelUpload::new(&gpu.device, &ring, &mut model, &destinations)?;
        let allocated = started.elapsed();
        for (index, tiles) in tensors.iter().enumerate() {
            for part in parts(index, tiles, PART_BYTES, 32) {
                let slot = ring.take()?.context("a closed ring")?;
                upload.submit(slot, part)?;
            }
        }
        gpu.device.synchronize()?;
        let submitted = started.elapsed();
        upload.finish()?;
        let seconds = (submitted - allocated).as_secs_f64();
        println!(
            "loading {dtype} {:5.2} GB: {:6.1} GB/s; allocate {:.1?}, pin {:.1?}, checksums {:.1?}",
            bytes as f64 / 1e9,
            bytes as f64 / seconds / 1e9,
            allocated - pinned,
            pinned,
            started.elapsed() - submitted
        );
    }
    Ok(())
}
