//! [`Readback`]: from the device to a caller's slice through pinned memory, one piece on its way while the one before it is
//! copied.

use bytemuck::Pod;

use crate::cuda::error::Named;
use crate::cuda::pinned::Pinned;
use crate::cuda::{CudaError, Device, Event, Stream};

/// Words of a piece: small enough that the last one's copy, which nothing hides, is short.
const PIECE_WORDS: usize = 1 << 17;

pub(super) struct Readback {
    halves: [Half; 2],
}

struct Half {
    staging: Pinned<u32>,
    /// The copy into `staging` has ended.
    arrived: Event,
}

impl Readback {
    pub(super) fn new(device: &Device) -> Result<Self, CudaError> {
        let half = || Ok(Half { staging: Pinned::new(device, PIECE_WORDS)?, arrived: Event::new(device)? });
        Ok(Self { halves: [half()?, half()?] })
    }

    /// Fills `host`, behind all work of the stream.
    ///
    /// # Safety
    /// As many values stand at `address` on the device until this returns.
    pub(super) unsafe fn bring<T: Pod>(
        &mut self,
        stream: &Stream,
        address: u64,
        host: &mut [T],
    ) -> Result<(), CudaError> {
        let words: &mut [u32] = bytemuck::cast_slice_mut(host);
        let lengths: Vec<usize> = words.chunks(PIECE_WORDS).map(<[u32]>::len).collect();
        for (piece, to) in words.chunks_mut(PIECE_WORDS).enumerate() {
            let first = if piece == 0 { 0 } else { piece + 1 };
            for next in first..(piece + 2).min(lengths.len()) {
                let half = &mut self.halves[next % 2];
                let from = address + (next * PIECE_WORDS * size_of::<u32>()) as u64;
                let staging = &mut half.staging.as_mut_slice()[..lengths[next]];
                // SAFETY: the source by this function's contract; `staging` has the length, and what it held before has
                // been copied out of it two pieces ago.
                unsafe { cudarc::driver::result::memcpy_dtoh_async(staging, from, stream.raw()) }
                    .named("cuMemcpyDtoH")?;
                half.arrived.record(stream)?;
            }
            let half = &self.halves[piece % 2];
            half.arrived.synchronize()?;
            to.copy_from_slice(&half.staging.as_slice()[..to.len()]);
        }
        Ok(())
    }
}
