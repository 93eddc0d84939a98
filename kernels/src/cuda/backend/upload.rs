// SPDX-License-Identifier: Apache-2.0

//! [`StepUpload`] copies words to the device once for each step. Their address changes only when
//! the buffer grows.
//!
//! If the device is idle, a copy engine takes the words while the host collects commands. If a step
//! is in flight, a kernel fetches them behind that step: a copy engine starts later
//! (word_copies.cu).

use std::sync::Arc;

use super::recorder::Recorder;
use crate::cuda::word_copies::WordCopy;
use crate::cuda::{Buffer, CudaError, Event, PinnedBuffer, Stream};

/// Words of the smallest buffer.
const WORDS_MIN: usize = 1 << 12;
/// The largest number of words that a kernel fetches, 64 KiB. Longer copies take so long
/// (estimated, at 25 GB/s) that the start of a copy engine matters little.
const FETCH_WORDS_MAX: usize = 1 << 14;

pub(super) struct StepUpload {
    staging: PinnedBuffer<u32>,
    device: Buffer<u32>,
    /// Recorded after the last copy out of `staging`.
    copied: Arc<Event>,
}

impl StepUpload {
    pub(super) fn new(stream: &Stream) -> Result<Self, CudaError> {
        Self::with_words(stream, WORDS_MIN)
    }

    fn with_words(stream: &Stream, words: usize) -> Result<Self, CudaError> {
        let device = stream.device();
        let staging = PinnedBuffer::new(device, words)?;
        Ok(Self { staging, device: Buffer::new(device, words)?, copied: Arc::new(Event::new(device)?) })
    }

    /// The device address of the words.
    pub(super) fn address(&self) -> u64 {
        self.device.view().address()
    }

    pub(super) fn bytes(&self) -> u64 {
        (self.device.len() * size_of::<u32>()) as u64
    }

    /// Lets `fill` write `words` words. They are on the device before the commands that `recorder`
    /// collects now run.
    pub(super) fn send(
        &mut self,
        recorder: &mut Recorder,
        words: usize,
        fill: impl FnOnce(&mut [u32]),
    ) -> Result<(), CudaError> {
        recorder.flush_upload(&self.copied)?;
        self.copied.synchronize()?;
        if words > self.device.len() {
            *self = Self::with_words(recorder.stream(), words.next_power_of_two())?;
        }
        fill(&mut self.staging.as_mut_slice()[..words]);
        if recorder.is_busy() && words <= FETCH_WORDS_MAX {
            let copy = WordCopy::new(&self.staging, self.device.view(), words);
            // SAFETY: the staging buffer is not touched before `copied`. Both buffers are freed
            // after that: `send` replaces them when it has waited, and `Cuda` when the stream has
            // ended.
            unsafe { recorder.upload(copy, self.copied.clone()) };
            return Ok(());
        }
        let (address, staging) = (self.address(), &self.staging.as_slice()[..words]);
        // SAFETY: the device buffer has room for `staging`. The staging buffer is not touched
        // before `copied`, and it is freed after it.
        unsafe { recorder.stream().enqueue_copy_to_device(address, staging) }?;
        self.copied.record(recorder.stream())
    }
}
