// SPDX-License-Identifier: Apache-2.0

//! Metrics that the router reads from the worker registry and from admission control at the time of
//! a scrape. A worker that is gone has no line.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt::Write as _;

use crate::admission::{ClassStats, ModelAdmissionStats, PriorityClass};
use crate::admission_control::AdmissionController;
use crate::fleet_watch::{CopyReport, ProcessReport};
use crate::registry::{ModelSnapshot, WorkerRegistry, WorkerSnapshot};
use crate::routing::WorkerReport;

/// Maximum number of tenants of a model with a line of their own: those with the most waiting
/// requests.
const TENANT_LINES_MAX: usize = 16;

type WorkerValue = fn(&WorkerSnapshot) -> f64;

/// Name, type and value of the metrics that each worker has.
const WORKER_METRICS: [(&str, &str, WorkerValue); 17] = [
    ("num_requests_running", "gauge", |w| f64::from(w.report.running)),
    ("num_requests_waiting", "gauge", |w| f64::from(w.report.waiting)),
    ("num_streams_placed", "gauge", |w| f64::from(w.own_streams)),
    ("kv_cache_usage_perc", "gauge", |w| match w.report.kv_total_tokens {
        0 => 0.0,
        total => w.report.kv_used_tokens as f64 / total as f64,
    }),
    ("kv_cached_tokens", "gauge", |w| w.report.kv_cached_tokens as f64),
    ("kv_unfilled_tokens", "gauge", |w| w.report.kv_unfilled_tokens as f64),
    ("kv_mapped_bytes", "gauge", |w| w.report.kv_mapped_bytes as f64),
    ("kv_evictions_total", "counter", |w| w.report.evictions as f64),
    ("forks_total", "counter", |w| w.report.forks as f64),
    ("deferred_logits_total", "counter", |w| w.report.deferred_logits as f64),
    ("prefix_cache_queries_total", "counter", |w| {
        (w.report.prompt_tokens_computed + w.report.prompt_tokens_cached) as f64
    }),
    ("prefix_cache_hits_total", "counter", |w| w.report.prompt_tokens_cached as f64),
    ("prefix_index_bytes", "gauge", |w| w.prefix_index.0 as f64),
    ("prefix_index_live", "gauge", |w| f64::from(u8::from(w.prefix_index.1))),
    ("num_preemptions_total", "counter", |w| w.report.preemptions as f64),
    ("spec_decode_num_draft_tokens_total", "counter", |w| w.report.draft_tokens as f64),
    ("spec_decode_num_accepted_tokens_total", "counter", |w| w.report.accepted_draft_tokens as f64),
];

type ClassValue = fn(&ClassStats) -> u32;

/// Name and value of the gauges that each priority class of a model has.
const CLASS_GAUGES: [(&str, ClassValue); 2] =
    [("num_requests_queued", |c| c.waiting_requests), ("num_permits_held", |c| c.held_permits)];

/// What the supervisor reports.
#[derive(Clone, Copy, Default)]
pub(crate) struct FleetGauges<'a> {
    pub(crate) processes: &'a [ProcessReport],
    pub(crate) copies: &'a [CopyReport],
}

/// The metrics in the Prometheus text format. `trace_spans_dropped` are the router's own.
pub(crate) fn render(
    registry: &WorkerRegistry,
    admission: &AdmissionController,
    fleet: &FleetGauges<'_>,
    trace_spans_dropped: u64,
) -> String {
    let models = registry.snapshot();
    let mut page = MetricsPage::default();
    page.line(format_args!("# TYPE ballast:num_streams gauge"));
    page.line(format_args!("ballast:num_streams {}", admission.streams()));
    page.render_workers(&models);
    page.render_weights(&models);
    page.render_admission(&models, admission);
    let lost_lines = service::logging::lost_lines();
    page.render_losses("log_lines_lost_total", lost_lines, &models, |report| report.log_lines_lost);
    let of_worker = |report: &WorkerReport| report.trace_spans_dropped;
    page.render_losses("trace_spans_dropped_total", trace_spans_dropped, &models, of_worker);
    page.render_copies(fleet.copies);
    page.render_processes(fleet.processes);
    page.text
}

/// Gauges of what clients hold, and of the quarantine.
pub(crate) fn render_intake(request_bytes: u64, quarantined: usize) -> String {
    let mut page = MetricsPage::default();
    page.line(format_args!("# TYPE ballast:request_bytes gauge"));
    page.line(format_args!("ballast:request_bytes {request_bytes}"));
    page.line(format_args!("# TYPE ballast:num_contents_quarantined gauge"));
    page.line(format_args!("ballast:num_contents_quarantined {quarantined}"));
    page.text
}

#[derive(Default)]
struct MetricsPage {
    text: String,
}

impl MetricsPage {
    fn line(&mut self, arguments: std::fmt::Arguments<'_>) {
        writeln!(self.text, "{arguments}").expect("writing to a string cannot fail");
    }

    fn render_workers(&mut self, models: &[ModelSnapshot]) {
        self.line(format_args!("# TYPE ballast:workers gauge"));
        // Of a name with several contents or kinds of devices, one line: two lines with equal
        // labels are not a valid page.
        let mut workers: BTreeMap<&str, usize> = BTreeMap::new();
        for snapshot in models {
            *workers.entry(snapshot.model.name()).or_default() += snapshot.workers.len();
        }
        for (model, workers) in workers {
            self.line(format_args!("ballast:workers{{model_name=\"{}\"}} {workers}", escape(model)));
        }
        for (name, kind, value) in WORKER_METRICS {
            self.line(format_args!("# TYPE ballast:{name} {kind}"));
            for snapshot in models {
                let model = escape(snapshot.model.name());
                for worker in &snapshot.workers {
                    let (engine, value) = (escape(&worker.name), value(worker));
                    self.line(format_args!(
                        "ballast:{name}{{model_name=\"{model}\",engine=\"{engine}\"}} {value}"
                    ));
                }
            }
        }
    }

    /// One line for each copy of weights, and one for each model that uses it.
    fn render_weights(&mut self, models: &[ModelSnapshot]) {
        let copy = |model: &ModelSnapshot, worker: &WorkerSnapshot| {
            let (generation, device) = (worker.generation, escape(&worker.device));
            let digest = model.model.digest_hex();
            format!("generation=\"{generation}\",digest=\"{digest}\",device=\"{device}\"")
        };
        let (mut copies, mut users) = (BTreeMap::new(), BTreeMap::new());
        for snapshot in models {
            for worker in &snapshot.workers {
                let copy = copy(snapshot, worker);
                copies.insert(copy.clone(), snapshot.model.description.weight_bytes);
                *users.entry((copy, snapshot.model.name())).or_insert(0) += 1;
            }
        }
        self.line(format_args!("# TYPE ballast:weights_bytes gauge"));
        for (copy, bytes) in copies {
            self.line(format_args!("ballast:weights_bytes{{{copy}}} {bytes}"));
        }
        self.line(format_args!("# TYPE ballast:weights_workers gauge"));
        for ((copy, model), workers) in users {
            let model = escape(model);
            self.line(format_args!("ballast:weights_workers{{{copy},model_name=\"{model}\"}} {workers}"));
        }
    }

    /// One line for each copy that the fleet is to have, whether or not it has workers.
    fn render_copies(&mut self, copies: &[CopyReport]) {
        for (name, value) in COPY_GAUGES {
            self.line(format_args!("# TYPE ballast:{name} gauge"));
            for copy in copies {
                let (model, device) = (escape(&copy.model), escape(&copy.device));
                let value = u32::from(value(copy));
                self.line(format_args!(
                    "ballast:{name}{{model_name=\"{model}\",device=\"{device}\"}} {value}"
                ));
            }
        }
    }

    /// Log lines and spans that the router and its workers have lost.
    fn render_losses(
        &mut self,
        name: &str,
        router: u64,
        models: &[ModelSnapshot],
        of_worker: impl Fn(&WorkerReport) -> u64,
    ) {
        self.line(format_args!("# TYPE ballast:{name} counter"));
        self.line(format_args!("ballast:{name}{{process=\"router\"}} {router}"));
        for worker in models.iter().flat_map(|snapshot| &snapshot.workers) {
            let (process, lost) = (escape(&worker.name), of_worker(&worker.report));
            self.line(format_args!("ballast:{name}{{process=\"{process}\"}} {lost}"));
        }
    }

    fn render_processes(&mut self, processes: &[ProcessReport]) {
        for (name, kind, value) in PROCESS_METRICS {
            self.line(format_args!("# TYPE ballast:{name} {kind}"));
            for process in processes {
                let (label, value) = (escape(&process.name), value(process));
                self.line(format_args!("ballast:{name}{{process=\"{label}\"}} {value}"));
            }
        }
    }

    fn render_admission(&mut self, models: &[ModelSnapshot], admission: &AdmissionController) {
        let stats = stats_by_name(models, admission);
        for (name, value) in CLASS_GAUGES {
            self.line(format_args!("# TYPE ballast:{name} gauge"));
            for (model, stats) in &stats {
                for (class, class_stats) in PriorityClass::ALL.into_iter().zip(&stats.classes) {
                    let (class, value) = (class.name(), value(class_stats));
                    self.line(format_args!(
                        "ballast:{name}{{model_name=\"{model}\",class=\"{class}\"}} {value}"
                    ));
                }
            }
        }
        self.line(format_args!("# TYPE ballast:num_permits gauge"));
        for (model, stats) in &stats {
            self.line(format_args!("ballast:num_permits{{model_name=\"{model}\"}} {}", stats.permits));
        }
        self.line(format_args!("# TYPE ballast:num_tenant_requests_queued gauge"));
        for (model, stats) in &stats {
            for (tenant, waiting) in stats.tenants.iter().take(TENANT_LINES_MAX) {
                let tenant = escape(tenant);
                self.line(format_args!(
                    "ballast:num_tenant_requests_queued{{model_name=\"{model}\",tenant=\"{tenant}\"}} {waiting}"
                ));
            }
        }
    }
}

/// The queues of each name together, with the name as a label value: devices that compute
/// differently have queues of their own.
fn stats_by_name(
    models: &[ModelSnapshot],
    admission: &AdmissionController,
) -> BTreeMap<String, ModelAdmissionStats> {
    let mut by_name: BTreeMap<String, ModelAdmissionStats> = BTreeMap::new();
    let heard = models.iter().filter_map(|s| Some((s.model.name(), admission.stats(s.model.key())?)));
    let unheard = admission.unheard_stats();
    let unheard = unheard.iter().map(|(key, stats)| (&*key.name, stats.clone()));
    for (name, stats) in heard.chain(unheard) {
        match by_name.entry(escape(name)) {
            Entry::Vacant(entry) => drop(entry.insert(stats)),
            Entry::Occupied(mut entry) => entry.get_mut().add(stats),
        }
    }
    by_name
}

type CopyValue = fn(&CopyReport) -> bool;

/// Name and value of the gauges that each copy of each model has.
const COPY_GAUGES: [(&str, CopyValue); 2] =
    [("weights_ready", |copy| copy.is_ready), ("weights_failed", |copy| copy.is_failed)];

type ProcessValue = fn(&ProcessReport) -> u32;

/// Name, type and value of the metrics that each process of the fleet has.
const PROCESS_METRICS: [(&str, &str, ProcessValue); 3] = [
    ("process_up", "gauge", |p| u32::from(p.is_running)),
    ("process_failed", "gauge", |p| u32::from(p.is_failed)),
    ("process_restarts_total", "counter", |p| p.restarts),
];

/// Escapes a label value of the Prometheus text format.
pub(crate) fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::AdmissionConfig;
    use crate::limits::RouterLimits;

    #[test]
    fn label_values_are_escaped() {
        assert_eq!(escape("a\"b\\c\nd"), "a\\\"b\\\\c\\nd");
    }

    #[test]
    fn a_registry_without_workers_gives_no_worker_lines() {
        let registry = WorkerRegistry::new(crate::config::RoutingMode::default());
        let limits = AdmissionConfig::default().limits(&RouterLimits::default());
        let admission = AdmissionController::new(registry.clone(), limits);
        let text = render(&registry, &admission, &FleetGauges::default(), 0);
        assert!(text.contains("ballast:num_streams 0\n"), "{text}");
        assert!(!text.contains("engine="), "{text}");
    }
}
