// SPDX-License-Identifier: Apache-2.0

//! The fake's [`ExecutionApi`]: buffers, streams and events. Work is done when it is enqueued.

use std::ffi::{CStr, c_void};
use std::fs::File;
use std::os::unix::fs::FileExt;

use nix::sys::memfd::{MFdFlags, memfd_create};

use super::{FIRST_ADDRESS, FakeDriver, FakeMapping, FakeMemory, FakeState, GAP};
use crate::checked::{
    DeviceAccess, DriverCall, DriverError, EncodedTensorMap, ErrorCode, ExecutionApi, LaunchConfig, RawEvent,
    RawFunction, RawGraph, RawGraphExec, RawModule, RawStream, TensorBoxLayout,
};

impl FakeState {
    /// Records a call that needs a current context.
    fn enter_context(&mut self, call: DriverCall) -> Result<(), DriverError> {
        self.enter(call)?;
        match self.current.contains_key(&std::thread::current().id()) {
            true => Ok(()),
            false => Err(DriverError { call, code: ErrorCode::INVALID_CONTEXT }),
        }
    }

    fn check_stream(&mut self, call: DriverCall, stream: RawStream) -> Result<(), DriverError> {
        self.enter(call)?;
        if self.streams.contains(&stream) { Ok(()) } else { Err(self.violation(call, "no such stream")) }
    }

    fn check_event(&mut self, call: DriverCall, event: RawEvent) -> Result<(), DriverError> {
        self.enter(call)?;
        if self.events.contains(&event) { Ok(()) } else { Err(self.violation(call, "no such event")) }
    }
}

fn unsupported<T>(call: DriverCall) -> Result<T, DriverError> {
    Err(DriverError { call, code: ErrorCode::NOT_SUPPORTED })
}

impl ExecutionApi for FakeDriver {
    fn synchronize(&self) -> Result<(), DriverError> {
        self.lock().enter_context(DriverCall::CtxSynchronize)
    }

    fn allocate(&self, bytes: usize) -> Result<u64, DriverError> {
        let call = DriverCall::MemAlloc;
        let mut state = self.lock();
        state.enter_context(call)?;
        if bytes == 0 {
            return Err(state.violation(call, "an empty allocation"));
        }
        if state.capacity - state.used() < bytes as u64 {
            return Err(DriverError { call, code: ErrorCode::OUT_OF_MEMORY });
        }
        let file = File::from(memfd_create("fake-buffer", MFdFlags::MFD_CLOEXEC).unwrap());
        file.set_len(bytes as u64).unwrap();
        let address = FIRST_ADDRESS + state.fresh() * GAP;
        let ordinal = state.current[&std::thread::current().id()];
        let access = [(ordinal, DeviceAccess::ReadWrite)].into();
        let mapping = FakeMapping { memory: FakeMemory(file), access };
        state.mapped.insert(address, mapping);
        state.allocated.insert(address);
        Ok(address)
    }

    unsafe fn free(&self, address: u64) -> Result<(), DriverError> {
        let mut state = self.lock();
        state.enter_context(DriverCall::MemFree)?;
        if !state.allocated.remove(&address) {
            return Err(state.violation(DriverCall::MemFree, "not allocated"));
        }
        state.mapped.remove(&address);
        Ok(())
    }

    fn allocate_host(&self, bytes: usize) -> Result<*mut u8, DriverError> {
        let mut state = self.lock();
        state.enter_context(DriverCall::MemHostAlloc)?;
        let mut buffer = vec![0u128; bytes.div_ceil(size_of::<u128>())].into_boxed_slice();
        let start: *mut u8 = buffer.as_mut_ptr().cast();
        state.host_buffers.insert(start.addr(), buffer);
        Ok(start)
    }

    unsafe fn free_host(&self, start: *mut u8) -> Result<(), DriverError> {
        let mut state = self.lock();
        state.enter_context(DriverCall::MemFreeHost)?;
        match state.host_buffers.remove(&start.addr()) {
            Some(_) => Ok(()),
            None => Err(state.violation(DriverCall::MemFreeHost, "not allocated")),
        }
    }

    fn create_stream(&self) -> Result<RawStream, DriverError> {
        let mut state = self.lock();
        state.enter_context(DriverCall::StreamCreate)?;
        let stream = RawStream(state.fresh() as usize);
        state.streams.insert(stream);
        Ok(stream)
    }

    unsafe fn destroy_stream(&self, stream: RawStream) -> Result<(), DriverError> {
        let mut state = self.lock();
        state.check_stream(DriverCall::StreamDestroy, stream)?;
        state.streams.remove(&stream);
        Ok(())
    }

    unsafe fn synchronize_stream(&self, stream: RawStream) -> Result<(), DriverError> {
        self.lock().check_stream(DriverCall::StreamSynchronize, stream)
    }

    unsafe fn wait_event(&self, stream: RawStream, event: RawEvent) -> Result<(), DriverError> {
        let mut state = self.lock();
        state.check_stream(DriverCall::StreamWaitEvent, stream)?;
        state.check_event(DriverCall::StreamWaitEvent, event)
    }

    unsafe fn begin_capture(&self, _: RawStream) -> Result<(), DriverError> {
        unsupported(DriverCall::StreamBeginCapture)
    }

    unsafe fn end_capture(&self, _: RawStream) -> Result<RawGraph, DriverError> {
        unsupported(DriverCall::StreamEndCapture)
    }

    fn create_event(&self, _: bool) -> Result<RawEvent, DriverError> {
        let mut state = self.lock();
        state.enter_context(DriverCall::EventCreate)?;
        let event = RawEvent(state.fresh() as usize);
        state.events.insert(event);
        Ok(event)
    }

    unsafe fn destroy_event(&self, event: RawEvent) -> Result<(), DriverError> {
        let mut state = self.lock();
        state.check_event(DriverCall::EventDestroy, event)?;
        state.events.remove(&event);
        Ok(())
    }

    unsafe fn record_event(&self, event: RawEvent, stream: RawStream) -> Result<(), DriverError> {
        let mut state = self.lock();
        state.check_stream(DriverCall::EventRecord, stream)?;
        state.check_event(DriverCall::EventRecord, event)
    }

    unsafe fn synchronize_event(&self, event: RawEvent) -> Result<(), DriverError> {
        self.lock().check_event(DriverCall::EventSynchronize, event)
    }

    unsafe fn is_event_done(&self, event: RawEvent) -> Result<bool, DriverError> {
        self.lock().check_event(DriverCall::EventQuery, event).map(|()| true)
    }

    unsafe fn elapsed_milliseconds(&self, _: RawEvent, _: RawEvent) -> Result<f32, DriverError> {
        unsupported(DriverCall::EventElapsedTime)
    }

    unsafe fn instantiate_graph(&self, _: RawGraph) -> Result<RawGraphExec, DriverError> {
        unsupported(DriverCall::GraphInstantiateWithFlags)
    }

    unsafe fn destroy_graph(&self, _: RawGraph) -> Result<(), DriverError> {
        unsupported(DriverCall::GraphDestroy)
    }

    unsafe fn upload_graph(&self, _: RawGraphExec, _: RawStream) -> Result<(), DriverError> {
        unsupported(DriverCall::GraphUpload)
    }

    unsafe fn launch_graph(&self, _: RawGraphExec, _: RawStream) -> Result<(), DriverError> {
        unsupported(DriverCall::GraphLaunch)
    }

    unsafe fn destroy_graph_exec(&self, _: RawGraphExec) -> Result<(), DriverError> {
        unsupported(DriverCall::GraphExecDestroy)
    }

    unsafe fn load_module(&self, _: &[u8]) -> Result<RawModule, DriverError> {
        unsupported(DriverCall::ModuleLoadData)
    }

    unsafe fn unload_module(&self, _: RawModule) -> Result<(), DriverError> {
        unsupported(DriverCall::ModuleUnload)
    }

    unsafe fn module_function(&self, _: RawModule, _: &CStr) -> Result<RawFunction, DriverError> {
        unsupported(DriverCall::ModuleGetFunction)
    }

    unsafe fn static_shared_bytes(&self, _: RawFunction) -> Result<u32, DriverError> {
        unsupported(DriverCall::FuncGetAttribute)
    }

    unsafe fn set_max_dynamic_shared_bytes(&self, _: RawFunction, _: u32) -> Result<(), DriverError> {
        unsupported(DriverCall::FuncSetAttribute)
    }

    unsafe fn blocks_per_multiprocessor(&self, _: RawFunction, _: u32, _: u32) -> Result<u32, DriverError> {
        unsupported(DriverCall::OccupancyMaxActiveBlocksPerMultiprocessor)
    }

    unsafe fn active_clusters(&self, _: RawFunction, _: &LaunchConfig) -> Result<u32, DriverError> {
        unsupported(DriverCall::OccupancyMaxActiveClusters)
    }

    fn encode_tensor_map(&self, _: &TensorBoxLayout) -> Result<EncodedTensorMap, DriverError> {
        unsupported(DriverCall::TensorMapEncodeTiled)
    }

    unsafe fn launch(
        &self,
        _: RawFunction,
        _: &LaunchConfig,
        _: RawStream,
        _: &mut [*mut c_void],
    ) -> Result<(), DriverError> {
        unsupported(DriverCall::LaunchKernelEx)
    }

    unsafe fn enqueue_copy_to_device(
        &self,
        stream: RawStream,
        address: u64,
        source: &[u8],
    ) -> Result<(), DriverError> {
        let call = DriverCall::MemcpyHtoDAsync;
        let mut state = self.lock();
        state.check_stream(call, stream)?;
        state.for_each_mapping(
            call,
            (address, source.len()),
            DeviceAccess::ReadWrite,
            |file, offset, part| {
                file.write_all_at(&source[part], offset).unwrap();
            },
        )
    }

    unsafe fn enqueue_copy_to_host(
        &self,
        stream: RawStream,
        target: &mut [u8],
        address: u64,
    ) -> Result<(), DriverError> {
        let call = DriverCall::MemcpyDtoHAsync;
        let mut state = self.lock();
        state.check_stream(call, stream)?;
        let range = (address, target.len());
        state.for_each_mapping(call, range, DeviceAccess::Read, |file, offset, part| {
            file.read_exact_at(&mut target[part], offset).unwrap();
        })
    }

    unsafe fn enqueue_copy_on_device(
        &self,
        stream: RawStream,
        target: u64,
        source: u64,
        bytes: usize,
    ) -> Result<(), DriverError> {
        let call = DriverCall::MemcpyDtoDAsync;
        let mut state = self.lock();
        state.check_stream(call, stream)?;
        let mut copied = vec![0; bytes];
        state.for_each_mapping(call, (source, bytes), DeviceAccess::Read, |file, offset, part| {
            file.read_exact_at(&mut copied[part], offset).unwrap();
        })?;
        state.for_each_mapping(call, (target, bytes), DeviceAccess::ReadWrite, |file, offset, part| {
            file.write_all_at(&copied[part], offset).unwrap();
        })
    }

    unsafe fn enqueue_fill(
        &self,
        stream: RawStream,
        address: u64,
        byte: u8,
        bytes: usize,
    ) -> Result<(), DriverError> {
        let call = DriverCall::MemsetD8Async;
        let mut state = self.lock();
        state.check_stream(call, stream)?;
        state.for_each_mapping(call, (address, bytes), DeviceAccess::ReadWrite, |file, offset, part| {
            file.write_all_at(&vec![byte; part.len()], offset).unwrap();
        })
    }
}
