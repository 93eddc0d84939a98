// SPDX-License-Identifier: Apache-2.0

//! [`ActiveStream`]: a stream that the engine computes: its channel to the call, and its trace.

use std::time::Duration;

use engine::EngineOutput;

use crate::stream_trace::{StreamTrace, TracedStep};
use crate::token_channel::{ChannelFull, StreamItem, TokenChannel};

pub(super) struct ActiveStream {
    pub(super) channel: TokenChannel,
    pub(super) trace: StreamTrace,
}

impl ActiveStream {
    pub(super) fn send(&mut self, output: EngineOutput, step: &TracedStep) -> Result<(), ChannelFull> {
        self.trace.record(&output, step);
        self.channel.send(output)
    }

    /// The trace ends first: a reader of the last item then finds it complete.
    pub(super) fn finish(self, last: StreamItem, now: Duration) {
        self.trace.finish(&last, now);
        self.channel.finish(last);
    }
}
