// SPDX-License-Identifier: Apache-2.0

//! Launcher of checksum.cu: computes XXH3-128 of every 1 MiB piece of a range in device memory.

pub use super::abi::elementwise::PIECE_BYTES;
use super::abi::elementwise::{CHECKSUM_THREADS, ChecksumPieces};
use super::launch::{KernelName, kernel_name, launch_kernel};
use super::module::image;
use super::{CudaError, Device, DeviceView, DeviceViewMut, LaunchConfig, LazyModule, Stream};

/// XXH3 hashes inputs of up to this length with other algorithms. The kernel does not implement
/// them.
pub(super) const SHORT_BYTES: usize = 240;

pub struct ChecksumKernels(LazyModule);

impl ChecksumKernels {
    const KERNEL: KernelName<ChecksumPieces> = kernel_name!("checksum", "checksum_pieces");

    pub fn new(device: &Device) -> Self {
        Self(LazyModule::new(device, "checksum", image!("checksum")))
    }

    /// Loads the kernel now, so that the first launch does not.
    pub fn load(&self) -> Result<(), CudaError> {
        self.0.kernel(Self::KERNEL.as_c_str()).map(drop)
    }

    /// Writes the low and the high half of the checksum of every piece of `bytes` to `out`. `bytes`
    /// begins at a multiple of 8. If the last piece has at most 240 bytes, the kernel does not
    /// write its checksum: [`super::loading`] hashes that piece on the host.
    pub fn launch(
        &self,
        stream: &Stream,
        bytes: DeviceView<'_, u8>,
        out: &mut DeviceViewMut<'_, [u64; 2]>,
    ) -> Result<(), CudaError> {
        let pieces = bytes.len().div_ceil(PIECE_BYTES);
        if out.len() != pieces {
            let (found, expected) = (out.len() * 16, pieces * 16);
            return Err(CudaError::Length { what: "checksums of pieces", found, expected });
        }
        if !bytes.address().is_multiple_of(8) {
            let found = (bytes.address() % 8) as usize;
            return Err(CudaError::Length { what: "misalignment of checksummed bytes", found, expected: 0 });
        }
        let long = pieces - usize::from(has_short_tail(bytes.len()));
        if long == 0 {
            return Ok(());
        }
        let launch = LaunchConfig {
            grid: (long as u32, 1, 1),
            block: CHECKSUM_THREADS,
            shared_bytes: 0,
            overlaps_predecessor: false,
            cluster: 1,
        };
        let arguments =
            ChecksumPieces { bytes: bytes.address(), total: bytes.len() as u64, out: out.address() };
        // SAFETY: block p reads at most 1 MiB from p MiB on, inside `bytes`, and writes 16 bytes at
        // 16 p, inside `out`.
        unsafe { launch_kernel(&self.0, Self::KERNEL, stream, launch, &arguments) }
    }
}

fn has_short_tail(bytes: usize) -> bool {
    (1..=SHORT_BYTES).contains(&(bytes % PIECE_BYTES))
}
