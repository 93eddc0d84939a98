// SPDX-License-Identifier: Apache-2.0

//! Results as one HTML page: a table and plots. The page has no script and loads nothing.

use super::plots::{Marks, Plot, PlotError, colour_text, cumulative, draw, thinned};
use super::result_file::{StoredRequest, StoredResult};
use super::statistics::SortedSample;

/// Plots of latencies end at this percentile: one slow request would squeeze all others.
const SHOWN_PERCENT: f64 = 99.5;

const STYLE: &str = "body{font:15px/1.4 system-ui,sans-serif;max-width:84rem;margin:2rem auto;padding:0 1rem;\
    color:#1a1a1a;background:#fff}table{border-collapse:collapse;margin:1rem 0}\
    th,td{padding:.2rem .8rem;text-align:right;border-bottom:1px solid #ddd}th:first-child{text-align:left}\
    .plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(26rem,1fr));gap:1rem}\
    figure{margin:0}.wide{overflow-x:auto}figcaption{font-weight:600}svg{width:100%;height:auto}\
    .mark{display:inline-block;width:.8em;height:.8em;margin-right:.4em}";

/// Rows of the table: the field, and its name.
const FIGURES: [(&str, &str); 22] = [
    ("duration", "duration (s)"),
    ("completed", "completed requests"),
    ("failed", "failed requests"),
    ("total_input_tokens", "input tokens"),
    ("total_output_tokens", "output tokens"),
    ("request_throughput", "requests/s"),
    ("request_goodput", "goodput (requests/s)"),
    ("output_throughput", "output tokens/s"),
    ("max_output_tokens_per_s", "output tokens/s, busiest second"),
    ("max_concurrent_requests", "most requests at one time"),
    ("mean_ttft_ms", "TTFT, mean (ms)"),
    ("median_ttft_ms", "TTFT, median (ms)"),
    ("p99_ttft_ms", "TTFT, p99 (ms)"),
    ("mean_tpot_ms", "TPOT, mean (ms)"),
    ("median_tpot_ms", "TPOT, median (ms)"),
    ("p99_tpot_ms", "TPOT, p99 (ms)"),
    ("median_itl_ms", "ITL, median (ms)"),
    ("p99_itl_ms", "ITL, p99 (ms)"),
    ("mean_e2el_ms", "E2EL, mean (ms)"),
    ("median_e2el_ms", "E2EL, median (ms)"),
    ("p99_e2el_ms", "E2EL, p99 (ms)"),
    ("p99_send_delay_ms", "send delay of the client, p99 (ms)"),
];

const SETTINGS: [(&str, &str); 11] = [
    ("label", "label"),
    ("date", "date (UTC)"),
    ("model_id", "model"),
    ("backend", "backend"),
    ("base_url", "server"),
    ("mix", "mix"),
    ("num_prompts", "requests"),
    ("request_rate", "requests/s wanted"),
    ("burstiness", "burstiness"),
    ("max_concurrency", "limit of concurrency"),
    ("seed", "seed"),
];

/// A page about these results. Each has a name, such as that of its file.
pub fn report_page(results: &[(String, StoredResult)]) -> Result<String, PlotError> {
    let requests: Vec<Vec<StoredRequest>> = results.iter().map(|(_, result)| result.requests()).collect();
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n<title>Serving benchmark</title>\n\
         <style>{STYLE}</style>\n</head>\n<body>\n<h1>Serving benchmark</h1>\n"
    );
    page += &table(results, &FIGURES);
    page += "<div class=\"plots\">\n";
    for (caption, plot) in plots(&requests) {
        page +=
            &format!("<figure>\n<figcaption>{}</figcaption>\n{}</figure>\n", escape(caption), draw(&plot)?);
    }
    page += "</div>\n<h2>Settings</h2>\n";
    page += &table(results, &SETTINGS);
    page += "<p>TTFT: time to first token, from the scheduled arrival. TPOT: time per output token after \
        the first. ITL: time between two events with text. E2EL: end-to-end latency. Plots need results \
        with the figures of each request (<code>--save-detailed</code>); latencies are shown up to \
        their percentile 99.5.</p>\n</body>\n</html>\n";
    Ok(page)
}

fn table(results: &[(String, StoredResult)], rows: &[(&str, &str)]) -> String {
    let mut text = "<div class=\"wide\"><table>\n<tr><th></th>".to_owned();
    for (at, (name, _)) in results.iter().enumerate() {
        let colour = colour_text(at);
        let mark = format!("<span class=\"mark\" style=\"background:{colour}\"></span>");
        text += &format!("<th>{mark}{}</th>", escape(name));
    }
    text += "</tr>\n";
    for (field, name) in rows {
        let values: Vec<String> = results.iter().map(|(_, result)| value_text(result, field)).collect();
        if values.iter().all(String::is_empty) {
            continue;
        }
        text += &format!("<tr><th>{}</th>", escape(name));
        values.iter().for_each(|value| text += &format!("<td>{}</td>", escape(value)));
        text += "</tr>\n";
    }
    text + "</table></div>\n"
}

fn value_text(result: &StoredResult, field: &str) -> String {
    match result.fields.get(field) {
        None | Some(serde_json::Value::Null) => String::new(),
        Some(serde_json::Value::String(text)) => text.clone(),
        // The mix: "dataset_name random, input_len 32".
        Some(serde_json::Value::Object(fields)) => {
            let parts = fields.iter().map(|(name, value)| match value.as_str() {
                Some(text) => format!("{name} {text}"),
                None => format!("{name} {value}"),
            });
            parts.collect::<Vec<_>>().join(", ")
        }
        Some(value) if value.is_f64() => format!("{:.2}", value.as_f64().unwrap_or_default()),
        Some(value) => value.to_string(),
    }
}

fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            other => escaped.push(other),
        }
    }
    escaped
}

fn plots(runs: &[Vec<StoredRequest>]) -> Vec<(&'static str, Plot)> {
    if runs.iter().all(Vec::is_empty) {
        return Vec::new();
    }
    let of = |values: fn(&StoredRequest) -> Vec<f64>| -> Vec<SortedSample> {
        let run = |run: &Vec<StoredRequest>| {
            SortedSample::new(run.iter().flat_map(values).map(|seconds| seconds * 1e3).collect())
        };
        runs.iter().map(run).collect()
    };
    vec![
        ("Time to first token, cumulative", latency_plot(&of(|request| vec![request.ttft]))),
        (
            "Time per output token, cumulative",
            latency_plot(&of(|request| request.tpot.into_iter().collect())),
        ),
        ("Inter-token latency, cumulative", latency_plot(&of(|request| request.itls.clone()))),
        ("End-to-end latency, cumulative", latency_plot(&of(|request| vec![request.e2el]))),
        ("Time to first token by arrival", arrival_plot(runs)),
        ("Output tokens per second", throughput_plot(runs)),
    ]
}

fn latency_plot(samples: &[SortedSample]) -> Plot {
    let x_max = samples.iter().map(|sample| sample.percentile(SHOWN_PERCENT)).fold(0.0, f64::max);
    Plot {
        x_name: "milliseconds",
        y_name: "share of the requests or tokens",
        marks: Marks::Line,
        x_max,
        y_max: 1.0,
        curves: samples.iter().map(|sample| cumulative(sample.values())).collect(),
    }
}

fn arrival_plot(runs: &[Vec<StoredRequest>]) -> Plot {
    let point = |request: &StoredRequest| (request.start, request.ttft * 1e3);
    let curves: Vec<Vec<(f64, f64)>> =
        runs.iter().map(|run| thinned(&run.iter().map(point).collect::<Vec<_>>())).collect();
    scaled("seconds since the first request", "milliseconds", Marks::Points, curves)
}

fn throughput_plot(runs: &[Vec<StoredRequest>]) -> Plot {
    let curves = runs.iter().map(|run| thinned(&tokens_by_second(run))).collect();
    scaled("seconds since the first request", "tokens per second", Marks::Line, curves)
}

/// A plot that shows all points.
fn scaled(x_name: &'static str, y_name: &'static str, marks: Marks, curves: Vec<Vec<(f64, f64)>>) -> Plot {
    let (x_max, y_max) =
        curves.iter().flatten().fold((0.0_f64, 0.0_f64), |(x, y), point| (x.max(point.0), y.max(point.1)));
    Plot { x_name, y_name, marks, x_max, y_max: y_max * 1.05, curves }
}

fn tokens_by_second(run: &[StoredRequest]) -> Vec<(f64, f64)> {
    let mut seconds: Vec<(f64, f64)> = Vec::new();
    for request in run {
        let share = request.output_tokens as f64 / (request.itls.len() + 1) as f64;
        let mut at = request.start + request.ttft;
        for itl in std::iter::once(&0.0).chain(&request.itls) {
            at += itl;
            let second = at as usize;
            while seconds.len() <= second {
                seconds.push((seconds.len() as f64, 0.0));
            }
            seconds[second].1 += share;
        }
    }
    seconds
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(detailed: bool) -> StoredResult {
        let arrays = r#", "ttfts": [0.1, 0.3], "itls": [[0.5], [0.5]], "output_lens": [2, 2],
            "input_lens": [1, 1], "start_times": [0.0, 1.0], "latencies": [0.6, 0.8], "errors": ["", ""]"#;
        let json = format!(
            r#"{{"duration": 1.8, "completed": 2, "request_throughput": 1.1, "output_throughput": 2.2,
            "request_goodput": null, "label": "<script>alert(1)</script>"{}}}"#,
            if detailed { arrays } else { "" }
        );
        StoredResult::parse(json.as_bytes()).unwrap()
    }

    #[test]
    fn a_page_has_six_plots_and_needs_nothing_from_outside() {
        let results = [("a&b".to_owned(), result(true)), ("<c>".to_owned(), result(true))];
        let page = report_page(&results).unwrap();
        assert_eq!(page.matches("<svg").count(), 6);
        for word in ["<script", "src=", "href=", "url(", "@import", "<c>", "goodput"] {
            assert!(!page.contains(word), "{word}");
        }
        assert!(page.contains("a&amp;b") && page.contains("&lt;script&gt;"));
    }

    #[test]
    fn a_result_without_requests_has_a_table_only() {
        let page = report_page(&[("a".to_owned(), result(false))]).unwrap();
        assert!(page.contains("<td>2.20</td>") && !page.contains("<svg"));
    }

    #[test]
    fn tokens_count_in_the_second_in_which_they_come() {
        assert_eq!(tokens_by_second(&result(true).requests()), [(0.0, 2.0), (1.0, 2.0)]);
    }
}
