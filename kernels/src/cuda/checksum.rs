//! Launcher of checksum.cu: the loader's piece checksums (XXH3-128 of every MiB), computed where the bytes are.

use std::ffi::CStr;

use super::module::{arguments, image};
use super::{CudaError, Device, Family, Launch, Stream, View, ViewMut};

/// Bytes of one piece; the last of a range may be shorter. As in checksum.cu and in the weight-server's loader.
pub const PIECE_BYTES: usize = 1 << 20;

/// XXH3 hashes inputs up to this length by other algorithms, which are left to the host.
pub(super) const SHORT_BYTES: usize = 240;

/// As checksum.cu.
const THREADS: u32 = 512;

const KERNEL: &CStr = c"checksum_pieces";

pub struct ChecksumKernels(Family);

impl ChecksumKernels {
    pub fn new(device: &Device) -> Self {
        Self(Family::new(device, "checksum", image!("checksum")))
    }

    /// Brings the kernel to the device now rather than with the first launch.
    pub fn load(&self) -> Result<(), CudaError> {
        self.0.kernel(KERNEL).map(drop)
    }

    /// Low and high half of every piece of `bytes`, which start at a multiple of 8. The last one is not written if it has
    /// at most 240 bytes: [`super::loading`] takes care of it.
    pub fn launch(
        &self,
        stream: &Stream,
        bytes: View<'_, u8>,
        out: &mut ViewMut<'_, [u64; 2]>,
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
        let (address, total, out) = (bytes.address(), bytes.len() as u64, out.address());
        let grid = (long as u32, 1, 1);
        let launch = Launch { grid, block: THREADS, shared_bytes: 0, overlaps_predecessor: false };
        let kernel = self.0.kernel(KERNEL)?;
        // SAFETY: (const uint8_t *, uint64_t, uint64_t *); block p reads at most 1 MiB from p MiB on, inside `bytes`, and
        // writes 16 bytes at 16 p, inside `out`.
        unsafe { kernel.launch(stream, launch, arguments![address, total, out]) }
    }
}

fn has_short_tail(bytes: usize) -> bool {
    (1..=SHORT_BYTES).contains(&(bytes % PIECE_BYTES))
}
