// SPDX-License-Identifier: Apache-2.0

//! What the page of metrics has beside their values: HELP lines and the names of vLLM.
//! `docs/OPERATING.md` says more.

use std::collections::HashSet;

const PREFIX: &str = "ballast:";

/// Names without prefix, and what they measure.
const HELP: [(&str, &str); 62] = [
    ("num_streams", "Streams that run or wait, of all models."),
    ("request_bytes", "Bytes that requests hold."),
    ("num_contents_quarantined", "Contents of requests that are refused because they crashed workers."),
    ("workers", "Workers that serve the model."),
    ("weights_bytes", "Size of a copy of weights that workers use."),
    ("weights_workers", "Workers of the model that use the copy of weights."),
    ("weights_ready", "1 while the model's weights are on the device."),
    ("weights_failed", "1 if the model's weights cannot be loaded onto the device."),
    ("num_permits", "Streams of the model that may run at once."),
    ("num_permits_held", "Permits that running streams hold."),
    ("num_requests_queued", "Requests that wait in the router."),
    ("num_tenant_requests_queued", "Requests of a tenant that wait in the router."),
    ("num_requests_running", "Sequences that run on the worker."),
    ("num_requests_waiting", "Sequences that wait on the worker."),
    ("num_streams_placed", "Streams that the router has placed on the worker."),
    ("kv_cache_usage_perc", "Part of the KV cache that running sequences hold, from 0 to 1."),
    ("kv_cached_tokens", "Tokens in cached blocks that no sequence holds."),
    ("kv_unfilled_tokens", "Positions in held blocks that hold no token yet."),
    ("kv_mapped_bytes", "Memory that backs the KV cache."),
    ("kv_evictions_total", "Cached blocks that were evicted."),
    ("forks_total", "Sequences that continued from the prompt of another one."),
    ("deferred_logits_total", "Rows of logits that waited for a grammar mask."),
    ("prefix_cache_queries_total", "Prompt tokens that were looked up in the prefix cache."),
    ("prefix_cache_hits_total", "Prompt tokens that the prefix cache had."),
    ("prefix_index_bytes", "Memory of what the router knows of the worker's prefix cache."),
    ("prefix_index_live", "1 while the worker's KV cache events arrive at the router."),
    ("routing_decisions_total", "Streams that were placed, by the reason for their worker."),
    ("routing_cached_tokens_total", "Prompt tokens that the router expected in the worker's prefix cache."),
    ("num_preemptions_total", "Sequences that were preempted."),
    ("spec_decode_num_draft_tokens_total", "Draft tokens that were verified."),
    ("spec_decode_num_accepted_tokens_total", "Draft tokens that were accepted."),
    ("device_temperature_celsius", "Temperature of the GPU."),
    ("device_power_watts", "Power that the GPU draws."),
    ("device_utilization_ratio", "Part of the last sample period in which a kernel ran, from 0 to 1."),
    ("device_memory_used_bytes", "Memory of the GPU that any process of the machine uses."),
    ("device_memory_total_bytes", "Memory of the GPU."),
    ("device_ecc_errors_total", "Memory errors of the GPU since its driver was loaded."),
    ("device_xid_errors_total", "Faults of the GPU that its driver has reported, by Xid."),
    ("model_on_fallback", "1 if the model is on the host although GPUs were to be tried first."),
    ("device_quarantined", "1 while the device is out of service."),
    ("log_lines_lost_total", "Log lines that stderr did not take."),
    ("trace_spans_dropped_total", "Spans that the collector of traces has not got."),
    ("process_up", "1 while the process runs."),
    ("process_failed", "1 if the process crashes again and again."),
    ("process_restarts_total", "Restarts of the process after a crash."),
    ("prompt_tokens_total", "Prompt tokens of admitted requests."),
    ("generation_tokens_total", "Output tokens."),
    ("time_to_first_token_seconds", "Time from the arrival of a request to its first token."),
    ("inter_token_latency_seconds", "Time between the token frames of a choice."),
    ("stream_resumes_total", "Streams that another worker resumed."),
    ("requests_refused_total", "Requests that were refused before their response began."),
    ("request_queue_time_seconds", "Time that requests waited for their permits."),
    ("e2e_request_latency_seconds", "Time from the arrival of a request to the end of a choice."),
    ("request_success_total", "Choices that ended, by reason."),
    ("http_requests_total", "Responses over HTTP, by route and status."),
    ("requests_denied_total", "Requests without a valid API key, above its limits or for another host."),
    ("key_prompt_tokens_total", "Prompt tokens of an API key."),
    ("key_generation_tokens_total", "Output tokens of an API key."),
    ("usage_lines_lost_total", "Lines that the usage log did not take."),
    ("tls_handshake_failures_total", "TLS handshakes that failed or took too long."),
    ("tls_certificate_expiry_timestamp_seconds", "End of the TLS certificate, in seconds since 1970."),
    ("requests_quarantined_total", "Requests that were put into quarantine."),
];

/// The metrics that vLLM has under the same name with the same type, unit and meaning. They are
/// exported under its prefix too, for dashboards and gateways that know vLLM.
const VLLM_NAMES: [&str; 15] = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
];
const VLLM_PREFIX: &str = "vllm:";

/// Adds a HELP line before each TYPE line, the metrics under vLLM's names, and the HELP lines of
/// metrics that have no value yet: a page without them would look as if they did not exist.
pub(crate) fn complete(metrics: &str) -> String {
    let (mut text, mut aliases) = (String::with_capacity(2 * metrics.len() + 4096), String::new());
    let (mut seen, mut has_alias) = (HashSet::new(), false);
    for line in metrics.lines() {
        if let Some(name) = family(line) {
            seen.insert(name);
            has_alias = VLLM_NAMES.contains(&name);
            if let Some((name, help)) = HELP.iter().find(|(known, _)| *known == name) {
                text.push_str(&format!("# HELP {PREFIX}{name} {help}\n"));
                if has_alias {
                    aliases.push_str(&format!("# HELP {VLLM_PREFIX}{name} {help}\n"));
                }
            }
        }
        text.push_str(line);
        text.push('\n');
        if has_alias {
            // The prefix occurs once, unless a label has it too.
            aliases.push_str(&line.replacen(PREFIX, VLLM_PREFIX, 1));
            aliases.push('\n');
        }
    }
    text.push_str(&aliases);
    for (name, help) in HELP.iter().filter(|(name, _)| !seen.contains(name)) {
        text.push_str(&format!("# HELP {PREFIX}{name} {help}\n"));
    }
    text
}

/// The name, without prefix, of the metric that begins with this line.
fn family(line: &str) -> Option<&str> {
    line.strip_prefix("# TYPE ")?.split(' ').next()?.strip_prefix(PREFIX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_metric_gets_its_help_once() {
        let text = complete("# TYPE ballast:process_up gauge\nballast:process_up{name=\"a\"} 1\n");
        let expected = "# HELP ballast:process_up 1 while the process runs.\n\
                        # TYPE ballast:process_up gauge\nballast:process_up{name=\"a\"} 1\n";
        assert!(text.starts_with(expected), "{text}");
        let names: HashSet<&str> = HELP.iter().map(|(name, _)| *name).collect();
        assert_eq!(names.len(), HELP.len());
        for name in names {
            assert_eq!(text.matches(&format!("# HELP ballast:{name} ")).count(), 1, "{name}");
        }
    }

    #[test]
    fn metrics_of_vllm_have_its_names_too() {
        let text = complete(
            "# TYPE ballast:workers gauge\nballast:workers 2\n\
             # TYPE ballast:kv_cache_usage_perc gauge\n\
             ballast:kv_cache_usage_perc{model_name=\"ballast:x\"} 0.5\n",
        );
        assert!(text.contains("# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{model_name=\"ballast:x\"} 0.5\n"), "{text}");
        assert!(text.contains("# HELP vllm:kv_cache_usage_perc "), "{text}");
        assert!(!text.contains("vllm:workers"), "{text}");
        assert!(VLLM_NAMES.iter().all(|name| HELP.iter().any(|(known, _)| known == name)));
    }
}
