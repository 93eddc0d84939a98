// SPDX-License-Identifier: Apache-2.0

//! [`Recorder`]: collects the commands of a step and enqueues them together, as a CUDA graph if the
//! same list came before, else one by one.
//!
//! All that changes from step to step (tokens, positions, tables, plans) stands in device memory.
//! So two steps have the same list if they have the same number of rows and the same bounds of the
//! attention plan.
//!
//! 1. A graph runs only for a list equal to the one it was captured from.
//! 2. The addresses in it are thus addresses of memory whose owners this step keeps.

use std::any::Any;
use std::collections::VecDeque;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ops::OpError;

use super::command::{CommandList, KernelCommand, KernelSet};
use crate::cuda::attention::AttentionPlanAddress;
use crate::cuda::error::device_error;
use crate::cuda::{Device, Graph, Stream};

/// Graphs kept at once: one per size of decode batch.
pub(super) const GRAPHS_MAX: usize = 12;
/// Hashes of lists that came once.
const SEEN_MAX: usize = 256;
/// Owners of memory in use before the recorder waits for the device.
const IN_FLIGHT_MAX: usize = 1 << 15;

pub(super) type MemoryOwner = Arc<dyn Any + Send + Sync>;

pub(super) struct Recorder {
    stream: Stream,
    kernels: KernelSet,
    pending: CommandList,
    /// Owners of the memory of `pending`, and of work in flight.
    owners: Vec<MemoryOwner>,
    in_flight: Vec<MemoryOwner>,
    /// The most recently used graph is the last one.
    graphs: Vec<CapturedGraph>,
    seen: VecDeque<u64>,
    use_graphs: bool,
    /// Time spent on captures so far.
    graph_time: Duration,
}

struct CapturedGraph {
    hash: u64,
    commands: CommandList,
    graph: Graph,
}

impl Recorder {
    pub(super) fn new(device: &Device, stream: Stream) -> Self {
        Self {
            stream,
            kernels: KernelSet::new(device),
            pending: CommandList::default(),
            owners: Vec::new(),
            in_flight: Vec::new(),
            graphs: Vec::new(),
            seen: VecDeque::new(),
            use_graphs: true,
            graph_time: Duration::ZERO,
        }
    }

    pub(super) fn stream(&self) -> &Stream {
        &self.stream
    }

    pub(super) fn set_graphs(&mut self, on: bool) {
        self.use_graphs = on;
    }

    /// Number of captured graphs that are kept.
    pub(super) fn graphs(&self) -> usize {
        self.graphs.len()
    }

    /// Launches in the graphs that are kept.
    pub(super) fn graph_launches(&self) -> u64 {
        self.graphs.iter().map(|captured| captured.commands.list.len() as u64).sum()
    }

    /// Time spent on captures so far.
    pub(super) fn graph_time(&self) -> Duration {
        self.graph_time
    }

    /// # Safety
    /// As [`KernelSet::enqueue`], where memory needs to live only as long as the owners given with
    /// [`Self::keep`].
    pub(super) unsafe fn push(&mut self, command: KernelCommand) {
        self.pending.list.push(command);
    }

    pub(super) fn keep(&mut self, owner: MemoryOwner) {
        self.owners.push(owner);
    }

    /// The index of a plan for [`KernelCommand::AttentionPaged`].
    pub(super) fn plan(&mut self, plan: AttentionPlanAddress) -> u32 {
        let plans = &mut self.pending.plans;
        let index = plans.iter().position(|known| *known == plan).unwrap_or_else(|| {
            plans.push(plan);
            plans.len() - 1
        });
        index as u32
    }

    /// Enqueues the collected commands.
    pub(super) fn flush(&mut self) -> Result<(), OpError> {
        if self.pending.list.is_empty() {
            return Ok(());
        }
        if self.in_flight.len() > IN_FLIGHT_MAX {
            self.wait()?;
        }
        let given = self.enqueue();
        self.in_flight.append(&mut self.owners);
        self.pending.list.clear();
        self.pending.plans.clear();
        given
    }

    /// Waits until all flushed work has ended.
    pub(super) fn wait(&mut self) -> Result<(), OpError> {
        self.stream.synchronize().map_err(device_error("wait"))?;
        self.in_flight.clear();
        Ok(())
    }

    fn enqueue(&mut self) -> Result<(), OpError> {
        let hash = hash_commands(&self.pending);
        if let Some(at) =
            self.graphs.iter().position(|graph| graph.hash == hash && graph.commands == self.pending)
        {
            let captured = self.graphs.remove(at);
            // SAFETY: the contract of `push` for a list equal to the captured one: the owners of
            // this step's addresses, which are those of the graph, are kept until the work has been
            // waited for.
            let launched = unsafe { captured.graph.launch() }.map_err(device_error("graph"));
            self.graphs.push(captured);
            return launched;
        }
        let again = self.seen.contains(&hash);
        if !again || !self.use_graphs {
            if self.seen.len() == SEEN_MAX {
                self.seen.pop_front();
            }
            self.seen.push_back(hash);
            // SAFETY: the contract of `push`; owners are kept until the work has been waited for.
            return unsafe { self.kernels.enqueue(&self.stream, &self.pending) };
        }
        let started = Instant::now();
        // SAFETY: as above.
        let work = || unsafe { self.kernels.enqueue(&self.stream, &self.pending) }.map_err(CaptureError::Op);
        if self.graphs.len() == GRAPHS_MAX {
            self.graphs.remove(0);
        }
        let graph = self.stream.capture(work).map_err(CaptureError::into_op)?;
        graph.upload().map_err(device_error("graph"))?;
        self.graph_time += started.elapsed();
        // SAFETY: the contract of `push`; these are the commands it was captured from.
        let launched = unsafe { graph.launch() }.map_err(device_error("graph"));
        self.graphs.push(CapturedGraph { hash, commands: self.pending.clone(), graph });
        launched
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        // Owners may be dropped only after the work. If waiting fails, the context is gone, and its
        // memory too.
        let _ = self.stream.synchronize();
    }
}

enum CaptureError {
    Op(OpError),
    Cuda(crate::cuda::CudaError),
}

impl From<crate::cuda::CudaError> for CaptureError {
    fn from(error: crate::cuda::CudaError) -> Self {
        Self::Cuda(error)
    }
}

impl CaptureError {
    fn into_op(self) -> OpError {
        match self {
            Self::Op(error) => error,
            Self::Cuda(error) => device_error("graph")(error),
        }
    }
}

/// A hash of 40 KB a step: one multiplication per word. It needs no defence against crafted input,
/// since equality decides.
fn hash_commands(commands: &CommandList) -> u64 {
    #[derive(Default)]
    struct MixHasher(u64);

    impl Hasher for MixHasher {
        fn write(&mut self, bytes: &[u8]) {
            for chunk in bytes.chunks(8) {
                let mut word = [0; 8];
                word[..chunk.len()].copy_from_slice(chunk);
                self.write_u64(u64::from_le_bytes(word));
            }
        }

        fn write_u8(&mut self, value: u8) {
            self.write_u64(u64::from(value));
        }

        fn write_u32(&mut self, value: u32) {
            self.write_u64(u64::from(value));
        }

        fn write_usize(&mut self, value: usize) {
            self.write_u64(value as u64);
        }

        fn write_u64(&mut self, value: u64) {
            self.0 = (self.0.rotate_left(5) ^ value).wrapping_mul(0x517c_c1b7_2722_0a95);
        }

        fn finish(&self) -> u64 {
            self.0
        }
    }

    let mut mix = MixHasher::default();
    commands.hash(&mut mix);
    mix.finish()
}
