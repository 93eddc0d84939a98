// SPDX-License-Identifier: Apache-2.0

//! What a request has used, for the usage log: its choices add to one record, which is written when
//! the last of them has ended.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use tokio::time::Instant;

use crate::access_control::KeyedRequest;
use crate::admission::Tenant;
use crate::choice::{ChoiceOutcome, FinishCause};
use crate::failover::ChoiceError;
use crate::generate::GenerationRequest;
use crate::usage_log::UsageLog;

/// Dropping it writes the line.
#[derive(Debug)]
pub(crate) struct RequestUsage {
    log: Arc<UsageLog>,
    arrived: Instant,
    /// What is known at the start.
    record: Value,
    totals: Mutex<UsageTotals>,
}

#[derive(Debug, Default)]
struct UsageTotals {
    /// Of a request whose prompts count one after the other.
    prompt_tokens: Option<u64>,
    cached_tokens: u64,
    output_tokens: u64,
    first_token: Option<Duration>,
    finish_reasons: Vec<&'static str>,
}

/// One choice of the request. Dropping it adds the choice to the request.
#[derive(Debug)]
pub(crate) struct ChoiceUsage {
    request: Arc<RequestUsage>,
    /// The first choice of its prompt: the prompt counts once.
    is_first: bool,
    pub(crate) output_tokens: usize,
    pub(crate) cached_tokens: u32,
    pub(crate) first_token: Option<Duration>,
    finish_reason: &'static str,
}

impl RequestUsage {
    pub(crate) fn begin(log: &Arc<UsageLog>, request: &GenerationRequest) -> Arc<Self> {
        let origin = request.origin();
        let tenant = match &origin.tenant {
            Tenant::Named(name) => Some(&**name),
            Tenant::Unnamed => None,
        };
        let record = json!({
            "request_id": &**origin.trace.id(),
            "key": origin.active.as_ref().map(|active: &KeyedRequest| active.key().name.to_string()),
            "tenant": tenant,
            "model": request.model.name(),
            "prompt_tokens": request.prompts().map(<[u32]>::len).sum::<usize>(),
        });
        Arc::new(Self { log: log.clone(), arrived: origin.arrived, record, totals: Mutex::default() })
    }

    /// `choice` is the number of the choice of its prompt.
    pub(crate) fn begin_choice(self: &Arc<Self>, choice: u32) -> ChoiceUsage {
        ChoiceUsage {
            request: self.clone(),
            is_first: choice == 0,
            output_tokens: 0,
            cached_tokens: 0,
            first_token: None,
            // What remains if the client or this process ends the choice.
            finish_reason: "abort",
        }
    }

    /// For a request without choices: a prompt that a worker has computed. The line counts these
    /// prompts only, and not all that the request has.
    pub(crate) fn record_prompt(&self, tokens: u64) {
        let mut totals = self.totals.lock().unwrap_or_else(PoisonError::into_inner);
        totals.prompt_tokens = Some(totals.prompt_tokens.unwrap_or_default() + tokens);
    }

    /// For a request without choices.
    pub(crate) fn record_cached(&self, tokens: u64) {
        self.totals.lock().unwrap_or_else(PoisonError::into_inner).cached_tokens += tokens;
    }

    /// For a request without choices that does not end well.
    pub(crate) fn record_finish(&self, reason: &'static str) {
        self.totals.lock().unwrap_or_else(PoisonError::into_inner).finish_reasons.push(reason);
    }

    fn line(&self) -> String {
        let totals = self.totals.lock().unwrap_or_else(PoisonError::into_inner);
        let milliseconds = |duration: Duration| duration.as_micros() as f64 / 1e3;
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut record = self.record.clone();
        record["time"] = json!(unix.as_millis() as f64 / 1e3);
        if let Some(tokens) = totals.prompt_tokens {
            record["prompt_tokens"] = json!(tokens);
        }
        record["cached_tokens"] = json!(totals.cached_tokens);
        record["completion_tokens"] = json!(totals.output_tokens);
        record["finish_reasons"] = json!(totals.finish_reasons);
        record["time_to_first_token_ms"] = json!(totals.first_token.map(milliseconds));
        record["total_ms"] = json!(milliseconds(self.arrived.elapsed()));
        record.to_string()
    }
}

impl Drop for RequestUsage {
    fn drop(&mut self) {
        self.log.append(self.line());
    }
}

impl ChoiceUsage {
    pub(crate) fn finish(&mut self, outcome: &Result<ChoiceOutcome, ChoiceError>) {
        self.finish_reason = outcome.as_ref().map_or("error", |outcome| outcome.finish.reason());
    }

    /// The choice generates nothing.
    pub(crate) fn finish_empty(mut self) {
        self.finish_reason = FinishCause::Length.reason();
    }
}

impl Drop for ChoiceUsage {
    fn drop(&mut self) {
        let mut totals = self.request.totals.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_first {
            totals.cached_tokens += u64::from(self.cached_tokens);
        }
        totals.output_tokens += self.output_tokens as u64;
        totals.first_token = [totals.first_token, self.first_token].into_iter().flatten().min();
        totals.finish_reasons.push(self.finish_reason);
    }
}
