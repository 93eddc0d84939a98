// SPDX-License-Identifier: Apache-2.0

//! A request for text, built field by field.

use std::time::Duration;

use proto::v1::generate_request::Prompt;
use proto::v1::grammar::Kind;
use proto::v1::{self as wire, Sampling};

/// A request of [`crate::BallastClient::generate`]. Fields that are not set have the defaults of
/// `ballast.proto`.
#[derive(Clone, Debug, PartialEq)]
#[must_use]
pub struct GenerateRequest {
    pub(crate) wire: wire::GenerateRequest,
    pub(crate) deadline: Option<Duration>,
}

/// What the output matches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OutputGrammar {
    JsonSchema(String),
    Regex(String),
    /// llguidance's dialect of Lark.
    Lark(String),
    /// llama.cpp's grammars.
    Gbnf(String),
    OneOf(Vec<String>),
    AnyJsonObject,
}

impl GenerateRequest {
    fn new(prompt: Prompt) -> Self {
        let wire = wire::GenerateRequest { prompt: Some(prompt), ..wire::GenerateRequest::default() };
        Self { wire, deadline: None }
    }

    /// Continues a text.
    pub fn text(prompt: impl Into<String>) -> Self {
        Self::new(Prompt::Text(prompt.into()))
    }

    /// Continues token ids, which are used without change.
    pub fn tokens(ids: impl Into<Vec<u32>>) -> Self {
        Self::new(Prompt::Tokens(wire::TokenIds { ids: ids.into() }))
    }

    /// Answers a chat of (role, content).
    pub fn chat<R: Into<String>, C: Into<String>>(messages: impl IntoIterator<Item = (R, C)>) -> Self {
        let message =
            |(role, content): (R, C)| wire::ChatMessage { role: role.into(), content: content.into() };
        Self::new(Prompt::Chat(wire::Chat { messages: messages.into_iter().map(message).collect() }))
    }

    /// Needed if the fleet serves several models.
    pub fn model(mut self, name: impl Into<String>) -> Self {
        self.wire.model = name.into();
        self
    }

    pub fn max_tokens(mut self, tokens: u32) -> Self {
        self.wire.max_tokens = tokens;
        self
    }

    pub fn min_tokens(mut self, tokens: u32) -> Self {
        self.wire.min_tokens = tokens;
        self
    }

    /// Replaces all sampling parameters.
    pub fn sampling(mut self, sampling: Sampling) -> Self {
        self.wire.sampling = Some(sampling);
        self
    }

    pub fn temperature(mut self, temperature: f32) -> Self {
        self.wire.sampling.get_or_insert_default().temperature = Some(temperature);
        self
    }

    pub fn seed(mut self, seed: u64) -> Self {
        self.wire.sampling.get_or_insert_default().seed = Some(seed);
        self
    }

    /// The output ends before the first of these texts.
    pub fn stop<S: Into<String>>(mut self, texts: impl IntoIterator<Item = S>) -> Self {
        self.wire.stop = texts.into_iter().map(Into::into).collect();
        self
    }

    pub fn stop_tokens(mut self, ids: impl Into<Vec<u32>>) -> Self {
        self.wire.stop_tokens = ids.into();
        self
    }

    /// The output does not end at the model's end-of-generation tokens.
    pub fn ignore_eos(mut self) -> Self {
        self.wire.ignore_eos = true;
        self
    }

    pub fn choices(mut self, n: u32) -> Self {
        self.wire.n = n;
        self
    }

    /// The choices are the most probable outputs, the best first, instead of random ones. The
    /// search follows `width` outputs at once, at least as many as there are choices; 0 means as
    /// many.
    pub fn beam_search(mut self, width: u32) -> Self {
        self.wire.beam_search.get_or_insert_default().width = width;
        self
    }

    /// The exponent of an output's length by which the beam search divides its sum of log
    /// probabilities.
    pub fn length_penalty(mut self, exponent: f32) -> Self {
        self.wire.beam_search.get_or_insert_default().length_penalty = Some(exponent);
        self
    }

    /// The beam search ends as soon as `width` outputs have ended with a stop token.
    pub fn early_stopping(mut self) -> Self {
        self.wire.beam_search.get_or_insert_default().early_stopping = true;
        self
    }

    /// Asks for the log probability of each token and of so many most likely ones.
    pub fn top_logprobs(mut self, alternatives: u32) -> Self {
        self.wire.top_logprobs = Some(alternatives);
        self
    }

    pub fn grammar(mut self, grammar: OutputGrammar) -> Self {
        let kind = match grammar {
            OutputGrammar::JsonSchema(text) => Kind::JsonSchema(text),
            OutputGrammar::Regex(text) => Kind::Regex(text),
            OutputGrammar::Lark(text) => Kind::Lark(text),
            OutputGrammar::Gbnf(text) => Kind::Gbnf(text),
            OutputGrammar::OneOf(values) => Kind::Choice(wire::StringList { values }),
            OutputGrammar::AnyJsonObject => Kind::JsonObject(wire::JsonObject {}),
        };
        self.wire.grammar.get_or_insert_default().kind = Some(kind);
        self
    }

    /// A keyword of the JSON schema that cannot be enforced is no error.
    pub fn lenient_grammar(mut self) -> Self {
        self.wire.grammar.get_or_insert_default().lenient = true;
        self
    }

    pub fn tenant(mut self, name: impl Into<String>) -> Self {
        self.wire.tenant = name.into();
        self
    }

    /// Lower is more urgent.
    pub fn priority(mut self, priority: i32) -> Self {
        self.wire.priority = priority;
        self
    }

    /// Shares cached blocks only with requests of the same salt.
    pub fn cache_salt(mut self, salt: impl Into<String>) -> Self {
        self.wire.cache_salt = salt.into();
        self
    }

    /// Bounds the whole request, here and at the server.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Some(deadline);
        self
    }
}
