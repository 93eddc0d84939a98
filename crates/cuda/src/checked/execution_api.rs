// SPDX-License-Identifier: Apache-2.0

//! [`ExecutionApi`]: memory of a context, streams, events, graphs and kernels; one method per
//! driver call.
//!
//! All of these belong to the context that was current on the calling thread when they were made.
//! The driver's calls on contexts, streams, events, modules and functions are thread-safe, so their
//! handles are plain numbers that any thread may use. Graphs are the exception: one thread at a
//! time.

use std::ffi::{CStr, c_void};

use super::DriverError;

/// `CUstream`
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RawStream(pub usize);

/// `CUevent`
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RawEvent(pub usize);

/// `CUgraph`: what a capture recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RawGraph(pub usize);

/// `CUgraphExec`: a graph that can be launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RawGraphExec(pub usize);

/// `CUmodule`
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RawModule(pub usize);

/// `CUfunction`
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RawFunction(pub usize);

/// Grid and block of one launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchConfig {
    pub grid: (u32, u32, u32),
    pub block: u32,
    /// Dynamic shared memory.
    pub shared_bytes: u32,
    /// Programmatic dependent launch: the kernel may start while its predecessor in the stream
    /// ends. Such a kernel executes `griddepcontrol.wait` before it touches what the predecessor
    /// writes or reads.
    pub overlaps_predecessor: bool,
    /// Successive blocks of a row of the grid that form a cluster: they run at the same time and
    /// read each other's shared memory. 1 if blocks are on their own. Divides `grid.0`.
    pub cluster: u32,
}

/// A tensor of 32-bit elements in device memory, and the boxes of it that kernels copy. The first
/// dimension is the fastest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorBoxLayout {
    /// A multiple of 16.
    pub address: u64,
    /// Elements in each dimension.
    pub extents: [u64; 3],
    /// Bytes from one element of the second and of the third dimension to the next. Multiples of
    /// 16.
    pub strides: [u64; 2],
    /// Elements of a box in each dimension, at most 256.
    pub box_extents: [u32; 3],
    /// Whether the copy puts 16-byte vector `p` of row `r` of a box at place `p ^ (r % 8)`. The
    /// first dimension of such a box has 32 elements.
    pub swizzled: bool,
}

/// The driver's encoding of a [`TensorBoxLayout`], a parameter of kernels. Its address is a
/// multiple of 64 on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncodedTensorMap(pub [u64; 16]);

/// A handle is valid from the call that returns it until the call that destroys it. Methods that
/// take a handle are unsafe: the handle has to be valid, and of this driver.
pub trait ExecutionApi {
    /// Waits for all work of the context that is current on this thread.
    fn synchronize(&self) -> Result<(), DriverError>;

    /// Allocates device memory in the current context.
    fn allocate(&self, bytes: usize) -> Result<u64, DriverError>;

    /// # Safety
    /// `address` came from `allocate` and is not used again, by work in flight either.
    unsafe fn free(&self, address: u64) -> Result<(), DriverError>;

    /// Allocates pinned host memory, page-aligned and uninitialized, in the current context.
    fn allocate_host(&self, bytes: usize) -> Result<*mut u8, DriverError>;

    /// The driver waits for copies in flight before it frees the memory.
    ///
    /// # Safety
    /// `start` came from `allocate_host` and is not used again.
    unsafe fn free_host(&self, start: *mut u8) -> Result<(), DriverError>;

    /// A stream that is not ordered with the default stream.
    fn create_stream(&self) -> Result<RawStream, DriverError>;

    /// The driver lets work in flight end before it frees the stream.
    ///
    /// # Safety
    /// Not used again.
    unsafe fn destroy_stream(&self, stream: RawStream) -> Result<(), DriverError>;

    /// # Safety
    /// A valid stream.
    unsafe fn synchronize_stream(&self, stream: RawStream) -> Result<(), DriverError>;

    /// # Safety
    /// A valid stream and a valid event.
    unsafe fn wait_event(&self, stream: RawStream, event: RawEvent) -> Result<(), DriverError>;

    /// Starts a capture that only calls of this thread can invalidate.
    ///
    /// # Safety
    /// A valid stream; the caller ends the capture on this thread.
    unsafe fn begin_capture(&self, stream: RawStream) -> Result<(), DriverError>;

    /// # Safety
    /// A valid stream on which this thread has begun a capture.
    unsafe fn end_capture(&self, stream: RawStream) -> Result<RawGraph, DriverError>;

    /// An event; one without timing is cheaper.
    fn create_event(&self, timed: bool) -> Result<RawEvent, DriverError>;

    /// The driver defers the destruction of an event that a stream still waits for.
    ///
    /// # Safety
    /// Not used again.
    unsafe fn destroy_event(&self, event: RawEvent) -> Result<(), DriverError>;

    /// # Safety
    /// A valid event and a valid stream.
    unsafe fn record_event(&self, event: RawEvent, stream: RawStream) -> Result<(), DriverError>;

    /// # Safety
    /// A valid event.
    unsafe fn synchronize_event(&self, event: RawEvent) -> Result<(), DriverError>;

    /// Whether the work before the event has ended.
    ///
    /// # Safety
    /// A valid event.
    unsafe fn is_event_done(&self, event: RawEvent) -> Result<bool, DriverError>;

    /// # Safety
    /// Two valid events.
    unsafe fn elapsed_milliseconds(&self, start: RawEvent, end: RawEvent) -> Result<f32, DriverError>;

    /// # Safety
    /// A valid graph.
    unsafe fn instantiate_graph(&self, graph: RawGraph) -> Result<RawGraphExec, DriverError>;

    /// # Safety
    /// Not used again; what was instantiated from it stays valid.
    unsafe fn destroy_graph(&self, graph: RawGraph) -> Result<(), DriverError>;

    /// Takes the device memory that the first launch would take.
    ///
    /// # Safety
    /// A valid graph and a valid stream.
    unsafe fn upload_graph(&self, graph: RawGraphExec, stream: RawStream) -> Result<(), DriverError>;

    /// # Safety
    /// A valid graph and a valid stream; all memory that the captured work uses stays valid until
    /// the launch has ended.
    unsafe fn launch_graph(&self, graph: RawGraphExec, stream: RawStream) -> Result<(), DriverError>;

    /// The driver defers the destruction of a graph that still runs.
    ///
    /// # Safety
    /// Not used again.
    unsafe fn destroy_graph_exec(&self, graph: RawGraphExec) -> Result<(), DriverError>;

    /// # Safety
    /// `image` is a whole fatbin, cubin or zero-terminated PTX text.
    unsafe fn load_module(&self, image: &[u8]) -> Result<RawModule, DriverError>;

    /// The driver waits for kernels in flight.
    ///
    /// # Safety
    /// Neither the module nor a function of it is used again.
    unsafe fn unload_module(&self, module: RawModule) -> Result<(), DriverError>;

    /// # Safety
    /// A valid module.
    unsafe fn module_function(&self, module: RawModule, name: &CStr) -> Result<RawFunction, DriverError>;

    /// Shared memory that the kernel itself declares.
    ///
    /// # Safety
    /// A function of a loaded module.
    unsafe fn static_shared_bytes(&self, function: RawFunction) -> Result<u32, DriverError>;

    /// Opts the kernel in to this much dynamic shared memory.
    ///
    /// # Safety
    /// A function of a loaded module.
    unsafe fn set_max_dynamic_shared_bytes(
        &self,
        function: RawFunction,
        bytes: u32,
    ) -> Result<(), DriverError>;

    /// # Safety
    /// A function of a loaded module.
    unsafe fn blocks_per_multiprocessor(
        &self,
        function: RawFunction,
        block: u32,
        shared_bytes: u32,
    ) -> Result<u32, DriverError>;

    /// Clusters of a launch like `config` that the device runs at the same time.
    ///
    /// # Safety
    /// A function of a loaded module.
    unsafe fn active_clusters(
        &self,
        function: RawFunction,
        config: &LaunchConfig,
    ) -> Result<u32, DriverError>;

    /// Encodes a layout. Refuses one that the copy engine cannot read. Touches no memory.
    fn encode_tensor_map(&self, layout: &TensorBoxLayout) -> Result<EncodedTensorMap, DriverError>;

    /// # Safety
    /// A function of a loaded module and a valid stream. `arguments` are as many as the kernel has
    /// parameters, each pointing to a value of the parameter's type, and what the kernel reads and
    /// writes with them stays valid until the kernel has ended.
    unsafe fn launch(
        &self,
        function: RawFunction,
        config: &LaunchConfig,
        stream: RawStream,
        arguments: &mut [*mut c_void],
    ) -> Result<(), DriverError>;

    /// # Safety
    /// A valid stream; until the copy has ended, the device's range stays valid and writable, and
    /// `source` stays valid and unchanged.
    unsafe fn enqueue_copy_to_device(
        &self,
        stream: RawStream,
        address: u64,
        source: &[u8],
    ) -> Result<(), DriverError>;

    /// # Safety
    /// A valid stream; until the copy has ended, the device's range stays valid and readable, and
    /// nothing else touches `target`.
    unsafe fn enqueue_copy_to_host(
        &self,
        stream: RawStream,
        target: &mut [u8],
        address: u64,
    ) -> Result<(), DriverError>;

    /// # Safety
    /// A valid stream; until the copy has ended, both ranges of the device stay valid. They do not
    /// overlap.
    unsafe fn enqueue_copy_on_device(
        &self,
        stream: RawStream,
        target: u64,
        source: u64,
        bytes: usize,
    ) -> Result<(), DriverError>;

    /// # Safety
    /// A valid stream; until the work has ended, the device's range stays valid and writable.
    unsafe fn enqueue_fill(
        &self,
        stream: RawStream,
        address: u64,
        byte: u8,
        bytes: usize,
    ) -> Result<(), DriverError>;
}
