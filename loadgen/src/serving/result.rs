// SPDX-License-Identifier: Apache-2.0

//! The result of a run as JSON, with the field names of `vllm bench serve`.

use serde_json::{Map, Value, json};

use super::arrivals::RequestRate;
use super::driver::{ServingLoad, ServingRun};
use super::goodput::{LatencyMetric, Objective};
use super::metrics::{ServingMetrics, gaps, latencies};
use super::statistics::SortedSample;
use super::target::RequestTemplate;

/// The percentiles of a result, beside the median.
pub const PERCENTILES: [u32; 3] = [90, 95, 99];

/// What a run measured: written beside its figures, so that two results can be told apart.
#[derive(Clone, Debug, PartialEq)]
pub struct ServingSettings {
    pub label: String,
    /// `%Y%m%d-%H%M%S` in UTC.
    pub date: String,
    pub base_url: String,
    pub template: RequestTemplate,
    /// The mix with its parameters.
    pub mix: Map<String, Value>,
    pub seed: u64,
    pub load: ServingLoad,
    pub objectives: Vec<Objective>,
}

/// One JSON object. `detailed` adds arrays with one entry for each request.
pub fn result_json(
    settings: &ServingSettings,
    run: &ServingRun,
    metrics: &ServingMetrics,
    detailed: bool,
) -> Map<String, Value> {
    let mut fields = settings_json(settings, run.requests.len());
    fields.extend(totals_json(metrics));
    let latencies = [
        ("ttft", &metrics.ttft_ms),
        ("tpot", &metrics.tpot_ms),
        ("itl", &metrics.itl_ms),
        ("e2el", &metrics.e2el_ms),
    ];
    latencies.into_iter().for_each(|(name, sample)| add_figures(&mut fields, name, sample));
    if settings.load.max_concurrency.is_some() {
        add_figures(&mut fields, "client_queue_time", &metrics.queue_time_ms);
    }
    add_figures(&mut fields, "send_delay", &metrics.send_delay_ms);
    fields.insert("max_send_delay_ms".to_owned(), json!(metrics.send_delay_ms.max()));
    fields.insert("is_client_slow".to_owned(), json!(metrics.is_client_slow()));
    if detailed {
        fields.extend(requests_json(run));
    }
    fields
}

fn into_map(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(fields) => fields,
        _ => Map::new(),
    }
}

fn settings_json(settings: &ServingSettings, requests: usize) -> Map<String, Value> {
    let ServingSettings { load, template, .. } = settings;
    let rate = match load.rate {
        RequestRate::PerSecond(rate) => json!(rate),
        RequestRate::Unlimited => json!("inf"),
    };
    let objectives: Map<String, Value> = settings
        .objectives
        .iter()
        .map(|objective| (metric_name(objective.metric).to_owned(), json!(objective.limit_ms)))
        .collect();
    into_map(json!({
        "date": settings.date,
        "endpoint_type": template.backend.name(),
        "backend": template.backend.name(),
        "label": settings.label,
        "model_id": template.model,
        "tokenizer_id": null,
        "num_prompts": requests,
        "request_rate": rate,
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency,
        "loop": if load.is_closed_loop() { "closed" } else { "open" },
        "base_url": settings.base_url,
        "mix": settings.mix,
        "seed": settings.seed,
        "temperature": template.temperature,
        "ignore_eos": template.ignore_eos,
        "goodput": objectives,
    }))
}

fn metric_name(metric: LatencyMetric) -> &'static str {
    match metric {
        LatencyMetric::Ttft => "ttft",
        LatencyMetric::Tpot => "tpot",
        LatencyMetric::E2el => "e2el",
    }
}

fn totals_json(metrics: &ServingMetrics) -> Map<String, Value> {
    let tokens = metrics.total_input_tokens + metrics.total_output_tokens;
    into_map(json!({
        "duration": metrics.duration_s,
        "completed": metrics.completed,
        "failed": metrics.failed,
        "total_input_tokens": metrics.total_input_tokens,
        "total_output_tokens": metrics.total_output_tokens,
        "request_throughput": metrics.per_second(metrics.completed),
        "request_goodput": metrics.good.map(|good| metrics.per_second(good)),
        "output_throughput": metrics.per_second(metrics.total_output_tokens),
        "total_token_throughput": metrics.per_second(tokens),
        "max_output_tokens_per_s": metrics.max_output_tokens_per_s,
        "max_concurrent_requests": metrics.max_concurrent_requests,
        "failures": metrics.failures,
        "turns_not_sent": metrics.turns_not_sent,
    }))
}

fn add_figures(fields: &mut Map<String, Value>, name: &str, sample: &SortedSample) {
    fields.insert(format!("mean_{name}_ms"), json!(sample.mean()));
    fields.insert(format!("median_{name}_ms"), json!(sample.percentile(50.0)));
    fields.insert(format!("std_{name}_ms"), json!(sample.standard_deviation()));
    for percent in PERCENTILES {
        fields.insert(format!("p{percent}_{name}_ms"), json!(sample.percentile(f64::from(percent))));
    }
}

/// Arrays in seconds. A failed request has its text in `errors` and zeros elsewhere, as in vLLM.
fn requests_json(run: &ServingRun) -> Map<String, Value> {
    let mut columns: [Vec<Value>; 10] = Default::default();
    for record in &run.requests {
        let row = match &record.outcome {
            Ok(answer) => {
                let latencies = latencies(record.scheduled, answer);
                [
                    json!(answer.prompt_tokens),
                    json!(answer.output_tokens),
                    json!(latencies.ttft),
                    json!(gaps(answer)),
                    json!(latencies.e2el),
                    json!(answer.text),
                    json!(""),
                ]
            }
            Err(failure) => {
                [json!(0), json!(0), json!(0.0), json!([]), json!(0.0), json!(""), json!(failure.to_string())]
            }
        };
        let times = [record.scheduled, record.queue_time, record.send_delay()];
        let row = row.into_iter().chain(times.map(|time| json!(time.as_secs_f64())));
        columns.iter_mut().zip(row).for_each(|(column, value)| column.push(value));
    }
    let names = [
        "input_lens",
        "output_lens",
        "ttfts",
        "itls",
        "latencies",
        "generated_texts",
        "errors",
        "start_times",
        "queue_times",
        "send_delays",
    ];
    names.into_iter().map(str::to_owned).zip(columns.map(Value::Array)).collect()
}

/// The time of day for [`ServingSettings::date`].
pub fn date_of_now() -> String {
    jiff::Timestamp::now().strftime("%Y%m%d-%H%M%S").to_string()
}
