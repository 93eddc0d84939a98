// SPDX-License-Identifier: Apache-2.0

//! What a client received of a response, in a form that compares exactly.

use proto::v1::OutputDelta;
use serde_json::Value;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Output {
    pub(super) choices: Vec<ChoiceOutput>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ChoiceOutput {
    tokens: Vec<u32>,
    /// Log probabilities of the tokens, bit for bit: as `f64` over HTTP, as `f32` over gRPC.
    logprob_bits: Vec<u64>,
    text: String,
    /// Why the choice ended; `None` while it runs.
    finish: Option<String>,
}

impl Output {
    pub(super) fn new(choices: usize) -> Self {
        Self { choices: vec![ChoiceOutput::default(); choices] }
    }

    pub(super) fn tokens(&self) -> usize {
        self.choices.iter().map(|choice| choice.tokens.len()).sum()
    }

    /// Whether every choice has its end.
    pub(super) fn is_finished(&self) -> bool {
        self.choices.iter().all(|choice| choice.finish.is_some())
    }

    pub(super) fn append(&mut self, delta: OutputDelta) {
        let choice = &mut self.choices[delta.choice as usize];
        choice.tokens.extend(delta.tokens);
        for entry in &delta.logprobs {
            choice.logprob_bits.push(u64::from(entry.logprob.to_bits()));
            choice.logprob_bits.extend(entry.top_tokens.iter().map(|&token| u64::from(token)));
            choice.logprob_bits.extend(entry.top_logprobs.iter().map(|top| u64::from(top.to_bits())));
        }
        choice.text.push_str(&delta.text);
    }

    pub(super) fn finish(&mut self, choice: usize, why: String) {
        self.choices[choice].finish = Some(why);
    }

    /// Appends the entries of `choices` in a chunk or in a whole response.
    pub(super) fn append_json(&mut self, body: &Value) {
        for entry in body["choices"].as_array().into_iter().flatten() {
            let choice = &mut self.choices[entry["index"].as_u64().unwrap() as usize];
            let tokens = entry["token_ids"].as_array().into_iter().flatten();
            choice.tokens.extend(tokens.map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()));
            let logprobs = entry["logprobs"]["token_logprobs"].as_array().into_iter().flatten();
            choice.logprob_bits.extend(logprobs.map(|value| value.as_f64().unwrap().to_bits()));
            choice.text.push_str(entry["text"].as_str().unwrap_or_default());
            if let Some(reason) = entry["finish_reason"].as_str() {
                choice.finish = Some(format!("{reason} {}", entry["stop_reason"]));
            }
        }
    }

    /// Whether this may be the beginning of `whole`. Text may lag behind its tokens.
    pub(super) fn is_begin_of(&self, whole: &Output) -> bool {
        self.choices.iter().zip(&whole.choices).all(|(begin, whole)| {
            whole.tokens.starts_with(&begin.tokens)
                && whole.logprob_bits.starts_with(&begin.logprob_bits)
                && whole.text.starts_with(&begin.text)
                && (begin.finish.is_none() || begin.finish == whole.finish)
        })
    }

    /// The first difference from the reference, for people.
    pub(super) fn difference(&self, whole: &Output) -> String {
        for (index, (found, expected)) in self.choices.iter().zip(&whole.choices).enumerate() {
            let pairs = found.tokens.iter().zip(&expected.tokens);
            if let Some(at) = pairs.clone().position(|(found, expected)| found != expected) {
                return format!(
                    "choice {index}: token {at} is {} instead of {}",
                    found.tokens[at], expected.tokens[at]
                );
            }
            if found != expected {
                let (tokens, logprobs) = (found.tokens.len(), found.logprob_bits.len());
                return format!(
                    "choice {index}: {tokens} of {} tokens, {logprobs} of {} log probabilities, {:?} instead of {:?}, \
                     text {:?} instead of {:?}",
                    expected.tokens.len(),
                    expected.logprob_bits.len(),
                    found.finish,
                    expected.finish,
                    found.text,
                    expected.text
                );
            }
        }
        "none".to_owned()
    }
}
