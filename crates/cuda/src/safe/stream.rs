// SPDX-License-Identifier: Apache-2.0

//! [`Stream`]: a queue of work on the device; [`Event`]: a point in a stream that other streams and
//! the host can wait for.

use std::sync::Arc;

use bytemuck::Pod;

use super::{Context, CudaError, Device};
use crate::checked::{DriverApi, RawEvent, RawStream};

/// Work in one stream runs in the order in which it was enqueued. Cheap to clone.
#[derive(Clone)]
pub struct Stream(Arc<OwnedStream>);

struct OwnedStream {
    context: Context,
    raw: RawStream,
}

impl Stream {
    /// A new stream, not ordered with the default stream.
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        let context = device.context()?;
        let raw = context.driver().create_stream()?;
        Ok(Self(Arc::new(OwnedStream { context, raw })))
    }

    pub fn device(&self) -> &Device {
        self.0.context.device()
    }

    /// Waits for all work enqueued so far.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the stream lives as long as self.
        Ok(unsafe { self.driver().synchronize_stream(self.0.raw) }?)
    }

    /// Lets work that is enqueued from now on wait for `event`.
    pub fn wait(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: both live.
        Ok(unsafe { self.driver().wait_event(self.0.raw, event.raw) }?)
    }

    /// Enqueues a copy to the device.
    ///
    /// # Safety
    /// Until the copy has ended, the device's range stays valid and writable, and `source` stays
    /// valid and unchanged.
    pub unsafe fn enqueue_copy_to_device<T: Pod>(&self, address: u64, source: &[T]) -> Result<(), CudaError> {
        let source = bytemuck::cast_slice(source);
        // SAFETY: the stream lives; the rest is this function's contract.
        Ok(unsafe { self.driver().enqueue_copy_to_device(self.0.raw, address, source) }?)
    }

    /// Enqueues a copy to the host.
    ///
    /// # Safety
    /// Until the copy has ended, the device's range stays valid and readable, and nothing else
    /// touches `target`.
    pub unsafe fn enqueue_copy_to_host<T: Pod>(
        &self,
        target: &mut [T],
        address: u64,
    ) -> Result<(), CudaError> {
        let target = bytemuck::cast_slice_mut(target);
        // SAFETY: the stream lives; the rest is this function's contract.
        Ok(unsafe { self.driver().enqueue_copy_to_host(self.0.raw, target, address) }?)
    }

    /// Enqueues a copy from one range of the device to another.
    ///
    /// # Safety
    /// Until the copy has ended, both ranges stay valid, the target writable. They do not overlap.
    pub unsafe fn enqueue_copy_on_device(
        &self,
        target: u64,
        source: u64,
        bytes: usize,
    ) -> Result<(), CudaError> {
        // SAFETY: the stream lives; the rest is this function's contract.
        Ok(unsafe { self.driver().enqueue_copy_on_device(self.0.raw, target, source, bytes) }?)
    }

    pub(super) fn raw(&self) -> RawStream {
        self.0.raw
    }

    pub(super) fn driver(&self) -> &dyn DriverApi {
        self.0.context.driver()
    }
}

impl Drop for OwnedStream {
    fn drop(&mut self) {
        // SAFETY: the last owner; the driver lets work in flight end before it frees the stream.
        let _ = unsafe { self.context.driver().destroy_stream(self.raw) };
    }
}

pub struct Event {
    context: Context,
    raw: RawEvent,
}

impl Event {
    /// An event without timing: cheaper, for order only.
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        Self::create(device, false)
    }

    /// An event that records the time at which the device reaches it.
    pub fn timed(device: &Device) -> Result<Self, CudaError> {
        Self::create(device, true)
    }

    fn create(device: &Device, timed: bool) -> Result<Self, CudaError> {
        let context = device.context()?;
        let raw = context.driver().create_event(timed)?;
        Ok(Self { context, raw })
    }

    pub fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: both live.
        Ok(unsafe { self.context.driver().record_event(self.raw, stream.raw()) }?)
    }

    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: lives.
        Ok(unsafe { self.context.driver().synchronize_event(self.raw) }?)
    }

    /// Whether the work before the event has ended.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        // SAFETY: lives.
        Ok(unsafe { self.context.driver().is_event_done(self.raw) }?)
    }

    /// The time from `start` to this event; both are timed, recorded and done.
    pub fn milliseconds_since(&self, start: &Self) -> Result<f32, CudaError> {
        // SAFETY: both live.
        Ok(unsafe { self.context.driver().elapsed_milliseconds(start.raw, self.raw) }?)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the owner; the driver defers the destruction of an event still waited for.
        let _ = unsafe { self.context.driver().destroy_event(self.raw) };
    }
}
