// SPDX-License-Identifier: Apache-2.0

//! [`StepUpload`] copies words to the device once for each step. Their address changes only when
//! the buffer grows.

use crate::cuda::{Buffer, CudaError, Event, PinnedBuffer, Stream};

/// Words of the smallest buffer.
const WORDS_MIN: usize = 1 << 12;

pub(super) struct StepUpload {
    staging: PinnedBuffer<u32>,
    device: Buffer<u32>,
    /// Recorded after the last copy out of `staging`.
    copied: Event,
}

impl StepUpload {
    pub(super) fn new(stream: &Stream) -> Result<Self, CudaError> {
        Self::with_words(stream, WORDS_MIN)
    }

    fn with_words(stream: &Stream, words: usize) -> Result<Self, CudaError> {
        let device = stream.device();
        let staging = PinnedBuffer::new(device, words)?;
        Ok(Self { staging, device: Buffer::new(device, words)?, copied: Event::new(device)? })
    }

    /// The device address of the words.
    pub(super) fn address(&self) -> u64 {
        self.device.view().address()
    }

    pub(super) fn bytes(&self) -> u64 {
        (self.device.len() * size_of::<u32>()) as u64
    }

    /// Lets `fill` write `words` words, then enqueues their copy to the device.
    pub(super) fn send(
        &mut self,
        stream: &Stream,
        words: usize,
        fill: impl FnOnce(&mut [u32]),
    ) -> Result<(), CudaError> {
        self.copied.synchronize()?;
        if words > self.device.len() {
            *self = Self::with_words(stream, words.next_power_of_two())?;
        }
        fill(&mut self.staging.as_mut_slice()[..words]);
        let (address, staging) = (self.address(), &self.staging.as_slice()[..words]);
        // SAFETY: the device buffer has room for `staging`. The staging buffer is not touched
        // before `copied`, and it is freed after it.
        unsafe { stream.enqueue_copy_to_device(address, staging) }?;
        self.copied.record(stream)
    }
}
