//! What a grammar costs a stream: the same streams free and constrained, through one fleet, in turns.

use proto::v1::inference_client::InferenceClient;
use serde::Serialize;
use tonic::transport::Channel;

use crate::report::{Summary, median};
use crate::streams::{Load, LoadError, LoadReport, run_load};

/// An array of records that has not ended when a stream has its tokens.
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
    pub free: Decode,
    pub constrained: Decode,
    /// Time between two tokens, constrained to free: the median over the rounds of the rounds' medians.
    pub slow_down: f64,
}

/// Of each round.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Decode {
    pub inter_token: Vec<Summary>,
    /// Of one stream, after its first token.
    pub tokens_per_s: Vec<f64>,
}

impl Decode {
    fn add(&mut self, report: LoadReport) {
        self.inter_token.push(report.inter_token);
        self.tokens_per_s.push(report.decode_tokens_per_s_of_a_stream);
    }
}

/// Once unmeasured and then `rounds` times in turns.
pub async fn structured_against_free(
    client: &InferenceClient<Channel>,
    load: Load,
    vocabulary: u32,
    rounds: u32,
) -> Result<StructuredReport, LoadError> {
    let (mut free, mut constrained) = (Decode::default(), Decode::default());
    for round in 0..=rounds {
        let without = run_load(client, Load { schema: None, ..load }, vocabulary, 2 * round).await?;
        let with =
            run_load(client, Load { schema: Some(RECORDS), ..load }, vocabulary, 2 * round + 1).await?;
        // The first steps fault in pages, and the first grammar is compiled.
        if round > 0 {
            free.add(without);
            constrained.add(with);
        }
    }
    let pairs = constrained.inter_token.iter().zip(&free.inter_token);
    let slow_down = median(pairs.map(|(with, without)| with.p50_ms / without.p50_ms).collect());
    Ok(StructuredReport { free, constrained, slow_down })
}
