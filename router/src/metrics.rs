//! Every metric of the router. Names and meanings follow vLLM's where it has the same thing, with our own prefix.

use std::fmt::Write as _;
use std::time::Duration;

use metrics::{counter, histogram};

use crate::admission::Class;
use crate::choice::{Finish, Outcome};
use crate::fleet::Fleet;
use crate::gate::Gate;
use crate::resume::Failure;

pub(crate) fn prompt(model: &str, tokens: usize) {
    counter!("ballast:prompt_tokens_total", "model_name" => model.to_owned()).increment(tokens as u64);
}

pub(crate) fn generated(model: &str, tokens: usize) {
    counter!("ballast:generation_tokens_total", "model_name" => model.to_owned()).increment(tokens as u64);
}

pub(crate) fn first_token(model: &str, since_arrival: Duration) {
    histogram!("ballast:time_to_first_token_seconds", "model_name" => model.to_owned()).record(since_arrival);
}

pub(crate) fn inter_token(model: &str, gap: Duration) {
    histogram!("ballast:inter_token_latency_seconds", "model_name" => model.to_owned()).record(gap);
}

/// A stream was taken over from a lost worker.
pub(crate) fn resumed(model: &str) {
    counter!("ballast:stream_resumes_total", "model_name" => model.to_owned()).increment(1);
}

/// Models that clients name are label values only where they are served.
pub(crate) fn refused(model: &str, class: Class, reason: &'static str) {
    let labels =
        [("model_name", model.to_owned()), ("class", class.name().to_owned()), ("reason", reason.to_owned())];
    counter!("ballast:requests_refused_total", &labels).increment(1);
}

/// Waited for a place before it was admitted.
pub(crate) fn queued(model: &str, class: Class, waited: Duration) {
    histogram!("ballast:request_queue_time_seconds", "model_name" => model.to_owned(), "class" => class.name())
        .record(waited);
}

pub(crate) fn choice_ended(model: &str, outcome: &Result<Outcome, Failure>) {
    let reason = match outcome {
        Ok(outcome) => {
            histogram!("ballast:e2e_request_latency_seconds", "model_name" => model.to_owned())
                .record(outcome.total);
            match outcome.finish {
                Finish::StopString(_) | Finish::StopToken(_) => "stop",
                Finish::Length => "length",
            }
        }
        Err(_) => "error",
    };
    finished(model, reason);
}

/// The client went away.
pub(crate) fn choice_cancelled(model: &str) {
    finished(model, "abort");
}

/// vLLM's name, although it counts the others too.
fn finished(model: &str, reason: &'static str) {
    counter!("ballast:request_success_total", "model_name" => model.to_owned(), "finished_reason" => reason)
        .increment(1);
}

pub(crate) fn http(route: &str, status: u16) {
    counter!("ballast:http_requests_total", "handler" => route.to_owned(), "status" => status.to_string())
        .increment(1);
}

/// Tenants of a model that have a line of their own; those with the most requests in the queue.
const TENANTS_MAX: usize = 16;

/// Gauges of now, read from fleet and gate at the time of the scrape; a worker that is gone has no line.
pub(crate) fn render_gauges(fleet: &Fleet, gate: &Gate) -> String {
    type Value = fn(&crate::fleet::ServedBy) -> f64;
    let gauges: [(&str, &str, Value); 15] = [
        ("num_requests_running", "gauge", |w| f64::from(w.report.running)),
        ("num_requests_waiting", "gauge", |w| f64::from(w.report.waiting)),
        ("num_streams_placed", "gauge", |w| f64::from(w.in_flight)),
        ("kv_cache_usage_perc", "gauge", |w| match w.report.kv_total_tokens {
            0 => 0.0,
            total => w.report.kv_used_tokens as f64 / total as f64,
        }),
        ("kv_cached_tokens", "gauge", |w| w.report.kv_cached_tokens as f64),
        ("kv_unfilled_tokens", "gauge", |w| w.report.kv_unfilled_tokens as f64),
        ("kv_mapped_bytes", "gauge", |w| w.report.kv_mapped_bytes as f64),
        ("kv_evictions_total", "counter", |w| w.report.evictions as f64),
        ("forks_total", "counter", |w| w.report.forks as f64),
        ("late_masks_total", "counter", |w| w.report.late_rows as f64),
        ("prefix_cache_queries_total", "counter", |w| {
            (w.report.prompt_tokens_computed + w.report.prompt_tokens_cached) as f64
        }),
        ("prefix_cache_hits_total", "counter", |w| w.report.prompt_tokens_cached as f64),
        ("num_preemptions_total", "counter", |w| w.report.preemptions as f64),
        ("spec_decode_num_draft_tokens_total", "counter", |w| w.report.drafted as f64),
        ("spec_decode_num_accepted_tokens_total", "counter", |w| w.report.accepted as f64),
    ];
    let served = fleet.served();
    let mut text = String::new();
    let mut line = |arguments: std::fmt::Arguments<'_>| {
        // Writing to a string cannot fail.
        let _: std::fmt::Result = writeln!(text, "{arguments}");
    };
    line(format_args!("# TYPE ballast:num_streams gauge"));
    line(format_args!("ballast:num_streams {}", gate.streams()));
    line(format_args!("# TYPE ballast:workers gauge"));
    for served in &served {
        let model = escaped(served.model.name());
        line(format_args!("ballast:workers{{model_name=\"{model}\"}} {}", served.workers.len()));
    }
    for (name, kind, value) in gauges {
        line(format_args!("# TYPE ballast:{name} {kind}"));
        for served in &served {
            let model = escaped(served.model.name());
            for worker in &served.workers {
                let engine = escaped(&worker.name);
                line(format_args!(
                    "ballast:{name}{{model_name=\"{model}\",engine=\"{engine}\"}} {}",
                    value(worker)
                ));
            }
        }
    }
    let standings =
        || served.iter().filter_map(|s| Some((escaped(s.model.name()), gate.standing(s.model.key())?)));
    type OfClass = fn(&crate::admission::ClassStanding) -> u32;
    let of_class: [(&str, OfClass); 2] =
        [("num_requests_queued", |c| c.waiting), ("num_places_held", |c| c.held)];
    for (name, value) in of_class {
        line(format_args!("# TYPE ballast:{name} gauge"));
        for (model, standing) in standings() {
            for (class, of_class) in Class::ALL.into_iter().zip(&standing.classes) {
                let class = class.name();
                line(format_args!(
                    "ballast:{name}{{model_name=\"{model}\",class=\"{class}\"}} {}",
                    value(of_class)
                ));
            }
        }
    }
    line(format_args!("# TYPE ballast:num_places gauge"));
    for (model, standing) in standings() {
        line(format_args!("ballast:num_places{{model_name=\"{model}\"}} {}", standing.capacity));
    }
    line(format_args!("# TYPE ballast:num_tenant_requests_queued gauge"));
    for (model, standing) in standings() {
        for (tenant, waiting) in standing.tenants.iter().take(TENANTS_MAX) {
            let tenant = escaped(tenant);
            line(format_args!(
                "ballast:num_tenant_requests_queued{{model_name=\"{model}\",tenant=\"{tenant}\"}} {waiting}"
            ));
        }
    }
    text
}

/// Label values of the Prometheus text format.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_values_cannot_break_out_of_their_quotes() {
        assert_eq!(escaped("a\"b\\c\nd"), "a\\\"b\\\\c\\nd");
    }

    #[test]
    fn an_empty_fleet_has_no_worker_lines() {
        let fleet = Fleet::new();
        let limits = crate::config::AdmissionConfig::default().limits(10);
        let text = render_gauges(&fleet, &Gate::new(fleet.clone(), limits));
        assert!(text.contains("ballast:num_streams 0\n"), "{text}");
        assert!(!text.contains("engine="), "{text}");
    }
}
