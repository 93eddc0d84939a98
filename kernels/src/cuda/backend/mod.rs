// SPDX-License-Identifier: Apache-2.0

//! [`Cuda`] implements `ops::Backend` on a GPU. Each op becomes a [`KernelCommand`]. The
//! [`Recorder`] enqueues the collected commands in two parts: after some layers, and when the model
//! reads a result.
//!
//! ```text
//! begin      checks the rows of a step and uploads them               step, upload
//! ops        check shapes, upload weights on first use, push commands vocabulary, data, tensor
//! attention  decides which kernel computes which rows                 plan, attention_plan
//! rotation   in one layer, enqueues the commands so far               recorder, fused_launch
//! read       enqueues the rest, as a CUDA graph if the same list came recorder, fused_launch
//!            before, and copies the result to the host                readback, drawn_tokens
//! ```

mod attention_plan;
mod block_set;
mod command;
mod data;
mod drawn_tokens;
mod expert_command;
mod experts;
mod fused_launch;
mod fusion;
mod kernel_set;
mod kv;
mod liveness;
mod operand;
mod plan;
mod readback;
mod recorder;
mod rope;
mod step;
mod tensor;
mod upload;
mod usage;
mod vocabulary;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ops::{OpError, Weight};
use quant::DType;
use turns::Turns;

use super::error::device_error;
use super::quantize::ActivationLayout;
use super::{Buffer, CudaError, Device, Stream};
use attention_plan::{AttentionPlanShape, DeviceAttentionPlan};
use command::KernelCommand;
use data::{ResidentWeight, make_resident};
use drawn_tokens::DrawnTokens;
use operand::{ActivationTiles, ByteRange, FloatRange, WeightMatrix};
use readback::Readback;
use recorder::Recorder;
use step::StepRows;
use upload::StepUpload;
use usage::{DRIVER_BYTES, allocated, graph_bytes};

pub use data::WeightData;
use kv::UnitPrefetch;
pub use kv::{CudaKv, kv_bytes};
pub use rope::CudaRope;
pub use tensor::CudaTensor;
pub use usage::{CudaWorkerShape, DeviceBytes, predict_device_bytes};

/// The GPU backend. It collects ops and runs them when a result is read.
pub struct Cuda {
    device: Device,
    recorder: Recorder,
    step: StepRows,
    /// Number of steps begun so far.
    steps: u64,
    plans: Vec<DeviceAttentionPlan>,
    caches: Vec<UnitPrefetch>,
    /// Quantized activations. One op at a time uses this buffer.
    activation_tiles: Arc<Buffer<u8>>,
    expert_scratch: Arc<Buffer<u8>>,
    finished_groups: Option<Arc<Buffer<u32>>>,
    drawn: DrawnTokens,
    draw_params: StepUpload,
    /// The work space of the shortlist kernels. It begins with their results.
    shortlists: Arc<Buffer<u64>>,
    records: Vec<u64>,
    readback: Readback,
    tensor_bytes: Arc<AtomicU64>,
}

impl Cuda {
    pub fn new(device: &Device) -> Result<Self, OpError> {
        Self::open(device).map_err(device_error("start"))
    }

    fn open(device: &Device) -> Result<Self, CudaError> {
        let stream = Stream::new(device)?;
        Ok(Self {
            device: device.clone(),
            step: StepRows::new(&stream)?,
            draw_params: StepUpload::new(&stream)?,
            shortlists: Arc::new(Buffer::new(device, 0)?),
            records: Vec::new(),
            recorder: Recorder::new(device, stream),
            steps: 0,
            plans: Vec::new(),
            caches: Vec::new(),
            activation_tiles: Arc::new(Buffer::new(device, 0)?),
            expert_scratch: Arc::new(Buffer::new(device, 0)?),
            finished_groups: None,
            drawn: DrawnTokens::new(device)?,
            readback: Readback::new(device),
            tensor_bytes: Arc::default(),
        })
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Turns the replay of repeated steps as CUDA graphs on or off, for benches and tests. Replay
    /// is on by default.
    pub fn set_graphs(&mut self, on: bool) {
        self.recorder.set_graphs(on);
    }

    /// Sets from how many commands on the first part of a step is enqueued, for tests.
    pub fn set_first_part_commands(&mut self, commands: usize) {
        self.recorder.set_first_part_commands(commands);
    }

    /// Takes turns with other processes on this device from now on.
    pub fn set_turns(&mut self, turns: Turns) {
        self.recorder.set_turns(turns);
    }

    /// The number of captured graphs in memory.
    pub fn graphs(&self) -> usize {
        self.recorder.graphs()
    }

    /// Names all that decides the bits of results, besides the types of weights and KV cache. All
    /// kernels for one architecture add in one order. The tensor cores of another architecture may
    /// round differently.
    pub fn fingerprint(&self) -> String {
        let (major, minor) = self.device.capability();
        format!("cuda-sm{major}{minor}")
    }

    /// The device memory that this backend has allocated so far.
    pub fn device_bytes(&self) -> DeviceBytes {
        let lists = self.shortlists.len() * size_of::<u64>();
        let counts = self.finished_groups.as_ref().map_or(0, |counts| counts.len() * size_of::<u32>());
        let experts = self.expert_scratch.len() + counts;
        let scratch = [self.activation_tiles.len(), experts, self.drawn.bytes(), lists];
        DeviceBytes {
            tensors: self.tensor_bytes.load(Ordering::Relaxed),
            scratch: scratch.map(|bytes| allocated(bytes as u64)).iter().sum::<u64>()
                + self.plans.iter().map(DeviceAttentionPlan::bytes).sum::<u64>()
                + self.step.bytes()
                + self.draw_params.bytes(),
            graphs: graph_bytes(self.recorder.graph_launches()),
            modules: self.device.module_bytes() + DRIVER_BYTES,
        }
    }

    /// The time spent on captures so far. A list of commands is captured when it occurs for the
    /// second time.
    pub fn graph_time(&self) -> Duration {
        self.recorder.graph_time()
    }

    /// Enqueues the collected commands and waits until they have ended. `read` does the same.
    pub fn wait(&mut self) -> Result<(), OpError> {
        self.recorder.flush()?;
        self.recorder.wait()
    }

    /// Adds a command. The command's memory stays alive: it belongs to this value, or to tensors
    /// and weights whose owners the recorder keeps.
    fn push(&mut self, command: KernelCommand) {
        // SAFETY: ops make ranges of tensors, weights, tables of angles, caches and scratch memory.
        // They keep the owners of the first three. Caches and scratch memory are freed only after
        // the backend has waited for the device. Lengths and indices were checked.
        unsafe { self.recorder.push(command) };
    }

    fn use_tensor(&mut self, tensor: &CudaTensor, rows: usize) -> FloatRange {
        self.recorder.keep(tensor.owner());
        tensor.rows(rows)
    }

    /// Returns the range of a norm weight or a bias: `len` values of f32.
    fn vector(
        &mut self,
        op: &'static str,
        what: &'static str,
        weight: &Weight<Self>,
        len: usize,
    ) -> Result<FloatRange, OpError> {
        for (what, found, expected) in [("rows of a vector", weight.rows(), 1), (what, weight.cols(), len)] {
            if found != expected {
                return Err(OpError::Shape { op, what, found, expected });
            }
        }
        if weight.dtype != DType::F32 {
            return Err(OpError::Type { op, dtype: weight.dtype });
        }
        let ResidentWeight { range, owner, .. } = make_resident(op, self.recorder.stream(), weight)?;
        self.recorder.keep(owner);
        Ok(FloatRange { address: range.address, len })
    }

    fn matrix(&mut self, op: &'static str, weight: &Weight<Self>) -> Result<WeightMatrix, OpError> {
        let ResidentWeight { range, tiles, owner } = make_resident(op, self.recorder.stream(), weight)?;
        self.recorder.keep(owner);
        Ok(WeightMatrix { dtype: weight.dtype, range, cols: tiles.cols() as u32, rows: tiles.rows() as u32 })
    }

    /// Returns scratch memory for `rows` rows of activations.
    fn activation_tiles(
        &mut self,
        op: &'static str,
        layout: ActivationLayout,
        rows: usize,
        cols: usize,
    ) -> Result<ActivationTiles, OpError> {
        let len = layout.bytes(rows, cols).ok_or(OpError::Type { op, dtype: layout.format })?;
        if len > self.activation_tiles.len() {
            let buffer = Buffer::new(&self.device, len).map_err(device_error(op))?;
            self.activation_tiles = Arc::new(buffer);
        }
        self.recorder.keep(self.activation_tiles.clone());
        let range = ByteRange { address: self.activation_tiles.view().address(), len };
        Ok(ActivationTiles { layout, range, tokens: rows as u32, cols: cols as u32 })
    }
}

impl Cuda {
    /// Returns the plans of this step for one shape of query tiles, as indices for commands.
    /// `groups` are the KV cache groups of the span's layers.
    fn plan_attention(&mut self, shape: AttentionPlanShape, groups: &[usize]) -> Result<Vec<u32>, OpError> {
        let at = match self.plans.iter().position(|plan| plan.shape() == shape) {
            Some(at) => at,
            None => {
                self.plans.push(DeviceAttentionPlan::new(&self.recorder, shape)?);
                self.plans.len() - 1
            }
        };
        let addresses = self.plans[at].addresses(&mut self.recorder, self.steps, &self.step, groups)?;
        Ok(addresses.iter().map(|&address| self.recorder.plan(address)).collect())
    }

    /// Waits for all ops, then fills `host` with the values at `address`. They lie in a tensor or
    /// in scratch memory.
    fn read_to_host<T: bytemuck::Pod>(
        &mut self,
        op: &'static str,
        address: u64,
        host: &mut [T],
    ) -> Result<(), OpError> {
        // Maps cache units for the next step while the device is busy.
        self.caches.retain(|cache| cache.map().is_some());
        // SAFETY: the callers checked lengths against what they own.
        unsafe { self.readback.read_to_host(self.recorder.stream(), address, host) }
            .map_err(device_error(op))?;
        if host.is_empty() {
            return self.recorder.wait();
        }
        // The copy that has arrived was enqueued after all other work.
        self.recorder.work_has_ended();
        Ok(())
    }
}
