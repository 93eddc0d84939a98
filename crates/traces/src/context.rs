// SPDX-License-Identifier: Apache-2.0

//! [`TraceContext`]: which trace a request belongs to, as W3C Trace Context carries it in headers.

use http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::Context;
use opentelemetry::propagation::{Extractor, TextMapPropagator};
use opentelemetry::trace::{SpanContext, TraceContextExt, TraceFlags, TraceId};
use opentelemetry_sdk::propagation::TraceContextPropagator;

pub const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
pub const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");
/// Version 00: `00-<32 digits>-<16 digits>-<2 digits>`.
const TRACEPARENT_BYTES: usize = 55;
/// The specification asks for at least this much. A longer state is left out, the trace goes on.
const TRACESTATE_BYTES_MAX: usize = 512;

/// The trace and the span that new spans are children of. The default belongs to no trace.
#[derive(Clone, Debug)]
pub struct TraceContext(SpanContext);

impl Default for TraceContext {
    fn default() -> Self {
        Self(SpanContext::NONE)
    }
}

impl TraceContext {
    /// The caller's context. Headers that are not well-formed count as none.
    pub fn from_headers(headers: &HeaderMap) -> Self {
        let parent = headers.get(TRACEPARENT).and_then(|value| value.to_str().ok());
        let Some(parent) = parent.filter(|parent| is_well_formed(parent)) else { return Self::default() };
        let headers = ContextHeaders { parent, state: joined_state(headers) };
        let context = TraceContextPropagator::new().extract_with_context(&Context::new(), &headers);
        Self(context.span().span_context().clone())
    }

    /// Sets the headers for a call, unless there is no trace.
    pub fn write_to(&self, headers: &mut HeaderMap) {
        if !self.0.is_valid() {
            return;
        }
        let (trace, span) = (self.0.trace_id(), self.0.span_id());
        let flags = self.0.trace_flags() & TraceFlags::SAMPLED;
        let parent = HeaderValue::try_from(format!("00-{trace}-{span}-{flags:02x}"));
        headers.extend(parent.ok().map(|parent| (TRACEPARENT, parent)));
        let state = self.0.trace_state().header();
        let state = (!state.is_empty()).then(|| HeaderValue::try_from(state).ok()).flatten();
        headers.extend(state.map(|state| (TRACESTATE, state)));
    }

    /// `None` if there is no trace. Displays as 32 hexadecimal digits.
    pub fn trace_id(&self) -> Option<TraceId> {
        self.0.is_valid().then(|| self.0.trace_id())
    }

    pub(crate) fn of_span(context: &SpanContext) -> Self {
        Self(context.clone())
    }

    /// As the SDK takes the parent of a span. Its sampler takes an invalid parent for one that is
    /// not sampled.
    pub(crate) fn to_parent(&self) -> Context {
        match self.0.is_valid() {
            true => Context::new().with_remote_span_context(self.0.clone()),
            false => Context::new(),
        }
    }
}

/// The SDK is lenient with lengths, and would continue other traces than the client's.
fn is_well_formed(parent: &str) -> bool {
    let bytes = parent.as_bytes();
    let is_digit = |byte: &u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(byte);
    let is_in_place = |(at, byte): (usize, &u8)| match at {
        2 | 35 | 52 => *byte == b'-',
        _ => is_digit(byte),
    };
    let is_end = match bytes.get(TRACEPARENT_BYTES) {
        None => true,
        // A later version may append fields.
        Some(next) => *next == b'-' && !parent.starts_with("00"),
    };
    bytes.len() >= TRACEPARENT_BYTES
        && is_end
        && bytes[..TRACEPARENT_BYTES].iter().enumerate().all(is_in_place)
}

/// Several headers are parts of one list.
fn joined_state(headers: &HeaderMap) -> Option<String> {
    let parts: Option<Vec<&str>> = headers.get_all(TRACESTATE).iter().map(|v| v.to_str().ok()).collect();
    let state = parts?.join(",");
    (!state.is_empty() && state.len() <= TRACESTATE_BYTES_MAX).then_some(state)
}

struct ContextHeaders<'a> {
    parent: &'a str,
    state: Option<String>,
}

impl Extractor for ContextHeaders<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        match key {
            "traceparent" => Some(self.parent),
            "tracestate" => self.state.as_deref(),
            _ => None,
        }
    }

    fn keys(&self) -> Vec<&str> {
        vec!["traceparent", "tracestate"]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    fn forwarded(headers: &[(&'static str, &str)]) -> HeaderMap {
        let mut given = HeaderMap::new();
        for (name, value) in headers {
            given.append(*name, value.parse().unwrap());
        }
        let mut forwarded = HeaderMap::new();
        TraceContext::from_headers(&given).write_to(&mut forwarded);
        forwarded
    }

    #[test]
    fn the_clients_context_is_forwarded_as_it_came() {
        let sent = forwarded(&[("traceparent", PARENT), ("tracestate", "a=1"), ("tracestate", "b=2")]);
        assert_eq!(sent[TRACEPARENT], *PARENT);
        assert_eq!(sent[TRACESTATE], *"a=1,b=2");
        let unsampled = PARENT.replace("-01", "-00");
        let sent = forwarded(&[("traceparent", &unsampled)]);
        assert_eq!(sent[TRACEPARENT], *unsampled);
        assert!(!sent.contains_key(TRACESTATE));
    }

    #[test]
    fn a_context_that_is_not_well_formed_counts_as_none() {
        let longer = format!("{PARENT}-ff");
        let none = "00-00000000000000000000000000000000-b7ad6b7169203331-01";
        for parent in [
            "",
            "00-abc-b7ad6b7169203331-01",
            &PARENT.replace("-01", "-1"),
            &PARENT.replace("-01", "-+1"),
            &PARENT.to_uppercase(),
            &PARENT.replacen("00", "ff", 1),
            &longer,
            none,
        ] {
            assert!(forwarded(&[("traceparent", parent)]).is_empty(), "{parent}");
        }
        let later = longer.replacen("00", "01", 1);
        assert_eq!(forwarded(&[("traceparent", &later)])[TRACEPARENT], *PARENT);
    }

    #[test]
    fn a_state_that_is_too_long_or_invalid_costs_only_the_state() {
        let long = format!("a={}", "x".repeat(TRACESTATE_BYTES_MAX));
        for state in [&*long, "no list"] {
            let sent = forwarded(&[("traceparent", PARENT), ("tracestate", state)]);
            assert_eq!(sent[TRACEPARENT], *PARENT, "{state}");
            assert_eq!(sent.len(), 1, "{state}");
        }
    }
}
