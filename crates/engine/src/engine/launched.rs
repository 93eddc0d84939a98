// SPDX-License-Identifier: Apache-2.0

//! [`LaunchedStep`]: a step whose outputs the engine has not reported.
//!
//! If the device draws every token of a step, and the next step can only be a decode of these
//! tokens, the engine launches the next step before it reads them:
//!
//! ```text
//! host     | launch n + 1 | wait for n | report n, take requests | launch n + 2 | wait for n + 1 |
//! device   | step n                    | step n + 1                             | step n + 2
//! ```
//!
//! 1. At most one step is in flight between two calls of `Engine::step`.
//! 2. A request that ends with a token of step n may have a row in step n + 1. The row's token is
//!    dropped. Its keys and values lie behind the request's last token, in a block that no other
//!    request reads. The blocks of the request go to others from step n + 2 on.
//! 3. No prompt is computed in a step that was planned before it arrived. So the next step is
//!    launched as late as possible (`launch_timer.rs`).

use super::Engine;
use crate::request::output::EngineOutput;
use crate::sample::output_rows::RowOutput;
use crate::schedule::batch::OutputRow;
use crate::schedule::launch_timer::LaunchTimer;
use crate::schedule::sequence_id::SequenceId;
use crate::schedule::step_plan::ScheduledChunk;
use crate::stats::StepReport;
use ops::{Backend, NO_ARGMAX, OpError};
use std::time::Duration;

/// The engine's steps in flight, and buffers that are kept between steps.
#[derive(Default)]
pub(super) struct StepsInFlight {
    /// The step that was launched before the last one was read.
    pub(super) ahead: Option<LaunchedStep>,
    pub(super) timer: LaunchTimer,
    /// Whether the last tokens were there before the engine asked for them.
    were_late: bool,
    /// Tokens that were read from the device.
    drawn: Vec<u32>,
    /// The outputs of a step that was reported.
    pub(super) spare_outputs: Vec<Option<OutputRow>>,
}

pub(super) struct LaunchedStep {
    /// In the order of the step. None if the request has ended.
    pub(super) outputs: Vec<Option<OutputRow>>,
    pub(super) report: StepReport,
    /// The device has the tokens. Otherwise `Engine::rows` has the outputs.
    pub(super) is_drawn_on_device: bool,
}

impl LaunchedStep {
    /// Drops the outputs of a request that ends.
    pub(super) fn forget(&mut self, sequence_id: SequenceId) {
        for output in &mut self.outputs {
            if output.is_some_and(|output| output.sequence_id == sequence_id) {
                *output = None;
            }
        }
    }
}

impl<B: Backend> Engine<B> {
    /// Records when the last call of [`Self::step`] began and ended. Returns how long the step
    /// took, for [`Self::observe`]: the device may have begun it before that call.
    pub fn step_was_read(&mut self, began: Duration, ended: Duration) -> Duration {
        let StepsInFlight { timer, ahead, were_late, .. } = &mut self.in_flight;
        let was_late = std::mem::take(were_late);
        timer.step_was_read(began, ended, was_late, ahead.is_some())
    }

    /// Until when the caller should wait before it calls [`Self::step`], so that requests that
    /// arrive meanwhile are in the next step. None: it should not wait.
    pub fn launch_due(&self) -> Option<Duration> {
        let ahead = self.in_flight.ahead.as_ref()?;
        // Otherwise the host has its tokens already.
        ahead.is_drawn_on_device.then(|| self.in_flight.timer.due())?
    }

    /// Whether the device can draw the tokens of all requests that run.
    fn is_drawn_on_device(&self) -> bool {
        let vocab_size = self.capacity.vocab_size;
        self.scheduler.running().iter().all(|&sequence_id| {
            let request_state = self.requests[sequence_id.index()].as_ref();
            let draw = request_state.and_then(|state| state.draw(0, false));
            draw.is_some_and(|draw| draw.device_params(vocab_size).is_some())
        })
    }

    /// Whether the tokens of the planned step can stay on the device.
    pub(super) fn may_leave_tokens(&self) -> bool {
        let plan = self.scheduler.plan();
        // The host needs the logits of a prompt from which others are forked.
        let has_followers = |chunk: &ScheduledChunk| {
            self.scheduler.sequence(chunk.sequence_id).is_some_and(|sequence| sequence.followers > 0)
        };
        self.drafting.is_none()
            && plan.rows == plan.decode_rows
            && self.backend.may_run_ahead(self.capacity.vocab_size)
            && !plan.chunks.iter().any(has_followers)
            && self.is_drawn_on_device()
    }

    /// Launches the step behind `launched`, whose tokens the host does not know yet.
    pub(super) fn launch_ahead(
        &mut self,
        launched: &LaunchedStep,
        now: Duration,
        out: &mut Vec<EngineOutput>,
    ) -> Result<(), OpError> {
        let rows = launched.outputs.iter().enumerate();
        let rows = rows.filter_map(|(output, row)| row.map(|row| (output, row.sequence_id)));
        let may_run_ahead = self.backend.may_run_ahead(self.capacity.vocab_size)
            && self.scheduler.can_plan_ahead(launched.outputs.len(), rows.clone().map(|(_, id)| id))
            && self.is_drawn_on_device();
        if !may_run_ahead {
            return Ok(());
        }
        for (output, sequence_id) in rows {
            self.scheduler.push_drawn(sequence_id, output);
        }
        let report = self.plan(now, out);
        // All requests may be paused, or end with this token.
        if report.rows > 0 {
            self.in_flight.ahead = Some(self.launch(report, true)?);
            self.stats.steps_ahead += 1;
        }
        Ok(())
    }

    /// Reads the tokens of a step that the device has drawn, and passes them to their requests.
    pub(super) fn report_drawn(
        &mut self,
        launched: &LaunchedStep,
        out: &mut Vec<EngineOutput>,
    ) -> Result<(), OpError> {
        let mut drawn = std::mem::take(&mut self.in_flight.drawn);
        drawn.clear();
        drawn.resize(launched.outputs.len(), NO_ARGMAX);
        let read = self.backend.finish_draws(&mut drawn);
        if let Ok(were_there) = read {
            self.in_flight.were_late = were_there;
            for (row, &token) in launched.outputs.iter().zip(&drawn) {
                let Some(OutputRow { sequence_id, position, .. }) = *row else { continue };
                let row = match token {
                    NO_ARGMAX => RowOutput::NoToken,
                    token => RowOutput::Token(token, None),
                };
                self.report_row_and_end(sequence_id, position, row, out);
            }
        }
        self.in_flight.drawn = drawn;
        read.map(|_| ())
    }
}
