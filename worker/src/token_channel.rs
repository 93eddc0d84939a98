// SPDX-License-Identifier: Apache-2.0

//! The channel from the engine loop to one call: a bounded queue of outputs that the engine never
//! blocks on.
//!
//! ```text
//!          room >= per_step          room < per_step            nothing read for PAUSED_MAX
//! running ------------------> sends ----------------> paused ------------------------> aborted
//!    ^                                                  |
//!    +------------- the reader emptied half ------------+
//! ```
//!
//! 1. A paused request skips steps. It keeps its KV blocks until another request needs them, and
//!    is then recomputed when it continues.
//! 2. A request that continues has room for many tokens. A slow reader thus cannot have its prompt
//!    recomputed for each token that it reads.
//! 3. One entry of the queue is reserved from the start for the item that ends the stream. The
//!    reader therefore always learns why its stream ended.

use std::time::Duration;

use engine::{ConstraintError, DRAFT_DEPTH_MAX, EngineOutput, SampleError};
use tokio::sync::mpsc;

/// How long the reader of a paused request may read nothing.
pub(crate) const PAUSED_MAX: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug)]
pub(crate) struct ChannelCapacity {
    /// Outputs that may wait for the reader.
    outputs: usize,
    /// Outputs that one step may add. With less room than this, the request is paused.
    per_step: usize,
}

/// The capacity of a token stream. One step adds one token and the accepted draft tokens. If the
/// constraint was not ready for the token before, the step adds that token instead of drafts. Token
/// outputs are small.
pub(crate) const TOKEN_CAPACITY: ChannelCapacity =
    ChannelCapacity { outputs: 128, per_step: 1 + DRAFT_DEPTH_MAX };

/// The capacity for the admission and one result: the vector of an embedding, or the outputs of a
/// beam search. The request is never paused, since reports of progress leave room for the result.
pub(crate) const RESULT_CAPACITY: ChannelCapacity = ChannelCapacity { outputs: 4, per_step: 2 };

/// The capacity of a score stream. `rows` is the limit of scored rows in one step, which bounds the
/// queued bytes.
pub(crate) fn score_capacity(rows: usize) -> ChannelCapacity {
    // One more output reports the admission.
    ChannelCapacity { outputs: 2 * (rows + 1), per_step: rows + 1 }
}

/// Why a stream ends before its request is complete.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(crate) enum StreamAbort {
    #[error("the request's deadline passed")]
    Deadline,
    #[error("the worker is stopping")]
    Drained,
    #[error("the client read nothing for {} s", PAUSED_MAX.as_secs())]
    TooSlow,
    #[error("the output queue of the stream overflowed")]
    ChannelFull,
    #[error("the step that computed the request failed: {detail}")]
    StepFailed { detail: String },
    /// The request is not at fault: another worker can resume it.
    #[error("the worker's device is lost: {detail}")]
    DeviceLost { detail: String },
    #[error("no token can be sampled: {0}")]
    BadLogits(SampleError),
    #[error("no token can be sampled: {0}")]
    Grammar(ConstraintError),
}

pub(crate) type StreamItem = Result<EngineOutput, StreamAbort>;

/// The engine's end of the channel.
pub(crate) struct TokenChannel {
    sender: mpsc::Sender<StreamItem>,
    final_item: Option<mpsc::OwnedPermit<StreamItem>>,
    capacity: ChannelCapacity,
    pause: Option<Pause>,
}

#[derive(Clone, Copy, Debug)]
struct Pause {
    /// When the pause began, or the reader last made room.
    since: Duration,
    /// Room in the queue at that time.
    room: usize,
}

/// The queue is full although the request was paused in time. This is a bug of the worker; the
/// stream is aborted.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ChannelFull;

/// What the engine loop does with a request, given how fast its reader is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum FlowControl {
    Unchanged,
    Pause,
    Resume,
    Abort,
}

/// Creates the channel of one call. Dropping the receiver cancels the request.
pub(crate) fn token_channel(capacity: ChannelCapacity) -> (TokenChannel, mpsc::Receiver<StreamItem>) {
    let (sender, receiver) = mpsc::channel(capacity.outputs + 1);
    let final_item = sender.clone().try_reserve_owned().ok();
    (TokenChannel { sender, final_item, capacity, pause: None }, receiver)
}

impl TokenChannel {
    /// Whether the receiver is dropped.
    pub(crate) fn is_closed(&self) -> bool {
        self.sender.is_closed()
    }

    pub(crate) fn send(&mut self, output: EngineOutput) -> Result<(), ChannelFull> {
        let is_report = matches!(output, EngineOutput::BeamProgress { .. });
        if is_report && self.sender.capacity() <= self.capacity.per_step {
            // The next report says as much.
            return Ok(());
        }
        match self.sender.try_send(Ok(output)) {
            // With a dropped receiver, the next check of `is_closed` cancels the request.
            Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => Ok(()),
            Err(mpsc::error::TrySendError::Full(_)) => Err(ChannelFull),
        }
    }

    /// Sends the last item of the stream.
    pub(crate) fn finish(mut self, last: StreamItem) {
        if let Some(permit) = self.final_item.take() {
            permit.send(last);
        }
    }

    /// Decides whether the request runs in the next step. Called before each step.
    pub(crate) fn flow_control(&mut self, now: Duration) -> FlowControl {
        let room = self.sender.capacity();
        match self.pause {
            None if room < self.capacity.per_step => {
                self.pause = Some(Pause { since: now, room });
                FlowControl::Pause
            }
            None => FlowControl::Unchanged,
            Some(_) if room >= self.capacity.per_step.max(self.capacity.outputs / 2) => {
                self.pause = None;
                FlowControl::Resume
            }
            Some(pause) if room > pause.room => {
                self.pause = Some(Pause { since: now, room });
                FlowControl::Unchanged
            }
            Some(pause) if now.saturating_sub(pause.since) >= PAUSED_MAX => FlowControl::Abort,
            Some(_) => FlowControl::Unchanged,
        }
    }
}

#[cfg(test)]
mod tests {
    use engine::RequestId;

    use super::*;

    const CAPACITY: ChannelCapacity = ChannelCapacity { outputs: 8, per_step: 3 };

    fn output(number: u64) -> EngineOutput {
        EngineOutput::Admitted { id: RequestId(number), cached_tokens: 0 }
    }

    #[test]
    fn a_slow_reader_pauses_its_request_until_it_has_read() {
        let (mut channel, mut reader) = token_channel(CAPACITY);
        for number in 0..5 {
            assert_eq!(channel.flow_control(Duration::ZERO), FlowControl::Unchanged);
            channel.send(output(number)).unwrap();
        }
        channel.send(output(5)).unwrap();
        assert_eq!(channel.flow_control(Duration::ZERO), FlowControl::Pause);
        assert_eq!(channel.flow_control(Duration::from_secs(1)), FlowControl::Unchanged);
        // The outputs of a step that has begun still have room.
        for number in 6..8 {
            channel.send(output(number)).unwrap();
        }
        assert_eq!(channel.send(output(8)), Err(ChannelFull));
        for _ in 0..4 {
            reader.try_recv().unwrap().unwrap();
        }
        assert_eq!(channel.flow_control(Duration::from_secs(2)), FlowControl::Resume);
        assert_eq!(channel.flow_control(Duration::from_secs(2)), FlowControl::Unchanged);
    }

    #[test]
    fn a_slow_reader_is_neither_resumed_for_single_outputs_nor_aborted() {
        let (mut channel, mut reader) = token_channel(CAPACITY);
        for number in 0..8 {
            channel.send(output(number)).unwrap();
        }
        assert_eq!(channel.flow_control(Duration::ZERO), FlowControl::Pause);
        for seconds in [50, 100, 150] {
            reader.try_recv().unwrap().unwrap();
            assert_eq!(channel.flow_control(Duration::from_secs(seconds)), FlowControl::Unchanged);
        }
        assert_eq!(channel.flow_control(Duration::from_secs(209)), FlowControl::Unchanged);
        assert_eq!(channel.flow_control(Duration::from_secs(210)), FlowControl::Abort);
        reader.try_recv().unwrap().unwrap();
        assert_eq!(channel.flow_control(Duration::from_secs(210)), FlowControl::Resume);
    }

    #[test]
    fn a_reader_that_never_reads_gets_all_outputs_and_then_the_abort() {
        let (mut channel, mut reader) = token_channel(CAPACITY);
        for number in 0..8 {
            channel.send(output(number)).unwrap();
        }
        assert_eq!(channel.flow_control(Duration::from_secs(3)), FlowControl::Pause);
        assert_eq!(channel.flow_control(Duration::from_secs(62)), FlowControl::Unchanged);
        assert_eq!(channel.flow_control(Duration::from_secs(63)), FlowControl::Abort);
        channel.finish(Err(StreamAbort::TooSlow));
        for number in 0..8 {
            assert_eq!(reader.try_recv().unwrap(), Ok(output(number)));
        }
        assert_eq!(reader.try_recv().unwrap(), Err(StreamAbort::TooSlow));
        assert!(reader.try_recv().is_err());
    }

    #[test]
    fn a_dropped_receiver_closes_the_channel() {
        let (mut channel, reader) = token_channel(CAPACITY);
        drop(reader);
        assert!(channel.is_closed());
        assert_eq!(channel.send(output(1)), Ok(()));
    }
}
