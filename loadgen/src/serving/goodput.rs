// SPDX-License-Identifier: Apache-2.0

//! Service level objectives, and which requests meet them.

use std::str::FromStr;

/// What an objective limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LatencyMetric {
    /// Time to first token.
    Ttft,
    /// Time per output token after the first.
    Tpot,
    /// End-to-end latency.
    E2el,
}

/// `ttft:200`: an upper bound in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Objective {
    pub metric: LatencyMetric,
    pub limit_ms: f64,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no objective: write ttft:MS, tpot:MS or e2el:MS")]
pub struct ObjectiveError(String);

impl FromStr for Objective {
    type Err = ObjectiveError;

    fn from_str(text: &str) -> Result<Self, ObjectiveError> {
        let refused = || ObjectiveError(text.to_owned());
        let (name, limit) = text.split_once(':').ok_or_else(refused)?;
        let metric = match name {
            "ttft" => LatencyMetric::Ttft,
            "tpot" => LatencyMetric::Tpot,
            "e2el" => LatencyMetric::E2el,
            _ => return Err(refused()),
        };
        let limit_ms = limit.parse::<f64>().ok().filter(|limit| limit.is_finite() && *limit >= 0.0);
        Ok(Self { metric, limit_ms: limit_ms.ok_or_else(refused)? })
    }
}

/// The latencies of one completed request, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RequestLatencies {
    pub ttft: f64,
    /// `None` for a single token, which meets every objective for the time between tokens.
    pub tpot: Option<f64>,
    pub e2el: f64,
}

/// Whether a request meets all objectives.
pub fn meets(objectives: &[Objective], latencies: &RequestLatencies) -> bool {
    objectives.iter().all(|objective| {
        let seconds = match objective.metric {
            LatencyMetric::Ttft => latencies.ttft,
            LatencyMetric::Tpot => latencies.tpot.unwrap_or(0.0),
            LatencyMetric::E2el => latencies.e2el,
        };
        seconds * 1e3 <= objective.limit_ms
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_good_if_it_meets_every_objective() {
        let objectives: Vec<Objective> =
            ["ttft:200", "tpot:50", "e2el:5000"].iter().map(|text| text.parse().unwrap()).collect();
        let good = RequestLatencies { ttft: 0.2, tpot: Some(0.05), e2el: 5.0 };
        assert!(meets(&objectives, &good));
        for bad in [
            RequestLatencies { ttft: 0.201, ..good },
            RequestLatencies { tpot: Some(0.051), ..good },
            RequestLatencies { e2el: 5.001, ..good },
        ] {
            assert!(!meets(&objectives, &bad), "{bad:?}");
        }
        assert!(meets(&objectives, &RequestLatencies { tpot: None, ..good }), "a single token");
        assert!(meets(&objectives[..1], &RequestLatencies { e2el: 60.0, ..good }), "not asked for");
    }

    #[test]
    fn texts_that_are_no_objective_are_refused() {
        for text in ["ttft", "ttft:", "itl:5", "ttft:-1", "ttft:fast", "ttft:inf", "200"] {
            assert_eq!(text.parse::<Objective>(), Err(ObjectiveError(text.to_owned())));
        }
    }
}
