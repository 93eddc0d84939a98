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
    choices: usize,
    outputs: mpsc::Receiver<StreamItem>,
) -> impl Stream<Item = Result<wire::GenerateFrame, Status>> + Send {
    let found = stream::once(beams(choices, outputs))
        .map_ok(|(beams, usage)| stream::iter(beam_frames(beams, usage).map(Ok)))
        .try_flatten();
    stream::iter([Ok(admitted(ahead))]).chain(found)
}

async fn beams(
    choices: usize,
    mut outputs: mpsc::Receiver<StreamItem>,
) -> Result<(Vec<Beam>, TokenUsage), Status> {
    let mut found = Vec::new();
    while let Some(item) = outputs.recv().await {
        match item? {
            EngineOutput::Beams { beams, .. } => found = beams,
            // The model gives too few tokens a probability above 0.
            EngineOutput::Finished { .. } if found.len() < choices => {
                let message = format!("the beam search has {} outputs of {choices}", found.len());
                return Err(Status::internal(message));
            }
            EngineOutput::Finished { usage, .. } => return Ok((found, usage)),
            _ => {}
        }
    }
    Err(Status::unavailable("the engine has stopped"))
}

#[cfg(test)]
mod tests {
    use engine::{FinishReason, RequestId};

    use super::*;

    #[tokio::test]
    async fn a_search_with_too_few_outputs_is_a_failure_of_the_request_and_not_of_the_worker() {
        let (id, reason, usage) = (RequestId(1), FinishReason::Searched, TokenUsage::default());
        let beam = Beam { tokens: vec![], stop_token: Some(3), score: -1.0 };
        for (choices, is_complete) in [(1, true), (2, false)] {
            let (sender, receiver) = mpsc::channel(2);
            let outputs = [
                EngineOutput::Beams { id, beams: vec![beam.clone()] },
                EngineOutput::Finished { id, reason, usage },
            ];
            for output in outputs {
                sender.send(Ok(output)).await.unwrap();
            }
            match beams(choices, receiver).await {
                Ok((found, _)) => assert!(is_complete && found == [beam.clone()]),
                Err(status) => assert!(!is_complete && status.code() == tonic::Code::Internal, "{status}"),
            }
        }
    }
}
