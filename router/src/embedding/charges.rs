// SPDX-License-Identifier: Apache-2.0

//! What the inputs of an embedding request cost: metrics, the tokens of the API key and the line of
//! the usage log.
//!
//! 1. An input counts once: when its vector arrives, or when its call ends without one although a
//!    worker may have computed it (the deadline passed, the client is gone, the worker failed).
//! 2. An input that a worker refuses costs nothing, nor does one that a lost worker had. It counts
//!    when the next worker has it.
//! 3. A request of which an input has counted gets a line in the usage log, however it ends.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use crate::generate::GenerationRequest;
use crate::metrics;
use crate::opening::{CallOutcome, RequestRefusal};
use crate::usage::RequestUsage;
use crate::usage_log::UsageLog;

/// Dropping it before [`Self::finish`] ends the request as aborted.
pub(super) struct InputCharges<'a> {
    request: &'a GenerationRequest,
    log: Option<&'a Arc<UsageLog>>,
    is_charged: Vec<AtomicBool>,
    /// From the first charge on.
    usage: OnceLock<Arc<RequestUsage>>,
    has_ended: bool,
}

/// The call for one input. Dropping it charges the input.
pub(super) struct InputCall<'a> {
    charges: &'a InputCharges<'a>,
    index: usize,
    tokens: usize,
    is_due: bool,
}

impl<'a> InputCharges<'a> {
    pub(super) fn new(request: &'a GenerationRequest, log: Option<&'a Arc<UsageLog>>) -> Self {
        let is_charged = request.prompts().map(|_| AtomicBool::new(false)).collect();
        Self { request, log, is_charged, usage: OnceLock::new(), has_ended: false }
    }

    /// A worker gets the input with this index.
    pub(super) fn begin_call(&'a self, index: usize, tokens: usize) -> InputCall<'a> {
        InputCall { charges: self, index, tokens, is_due: true }
    }

    /// All calls have ended.
    pub(super) fn finish(mut self, is_ok: bool) {
        self.has_ended = true;
        if let (false, Some(usage)) = (is_ok, self.usage.get()) {
            usage.record_finish("error");
        }
    }

    fn charge(&self, index: usize, tokens: usize) {
        // A call that was dropped for the loss of another one is repeated.
        if self.is_charged[index].swap(true, Ordering::Relaxed) {
            return;
        }
        metrics::record_prompt_tokens(self.request.model.name(), tokens);
        if let Some(active) = &self.request.origin().active {
            active.record_prompt(tokens);
        }
        if let Some(log) = self.log {
            let usage = self.usage.get_or_init(|| RequestUsage::begin(log, self.request));
            usage.record_prompt(tokens as u64);
        }
    }
}

impl Drop for InputCharges<'_> {
    fn drop(&mut self) {
        if let (false, Some(usage)) = (self.has_ended, self.usage.get()) {
            usage.record_finish("abort");
        }
    }
}

impl InputCall<'_> {
    /// The worker has sent the vector.
    pub(super) fn answered(self, cached_tokens: u32) {
        let charges = self.charges;
        drop(self);
        if let Some(usage) = charges.usage.get() {
            usage.record_cached(u64::from(cached_tokens));
        }
    }

    /// The worker has sent no vector.
    pub(super) fn failed(mut self, outcome: &CallOutcome) {
        self.is_due = matches!(
            outcome,
            CallOutcome::Refused(RequestRefusal::DeadlineExceeded | RequestRefusal::WorkerError { .. })
        );
    }
}

impl Drop for InputCall<'_> {
    fn drop(&mut self) {
        if self.is_due {
            self.charges.charge(self.index, self.tokens);
        }
    }
}
