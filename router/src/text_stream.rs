// SPDX-License-Identifier: Apache-2.0

//! Detokenizes the output of one choice.
//!
//! 1. Text is emitted in whole characters.
//! 2. Text that could still become part of a stop string is held back.
//! 3. The text does not depend on how tokens were cut into frames. So a resumed stream has the same
//!    text.

use std::sync::Arc;

use text::{DetokenizeOptions, Detokenizer, StopMatcher, StopStringError};

use crate::model::ServedModel;
use crate::params::CheckedParams;

#[derive(Debug)]
pub(crate) struct TextStream {
    /// `None` if the model has no tokenizer: its output is token ids without text.
    detokenizer: Option<Detokenizer>,
    matcher: StopMatcher,
    stops: Vec<String>,
    /// The text ends with the stop string.
    includes_stop: bool,
    /// Control tokens that appear in the text with their names.
    visible: Arc<[u32]>,
}

/// Result of pushing some tokens.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PushedText {
    pub(crate) text: String,
    /// How many of the tokens belong to the output. Tokens after a complete stop string do not.
    pub(crate) consumed_tokens: usize,
    pub(crate) stop: Option<String>,
}

impl TextStream {
    /// `at_text_start`: the output is a text of its own (a chat reply) and does not continue the
    /// prompt.
    pub(crate) fn new(
        model: &ServedModel,
        params: &CheckedParams,
        at_text_start: bool,
        visible: Arc<[u32]>,
    ) -> Result<Self, StopStringError> {
        let options = DetokenizeOptions { skip_special: true, at_text_start };
        Ok(Self {
            detokenizer: model.text.tokenizer().ok().map(|it| Detokenizer::new(it.clone(), options)),
            matcher: StopMatcher::new(params.stop.clone())?,
            stops: params.stop.clone(),
            includes_stop: params.include_stop_string,
            visible,
        })
    }

    pub(crate) fn push(&mut self, ids: &[u32]) -> PushedText {
        let mut text = String::new();
        let all = PushedText { text: String::new(), consumed_tokens: ids.len(), stop: None };
        let Some(detokenizer) = &mut self.detokenizer else { return all };
        for (index, &id) in ids.iter().enumerate() {
            let piece = match self.visible.contains(&id) {
                true => detokenizer.push_named(id),
                false => detokenizer.push(id),
            };
            let progress = self.matcher.push(&piece);
            text.push_str(&progress.emit);
            if let Some(stop) = progress.matched {
                let stop = self.stops[stop].clone();
                if self.includes_stop {
                    text.push_str(&stop);
                }
                let stop = Some(stop);
                return PushedText { text, consumed_tokens: index + 1, stop };
            }
        }
        PushedText { text, ..all }
    }

    /// The held-back text, when no token follows.
    pub(crate) fn finish(self) -> String {
        let mut matcher = self.matcher;
        let incomplete = self.detokenizer.map_or_else(String::new, Detokenizer::finish);
        let mut rest = matcher.push(&incomplete).emit;
        rest.push_str(&matcher.finish());
        rest
    }
}
