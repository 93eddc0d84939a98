// SPDX-License-Identifier: Apache-2.0

//! [`Graph`]: captured work of a stream, ready to be launched again.

use std::cell::Cell;
use std::marker::PhantomData;

use super::{CudaError, Stream};
use crate::checked::{RawGraph, RawGraphExec};

/// It does not keep the memory that the captured work uses.
pub struct Graph {
    stream: Stream,
    exec: RawGraphExec,
    /// Not `Sync`: the driver does not synchronize launches of one graph from several threads.
    /// `Send`: launches go through `&self` of one stream, which the driver serializes.
    not_sync: PhantomData<Cell<()>>,
}

/// The result of a capture, destroyed once a [`Graph`] has been made of it.
struct CapturedWork<'s> {
    stream: &'s Stream,
    raw: RawGraph,
}

impl Stream {
    /// Records the work that `work` enqueues to this stream, instead of running it.
    pub fn capture<E: From<CudaError>>(&self, work: impl FnOnce() -> Result<(), E>) -> Result<Graph, E> {
        Graph::capture(self, work)
    }
}

impl Graph {
    fn capture<E: From<CudaError>>(stream: &Stream, work: impl FnOnce() -> Result<(), E>) -> Result<Self, E> {
        let driver = stream.driver();
        // SAFETY: the stream lives; the capture is ended below on every path.
        unsafe { driver.begin_capture(stream.raw()) }.map_err(CudaError::from)?;
        let worked = work();
        // SAFETY: a capture was begun on this stream by this thread.
        let captured = unsafe { driver.end_capture(stream.raw()) };
        let captured = captured.map(|raw| CapturedWork { stream, raw });
        // If `work` failed halfway, the driver may still have made a graph of it, which is dropped
        // here.
        worked?;
        let captured = captured.map_err(CudaError::from)?;
        // SAFETY: the graph came from the capture and lives; `exec` is owned by the value that is
        // returned.
        let exec = unsafe { driver.instantiate_graph(captured.raw) }.map_err(CudaError::from)?;
        Ok(Self { stream: stream.clone(), exec, not_sync: PhantomData })
    }

    /// Takes the device memory that the first launch would take.
    pub fn upload(&self) -> Result<(), CudaError> {
        // SAFETY: both live.
        Ok(unsafe { self.stream.driver().upload_graph(self.exec, self.stream.raw()) }?)
    }

    /// Launches the captured work in the stream that it was captured from.
    ///
    /// # Safety
    /// All memory that the captured work uses lives until this launch has ended, and nothing else
    /// uses it meanwhile in a way that the work itself could not have been enqueued with.
    pub unsafe fn launch(&self) -> Result<(), CudaError> {
        // SAFETY: both live; what the work uses, by this function's contract.
        Ok(unsafe { self.stream.driver().launch_graph(self.exec, self.stream.raw()) }?)
    }
}

impl Drop for CapturedWork<'_> {
    fn drop(&mut self) {
        // SAFETY: the owner; what was instantiated of it stands for itself.
        let _ = unsafe { self.stream.driver().destroy_graph(self.raw) };
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: the owner; the driver defers the destruction of a graph that still runs.
        let _ = unsafe { self.stream.driver().destroy_graph_exec(self.exec) };
    }
}
