// SPDX-License-Identifier: Apache-2.0

//! What the fuzz target in `worker/fuzz` calls: from messages to the engine's requests. Behind
//! the feature `fuzzing`.

use std::time::Duration;

use engine::{Request, RequestId, ScoreRequest};
use proto::worker::v1 as wire;

use crate::wire::request::{RequestFieldError, grammar_source, request_from_wire, score_request_from_wire};

/// The request that `Generate` passes to the engine, or the text of the refusal.
pub fn generate_request(mut wire: wire::GenerateRequest, id: RequestId) -> Result<Request, String> {
    let text = |refusal: RequestFieldError| refusal.to_string();
    wire.grammar.take().map(grammar_source).transpose().map_err(text)?;
    request_from_wire(wire, id, Duration::ZERO).map_err(text)
}

/// The request that `Score` passes to the engine, or the text of the refusal.
pub fn score_request(wire: wire::ScoreRequest, id: RequestId) -> Result<ScoreRequest, String> {
    score_request_from_wire(wire, id, Duration::ZERO).map_err(|refusal| refusal.to_string())
}
