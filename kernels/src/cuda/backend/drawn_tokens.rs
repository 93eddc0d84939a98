// SPDX-License-Identifier: Apache-2.0

//! [`DrawnTokens`]: results of argmax on the device, and their way to the host.
//!
//! The next step may read the tokens on the device, and it may be enqueued before the host has read
//! them. So each result is copied to pinned memory of its own.

use std::collections::VecDeque;
use std::sync::Arc;

use super::recorder::Recorder;
use super::step::WordRange;
use crate::cuda::{Buffer, CudaError, Device, Event, PinnedBuffer};

/// Rows for which there is room at first.
const ROWS_MIN: usize = 64;

pub(super) struct DrawnTokens {
    device: Device,
    best: Arc<Buffer<u32>>,
    /// Rows of the last argmax.
    rows: usize,
    /// Copies in flight, the oldest first.
    unread: VecDeque<Copy>,
    spare: Vec<Copy>,
}

struct Copy {
    staging: PinnedBuffer<u32>,
    rows: usize,
    /// Recorded after the copy into `staging`.
    arrived: Event,
}

impl DrawnTokens {
    pub(super) fn new(device: &Device) -> Result<Self, CudaError> {
        let best = Arc::new(Buffer::new(device, ROWS_MIN)?);
        Ok(Self { device: device.clone(), best, rows: 0, unread: VecDeque::new(), spare: Vec::new() })
    }

    /// Makes room for an argmax of `rows` rows. Returns where it writes, and the memory's owner.
    pub(super) fn begin(&mut self, rows: usize) -> Result<(WordRange, Arc<Buffer<u32>>), CudaError> {
        if rows > self.best.len() {
            self.best = Arc::new(Buffer::new(&self.device, rows.next_power_of_two())?);
        }
        self.rows = rows;
        Ok((self.on_device(), self.best.clone()))
    }

    /// The tokens of the last argmax, and the memory's owner.
    pub(super) fn last(&self) -> (WordRange, Arc<Buffer<u32>>) {
        (self.on_device(), self.best.clone())
    }

    /// Enqueues the copy of the tokens to the host.
    pub(super) fn send(&mut self, recorder: &Recorder) -> Result<(), CudaError> {
        let fits = self.spare.iter().position(|copy| copy.staging.as_slice().len() >= self.rows);
        let mut copy = match fits {
            Some(at) => self.spare.swap_remove(at),
            None => Copy {
                staging: PinnedBuffer::new(&self.device, self.best.len())?,
                rows: 0,
                arrived: Event::new(&self.device)?,
            },
        };
        copy.rows = self.rows;
        // SAFETY: `best` holds `rows` words. The stream computes what overwrites or frees them
        // later than this copy. Nothing touches `staging` before `receive` has waited.
        let sent = unsafe { recorder.send(self.on_device().view(), &mut copy.staging) };
        sent.and_then(|()| copy.arrived.record(recorder.stream()))?;
        self.unread.push_back(copy);
        Ok(())
    }

    /// Rows of the oldest tokens that the host has not read.
    pub(super) fn unread_rows(&self) -> Option<usize> {
        self.unread.front().map(|copy| copy.rows)
    }

    /// Waits for the oldest tokens that the host has not read.
    pub(super) fn receive(&mut self, to: &mut [u32]) -> Result<(), CudaError> {
        let Some(copy) = self.unread.pop_front() else { return Ok(()) };
        copy.arrived.synchronize()?;
        to.copy_from_slice(&copy.staging.as_slice()[..to.len()]);
        self.spare.push(copy);
        Ok(())
    }

    /// Bytes of device memory.
    pub(super) fn bytes(&self) -> usize {
        self.best.len() * size_of::<u32>()
    }

    fn on_device(&self) -> WordRange {
        WordRange { address: self.best.view().address(), len: self.rows }
    }
}
