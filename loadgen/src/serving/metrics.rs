// SPDX-License-Identifier: Apache-2.0

//! The figures of a run, as vLLM's benchmark defines them.
//!
//! TTFT: from the scheduled arrival to the first text. E2EL: to the last event of the choice. TPOT:
//! (E2EL - TTFT) / (output tokens - 1). ITL: between two events with text. A failed request counts
//! as failed and nowhere else.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

use super::answer::StreamedAnswer;
use super::driver::{SentRequest, ServingRun};
use super::goodput::{Objective, RequestLatencies, meets};
use super::statistics::SortedSample;

/// The client is a bottleneck above this delay of 99% of its sends. A free client is below 1 ms.
const SEND_DELAY_MS_MAX: f64 = 10.0;

/// Failures of one kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FailureCount {
    pub kind: String,
    pub count: u64,
    /// The text of the first one.
    pub example: String,
}

/// Latencies are in milliseconds.
#[derive(Clone, Debug, PartialEq)]
pub struct ServingMetrics {
    pub duration_s: f64,
    pub completed: u64,
    pub failed: u64,
    pub total_input_tokens: u64,
    pub total_output_tokens: u64,
    /// Completed requests that meet all objectives. `None` without objectives.
    pub good: Option<u64>,
    pub max_output_tokens_per_s: f64,
    pub max_concurrent_requests: u64,
    pub ttft_ms: SortedSample,
    pub tpot_ms: SortedSample,
    pub itl_ms: SortedSample,
    pub e2el_ms: SortedSample,
    /// Waits for the client's limit of concurrency.
    pub queue_time_ms: SortedSample,
    pub send_delay_ms: SortedSample,
    pub failures: Vec<FailureCount>,
    pub turns_not_sent: u64,
}

/// The latencies of an answer, in seconds, from the scheduled arrival.
pub(crate) fn latencies(scheduled: Duration, answer: &StreamedAnswer) -> RequestLatencies {
    let first = answer.token_times.first().copied().unwrap_or(answer.end);
    let ttft = first.saturating_sub(scheduled).as_secs_f64();
    let e2el = answer.end.saturating_sub(scheduled).as_secs_f64();
    let gaps = answer.output_tokens.saturating_sub(1);
    RequestLatencies { ttft, tpot: (gaps > 0).then(|| (e2el - ttft) / gaps as f64), e2el }
}

/// Times between events with text, in seconds.
pub(crate) fn gaps(answer: &StreamedAnswer) -> Vec<f64> {
    answer.token_times.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect()
}

impl ServingMetrics {
    pub fn of(run: &ServingRun, objectives: &[Objective]) -> Self {
        let answers: Vec<(&SentRequest, &StreamedAnswer)> =
            run.requests.iter().filter_map(|record| Some((record, record.outcome.as_ref().ok()?))).collect();
        let all: Vec<RequestLatencies> =
            answers.iter().map(|(record, answer)| latencies(record.scheduled, answer)).collect();
        let good = all.iter().filter(|request| meets(objectives, request)).count() as u64;
        let ms = |values: Vec<f64>| SortedSample::new(values.into_iter().map(|s| s * 1e3).collect());
        let of_all = |time: fn(&SentRequest) -> Duration| {
            ms(run.requests.iter().map(|record| time(record).as_secs_f64()).collect())
        };
        Self {
            duration_s: run.duration.as_secs_f64(),
            completed: answers.len() as u64,
            failed: (run.requests.len() - answers.len()) as u64,
            total_input_tokens: answers.iter().map(|(_, answer)| answer.prompt_tokens).sum(),
            total_output_tokens: answers.iter().map(|(_, answer)| answer.output_tokens).sum(),
            good: (!objectives.is_empty()).then_some(good),
            max_output_tokens_per_s: output_tokens_by_second(&answers).into_iter().fold(0.0, f64::max),
            max_concurrent_requests: peak_concurrency(&answers),
            ttft_ms: ms(all.iter().map(|request| request.ttft).collect()),
            tpot_ms: ms(all.iter().filter_map(|request| request.tpot).collect()),
            itl_ms: ms(answers.iter().flat_map(|(_, answer)| gaps(answer)).collect()),
            e2el_ms: ms(all.iter().map(|request| request.e2el).collect()),
            queue_time_ms: of_all(|record| record.queue_time),
            send_delay_ms: of_all(SentRequest::send_delay),
            failures: count_failures(run),
            turns_not_sent: run.turns_not_sent,
        }
    }

    /// A count per second of the run.
    pub fn per_second(&self, count: u64) -> f64 {
        if self.duration_s > 0.0 { count as f64 / self.duration_s } else { 0.0 }
    }

    /// Whether the client sent its requests so late that the figures are its own.
    pub fn is_client_slow(&self) -> bool {
        self.send_delay_ms.percentile(99.0) > SEND_DELAY_MS_MAX
    }
}

/// Output tokens in each second of the run. An event may have several tokens, or parts of one: each
/// event of an answer counts the same share of its tokens.
fn output_tokens_by_second(answers: &[(&SentRequest, &StreamedAnswer)]) -> Vec<f64> {
    let mut seconds = Vec::new();
    for (_, answer) in answers {
        let share = answer.output_tokens as f64 / answer.token_times.len() as f64;
        for at in &answer.token_times {
            let second = at.as_secs() as usize;
            if second >= seconds.len() {
                seconds.resize(second + 1, 0.0);
            }
            seconds[second] += share;
        }
    }
    seconds
}

/// The most requests that were between send and end at one time.
fn peak_concurrency(answers: &[(&SentRequest, &StreamedAnswer)]) -> u64 {
    let mut changes: Vec<(Duration, i64)> =
        answers.iter().flat_map(|(record, answer)| [(record.sent, 1), (answer.end, -1)]).collect();
    // At one instant, ends come before sends.
    changes.sort_unstable();
    let (mut now, mut peak) = (0, 0);
    for (_, change) in changes {
        now += change;
        peak = peak.max(now);
    }
    peak.unsigned_abs()
}

fn count_failures(run: &ServingRun) -> Vec<FailureCount> {
    let mut counts: BTreeMap<String, FailureCount> = BTreeMap::new();
    for failure in run.requests.iter().filter_map(|record| record.outcome.as_ref().err()) {
        let kind = failure.kind();
        let first = || FailureCount { kind: kind.clone(), count: 0, example: failure.to_string() };
        counts.entry(kind.clone()).or_insert_with(first).count += 1;
    }
    let mut counts: Vec<FailureCount> = counts.into_values().collect();
    counts.sort_by_key(|failure| std::cmp::Reverse(failure.count));
    counts
}

#[cfg(test)]
mod tests {
    use super::super::answer::RequestFailure;
    use super::*;

    fn seconds(s: f64) -> Duration {
        Duration::from_secs_f64(s)
    }

    /// Four tokens, one every half second, the first a second after `sent`.
    fn record(scheduled: f64, sent: f64) -> SentRequest {
        let token_times: Vec<Duration> = (0..4).map(|n| seconds(sent + 1.0 + 0.5 * f64::from(n))).collect();
        let end = seconds(sent + 2.5);
        let answer =
            StreamedAnswer { token_times, end, prompt_tokens: 10, output_tokens: 4, text: String::new() };
        SentRequest {
            scheduled: seconds(scheduled),
            queue_time: Duration::ZERO,
            sent: seconds(sent),
            ended: end,
            outcome: Ok(answer),
        }
    }

    fn failed(failure: RequestFailure) -> SentRequest {
        SentRequest { outcome: Err(failure), ..record(0.0, 0.0) }
    }

    fn run(requests: Vec<SentRequest>) -> ServingRun {
        ServingRun { requests, duration: seconds(10.0), turns_not_sent: 0 }
    }

    #[test]
    fn latencies_count_from_the_scheduled_arrival_and_not_from_a_late_send() {
        let metrics = ServingMetrics::of(&run(vec![record(0.0, 0.0), record(0.0, 3.0)]), &[]);
        assert_eq!(metrics.ttft_ms.values(), [1000.0, 4000.0]);
        assert_eq!(metrics.e2el_ms.values(), [2500.0, 5500.0]);
        assert_eq!(metrics.tpot_ms.values(), [500.0, 500.0]);
        assert_eq!(metrics.itl_ms.values(), [500.0; 6]);
        assert_eq!((metrics.send_delay_ms.max(), metrics.is_client_slow()), (3000.0, true));
        assert_eq!((metrics.total_input_tokens, metrics.total_output_tokens), (20, 8));
        assert_eq!(metrics.per_second(metrics.total_output_tokens), 0.8);
    }

    #[test]
    fn a_wait_for_the_limit_of_concurrency_is_latency_and_no_delay_of_the_client() {
        let waited = SentRequest { queue_time: seconds(3.0), ..record(0.0, 3.0) };
        let metrics = ServingMetrics::of(&run(vec![waited]), &[]);
        assert_eq!((metrics.ttft_ms.max(), metrics.queue_time_ms.max()), (4000.0, 3000.0));
        assert!(!metrics.is_client_slow());
    }

    #[test]
    fn goodput_counts_completed_requests_that_meet_all_objectives() {
        let refused = RequestFailure::Status { status: 503, text: "full".to_owned() };
        let run = run(vec![record(0.0, 0.0), record(0.0, 3.0), failed(refused)]);
        let good = |texts: &[&str]| {
            let objectives: Vec<Objective> = texts.iter().map(|text| text.parse().unwrap()).collect();
            ServingMetrics::of(&run, &objectives).good
        };
        assert_eq!(good(&[]), None);
        assert_eq!(good(&["ttft:1500"]), Some(1));
        assert_eq!(good(&["tpot:500", "e2el:6000"]), Some(2));
        assert_eq!(good(&["tpot:499"]), Some(0));
    }

    #[test]
    fn failures_are_counted_by_kind_and_give_no_latency() {
        let status = |text: &str| RequestFailure::Status { status: 500, text: text.to_owned() };
        let run = run(vec![
            failed(RequestFailure::Cut),
            failed(status("first")),
            failed(status("second")),
            record(0.0, 0.0),
        ]);
        let metrics = ServingMetrics::of(&run, &[]);
        assert_eq!((metrics.completed, metrics.failed, metrics.ttft_ms.values().len()), (1, 3, 1));
        let counts: Vec<_> =
            metrics.failures.iter().map(|f| (f.kind.as_str(), f.count, f.example.as_str())).collect();
        let cut = "the stream breaks off before [DONE]";
        assert_eq!(counts, [("HTTP 500", 2, "HTTP 500: first"), ("cut", 1, cut)]);
    }

    #[test]
    fn the_peaks_are_those_of_the_busiest_second_and_instant() {
        // One ends at 2.5, when another one is sent.
        let metrics =
            ServingMetrics::of(&run(vec![record(0.0, 0.0), record(1.0, 1.0), record(2.5, 2.5)]), &[]);
        assert_eq!(metrics.max_concurrent_requests, 2);
        assert_eq!(metrics.max_output_tokens_per_s, 4.0);
    }
}
