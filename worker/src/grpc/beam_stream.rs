// SPDX-License-Identifier: Apache-2.0

//! `SearchBeams`: reports the admission, waits for the outputs of the search, and sends them.

use engine::{Beam, EngineOutput, TokenUsage};
use futures::{Stream, StreamExt, TryStreamExt, stream};
use proto::worker::v1 as wire;
use tokio::sync::mpsc;
use tonic::Status;

use crate::token_channel::StreamItem;
use crate::wire::frames::{admitted, beam_frames};

/// Dropping the stream drops the receiver, which cancels the search.
pub(super) fn frames(
    ahead: usize,
    outputs: mpsc::Receiver<StreamItem>,
) -> impl Stream<Item = Result<wire::GenerateFrame, Status>> + Send {
    let found = stream::once(beams(outputs))
        .map_ok(|(beams, usage)| stream::iter(beam_frames(beams, usage).map(Ok)))
        .try_flatten();
    stream::iter([Ok(admitted(ahead))]).chain(found)
}

async fn beams(mut outputs: mpsc::Receiver<StreamItem>) -> Result<(Vec<Beam>, TokenUsage), Status> {
    let mut found = None;
    while let Some(item) = outputs.recv().await {
        match item? {
            EngineOutput::Beams { beams, .. } => found = Some(beams),
            EngineOutput::Finished { usage, .. } => {
                let beams = found.ok_or_else(|| Status::internal("the beam search ended without outputs"))?;
                return Ok((beams, usage));
            }
            _ => {}
        }
    }
    Err(Status::unavailable("the engine has stopped"))
}
