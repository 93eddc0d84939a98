// SPDX-License-Identifier: Apache-2.0

//! A whole completion, from the events of its stream.

use futures::TryStreamExt;
use proto::v1::{Finished, Started, TokenLogprob};

use crate::error::ClientError;
use crate::generate_stream::{GenerateEvent, GenerateStream};

#[derive(Clone, Debug, Default, PartialEq)]
pub struct CompletedChoice {
    pub text: String,
    pub tokens: Vec<u32>,
    pub logprobs: Vec<TokenLogprob>,
    pub finished: Finished,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Completion {
    pub started: Started,
    pub choices: Vec<CompletedChoice>,
}

impl Completion {
    pub(crate) async fn read(mut events: GenerateStream, choices: u32) -> Result<Self, ClientError> {
        let mut completion =
            Self { choices: vec![CompletedChoice::default(); choices as usize], ..Self::default() };
        while let Some(event) = events.try_next().await? {
            completion.add(event);
        }
        Ok(completion)
    }

    /// A server sends no choice beyond those that were asked for; one that did is not indexed.
    fn add(&mut self, event: GenerateEvent) {
        match event {
            GenerateEvent::Started(started) => self.started = started,
            GenerateEvent::Delta(delta) => {
                if let Some(choice) = self.choices.get_mut(delta.choice as usize) {
                    choice.text.push_str(&delta.text);
                    choice.tokens.extend(delta.tokens);
                    choice.logprobs.extend(delta.logprobs);
                }
            }
            GenerateEvent::Finished(finished) => {
                if let Some(choice) = self.choices.get_mut(finished.choice as usize) {
                    choice.finished = finished;
                }
            }
        }
    }
}
