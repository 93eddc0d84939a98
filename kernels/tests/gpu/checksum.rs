//! checksum.cu, and what is made of it for many ranges, against xxhash on the host.

use anyhow::ensure;
use kernels::cuda::Buffer;
use kernels::cuda::checksum::{Checksums, PIECE_BYTES};
use kernels::cuda::loading::sum_all;
use xxhash_rust::xxh3::xxh3_128;

use crate::Gpu;
use crate::bench::time;
use crate::random::Random;

pub(crate) fn pieces_hash_as_on_the_host(gpu: &Gpu) -> anyhow::Result<()> {
    let checksums = Checksums::new(&gpu.device);
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
    let contents = lengths.map(|len| Random::new(len as u64).bytes(len));
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

pub(crate) fn bench(gpu: &Gpu) -> anyhow::Result<()> {
    let checksums = Checksums::new(&gpu.device);
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
    Ok(())
}
