// SPDX-License-Identifier: Apache-2.0

//! Measures structured output: the same streams with a grammar and without, on one fleet, in turns.

use proto::v1::inference_client::InferenceClient;
use serde::Serialize;
use tonic::transport::Channel;

use crate::report::{LatencySummary, median};
use crate::streams::{StreamLoad, StreamLoadError, StreamLoadReport, run_load};

/// An array of records that is longer than the output of a stream.
const RECORDS: &str = r#"{"type": "array", "minItems": 1000, "items": {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["function", "class", "module"]},
        "line": {"type": "integer", "minimum": 1, "maximum": 99999},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 5}
    },
    "required": ["name", "kind", "line", "tags"],
    "additionalProperties": false
}}"#;

#[derive(Clone, Debug, Serialize)]
pub struct StructuredReport {
    pub free: DecodeSpeed,
    pub constrained: DecodeSpeed,
    /// Ratio of inter-token latency with grammar to without: the median over the rounds' medians.
    pub slow_down: f64,
}

/// Decode speed in each round.
#[derive(Clone, Debug, Default, Serialize)]
pub struct DecodeSpeed {
    pub inter_token: Vec<LatencySummary>,
    /// Decode speed of one stream after its first token.
    pub tokens_per_s: Vec<f64>,
}

impl DecodeSpeed {
    fn add(&mut self, report: StreamLoadReport) {
        self.inter_token.push(report.inter_token);
        self.tokens_per_s.push(report.decode_tokens_per_s_of_a_stream);
    }
}

/// Runs both once as warm-up and then `rounds` times in turns.
pub async fn compare_structured_output(
    client: &InferenceClient<Channel>,
    load: StreamLoad,
    vocabulary: u32,
    rounds: u32,
) -> Result<StructuredReport, StreamLoadError> {
    let (mut free, mut constrained) = (DecodeSpeed::default(), DecodeSpeed::default());
    for round in 0..=rounds {
        let without = run_load(client, StreamLoad { schema: None, ..load }, vocabulary, 2 * round).await?;
        let with =
            run_load(client, StreamLoad { schema: Some(RECORDS), ..load }, vocabulary, 2 * round + 1).await?;
        // The warm-up round faults in pages and compiles the grammar.
        if round > 0 {
            free.add(without);
            constrained.add(with);
        }
    }
    let pairs = constrained.inter_token.iter().zip(&free.inter_token);
    let slow_down = median(pairs.map(|(with, without)| with.p50_ms / without.p50_ms).collect());
    Ok(StructuredReport { free, constrained, slow_down })
}
