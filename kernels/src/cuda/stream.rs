//! [`Stream`], [`Event`] and [`Graph`]: order of work on the device.

use std::sync::Arc;

use cudarc::driver::result;
use cudarc::driver::sys;

use super::error::Named;
use super::{CudaError, Device};

/// Work in one stream runs in the order it was given. Cheap to clone.
#[derive(Clone)]
pub struct Stream(Arc<StreamInner>);

struct StreamInner {
    device: Device,
    raw: sys::CUstream,
}

// SAFETY: the driver's calls on streams are thread-safe.
unsafe impl Send for StreamInner {}
// SAFETY: as above.
unsafe impl Sync for StreamInner {}

/// What a capture made, until it has become a [`Graph`].
struct Captured(sys::CUgraph);

/// A point in a stream.
pub struct Event {
    /// Keeps the context.
    _device: Device,
    raw: sys::CUevent,
}

// SAFETY: the driver's calls on events are thread-safe.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

/// Captured work, ready to be replayed. It keeps nothing of what the work uses.
pub struct Graph {
    stream: Stream,
    exec: sys::CUgraphExec,
}

// SAFETY: launches go through `&self` of one stream, which the driver serialises.
unsafe impl Send for Graph {}

impl Stream {
    /// A stream of its own, not ordered with the default stream.
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        device.bind()?;
        let raw = result::stream::create(result::stream::StreamKind::NonBlocking).named("cuStreamCreate")?;
        Ok(Self(Arc::new(StreamInner { device: device.clone(), raw })))
    }

    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Waits for all work given so far.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the stream lives as long as self.
        unsafe { result::stream::synchronize(self.0.raw) }.named("cuStreamSynchronize")
    }

    /// Work given from now on waits for `event`.
    pub fn wait(&self, event: &Event) -> Result<(), CudaError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both live.
        unsafe { result::stream::wait_event(self.0.raw, event.raw, flags) }.named("cuStreamWaitEvent")
    }

    /// Records what `work` gives to this stream, instead of running it.
    pub fn capture<E: From<CudaError>>(&self, work: impl FnOnce() -> Result<(), E>) -> Result<Graph, E> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives; the capture is ended below on every path.
        unsafe { result::stream::begin_capture(self.0.raw, mode) }.named("cuStreamBeginCapture")?;
        let worked = work();
        // SAFETY: a capture was begun on this stream by this thread.
        let captured = unsafe { result::stream::end_capture(self.0.raw) }.named("cuStreamEndCapture");
        let graph = match (worked, captured) {
            (Ok(()), captured) => Captured(captured?),
            (Err(error), captured) => {
                // Work may fail halfway and leave a capture that is whole to the driver.
                drop(captured.map(Captured));
                return Err(error);
            }
        };
        let mut exec = std::ptr::null_mut();
        // SAFETY: `graph` came from the capture and lives; `exec` is owned by the Graph.
        unsafe { sys::cuGraphInstantiateWithFlags(&mut exec, graph.0, 0) }
            .result()
            .named("cuGraphInstantiate")?;
        Ok(Graph { stream: self.clone(), exec })
    }

    pub fn raw(&self) -> sys::CUstream {
        self.0.raw
    }
}

impl Drop for StreamInner {
    fn drop(&mut self) {
        // SAFETY: the last owner; the driver lets work in flight end before it frees the stream.
        let _ = unsafe { result::stream::destroy(self.raw) };
    }
}

impl Drop for Captured {
    fn drop(&mut self) {
        // SAFETY: the owner; what was instantiated of it stands for itself.
        let _ = unsafe { result::graph::destroy(self.0) };
    }
}

impl Graph {
    /// Takes the device memory that the first launch would take.
    pub fn upload(&self) -> Result<(), CudaError> {
        // SAFETY: both live.
        unsafe { sys::cuGraphUpload(self.exec, self.stream.0.raw) }.result().named("cuGraphUpload")
    }

    /// Gives the captured work to the stream it was captured from.
    ///
    /// # Safety
    /// All memory that the captured work uses lives until this launch has ended, and nothing else uses it meanwhile in a way
    /// that the work itself could not have been given with.
    pub unsafe fn launch(&self) -> Result<(), CudaError> {
        // SAFETY: both live; what the work uses, by this function's contract.
        unsafe { result::graph::launch(self.exec, self.stream.0.raw) }.named("cuGraphLaunch")
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: the owner; the driver defers the destruction of a graph that still runs.
        let _ = unsafe { result::graph::exec_destroy(self.exec) };
    }
}

impl Event {
    /// Without timing: cheaper, for order only.
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        Self::with_flags(device, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    pub fn timed(device: &Device) -> Result<Self, CudaError> {
        Self::with_flags(device, sys::CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn with_flags(device: &Device, flags: sys::CUevent_flags) -> Result<Self, CudaError> {
        device.bind()?;
        let raw = result::event::create(flags).named("cuEventCreate")?;
        Ok(Self { _device: device.clone(), raw })
    }

    pub fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: both live.
        unsafe { result::event::record(self.raw, stream.0.raw) }.named("cuEventRecord")
    }

    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: lives.
        unsafe { result::event::synchronize(self.raw) }.named("cuEventSynchronize")
    }

    /// Whether the work before the point has ended.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        // SAFETY: lives.
        match unsafe { result::event::query(self.raw) } {
            Ok(()) => Ok(true),
            Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            Err(source) => Err(CudaError::Call { call: "cuEventQuery", source }),
        }
    }

    /// From `start` to here; both timed, recorded and done.
    pub fn milliseconds_since(&self, start: &Self) -> Result<f32, CudaError> {
        // SAFETY: both live.
        unsafe { result::event::elapsed(start.raw, self.raw) }.named("cuEventElapsedTime")
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the owner; the driver defers the destruction of an event still waited for.
        let _ = unsafe { result::event::destroy(self.raw) };
    }
}
