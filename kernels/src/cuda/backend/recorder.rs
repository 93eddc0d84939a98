// SPDX-License-Identifier: Apache-2.0

//! [`Recorder`] collects the commands of a step and enqueues them in two parts. If the same list of
//! commands came before, it launches them as one CUDA graph; otherwise it launches them one by one.
//!
//! The first part is a few layers. The device computes it while the host collects the rest, which
//! takes 60 to 140 us. One part would leave the device idle for that time. A device that is still
//! busy with the step before gets the step as one part.
//!
//! All data that changes from step to step (tokens, positions, tables, plans) is in device memory.
//! So two steps have the same list if they have the same number of rows, the same bounds of the
//! attention plans and, with several KV cache groups, the same bound of the block tables.
//!
//! If other processes compute on the device, the recorder takes turns with them. A turn begins when
//! commands are enqueued. It ends when the device has computed them and the turn has lasted for
//! some steps, or one long micro-batch.
//!
//! 1. A graph is launched only for a list equal to the one from which it was captured.
//! 2. So the addresses in the graph are addresses of memory whose owners this step keeps.

use std::any::Any;
use std::collections::VecDeque;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ops::OpError;
use turns::{HeldTurn, Turns};

use super::command::{CommandList, KernelCommand};
use super::kernel_set::KernelSet;
use crate::cuda::attention::{AttentionKernels, AttentionPlanAddress};
use crate::cuda::error::device_error;
use crate::cuda::experts::ExpertKernels;
use crate::cuda::word_copies::{WordCopy, WordCopyKernels};
use crate::cuda::{CudaError, Device, DeviceView, Event, Graph, PinnedBuffer, Stream};

/// The number of graphs of each part, and of whole steps, that are kept: one for each size of
/// decode batch.
pub(super) const GRAPHS_MAX: usize = 12;
/// From this number of commands on, the first part may be enqueued. The device needs at least 60 us
/// for them.
const FIRST_PART_COMMANDS: usize = 64;
/// The number of hashes kept of lists that occurred once: two for each step.
const SEEN_MAX: usize = 512;
/// The number of memory owners in use at which the recorder waits for the device.
const IN_FLIGHT_MAX: usize = 1 << 15;

pub(super) type MemoryOwner = Arc<dyn Any + Send + Sync>;

pub(super) struct Recorder {
    /// By part. In order of use: the most recently used graph is the last one. They are before
    /// `kernels`, so that they are dropped before the modules whose functions they call.
    graphs: [Vec<CapturedGraph>; 3],
    stream: Stream,
    kernels: KernelSet,
    word_copies: WordCopyKernels,
    /// Words that the device fetches before it runs `pending`, and the event behind that.
    uploads: Vec<(WordCopy, Arc<Event>)>,
    pending: CommandList,
    /// What `pending` is.
    part: StepPart,
    first_part_commands: usize,
    /// Owners of the memory that `pending` uses. `in_flight` has the owners for work in flight.
    owners: Vec<MemoryOwner>,
    in_flight: Vec<MemoryOwner>,
    /// By mark, the oldest first: how many of `in_flight` are before it and behind the one before.
    marks: VecDeque<usize>,
    /// Owners for work that has ended. They are dropped when the device is busy again, because that
    /// takes some 10 us. The last owner of a buffer waits for the device.
    ended: Vec<MemoryOwner>,
    seen: VecDeque<u64>,
    use_graphs: bool,
    /// The time spent on captures so far.
    graph_time: Duration,
    /// Absent if this process does not take turns.
    turns: Option<Turns>,
    /// Held while the device computes, and between steps that follow closely.
    turn: Option<HeldTurn>,
    /// When the device had computed the last commands. Absent while commands are in flight.
    ended_at: Option<Instant>,
    /// The host work before the commands in flight.
    host_work: Duration,
}

/// A step, or a micro-batch, that was not divided so far, or the parts of a divided one.
#[derive(Clone, Copy, PartialEq, Eq)]
enum StepPart {
    Whole,
    First,
    Rest,
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
            word_copies: WordCopyKernels::new(device),
            uploads: Vec::new(),
            pending: CommandList::default(),
            part: StepPart::Whole,
            first_part_commands: FIRST_PART_COMMANDS,
            owners: Vec::new(),
            in_flight: Vec::new(),
            marks: VecDeque::new(),
            ended: Vec::new(),
            graphs: Default::default(),
            seen: VecDeque::new(),
            use_graphs: true,
            graph_time: Duration::ZERO,
            turns: None,
            turn: None,
            ended_at: None,
            host_work: Duration::MAX,
        }
    }

    pub(super) fn set_turns(&mut self, turns: Turns) {
        self.turns = Some(turns);
    }

    pub(super) fn experts(&self) -> &ExpertKernels {
        &self.kernels.experts
    }

    pub(super) fn attentions(&self) -> &AttentionKernels {
        &self.kernels.attentions
    }

    pub(super) fn stream(&self) -> &Stream {
        &self.stream
    }

    pub(super) fn set_first_part_commands(&mut self, commands: usize) {
        self.first_part_commands = commands;
    }

    pub(super) fn set_graphs(&mut self, on: bool) {
        self.use_graphs = on;
    }

    /// The number of captured graphs in memory.
    pub(super) fn graphs(&self) -> usize {
        self.graphs.iter().map(Vec::len).sum()
    }

    /// The number of launches in the graphs in memory.
    pub(super) fn graph_launches(&self) -> u64 {
        self.graphs.iter().flatten().map(|captured| captured.commands.list.len() as u64).sum()
    }

    /// The time spent on captures so far.
    pub(super) fn graph_time(&self) -> Duration {
        self.graph_time
    }

    /// # Safety
    /// As [`KernelSet::enqueue`], except that memory needs to live only as long as the owners that
    /// [`Self::keep`] received.
    pub(super) unsafe fn push(&mut self, command: KernelCommand) {
        self.pending.list.push(command);
    }

    pub(super) fn keep(&mut self, owner: MemoryOwner) {
        self.owners.push(owner);
    }

    /// Returns the index of a plan for [`KernelCommand::AttentionPaged`].
    pub(super) fn plan(&mut self, plan: AttentionPlanAddress) -> u32 {
        let plans = &mut self.pending.plans;
        let index = plans.iter().position(|known| *known == plan).unwrap_or_else(|| {
            plans.push(plan);
            plans.len() - 1
        });
        index as u32
    }

    /// Enqueues what is left of the step before. The next commands are the first ones of a step, or
    /// of a micro-batch.
    pub(super) fn begin_step(&mut self) -> Result<(), OpError> {
        self.flush()?;
        self.part = StepPart::Whole;
        Ok(())
    }

    /// Enqueues the first part of the step if it is long enough and the device idle. It is called
    /// before norms of heads and rotations, which are never fused with a product before them
    /// ([`super::fusion`]), and ends the part behind a product alone, so that norms, rotations and
    /// the write to the cache stay together.
    pub(super) fn end_first_part(&mut self) -> Result<(), OpError> {
        if self.part != StepPart::Whole
            || !self.in_flight.is_empty()
            || self.pending.list.len() < self.first_part_commands
            || !matches!(self.pending.list.last(), Some(KernelCommand::Product { .. }))
        {
            return Ok(());
        }
        self.part = StepPart::First;
        self.flush()?;
        self.part = StepPart::Rest;
        Ok(())
    }

    /// Enqueues the collected commands.
    pub(super) fn flush(&mut self) -> Result<(), OpError> {
        if self.pending.list.is_empty() {
            return Ok(());
        }
        if self.in_flight.len() > IN_FLIGHT_MAX {
            self.wait()?;
        }
        // The rest of a step belongs to the turn of its first part.
        let has_turn = self.part == StepPart::Rest && self.ended_at.is_none() && self.turn.is_some();
        if !has_turn {
            self.take_turn()?;
        }
        let given = self.enqueue_uploads().map_err(device_error("upload")).and_then(|()| self.enqueue());
        self.in_flight.append(&mut self.owners);
        self.ended.clear();
        self.pending.list.clear();
        self.pending.plans.clear();
        given
    }

    /// Waits until all flushed work has ended, and ends the turn if it has lasted long enough.
    pub(super) fn wait(&mut self) -> Result<(), OpError> {
        let ended = self.stream.synchronize().map_err(device_error("wait"));
        if ended.is_ok() {
            self.work_has_ended();
        } else {
            self.rest_turn();
        }
        ended
    }

    /// Does what [`Self::wait`] does, for a caller that has waited for all flushed work.
    pub(super) fn work_has_ended(&mut self) {
        self.rest_turn();
        self.ended.append(&mut self.in_flight);
        self.marks.iter_mut().for_each(|owners| *owners = 0);
    }

    /// Whether flushed work may be in flight.
    pub(super) fn is_busy(&self) -> bool {
        !self.in_flight.is_empty()
    }

    /// Lets the device fetch words before it runs the commands that are collected now, and records
    /// `copied` behind that. An upload waits for its turn like the commands.
    ///
    /// # Safety
    /// The memory of the copy stays valid, and the host's words unchanged, until `copied`.
    pub(super) unsafe fn upload(&mut self, copy: WordCopy, copied: Arc<Event>) {
        self.uploads.push((copy, copied));
    }

    /// Enqueues the upload with this event if it is still to be enqueued.
    pub(super) fn flush_upload(&mut self, copied: &Arc<Event>) -> Result<(), CudaError> {
        if self.uploads.iter().any(|(_, other)| Arc::ptr_eq(other, copied)) {
            self.enqueue_uploads()?;
        }
        Ok(())
    }

    fn enqueue_uploads(&mut self) -> Result<(), CudaError> {
        if self.uploads.is_empty() {
            return Ok(());
        }
        let copies: Vec<WordCopy> = self.uploads.iter().map(|&(copy, _)| copy).collect();
        // SAFETY: the contract of `upload`.
        unsafe { self.word_copies.fetch(&self.stream, &copies) }?;
        self.uploads.drain(..).try_for_each(|(_, copied)| copied.record(&self.stream))
    }

    /// Enqueues a copy to the host behind all flushed work.
    ///
    /// # Safety
    /// Both sides stay valid until the copy has ended, and nothing else touches `to`.
    pub(super) unsafe fn send(
        &self,
        from: DeviceView<'_, u32>,
        to: &mut PinnedBuffer<u32>,
    ) -> Result<(), CudaError> {
        // SAFETY: this function's contract.
        unsafe { self.word_copies.send(&self.stream, from, to) }
    }

    /// Marks the end of the work that was flushed so far.
    pub(super) fn mark(&mut self) {
        let before: usize = self.marks.iter().sum();
        self.marks.push_back(self.in_flight.len() - before);
    }

    /// The work before the oldest mark has ended. Other work may be behind it: then the device
    /// stays busy, and the turn goes on.
    pub(super) fn mark_has_ended(&mut self) {
        let owners = self.marks.pop_front().unwrap_or(0);
        self.ended.extend(self.in_flight.drain(..owners));
        if self.in_flight.is_empty() && self.ended_at.is_none() {
            self.rest_turn();
        }
    }

    /// Whether another process waits for the turn of this one.
    pub(super) fn is_turn_awaited(&self) -> bool {
        self.turn.as_ref().is_some_and(HeldTurn::is_awaited)
    }

    fn rest_turn(&mut self) {
        self.turn = self.turn.take().and_then(|turn| turn.rest(self.host_work));
        self.ended_at = Some(Instant::now());
    }

    /// Drops the owners in `ended`.
    pub(super) fn drop_owners(&mut self) {
        self.ended.clear();
    }

    /// Ends the turn if there is one: the device waits for the host from here on.
    pub(super) fn end_turn(&mut self) -> Result<(), OpError> {
        if self.turn.is_some() {
            self.wait()?;
            self.turn = None;
        }
        Ok(())
    }

    fn take_turn(&mut self) -> Result<(), OpError> {
        let Some(turns) = self.turns.clone() else { return Ok(()) };
        if self.ended_at.is_none()
            && let Some(turn) = &self.turn
        {
            // A further micro-batch of the same step.
            if !turn.is_over() {
                return Ok(());
            }
            self.wait()?;
        }
        self.host_work = self.ended_at.take().map_or(Duration::MAX, |ended| ended.elapsed());
        let kept = self.turn.take().and_then(HeldTurn::resume);
        self.turn = Some(kept.unwrap_or_else(|| turns.take()));
        Ok(())
    }

    fn enqueue(&mut self) -> Result<(), OpError> {
        let hash = hash_commands(&self.pending);
        let graphs = &mut self.graphs[self.part as usize];
        if let Some(at) = graphs.iter().position(|graph| graph.hash == hash && graph.commands == self.pending)
        {
            let captured = graphs.remove(at);
            // SAFETY: the contract of `push`, for a list equal to the captured one. So the graph's
            // addresses are those of this step, and the recorder keeps their owners until it has
            // waited for the work.
            let launched = unsafe { captured.graph.launch() }.map_err(device_error("graph"));
            graphs.push(captured);
            return launched;
        }
        let again = self.seen.contains(&hash);
        if !again || !self.use_graphs {
            if self.seen.len() == SEEN_MAX {
                self.seen.pop_front();
            }
            self.seen.push_back(hash);
            // SAFETY: the contract of `push`. The recorder keeps owners until it has waited for the
            // work.
            return unsafe { self.kernels.enqueue(&self.stream, &self.pending) };
        }
        let started = Instant::now();
        // SAFETY: as above.
        let work = || unsafe { self.kernels.enqueue(&self.stream, &self.pending) }.map_err(CaptureError::Op);
        if graphs.len() == GRAPHS_MAX {
            graphs.remove(0);
        }
        let graph = self.stream.capture(work).map_err(CaptureError::into_op)?;
        graph.upload().map_err(device_error("graph"))?;
        self.graph_time += started.elapsed();
        // SAFETY: the contract of `push`. The graph was captured from these commands.
        let launched = unsafe { graph.launch() }.map_err(device_error("graph"));
        graphs.push(CapturedGraph { hash, commands: self.pending.clone(), graph });
        launched
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        // Owners may be dropped only after the work has ended. If waiting fails, the context is
        // gone, and its memory with it.
        let _ = self.stream.synchronize();
    }
}

enum CaptureError {
    Op(OpError),
    Cuda(CudaError),
}

impl From<CudaError> for CaptureError {
    fn from(error: CudaError) -> Self {
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

/// Hashes about 40 KB for each step, with one multiplication per word. The hash needs no defence
/// against crafted input, because graphs are compared by equality as well.
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
