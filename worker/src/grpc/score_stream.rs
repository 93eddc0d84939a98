// SPDX-License-Identifier: Apache-2.0

//! Collects the outputs of a score request into frames.

use engine::EngineOutput;
use futures::{Stream, stream};
use proto::worker::v1 as wire;
use tokio::sync::mpsc;
use tonic::Status;

use crate::token_channel::StreamItem;
use crate::wire::frames::ScoreFrames;

struct ScoreStream {
    outputs: mpsc::Receiver<StreamItem>,
    frames: ScoreFrames,
    end: Option<Result<(), Status>>,
}

pub(super) fn frames(
    outputs: mpsc::Receiver<StreamItem>,
) -> impl Stream<Item = Result<wire::ScoreFrame, Status>> + Send {
    let stream = ScoreStream { outputs, frames: ScoreFrames::default(), end: None };
    stream::unfold(stream, async |mut stream| Some((stream.next().await?, stream)))
}

impl ScoreStream {
    async fn next(&mut self) -> Option<Result<wire::ScoreFrame, Status>> {
        // Collects outputs until a frame is full or the request has ended.
        while self.end.is_none() && !self.frames.is_full() {
            match self.outputs.recv().await {
                Some(Ok(EngineOutput::Finished { .. })) => self.end = Some(Ok(())),
                Some(Ok(output)) => self.frames.push(output),
                Some(Err(abort)) => self.end = Some(Err(abort.into())),
                None => self.end = Some(Err(Status::unavailable("the engine has stopped"))),
            }
        }
        match (self.frames.take(), self.end.take()) {
            (Some(frame), end) => {
                self.end = end;
                Some(Ok(frame))
            }
            (None, Some(Err(status))) => {
                self.end = Some(Ok(()));
                Some(Err(status))
            }
            (None, _) => None,
        }
    }
}
