// SPDX-License-Identifier: Apache-2.0

//! [`DrawnTokens`]: tokens that the device chose, and their way to the host.
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
    /// Rows that a token was chosen for last.
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

    /// Makes room for the tokens of `rows` rows, on both sides.
    pub(super) fn begin(&mut self, rows: usize) -> Result<(), CudaError> {
        if rows > self.best.len() {
            self.best = Arc::new(Buffer::new(&self.device, rows.next_power_of_two())?);
        }
        self.rows = rows;
        if !self.spare.iter().any(|copy| copy.staging.as_slice().len() >= rows) {
            let staging = PinnedBuffer::new(&self.device, self.best.len())?;
            self.spare.push(Copy { staging, rows: 0, arrived: Event::new(&self.device)? });
        }
        Ok(())
    }

    /// The tokens that are being chosen, or were chosen last, and the memory's owner.
    pub(super) fn last(&self) -> (WordRange, Arc<Buffer<u32>>) {
        (self.on_device(), self.best.clone())
    }

    /// Enqueues the copy of the tokens to the host.
    pub(super) fn send(&mut self, recorder: &Recorder) -> Result<(), CudaError> {
        let fits = self.spare.iter().position(|copy| copy.staging.as_slice().len() >= self.rows);
        let Some(at) = fits else { panic!("`begin` made room for {} tokens", self.rows) };
        let mut copy = self.spare.swap_remove(at);
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

    /// Waits for the oldest tokens that the host has not read. Returns whether they were there.
    pub(super) fn receive(&mut self, to: &mut [u32]) -> Result<bool, CudaError> {
        let Some(copy) = self.unread.pop_front() else { return Ok(true) };
        let were_there = copy.arrived.is_done()?;
        copy.arrived.synchronize()?;
        to.copy_from_slice(&copy.staging.as_slice()[..to.len()]);
        self.spare.push(copy);
        Ok(were_there)
    }

    /// Bytes of device memory.
    pub(super) fn bytes(&self) -> usize {
        self.best.len() * size_of::<u32>()
    }

    fn on_device(&self) -> WordRange {
        WordRange { address: self.best.view().address(), len: self.rows }
    }
}
