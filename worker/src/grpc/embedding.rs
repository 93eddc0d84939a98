// SPDX-License-Identifier: Apache-2.0

//! `Embed`: waits for the vector of one request.

use engine::EngineOutput;
use models::Pooling;
use proto::worker::v1 as wire;
use tokio::sync::mpsc;
use tonic::Status;

use crate::pooling::pooling_to_wire;
use crate::token_channel::StreamItem;

/// The worker's pooling, if the caller means the same.
pub(super) fn check_pooling(asked: i32, own: Option<Pooling>) -> Result<Pooling, Status> {
    let own_to_wire = pooling_to_wire(own);
    match own {
        Some(pooling) if asked == own_to_wire as i32 => Ok(pooling),
        _ => {
            let own = own_to_wire.as_str_name();
            Err(Status::failed_precondition(format!(
                "the request is for another pooling: this worker has {own}"
            )))
        }
    }
}

/// Dropping the future drops the receiver, which cancels the request.
pub(super) async fn embedding(mut outputs: mpsc::Receiver<StreamItem>) -> Result<wire::EmbedReply, Status> {
    let mut values = None;
    while let Some(item) = outputs.recv().await {
        match item? {
            EngineOutput::Embedding { values: pooled, .. } => values = Some(pooled),
            EngineOutput::Finished { usage, .. } => {
                let values = values.ok_or_else(|| Status::internal("the request ended without a vector"))?;
                return Ok(wire::EmbedReply { values, cached_tokens: usage.cached_tokens as u32 });
            }
            _ => {}
        }
    }
    Err(Status::unavailable("the engine has stopped"))
}
