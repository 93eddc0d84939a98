// SPDX-License-Identifier: Apache-2.0

//! Counters and histograms of the router. Names and meanings are vLLM's where vLLM has the same
//! metric, with the prefix `ballast:`.

use std::time::Duration;

use metrics::{Counter, Histogram, counter, gauge, histogram};

use crate::admission::PriorityClass;
use crate::routing::StreamPlacement;

pub(crate) fn record_prompt_tokens(model: &str, tokens: usize) {
    counter!("ballast:prompt_tokens_total", "model_name" => model.to_owned()).increment(tokens as u64);
}

/// What a choice records for each token. The metrics are looked up once for each choice.
pub(crate) struct TokenMetrics {
    output_tokens: Counter,
    inter_token_latency: Histogram,
}

impl TokenMetrics {
    pub(crate) fn of_model(model: &str) -> Self {
        let model = model.to_owned();
        Self {
            output_tokens: counter!("ballast:generation_tokens_total", "model_name" => model.clone()),
            inter_token_latency: histogram!("ballast:inter_token_latency_seconds", "model_name" => model),
        }
    }

    pub(crate) fn record_output_tokens(&self, tokens: usize) {
        self.output_tokens.increment(tokens as u64);
    }

    pub(crate) fn record_inter_token_latency(&self, latency: Duration) {
        self.inter_token_latency.record(latency);
    }
}

pub(crate) fn record_time_to_first_token(model: &str, since_arrival: Duration) {
    histogram!("ballast:time_to_first_token_seconds", "model_name" => model.to_owned()).record(since_arrival);
}

pub(crate) fn record_placement(model: &str, placement: &StreamPlacement) {
    let labels = [("model_name", model.to_owned()), ("reason", placement.reason.name().to_owned())];
    counter!("ballast:routing_decisions_total", &labels).increment(1);
    counter!("ballast:routing_cached_tokens_total", "model_name" => model.to_owned())
        .increment(placement.cached_tokens);
}

/// A stream was resumed on another worker.
pub(crate) fn record_resume(model: &str) {
    counter!("ballast:stream_resumes_total", "model_name" => model.to_owned()).increment(1);
}

/// `model` is the name of a served model: names that only clients know are no label values.
pub(crate) fn record_refusal(model: &str, class: PriorityClass, reason: &'static str) {
    let labels =
        [("model_name", model.to_owned()), ("class", class.name().to_owned()), ("reason", reason.to_owned())];
    counter!("ballast:requests_refused_total", &labels).increment(1);
}

/// The time that a request waited for its permits.
pub(crate) fn record_queue_time(model: &str, class: PriorityClass, waited: Duration) {
    histogram!("ballast:request_queue_time_seconds", "model_name" => model.to_owned(), "class" => class.name())
        .record(waited);
}

pub(crate) fn record_finished_choice(model: &str, reason: &'static str, total_time: Duration) {
    histogram!("ballast:e2e_request_latency_seconds", "model_name" => model.to_owned()).record(total_time);
    count_choice(model, reason);
}

pub(crate) fn record_failed_choice(model: &str) {
    count_choice(model, "error");
}

/// The client disconnected.
pub(crate) fn record_cancelled_choice(model: &str) {
    count_choice(model, "abort");
}

/// The name is vLLM's, although the metric also counts failed and cancelled choices.
fn count_choice(model: &str, reason: &'static str) {
    counter!("ballast:request_success_total", "model_name" => model.to_owned(), "finished_reason" => reason)
        .increment(1);
}

pub(crate) fn record_http_response(route: &str, status: u16) {
    counter!("ballast:http_requests_total", "handler" => route.to_owned(), "status" => status.to_string())
        .increment(1);
}

/// A request was refused because of its API key or the host that it names.
pub(crate) fn record_access_refusal(reason: &'static str) {
    counter!("ballast:requests_denied_total", "reason" => reason).increment(1);
}

/// `key` is a name of the key file.
pub(crate) fn record_key_prompt_tokens(key: &str, tokens: usize) {
    counter!("ballast:key_prompt_tokens_total", "key" => key.to_owned()).increment(tokens as u64);
}

pub(crate) fn record_key_output_tokens(key: &str, tokens: usize) {
    counter!("ballast:key_generation_tokens_total", "key" => key.to_owned()).increment(tokens as u64);
}

/// The usage log did not take a line.
pub(crate) fn record_lost_usage_line() {
    counter!("ballast:usage_lines_lost_total").increment(1);
}

/// A request was put into quarantine.
pub(crate) fn record_quarantine(model: &str) {
    counter!("ballast:requests_quarantined_total", "model_name" => model.to_owned()).increment(1);
}

/// A client's TLS handshake failed or took too long.
pub(crate) fn record_failed_handshake(reason: &'static str) {
    counter!("ballast:tls_handshake_failures_total", "reason" => reason).increment(1);
}

/// The end of the validity of the TLS certificate in use, in seconds since 1970.
pub(crate) fn record_certificate_expiry(not_after: u64) {
    gauge!("ballast:tls_certificate_expiry_timestamp_seconds").set(not_after as f64);
}
