// SPDX-License-Identifier: Apache-2.0

//! The events of a request.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures::Stream;
use proto::v1::generate_frame::Frame;
use proto::v1::{Finished, GenerateFrame, OutputDelta, Started};
use tokio::time::{Instant, Sleep, sleep_until};
use tonic::Streaming;

use crate::error::ClientError;

#[derive(Clone, Debug, PartialEq)]
pub enum GenerateEvent {
    /// A worker has admitted the request. The first event.
    Started(Started),
    /// Tokens of a choice, and the text that they made certain.
    Delta(OutputDelta),
    /// The end of a choice.
    Finished(Finished),
}

/// A stream of [`GenerateEvent`]s, which ends after the end of each choice or with one error.
/// Dropping it cancels the request.
#[derive(Debug)]
pub struct GenerateStream {
    /// `None` after the end.
    frames: Option<Streaming<GenerateFrame>>,
    unfinished: u32,
    /// tonic watches deadlines only until the response starts.
    deadline: Option<Pin<Box<Sleep>>>,
}

impl GenerateStream {
    pub(crate) fn new(frames: Streaming<GenerateFrame>, choices: u32, deadline: Option<Instant>) -> Self {
        let deadline = deadline.map(|at| Box::pin(sleep_until(at)));
        Self { frames: Some(frames), unfinished: choices, deadline }
    }

    fn end(&mut self, error: ClientError) -> Poll<Option<Result<GenerateEvent, ClientError>>> {
        self.frames = None;
        Poll::Ready(Some(Err(error)))
    }
}

impl Stream for GenerateStream {
    type Item = Result<GenerateEvent, ClientError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            let Some(frames) = &mut self.frames else {
                return Poll::Ready(None);
            };
            let Poll::Ready(next) = Pin::new(frames).poll_next(context) else {
                let Some(deadline) = &mut self.deadline else {
                    return Poll::Pending;
                };
                ready!(deadline.as_mut().poll(context));
                let message = "the server has not ended the stream".to_owned();
                return self.end(ClientError::DeadlineExceeded { message });
            };
            let frame = match next {
                Some(Ok(frame)) => frame.frame,
                Some(Err(status)) => return self.end(status.into()),
                None if self.unfinished > 0 => {
                    let unfinished = self.unfinished;
                    return self.end(ClientError::Incomplete { unfinished });
                }
                None => {
                    self.frames = None;
                    return Poll::Ready(None);
                }
            };
            let event = match frame {
                Some(Frame::Started(started)) => GenerateEvent::Started(started),
                Some(Frame::Delta(delta)) => GenerateEvent::Delta(delta),
                Some(Frame::Finished(finished)) => {
                    self.unfinished = self.unfinished.saturating_sub(1);
                    GenerateEvent::Finished(finished)
                }
                // A kind of frame that a later server sends.
                None => continue,
            };
            return Poll::Ready(Some(Ok(event)));
        }
    }
}
