// SPDX-License-Identifier: Apache-2.0

//! The real driver's [`ExecutionApi`].

use std::ffi::{CStr, c_int, c_uint, c_void};

use cudarc::driver::sys::{
    self, CUevent, CUevent_flags, CUevent_wait_flags, CUfunction, CUfunction_attribute, CUgraph, CUgraphExec,
    CUmodule, CUstream, CUstream_flags, CUstreamCaptureMode, CUtensorMap, CUtensorMapDataType,
    CUtensorMapFloatOOBfill, CUtensorMapInterleave, CUtensorMapL2promotion, CUtensorMapSwizzle,
};

use super::{LibCuda, check};
use crate::checked::{
    DriverCall, DriverError, EncodedTensorMap, ErrorCode, ExecutionApi, LaunchConfig, RawEvent, RawFunction,
    RawGraph, RawGraphExec, RawModule, RawStream, TensorBoxLayout,
};

/// Handles are pointers into the driver; outside of this crate's two lowest layers they are
/// numbers.
macro_rules! handles {
    ($($raw:ident = $pointer:ty;)*) => {
        $(impl $raw {
            fn new(pointer: $pointer) -> Self {
                Self(pointer.expose_provenance())
            }

            fn pointer(self) -> $pointer {
                std::ptr::with_exposed_provenance_mut(self.0)
            }
        })*
    };
}

handles! {
    RawStream = CUstream;
    RawEvent = CUevent;
    RawGraph = CUgraph;
    RawGraphExec = CUgraphExec;
    RawModule = CUmodule;
    RawFunction = CUfunction;
}

impl ExecutionApi for LibCuda {
    fn synchronize(&self) -> Result<(), DriverError> {
        // SAFETY: takes nothing; without a current context the call is refused.
        check(DriverCall::CtxSynchronize, unsafe { (self.functions.synchronize)() })
    }

    fn allocate(&self, bytes: usize) -> Result<u64, DriverError> {
        let mut address = 0;
        // SAFETY: one number is written; without a current context the call is refused.
        check(DriverCall::MemAlloc, unsafe { (self.functions.allocate)(&mut address, bytes) })?;
        Ok(address)
    }

    unsafe fn free(&self, address: u64) -> Result<(), DriverError> {
        // SAFETY: the caller vouches for the address.
        check(DriverCall::MemFree, unsafe { (self.functions.free)(address) })
    }

    fn allocate_host(&self, bytes: usize) -> Result<*mut u8, DriverError> {
        let mut start = std::ptr::null_mut();
        // SAFETY: one pointer is written; without a current context the call is refused.
        check(DriverCall::MemHostAlloc, unsafe { (self.functions.allocate_host)(&mut start, bytes, 0) })?;
        Ok(start.cast())
    }

    unsafe fn free_host(&self, start: *mut u8) -> Result<(), DriverError> {
        // SAFETY: the caller vouches for the pointer.
        check(DriverCall::MemFreeHost, unsafe { (self.functions.free_host)(start.cast()) })
    }

    fn create_stream(&self) -> Result<RawStream, DriverError> {
        let mut stream: CUstream = std::ptr::null_mut();
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
        // SAFETY: one pointer is written; without a current context the call is refused.
        check(DriverCall::StreamCreate, unsafe { (self.functions.create_stream)(&mut stream, flags) })?;
        Ok(RawStream::new(stream))
    }

    unsafe fn destroy_stream(&self, stream: RawStream) -> Result<(), DriverError> {
        // SAFETY: the caller vouches for the stream.
        check(DriverCall::StreamDestroy, unsafe { (self.functions.destroy_stream)(stream.pointer()) })
    }

    unsafe fn synchronize_stream(&self, stream: RawStream) -> Result<(), DriverError> {
        // SAFETY: the caller vouches for the stream.
        check(DriverCall::StreamSynchronize, unsafe { (self.functions.synchronize_stream)(stream.pointer()) })
    }

    unsafe fn wait_event(&self, stream: RawStream, event: RawEvent) -> Result<(), DriverError> {
        let flags = CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT as c_uint;
        // SAFETY: the caller vouches for both.
        let status = unsafe { (self.functions.wait_event)(stream.pointer(), event.pointer(), flags) };
        check(DriverCall::StreamWaitEvent, status)
    }

    unsafe fn begin_capture(&self, stream: RawStream) -> Result<(), DriverError> {
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the caller vouches for the stream.
        let status = unsafe { (self.functions.begin_capture)(stream.pointer(), mode) };
        check(DriverCall::StreamBeginCapture, status)
    }

    unsafe fn end_capture(&self, stream: RawStream) -> Result<RawGraph, DriverError> {
        let mut graph: CUgraph = std::ptr::null_mut();
        // SAFETY: the caller vouches for the stream; one pointer is written.
        let status = unsafe { (self.functions.end_capture)(stream.pointer(), &mut graph) };
        check(DriverCall::StreamEndCapture, status)?;
        Ok(RawGraph::new(graph))
    }

    fn create_event(&self, timed: bool) -> Result<RawEvent, DriverError> {
        let flags = match timed {
            true => CUevent_flags::CU_EVENT_DEFAULT,
            false => CUevent_flags::CU_EVENT_DISABLE_TIMING,
        };
        let mut event: CUevent = std::ptr::null_mut();
        // SAFETY: one pointer is written; without a current context the call is refused.
        let status = unsafe { (self.functions.create_event)(&mut event, flags as c_uint) };
        check(DriverCall::EventCreate, status)?;
        Ok(RawEvent::new(event))
    }

    unsafe fn destroy_event(&self, event: RawEvent) -> Result<(), DriverError> {
        // SAFETY: the caller vouches for the event.
        check(DriverCall::EventDestroy, unsafe { (self.functions.destroy_event)(event.pointer()) })
    }

    unsafe fn record_event(&self, event: RawEvent, stream: RawStream) -> Result<(), DriverError> {
        // SAFETY: the caller vouches for both.
        let status = unsafe { (self.functions.record_event)(event.pointer(), stream.pointer()) };
        check(DriverCall::EventRecord, status)
    }

    unsafe fn synchronize_event(&self, event: RawEvent) -> Result<(), DriverError> {
        // SAFETY: the caller vouches for the event.
        check(DriverCall::EventSynchronize, unsafe { (self.functions.synchronize_event)(event.pointer()) })
    }

    unsafe fn is_event_done(&self, event: RawEvent) -> Result<bool, DriverError> {
        // SAFETY: the caller vouches for the event.
        let status = unsafe { (self.functions.query_event)(event.pointer()) };
        if ErrorCode(status) == ErrorCode::NOT_READY {
            return Ok(false);
        }
        check(DriverCall::EventQuery, status).map(|()| true)
    }

    unsafe fn elapsed_milliseconds(&self, start: RawEvent, end: RawEvent) -> Result<f32, DriverError> {
        let mut milliseconds = 0.0;
        // SAFETY: the caller vouches for both; one number is written.
        let status =
            unsafe { (self.functions.elapsed_time)(&mut milliseconds, start.pointer(), end.pointer()) };
        check(DriverCall::EventElapsedTime, status)?;
        Ok(milliseconds)
    }

    unsafe fn instantiate_graph(&self, graph: RawGraph) -> Result<RawGraphExec, DriverError> {
        let mut exec: CUgraphExec = std::ptr::null_mut();
        // SAFETY: the caller vouches for the graph; one pointer is written.
        let status = unsafe { (self.functions.instantiate_graph)(&mut exec, graph.pointer(), 0) };
        check(DriverCall::GraphInstantiateWithFlags, status)?;
        Ok(RawGraphExec::new(exec))
    }

    unsafe fn destroy_graph(&self, graph: RawGraph) -> Result<(), DriverError> {
        // SAFETY: the caller vouches for the graph.
        check(DriverCall::GraphDestroy, unsafe { (self.functions.destroy_graph)(graph.pointer()) })
    }

    unsafe fn upload_graph(&self, graph: RawGraphExec, stream: RawStream) -> Result<(), DriverError> {
        // SAFETY: the caller vouches for both.
        let status = unsafe { (self.functions.upload_graph)(graph.pointer(), stream.pointer()) };
        check(DriverCall::GraphUpload, status)
    }

    unsafe fn launch_graph(&self, graph: RawGraphExec, stream: RawStream) -> Result<(), DriverError> {
        // SAFETY: the caller vouches for both, and for what the work uses.
        let status = unsafe { (self.functions.launch_graph)(graph.pointer(), stream.pointer()) };
        check(DriverCall::GraphLaunch, status)
    }

    unsafe fn destroy_graph_exec(&self, graph: RawGraphExec) -> Result<(), DriverError> {
        // SAFETY: the caller vouches for the graph.
        check(DriverCall::GraphExecDestroy, unsafe { (self.functions.destroy_graph_exec)(graph.pointer()) })
    }

    unsafe fn load_module(&self, image: &[u8]) -> Result<RawModule, DriverError> {
        let mut module: CUmodule = std::ptr::null_mut();
        // SAFETY: the caller vouches for the image, which says itself where it ends; one pointer is
        // written.
        let status = unsafe { (self.functions.load_module)(&mut module, image.as_ptr().cast()) };
        check(DriverCall::ModuleLoadData, status)?;
        Ok(RawModule::new(module))
    }

    unsafe fn unload_module(&self, module: RawModule) -> Result<(), DriverError> {
        // SAFETY: the caller vouches for the module.
        check(DriverCall::ModuleUnload, unsafe { (self.functions.unload_module)(module.pointer()) })
    }

    unsafe fn module_function(&self, module: RawModule, name: &CStr) -> Result<RawFunction, DriverError> {
        let mut function: CUfunction = std::ptr::null_mut();
        // SAFETY: the caller vouches for the module; the name is a C string; one pointer is
        // written.
        let status =
            unsafe { (self.functions.module_function)(&mut function, module.pointer(), name.as_ptr()) };
        check(DriverCall::ModuleGetFunction, status)?;
        Ok(RawFunction::new(function))
    }

    unsafe fn static_shared_bytes(&self, function: RawFunction) -> Result<u32, DriverError> {
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
        let mut bytes: c_int = 0;
        // SAFETY: the caller vouches for the function; one number is written.
        let status =
            unsafe { (self.functions.function_attribute)(&mut bytes, attribute, function.pointer()) };
        check(DriverCall::FuncGetAttribute, status)?;
        Ok(bytes.max(0).cast_unsigned())
    }

    unsafe fn set_max_dynamic_shared_bytes(
        &self,
        function: RawFunction,
        bytes: u32,
    ) -> Result<(), DriverError> {
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the caller vouches for the function.
        let status = unsafe {
            (self.functions.set_function_attribute)(function.pointer(), attribute, bytes.cast_signed())
        };
        check(DriverCall::FuncSetAttribute, status)
    }

    unsafe fn blocks_per_multiprocessor(
        &self,
        function: RawFunction,
        block: u32,
        shared_bytes: u32,
    ) -> Result<u32, DriverError> {
        let mut blocks: c_int = 0;
        // SAFETY: the caller vouches for the function; one number is written.
        let status = unsafe {
            (self.functions.occupancy)(
                &mut blocks,
                function.pointer(),
                block.cast_signed(),
                shared_bytes as usize,
            )
        };
        check(DriverCall::OccupancyMaxActiveBlocksPerMultiprocessor, status)?;
        Ok(blocks.max(0).cast_unsigned())
    }

    unsafe fn active_clusters(
        &self,
        function: RawFunction,
        config: &LaunchConfig,
    ) -> Result<u32, DriverError> {
        let mut clusters: c_int = 0;
        let mut attributes = launch_attributes(config);
        let raw = launch_config(config, std::ptr::null_mut(), &mut attributes);
        // SAFETY: the caller vouches for the function; `raw` and its attributes live until the call
        // returns, and one number is written.
        let status = unsafe { (self.functions.active_clusters)(&mut clusters, function.pointer(), &raw) };
        check(DriverCall::OccupancyMaxActiveClusters, status)?;
        Ok(clusters.max(0).cast_unsigned())
    }

    fn encode_tensor_map(&self, layout: &TensorBoxLayout) -> Result<EncodedTensorMap, DriverError> {
        let mut map = CUtensorMap { opaque: [0; 16] };
        let element_steps: [c_uint; 3] = [1; 3];
        let swizzle = match layout.swizzled {
            true => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            false => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
        };
        // SAFETY: the driver reads three extents, box extents and steps and two strides, and writes
        // one map. It does not read the tensor.
        let status = unsafe {
            (self.functions.encode_tensor_map)(
                &mut map,
                CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT32,
                layout.extents.len() as c_uint,
                std::ptr::without_provenance_mut(layout.address as usize),
                layout.extents.as_ptr(),
                layout.strides.as_ptr(),
                layout.box_extents.as_ptr(),
                element_steps.as_ptr(),
                CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        check(DriverCall::TensorMapEncodeTiled, status)?;
        Ok(EncodedTensorMap(map.opaque))
    }

    unsafe fn launch(
        &self,
        function: RawFunction,
        config: &LaunchConfig,
        stream: RawStream,
        arguments: &mut [*mut c_void],
    ) -> Result<(), DriverError> {
        let mut attributes = launch_attributes(config);
        let raw = launch_config(config, stream.pointer(), &mut attributes);
        // SAFETY: the caller vouches for the function, the stream and the arguments.
        let status = unsafe {
            (self.functions.launch)(&raw, function.pointer(), arguments.as_mut_ptr(), std::ptr::null_mut())
        };
        check(DriverCall::LaunchKernelEx, status)
    }

    unsafe fn enqueue_copy_to_device(
        &self,
        stream: RawStream,
        address: u64,
        source: &[u8],
    ) -> Result<(), DriverError> {
        let (start, bytes) = (source.as_ptr().cast(), source.len());
        // SAFETY: the caller vouches for the stream, the range and the time that both sides stay
        // valid.
        let status =
            unsafe { (self.functions.enqueue_copy_to_device)(address, start, bytes, stream.pointer()) };
        check(DriverCall::MemcpyHtoDAsync, status)
    }

    unsafe fn enqueue_copy_to_host(
        &self,
        stream: RawStream,
        target: &mut [u8],
        address: u64,
    ) -> Result<(), DriverError> {
        let (start, bytes) = (target.as_mut_ptr().cast(), target.len());
        // SAFETY: the caller vouches for the stream, the range and the time that both sides stay
        // valid.
        let status =
            unsafe { (self.functions.enqueue_copy_to_host)(start, address, bytes, stream.pointer()) };
        check(DriverCall::MemcpyDtoHAsync, status)
    }

    unsafe fn enqueue_copy_on_device(
        &self,
        stream: RawStream,
        target: u64,
        source: u64,
        bytes: usize,
    ) -> Result<(), DriverError> {
        // SAFETY: the caller vouches for the stream and for both ranges.
        let status =
            unsafe { (self.functions.enqueue_copy_on_device)(target, source, bytes, stream.pointer()) };
        check(DriverCall::MemcpyDtoDAsync, status)
    }

    unsafe fn enqueue_fill(
        &self,
        stream: RawStream,
        address: u64,
        byte: u8,
        bytes: usize,
    ) -> Result<(), DriverError> {
        // SAFETY: the caller vouches for the stream and the range.
        let status = unsafe { (self.functions.enqueue_fill)(address, byte, bytes, stream.pointer()) };
        check(DriverCall::MemsetD8Async, status)
    }
}

/// The attributes of a launch: the first `LaunchAttributes::count` of the array.
struct LaunchAttributes {
    all: [sys::CUlaunchAttribute; 2],
    count: u32,
}

fn launch_attributes(config: &LaunchConfig) -> LaunchAttributes {
    use sys::CUlaunchAttributeID::{
        CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
    };
    let attribute = |id, value| sys::CUlaunchAttribute { id, pad: [0; 4], value };
    let overlaps = attribute(
        CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        sys::CUlaunchAttributeValue {
            programmaticStreamSerializationAllowed: i32::from(config.overlaps_predecessor),
        },
    );
    let cluster = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: config.cluster, y: 1, z: 1 };
    let cluster =
        attribute(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, sys::CUlaunchAttributeValue { clusterDim: cluster });
    LaunchAttributes { all: [overlaps, cluster], count: 1 + u32::from(config.cluster > 1) }
}

/// Valid as long as `attributes`.
fn launch_config(
    config: &LaunchConfig,
    stream: CUstream,
    attributes: &mut LaunchAttributes,
) -> sys::CUlaunchConfig {
    sys::CUlaunchConfig {
        gridDimX: config.grid.0,
        gridDimY: config.grid.1,
        gridDimZ: config.grid.2,
        blockDimX: config.block,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: config.shared_bytes,
        hStream: stream,
        attrs: attributes.all.as_mut_ptr(),
        numAttrs: attributes.count,
    }
}
