// SPDX-License-Identifier: Apache-2.0

//! The result of `ballast bench serve` on the terminal.

use loadgen::serving::{PERCENTILES, RequestRate, ServingMetrics, ServingSettings, SortedSample};
use service::printable::printable_lines;

pub(super) fn table(settings: &ServingSettings, metrics: &ServingMetrics) -> String {
    let mut text = heading(settings);
    let mut line = |name: &str, value: String| text += &format!("{name:<34} {value:>12}\n");
    line("completed requests", metrics.completed.to_string());
    line("failed requests", metrics.failed.to_string());
    line("duration (s)", format!("{:.2}", metrics.duration_s));
    line("input tokens", metrics.total_input_tokens.to_string());
    line("output tokens", metrics.total_output_tokens.to_string());
    line("requests/s", format!("{:.2}", metrics.per_second(metrics.completed)));
    if let Some(good) = metrics.good {
        line("goodput (requests/s)", format!("{:.2}", metrics.per_second(good)));
    }
    let tokens = metrics.total_input_tokens + metrics.total_output_tokens;
    line("output tokens/s", format!("{:.1}", metrics.per_second(metrics.total_output_tokens)));
    line("output tokens/s, busiest second", format!("{:.1}", metrics.max_output_tokens_per_s));
    line("input and output tokens/s", format!("{:.1}", metrics.per_second(tokens)));
    line("most requests at one time", metrics.max_concurrent_requests.to_string());
    text += &latency_table(settings, metrics);
    text += &remarks(metrics);
    printable_lines(&text)
}

fn heading(settings: &ServingSettings) -> String {
    let load = &settings.load;
    let arrivals = match load.rate {
        _ if load.is_closed_loop() => "closed loop".to_owned(),
        RequestRate::Unlimited => "all requests at once".to_owned(),
        RequestRate::PerSecond(rate) if load.burstiness == 1.0 => format!("{rate} requests/s (Poisson)"),
        RequestRate::PerSecond(rate) => {
            format!("{rate} requests/s (gamma, burstiness {})", load.burstiness)
        }
    };
    let limit = load.max_concurrency.map(|limit| format!(", at most {limit} at one time"));
    let mix = settings.mix.get("dataset_name").and_then(|name| name.as_str()).unwrap_or_default();
    format!(
        "{} at {}: {arrivals}{}, {mix}\n",
        settings.template.model,
        settings.base_url,
        limit.unwrap_or_default()
    )
}

fn latency_table(settings: &ServingSettings, metrics: &ServingMetrics) -> String {
    let mut text = format!("{:<34} {:>12} {:>10}", "milliseconds", "mean", "median");
    PERCENTILES.iter().for_each(|percent| text += &format!(" {:>10}", format!("p{percent}")));
    text.push('\n');
    let queue = settings.load.max_concurrency.map(|_| &metrics.queue_time_ms);
    let rows: [(&str, Option<&SortedSample>); 6] = [
        ("time to first token (TTFT)", Some(&metrics.ttft_ms)),
        ("time per output token (TPOT)", Some(&metrics.tpot_ms)),
        ("inter-token latency (ITL)", Some(&metrics.itl_ms)),
        ("end-to-end latency (E2EL)", Some(&metrics.e2el_ms)),
        ("wait for --max-concurrency", queue),
        ("send delay of this client", Some(&metrics.send_delay_ms)),
    ];
    for (name, sample) in rows.into_iter().filter_map(|(name, sample)| Some((name, sample?))) {
        text += &format!("{name:<34} {:>12.2} {:>10.2}", sample.mean(), sample.percentile(50.0));
        PERCENTILES
            .iter()
            .for_each(|percent| text += &format!(" {:>10.2}", sample.percentile(f64::from(*percent))));
        text.push('\n');
    }
    text
}

fn remarks(metrics: &ServingMetrics) -> String {
    let mut text = String::new();
    for failure in &metrics.failures {
        text += &format!("failed: {} x {} (first: {})\n", failure.count, failure.kind, failure.example);
    }
    if metrics.turns_not_sent > 0 {
        text += &format!("{} later turns of failed conversations were not sent\n", metrics.turns_not_sent);
    }
    if metrics.is_client_slow() {
        text += &format!(
            "warning: this client was a bottleneck: it sent 1% of the requests {:.1} ms late or more (at \
             most {:.1} ms); use a free machine or a lower rate\n",
            metrics.send_delay_ms.percentile(99.0),
            metrics.send_delay_ms.max()
        );
    }
    text
}
