// SPDX-License-Identifier: Apache-2.0

//! Launcher of word_copies.cu: copies words between pinned host memory and the device by kernels.

use super::abi::elementwise::{
    FetchWords, SendWords, WORD_COPY_BLOCK_WORDS, WORD_COPY_RANGES, WORD_COPY_THREADS, WordCopies,
};
use super::launch::{kernel_name, launch_kernel};
use super::module::image;
use super::{CudaError, Device, DeviceView, LaunchConfig, LazyModule, PinnedBuffer, Stream};

pub struct WordCopyKernels(LazyModule);

/// Words of pinned memory, and where they go in device memory.
#[derive(Clone, Copy, Debug)]
pub struct WordCopy {
    from: u64,
    to: u64,
    words: u32,
}

impl WordCopy {
    /// A copy of the first `words` words.
    pub fn new(from: &PinnedBuffer<u32>, to: DeviceView<'_, u32>, words: usize) -> Self {
        assert!(words <= from.as_slice().len().min(to.len()), "both buffers have room for {words} words");
        // Pinned memory has the same address on the host and on the device.
        Self { from: from.as_slice().as_ptr() as u64, to: to.address(), words: words as u32 }
    }
}

impl WordCopyKernels {
    pub fn new(device: &Device) -> Self {
        Self(LazyModule::new(device, "word_copies", image!("word_copies")))
    }

    /// Enqueues copies from the host.
    ///
    /// # Safety
    /// The memory of all copies stays valid, and the host's words unchanged, until they have ended.
    pub unsafe fn fetch(&self, stream: &Stream, copies: &[WordCopy]) -> Result<(), CudaError> {
        for copies in copies.chunks(WORD_COPY_RANGES) {
            let mut arguments = WordCopies { ranges: copies.len() as i32, ..WordCopies::default() };
            let mut blocks = 0;
            for (range, copy) in copies.iter().enumerate() {
                arguments.from[range] = copy.from;
                arguments.to[range] = copy.to;
                arguments.words[range] = copy.words;
                blocks += copy.words.div_ceil(WORD_COPY_BLOCK_WORDS);
            }
            if blocks > 0 {
                let name = kernel_name!("word_copies", "fetch_words");
                let arguments = FetchWords { copies: arguments };
                // SAFETY: block b copies the words that `fetch_words` counts for it, inside the
                // ranges, which are valid by this function's contract.
                unsafe { launch_kernel(&self.0, name, stream, launch_of(blocks), &arguments) }?;
            }
        }
        Ok(())
    }

    /// Enqueues a copy to the host.
    ///
    /// # Safety
    /// Both sides stay valid until the copy has ended, and nothing else touches `to`.
    pub unsafe fn send(
        &self,
        stream: &Stream,
        from: DeviceView<'_, u32>,
        to: &mut PinnedBuffer<u32>,
    ) -> Result<(), CudaError> {
        assert!(from.len() <= to.as_slice().len(), "there is room for {} words", from.len());
        let to = to.as_mut_slice().as_mut_ptr() as u64;
        let arguments = SendWords { from: from.address(), to, words: from.len() as u32 };
        let name = kernel_name!("word_copies", "send_words");
        // SAFETY: the block copies `from.len()` words, for which there is room on both sides.
        unsafe { launch_kernel(&self.0, name, stream, launch_of(1), &arguments) }
    }
}

fn launch_of(blocks: u32) -> LaunchConfig {
    LaunchConfig {
        grid: (blocks, 1, 1),
        block: WORD_COPY_THREADS,
        shared_bytes: 0,
        overlaps_predecessor: true,
        cluster: 1,
    }
}
