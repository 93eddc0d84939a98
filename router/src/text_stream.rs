//! Token ids of one choice to text as it becomes certain: whole characters only, nothing that could still become part of
//! a stop string. Independent of how the tokens were cut into frames, so a resumed stream reads the same.

use text::{DetokenizeOptions, Detokenizer, StopMatcher, StopStringError};

use crate::model::Model;

#[derive(Debug)]
pub(crate) struct TextStream {
    detokenizer: Detokenizer,
    matcher: StopMatcher,
    stops: Vec<String>,
}

/// What some tokens led to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Pushed {
    pub(crate) text: String,
    /// How many of the tokens belong to the output: all, unless a stop string was complete before the last.
    pub(crate) consumed: usize,
    pub(crate) stop: Option<String>,
}

impl TextStream {
    /// `at_text_start`: the output is a text of its own (a chat reply) and not the continuation of one.
    pub(crate) fn new(model: &Model, stops: &[String], at_text_start: bool) -> Result<Self, StopStringError> {
        let options = DetokenizeOptions { skip_special: true, at_text_start };
        Ok(Self {
            detokenizer: Detokenizer::new(model.text.tokenizer.clone(), options),
            matcher: StopMatcher::new(stops.to_vec())?,
            stops: stops.to_vec(),
        })
    }

    pub(crate) fn push(&mut self, ids: &[u32]) -> Pushed {
        let mut text = String::new();
        for (index, &id) in ids.iter().enumerate() {
            let progress = self.matcher.push(&self.detokenizer.push(id));
            text.push_str(&progress.emit);
            if let Some(stop) = progress.matched {
                return Pushed { text, consumed: index + 1, stop: Some(self.stops[stop].clone()) };
            }
        }
        Pushed { text, consumed: ids.len(), stop: None }
    }

    /// What was held back, now that no token follows.
    pub(crate) fn finish(self) -> String {
        let mut matcher = self.matcher;
        let mut rest = matcher.push(&self.detokenizer.finish()).emit;
        rest.push_str(&matcher.finish());
        rest
    }
}
