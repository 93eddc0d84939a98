// SPDX-License-Identifier: Apache-2.0

//! The HELP lines of all metrics. `docs/OPERATING.md` says more.

const PREFIX: &str = "ballast:";

/// Names without prefix, and what they measure.
const HELP: [(&str, &str); 44] = [
    ("num_streams", "Streams that run or wait, of all models."),
    ("request_bytes", "Bytes that requests hold."),
    ("num_contents_quarantined", "Contents of requests that are refused because they crashed workers."),
    ("workers", "Workers that serve the model."),
    ("weights_bytes", "Size of a copy of weights that workers use."),
    ("weights_workers", "Workers of the model that use the copy of weights."),
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
    ("num_preemptions_total", "Sequences that were preempted."),
    ("spec_decode_num_draft_tokens_total", "Draft tokens that were verified."),
    ("spec_decode_num_accepted_tokens_total", "Draft tokens that were accepted."),
    ("log_lines_lost_total", "Log lines that stderr did not take."),
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
    ("requests_denied_total", "Requests without a valid API key or above its limits."),
    ("key_prompt_tokens_total", "Prompt tokens of an API key."),
    ("key_generation_tokens_total", "Output tokens of an API key."),
    ("usage_lines_lost_total", "Lines that the usage log did not take."),
    ("requests_quarantined_total", "Requests that were put into quarantine."),
];

/// Adds a HELP line before each TYPE line.
pub(crate) fn add_help(metrics: &str) -> String {
    let mut text = String::with_capacity(metrics.len() + 4096);
    for line in metrics.lines() {
        let name = line.strip_prefix("# TYPE ").and_then(|line| line.split(' ').next());
        let help = name
            .and_then(|name| name.strip_prefix(PREFIX))
            .and_then(|name| HELP.iter().find(|(known, _)| *known == name));
        if let Some((name, help)) = help {
            text.push_str(&format!("# HELP {PREFIX}{name} {help}\n"));
        }
        text.push_str(line);
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_metric_gets_its_help_once() {
        let text = add_help("# TYPE ballast:process_up gauge\nballast:process_up{name=\"a\"} 1\n");
        let expected = "# HELP ballast:process_up 1 while the process runs.\n\
                        # TYPE ballast:process_up gauge\nballast:process_up{name=\"a\"} 1\n";
        assert_eq!(text, expected);
        let names: std::collections::HashSet<&str> = HELP.iter().map(|(name, _)| *name).collect();
        assert_eq!(names.len(), HELP.len());
    }
}
