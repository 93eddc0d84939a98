// SPDX-License-Identifier: Apache-2.0

//! Rates of workers, from their counters at two moments. A plain value; time is an argument.

use std::collections::HashMap;
use std::time::Instant;

use proto::worker::v1::StatsReply;

/// In tokens per second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct WorkerTokenRates {
    pub(crate) output: f64,
    /// Prompt tokens, computed or from the prefix cache.
    pub(crate) prompt: f64,
}

/// The counters of each worker at the last reading.
#[derive(Debug, Default)]
pub(crate) struct WorkerRates {
    last: HashMap<String, Reading>,
}

#[derive(Clone, Copy, Debug)]
struct Reading {
    at: Instant,
    output: u64,
    prompt: u64,
}

impl WorkerRates {
    /// Takes a reading, and returns the rates since the last one. A worker without an earlier
    /// reading has none, and neither has one that was restarted: its counters begin at 0.
    pub(crate) fn advance(
        &mut self,
        workers: &HashMap<String, StatsReply>,
        now: Instant,
    ) -> HashMap<String, WorkerTokenRates> {
        let reading = |stats: &StatsReply| Reading {
            at: now,
            output: stats.output_tokens,
            prompt: stats.prompt_tokens_computed + stats.prompt_tokens_cached,
        };
        let readings: HashMap<String, Reading> =
            workers.iter().map(|(name, stats)| (name.clone(), reading(stats))).collect();
        let rates = readings.iter().filter_map(|(name, new)| {
            let old = self.last.get(name)?;
            let seconds = new.at.saturating_duration_since(old.at).as_secs_f64();
            let rate = |new: u64, old: u64| Some(new.checked_sub(old)? as f64 / seconds);
            let rates = WorkerTokenRates {
                output: rate(new.output, old.output)?,
                prompt: rate(new.prompt, old.prompt)?,
            };
            (seconds > 0.0).then(|| (name.clone(), rates))
        });
        let rates = rates.collect();
        self.last = readings;
        rates
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_rate_needs_two_readings_of_one_process() {
        let worker = |output_tokens, prompt_tokens_computed| {
            let stats = StatsReply {
                output_tokens,
                prompt_tokens_computed,
                prompt_tokens_cached: 100,
                ..StatsReply::default()
            };
            HashMap::from([("worker-0".to_owned(), stats)])
        };
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let mut rates = WorkerRates::default();
        assert_eq!(rates.advance(&worker(10, 0), start), HashMap::new());
        let found = rates.advance(&worker(30, 50), start + 2 * second);
        assert_eq!(found["worker-0"], WorkerTokenRates { output: 10.0, prompt: 25.0 });
        assert_eq!(rates.advance(&worker(3, 0), start + 3 * second), HashMap::new(), "it was restarted");
        let found = rates.advance(&worker(4, 0), start + 4 * second);
        assert_eq!(found["worker-0"], WorkerTokenRates { output: 1.0, prompt: 0.0 });
        assert_eq!(rates.advance(&HashMap::new(), start + 5 * second), HashMap::new());
        assert_eq!(rates.advance(&worker(9, 0), start + 6 * second), HashMap::new(), "it did not answer");
    }
}
