//! [`Cuda`]: `ops::Backend` on a GPU. Checks shapes, and turns ops into commands that the recorder gives to the device.
//!
//! ```text
//! begin      rows of a step, checked and sent to the device          step, upload
//! ops        shapes checked, weights made resident, command pushed   data, tensor, command
//! attention  which kernel computes which rows                        plan, attention_plan
//! read       everything collected goes to the device, as a graph     recorder
//!            when the same list came before
//! ```

mod attention_plan;
mod command;
mod data;
mod experts;
mod fusion;
mod kv;
mod plan;
mod readback;
mod recorder;
mod rope;
mod step;
mod tensor;
mod upload;
mod usage;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ops::{
    Activation, AttentionSpec, Backend, Experts, KvLayout, KvType, Linear, OpError, RopePairing, RopeSpec,
    Step, Weight,
};
use quant::DType;

use super::attention::Method;
use super::error::device_error;
use super::quantize::activation_bytes;
use super::{Buffer, CudaError, Device, Stream};
use attention_plan::{DevicePlan, PlanShape};
use command::{AttentionOperands, Command, Floats, Matrix, Panels, Range, Shape};
use data::{Resident, resident};
use readback::Readback;
use recorder::Recorder;
use step::{Rows, Words};
use usage::allocated;

pub use data::Data;
use kv::Ahead;
pub use kv::{Kv, kv_bytes};
pub use rope::Rope;
pub use tensor::Tensor;
pub use usage::{DeviceBytes, WorkerShape, predict};

/// Rows whose best value is looked for at once.
const BEST_ROWS: usize = 64;

/// The GPU backend. Ops are collected and run when something is read.
pub struct Cuda {
    device: Device,
    /// The layer that maps memory has a device of its own; opened when there is a cache to map.
    memory: Option<memory::cuda::Device>,
    recorder: Recorder,
    step: Rows,
    /// Steps begun so far.
    steps: u64,
    plans: Vec<DevicePlan>,
    caches: Vec<Ahead>,
    /// Quantised activations of one op at a time.
    panels: Arc<Buffer<u8>>,
    expert_scratch: Arc<Buffer<u8>>,
    best: Arc<Buffer<u32>>,
    readback: Readback,
    tensor_bytes: Arc<AtomicU64>,
}

impl Cuda {
    pub fn new(device: &Device) -> Result<Self, OpError> {
        Self::open(device).map_err(device_error("start"))
    }

    fn open(device: &Device) -> Result<Self, CudaError> {
        device.bind()?;
        let stream = Stream::new(device)?;
        Ok(Self {
            device: device.clone(),
            memory: None,
            step: Rows::new(&stream)?,
            recorder: Recorder::new(device, stream),
            steps: 0,
            plans: Vec::new(),
            caches: Vec::new(),
            panels: Arc::new(Buffer::new(device, 0)?),
            expert_scratch: Arc::new(Buffer::new(device, 0)?),
            best: Arc::new(Buffer::new(device, BEST_ROWS)?),
            readback: Readback::new(device),
            tensor_bytes: Arc::default(),
        })
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Whether steps that come again are replayed as graphs; on at first. For measurements and tests.
    pub fn set_graphs(&mut self, on: bool) {
        self.recorder.set_graphs(on);
    }

    /// Graphs captured and still kept.
    pub fn graphs(&self) -> usize {
        self.recorder.graphs()
    }

    /// What decides the bits of results, beside the types of weights and cache: kernels for one architecture add in one
    /// order, and tensor cores of another may round otherwise.
    pub fn fingerprint(&self) -> String {
        let (major, minor) = self.device.capability();
        format!("cuda-sm{major}{minor}")
    }

    /// Device memory that is there now for this backend.
    pub fn device_bytes(&self) -> DeviceBytes {
        let scratch = [self.panels.len(), self.expert_scratch.len(), self.best.len() * size_of::<u32>()];
        DeviceBytes {
            tensors: self.tensor_bytes.load(Ordering::Relaxed),
            scratch: scratch.map(|bytes| allocated(bytes as u64)).iter().sum::<u64>()
                + self.plans.iter().map(DevicePlan::bytes).sum::<u64>()
                + self.step.bytes(),
            graphs: self.recorder.graph_bytes(),
            modules: self.device.module_bytes(),
        }
    }

    /// Starts what was collected and waits for its end. `read` does so too.
    pub fn wait(&mut self) -> Result<(), OpError> {
        self.recorder.flush()?;
        self.recorder.wait()
    }

    /// A command over memory that lives: the ranges of tensors and weights whose owners were kept, or of this value.
    fn push(&mut self, command: Command) {
        // SAFETY: ops make ranges of tensors, weights, tables of angles, caches and scratch memory, and keep the owners of the
        // first three; caches and scratch memory go only after the device was waited for. Lengths and indices were checked.
        unsafe { self.recorder.push(command) };
    }

    fn use_tensor(&mut self, tensor: &Tensor, rows: usize) -> Floats {
        self.recorder.keep(tensor.owner());
        tensor.rows(rows)
    }

    /// A norm weight or a bias: `len` values of f32.
    fn vector(
        &mut self,
        op: &'static str,
        what: &'static str,
        weight: &Weight<Self>,
        len: usize,
    ) -> Result<Floats, OpError> {
        for (what, found, expected) in [("rows of a vector", weight.rows(), 1), (what, weight.cols(), len)] {
            if found != expected {
                return Err(OpError::Shape { op, what, found, expected });
            }
        }
        if weight.dtype != DType::F32 {
            return Err(OpError::Type { op, dtype: weight.dtype });
        }
        let Resident { range, owner, .. } = resident(op, self.recorder.stream(), weight)?;
        self.recorder.keep(owner);
        Ok(Floats { address: range.address, len })
    }

    fn matrix(&mut self, op: &'static str, weight: &Weight<Self>) -> Result<Matrix, OpError> {
        let Resident { range, tiles, owner } = resident(op, self.recorder.stream(), weight)?;
        self.recorder.keep(owner);
        Ok(Matrix { dtype: weight.dtype, range, cols: tiles.cols() as u32, rows: tiles.rows() as u32 })
    }

    /// Scratch memory for `rows` rows of activations in `format`.
    fn panels(
        &mut self,
        op: &'static str,
        format: DType,
        rows: usize,
        cols: usize,
    ) -> Result<Panels, OpError> {
        let len = activation_bytes(format, rows, cols).ok_or(OpError::Type { op, dtype: format })?;
        if len > self.panels.len() {
            let buffer = Buffer::new(&self.device, len).map_err(device_error(op))?;
            self.panels = Arc::new(buffer);
        }
        self.recorder.keep(self.panels.clone());
        let range = Range { address: self.panels.view().address(), len };
        Ok(Panels { format, range, tokens: rows as u32, cols: cols as u32 })
    }

    fn kv_device(&mut self, op: &'static str) -> Result<&memory::cuda::Device, OpError> {
        use memory::cuda::{self, DeviceSelector, DeviceUuid};
        if self.memory.is_none() {
            let failed = |source: Box<dyn std::error::Error + Send + Sync>| OpError::Device { op, source };
            let driver = cuda::open_driver().map_err(|error| failed(error.into()))?;
            let wanted = DeviceSelector::Uuid(DeviceUuid(self.device.uuid().0));
            let device = cuda::Device::open(driver, wanted).map_err(|error| failed(error.into()))?;
            self.memory = Some(device);
        }
        self.memory.as_ref().ok_or(OpError::Memory { op, what: "a device", bytes: 0 })
    }
}

impl Backend for Cuda {
    type Data = Data;
    type Tensor = Tensor;
    type Kv = Kv;
    type Rope = Rope;

    fn tensor(&mut self, rows_max: usize, cols: usize) -> Result<Tensor, OpError> {
        const OP: &str = "tensor";
        let bytes = (rows_max as u64).saturating_mul(cols as u64).saturating_mul(size_of::<f32>() as u64);
        let values = rows_max.checked_mul(cols).filter(|_| bytes < u64::MAX);
        let values = values.ok_or(OpError::Memory { op: OP, what: "a tensor", bytes })?;
        let buffer = Buffer::new(&self.device, values).map_err(device_error(OP))?;
        Ok(Tensor::new(buffer, rows_max, cols, &self.tensor_bytes))
    }

    fn kv(&mut self, layout: &KvLayout) -> Result<Kv, OpError> {
        let kv = Kv::new(self.kv_device("kv")?, layout)?;
        self.caches.push(kv.ahead());
        Ok(kv)
    }

    fn rope_table(&mut self, spec: &RopeSpec) -> Result<Rope, OpError> {
        Rope::new(self.recorder.stream(), spec).map_err(device_error("rope_table"))
    }

    fn begin(&mut self, step: &Step<'_>) -> Result<(), OpError> {
        // Commands of the step before refer to its rows.
        self.recorder.flush()?;
        self.steps += 1;
        self.step.set(self.recorder.stream(), step)
    }

    fn embed(&mut self, table: &Weight<Self>, out: &mut Tensor, rows: usize) -> Result<(), OpError> {
        const OP: &str = "embed";
        self.step.check(OP, rows)?;
        out.check(OP, "columns of out", rows, table.cols())?;
        let (index, len) = (self.step.token_max() as usize, table.rows());
        if rows > 0 && index >= len {
            return Err(OpError::Index { op: OP, what: "token", index, len });
        }
        let table = self.matrix(OP, table)?;
        let out = self.use_tensor(out, rows);
        self.push(Command::Embed { table, tokens: self.step.tokens_on_device(), out });
        Ok(())
    }

    fn rms_norm(
        &mut self,
        x: &Tensor,
        weight: &Weight<Self>,
        eps: f32,
        out: &mut Tensor,
        rows: usize,
    ) -> Result<(), OpError> {
        const OP: &str = "rms_norm";
        let weight = self.vector(OP, "columns of x against the weight", weight, x.cols())?;
        x.check(OP, "columns of x", rows, weight.len)?;
        out.check(OP, "columns of out", rows, weight.len)?;
        let (x, out) = (self.use_tensor(x, rows), self.use_tensor(out, rows));
        self.push(Command::Norm { x, weight, eps: eps.into(), out });
        Ok(())
    }

    fn rms_norm_heads(
        &mut self,
        x: &mut Tensor,
        weight: &Weight<Self>,
        eps: f32,
        rows: usize,
    ) -> Result<(), OpError> {
        const OP: &str = "rms_norm_heads";
        let weight = self.vector(OP, "values of a head", weight, weight.cols())?;
        x.check_heads(OP, "columns of x", rows, weight.len)?;
        let x = self.use_tensor(x, rows);
        self.push(Command::NormHeads { x, weight, eps: eps.into() });
        Ok(())
    }

    fn add(&mut self, x: &mut Tensor, y: &Tensor, rows: usize) -> Result<(), OpError> {
        const OP: &str = "add";
        x.check(OP, "columns of x", rows, y.cols())?;
        y.check(OP, "columns of y", rows, x.cols())?;
        let (x, y) = (self.use_tensor(x, rows), self.use_tensor(y, rows));
        self.push(Command::Add { x, y });
        Ok(())
    }

    fn add_rms_norm(
        &mut self,
        x: &mut Tensor,
        y: &Tensor,
        weight: &Weight<Self>,
        eps: f32,
        out: &mut Tensor,
        rows: usize,
    ) -> Result<(), OpError> {
        const OP: &str = "add_rms_norm";
        let weight = self.vector(OP, "columns of x against the weight", weight, x.cols())?;
        x.check(OP, "columns of x", rows, weight.len)?;
        y.check(OP, "columns of y", rows, weight.len)?;
        out.check(OP, "columns of out", rows, weight.len)?;
        let (x, y, out) = (self.use_tensor(x, rows), self.use_tensor(y, rows), self.use_tensor(out, rows));
        self.push(Command::AddNorm { x, y, weight, eps: eps.into(), out });
        Ok(())
    }

    fn linear(
        &mut self,
        layer: &Linear<Self>,
        x: &Tensor,
        out: &mut Tensor,
        rows: usize,
    ) -> Result<(), OpError> {
        self.linears(x, &mut [(layer, out)], rows)
    }

    fn linears(
        &mut self,
        x: &Tensor,
        layers: &mut [(&Linear<Self>, &mut Tensor)],
        rows: usize,
    ) -> Result<(), OpError> {
        const OP: &str = "linear";
        let mut quantized: Option<Panels> = None;
        // Layers of one type stand together: they share launches, and their rounded input.
        let mut order: Vec<usize> = (0..layers.len()).collect();
        order.sort_by_key(|&at| {
            let dtype = layers[at].0.weight.dtype;
            (dtype.activation().map(|format| format as u32), dtype as u32)
        });
        for at in order {
            let (layer, out) = &layers[at];
            x.check(OP, "columns of x", rows, layer.n_in())?;
            out.check(OP, "columns of out", rows, layer.n_out())?;
            let dtype = layer.weight.dtype;
            let format = dtype.activation().ok_or(OpError::Type { op: OP, dtype })?;
            let bias = match &layer.bias {
                Some(bias) => Some(self.vector(OP, "bias length", bias, layer.n_out())?),
                None => None,
            };
            let matrix = self.matrix(OP, &layer.weight)?;
            let (input, out) = (self.use_tensor(x, rows), self.use_tensor(out, rows));
            let panels = match quantized {
                Some(panels) if panels.format == format => panels,
                // F32 weights take rows as they are.
                _ if format == DType::F32 => {
                    let range = Range { address: input.address, len: input.len * size_of::<f32>() };
                    Panels { format, range, tokens: rows as u32, cols: x.cols() as u32 }
                }
                _ => {
                    let panels = self.panels(OP, format, rows, x.cols())?;
                    self.push(Command::Quantize { x: input, panels });
                    *quantized.insert(panels)
                }
            };
            self.push(Command::Product { panels, matrix, bias, out });
        }
        Ok(())
    }

    fn rope(&mut self, x: &mut Tensor, rope: &Rope, head_dim: usize, rows: usize) -> Result<(), OpError> {
        const OP: &str = "rope";
        self.step.check(OP, rows)?;
        x.check_heads(OP, "columns of x", rows, head_dim)?;
        if 2 * rope.pairs() > head_dim {
            let (found, expected) = (2 * rope.pairs(), head_dim);
            return Err(OpError::Shape { op: OP, what: "number of turning values", found, expected });
        }
        self.recorder.keep(rope.owner());
        let x = self.use_tensor(x, rows);
        self.push(Command::Rope {
            x,
            positions: self.step.positions_on_device(),
            adjacent: rope.pairing == RopePairing::Adjacent,
            frequencies: rope.frequencies(),
            magnitude: rope.magnitude.into(),
            head_dim: head_dim as u32,
        });
        Ok(())
    }

    fn kv_write(
        &mut self,
        kv: &mut Kv,
        layer: usize,
        keys: &Tensor,
        values: &Tensor,
        rows: usize,
    ) -> Result<(), OpError> {
        const OP: &str = "kv_write";
        self.step.check(OP, rows)?;
        let (shape, address) = kv.layer(OP, layer)?;
        let cols = shape.kv_heads * shape.head_dim;
        keys.check(OP, "columns of keys", rows, cols)?;
        values.check(OP, "columns of values", rows, cols)?;
        if rows == 0 {
            return Ok(());
        }
        kv.prepare(OP, layer, self.step.kv_slots(), self.step.slot_max())?;
        self.recorder.keep(kv.owner());
        let (keys, values) = (self.use_tensor(keys, rows), self.use_tensor(values, rows));
        self.push(Command::KvWrite {
            layer: address,
            is_f16: shape.kind == KvType::F16,
            keys,
            values,
            slots: self.step.slots_on_device(),
            kv_heads: shape.kv_heads as u32,
            head_dim: shape.head_dim as u32,
        });
        Ok(())
    }

    fn attention(
        &mut self,
        kv: &Kv,
        layer: usize,
        queries: &Tensor,
        spec: &AttentionSpec,
        out: &mut Tensor,
        rows: usize,
    ) -> Result<(), OpError> {
        const OP: &str = "attention";
        self.step.check(OP, rows)?;
        let (shape, address) = kv.layer(OP, layer)?;
        for (what, found, expected) in [
            ("kv_heads", spec.kv_heads, shape.kv_heads),
            ("head_dim", spec.head_dim, shape.head_dim),
            ("remainder of heads / kv_heads", spec.heads % spec.kv_heads.max(1), 0),
        ] {
            if found != expected {
                return Err(OpError::Shape { op: OP, what, found, expected });
            }
        }
        let cols = spec.heads * spec.head_dim;
        queries.check(OP, "columns of queries", rows, cols)?;
        out.check(OP, "columns of out", rows, cols)?;
        if rows == 0 || cols == 0 {
            return Ok(());
        }
        kv.check_written(OP, layer, self.steps, || self.step.blocks_read(OP, kv.block_tokens()))?;
        self.recorder.keep(kv.owner());
        let operands = AttentionOperands {
            layer: address,
            is_f16: shape.kind == KvType::F16,
            shape: Shape {
                heads: spec.heads as u32,
                kv_heads: spec.kv_heads as u32,
                head_dim: spec.head_dim as u32,
                scale: spec.scale.into(),
            },
            queries: self.use_tensor(queries, rows),
            tables: self.step.tables_on_device(),
            out: self.use_tensor(out, rows),
        };
        match Method::of(spec, shape.kind) {
            Method::Tiles { split_tokens, chunk_tokens } => {
                let (heads, head_dim) = (spec.heads, spec.head_dim);
                let shape = PlanShape { split_tokens, chunk_tokens, heads, head_dim };
                for plan in self.attention_plans(shape)? {
                    self.push(Command::AttentionTiles { operands, plan });
                }
            }
            Method::Plain => self.push(Command::AttentionPlain {
                operands,
                table_starts: self.step.table_starts_on_device(),
                positions: self.step.positions_on_device(),
            }),
        }
        Ok(())
    }

    fn gated(
        &mut self,
        activation: Activation,
        gate: &Tensor,
        up: &Tensor,
        out: &mut Tensor,
        rows: usize,
    ) -> Result<(), OpError> {
        const OP: &str = "gated";
        for (what, tensor) in [("columns of gate", gate), ("columns of up", up)] {
            tensor.check(OP, what, rows, out.cols())?;
        }
        out.check(OP, "columns of out", rows, gate.cols())?;
        let (gate, up, out) =
            (self.use_tensor(gate, rows), self.use_tensor(up, rows), self.use_tensor(out, rows));
        match activation {
            Activation::Silu => self.push(Command::Gated { gate, up, out }),
        }
        Ok(())
    }

    fn expert(&self, stack: &Weight<Self>, index: usize) -> Result<Weight<Self>, OpError> {
        data::expert("expert", stack, index)
    }

    fn experts(
        &mut self,
        layer: &Experts<Self>,
        activation: Activation,
        router: &Tensor,
        x: &Tensor,
        out: &mut Tensor,
        rows: usize,
    ) -> Result<(), OpError> {
        self.experts_on_device(layer, activation, router, x, out, rows)
    }

    fn gather_outputs(
        &mut self,
        x: &Tensor,
        outputs: std::ops::Range<usize>,
        out: &mut Tensor,
    ) -> Result<(), OpError> {
        const OP: &str = "gather_outputs";
        x.check(OP, "columns of x", self.step.len(), out.cols())?;
        out.check(OP, "columns of out", outputs.len(), x.cols())?;
        let (index, len) = (outputs.end, self.step.outputs());
        if outputs.start > outputs.end || index > len {
            return Err(OpError::Index { op: OP, what: "output", index, len });
        }
        let cols = x.cols() as u32;
        let (x, out) = (self.use_tensor(x, self.step.len()), self.use_tensor(out, outputs.len()));
        self.push(Command::Gather { x, rows: self.step.outputs_on_device(outputs), cols, out });
        Ok(())
    }

    fn argmax(&mut self, x: &Tensor, rows: usize, cols: usize, best: &mut [u32]) -> Result<(), OpError> {
        const OP: &str = "argmax";
        x.check(OP, "columns", rows, cols)?;
        if best.len() != rows {
            let (found, expected) = (best.len(), rows);
            return Err(OpError::Shape { op: OP, what: "host slice", found, expected });
        }
        if rows > self.best.len() {
            self.best = Arc::new(Buffer::new(&self.device, rows).map_err(device_error(OP))?);
        }
        self.recorder.keep(self.best.clone());
        let at = Words { address: self.best.view().address(), len: rows };
        let x = self.use_tensor(x, rows);
        self.push(Command::Argmax { x, cols: cols as u32, out: at });
        self.recorder.flush()?;
        self.bring(OP, at.address, best)
    }

    fn trim(&mut self, kv: &mut Kv, blocks: usize) -> Result<(), OpError> {
        self.recorder.flush()?;
        let recorder = &mut self.recorder;
        kv.trim(blocks, || recorder.wait())
    }

    fn write(&mut self, x: &mut Tensor, rows: usize, host: &[f32]) -> Result<(), OpError> {
        const OP: &str = "write";
        x.check_host(OP, rows, host.len())?;
        self.recorder.flush()?;
        // SAFETY: the tensor is borrowed mutably until the copy has ended.
        let mut values = unsafe { x.rows(rows).view_mut() };
        values.copy_from_host(self.recorder.stream(), host).map_err(device_error(OP))
    }

    fn read(&mut self, x: &Tensor, rows: usize, host: &mut [f32]) -> Result<(), OpError> {
        const OP: &str = "read";
        x.check_host(OP, rows, host.len())?;
        self.recorder.flush()?;
        self.bring(OP, x.rows(rows).address, host)
    }
}

impl Cuda {
    /// The plans of this step for one shape of items, as indices for commands.
    fn attention_plans(&mut self, shape: PlanShape) -> Result<Vec<u32>, OpError> {
        let at = match self.plans.iter().position(|plan| plan.shape() == shape) {
            Some(at) => at,
            None => {
                self.plans.push(DevicePlan::new(self.recorder.stream(), shape)?);
                self.plans.len() - 1
            }
        };
        let stream = self.recorder.stream().clone();
        let addresses = self.plans[at].addresses(&stream, self.steps, &self.step)?;
        Ok(addresses.iter().map(|&address| self.recorder.plan(address)).collect())
    }

    /// Waits for all ops, and fills `host` from what they left at `address`: as many values of a tensor, or of scratch
    /// memory.
    fn bring<T: bytemuck::Pod>(
        &mut self,
        op: &'static str,
        address: u64,
        host: &mut [T],
    ) -> Result<(), OpError> {
        // The device is busy meanwhile.
        self.caches.retain(|cache| cache.map().is_some());
        // SAFETY: the callers checked lengths against what they own.
        unsafe { self.readback.bring(self.recorder.stream(), address, host) }.map_err(device_error(op))?;
        self.recorder.wait()
    }
}
