// SPDX-License-Identifier: Apache-2.0

//! `SearchBeams`: reports the admission and the progress of the search, and sends its outputs.

use engine::{Beam, EngineOutput, TokenUsage};
use futures::{Stream, StreamExt, TryStreamExt, stream};
use proto::worker::v1 as wire;
use tokio::sync::mpsc;
use tonic::Status;

use crate::token_channel::StreamItem;
use crate::wire::frames::{admitted, beam_frames, beam_progress};

/// What the engine says of a search.
enum SearchNews {
    Progress { length: usize, computed_tokens: u64 },
    Found(Vec<Beam>, TokenUsage),
}

/// Dropping the stream drops the receiver, which cancels the search.
pub(super) fn frames(
    ahead: usize,
    choices: usize,
    outputs: mpsc::Receiver<StreamItem>,
) -> impl Stream<Item = Result<wire::GenerateFrame, Status>> + Send {
    // `None` after the outputs.
    let news = stream::try_unfold(Some(outputs), move |outputs| async move {
        let Some(mut outputs) = outputs else { return Ok::<_, Status>(None) };
        let news = next_news(choices, &mut outputs).await?;
        let is_last = matches!(news, SearchNews::Found(..));
        Ok(Some((news, (!is_last).then_some(outputs))))
    });
    let frames = news.map_ok(|news| match news {
        SearchNews::Progress { length, computed_tokens } => {
            stream::iter([Ok(beam_progress(length, computed_tokens))]).left_stream()
        }
        SearchNews::Found(beams, usage) => stream::iter(beam_frames(beams, usage).map(Ok)).right_stream(),
    });
    stream::iter([Ok(admitted(ahead))]).chain(frames.try_flatten())
}

async fn next_news(choices: usize, outputs: &mut mpsc::Receiver<StreamItem>) -> Result<SearchNews, Status> {
    let mut found = Vec::new();
    while let Some(item) = outputs.recv().await {
        match item? {
            EngineOutput::BeamProgress { length, computed_tokens, .. } => {
                return Ok(SearchNews::Progress { length, computed_tokens });
            }
            EngineOutput::Beams { beams, .. } => found = beams,
            // The model gives too few tokens a probability above 0.
            EngineOutput::Finished { .. } if found.len() < choices => {
                let message = format!("the beam search has {} outputs of {choices}", found.len());
                return Err(Status::internal(message));
            }
            EngineOutput::Finished { usage, .. } => return Ok(SearchNews::Found(found, usage)),
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
            let (sender, receiver) = mpsc::channel(3);
            let outputs = [
                EngineOutput::BeamProgress { id, length: 2, computed_tokens: 5 },
                EngineOutput::Beams { id, beams: vec![beam.clone()] },
                EngineOutput::Finished { id, reason, usage },
            ];
            for output in outputs {
                sender.send(Ok(output)).await.unwrap();
            }
            let mut frames = std::pin::pin!(frames(7, choices, receiver));
            let mut next = async || frames.next().await;
            assert_eq!(next().await.unwrap().unwrap(), admitted(7));
            assert_eq!(next().await.unwrap().unwrap(), beam_progress(2, 5));
            match next().await.unwrap() {
                Ok(frame) => {
                    let all: Vec<_> = beam_frames(vec![beam.clone()], usage).collect();
                    assert!(is_complete && vec![frame] == all);
                }
                Err(status) => assert!(!is_complete && status.code() == tonic::Code::Internal, "{status}"),
            }
            assert!(next().await.is_none());
        }
    }
}
