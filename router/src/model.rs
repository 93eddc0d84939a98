//! A model as the router knows it: its name and limits, tokenizer and chat template. Built once from the GGUF metadata that
//! a worker sends, shared by all workers with the same content.

use std::sync::Arc;

use serde_json::{Map, Value};
use text::{
    ChatInput, ChatTemplate, DetokenizeOptions, Detokenizer, EncodeError, EncodeOptions, LoadTemplateError,
    LoadTokenizerError, RenderError, Tokenizer,
};

use crate::breakers::Breakers;
use crate::params::ModelLimits;
use crate::placement::ModelKey;

/// What a worker says about the model it serves.
#[derive(Debug)]
pub(crate) struct Description {
    pub(crate) key: ModelKey,
    pub(crate) digest: Vec<u8>,
    pub(crate) generation: u64,
    pub(crate) context_tokens: u32,
    pub(crate) vocabulary: u32,
    pub(crate) weight_bytes: u64,
}

#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) about: Description,
    pub(crate) joined_unix_seconds: i64,
    pub(crate) text: Arc<ModelText>,
}

#[derive(Debug)]
pub(crate) struct ModelText {
    pub(crate) tokenizer: Arc<Tokenizer>,
    /// Without one, or with a broken one, the model still completes text.
    template: Result<ChatTemplate, LoadTemplateError>,
    breakers: Breakers,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum LoadModelError {
    #[error("the model's metadata")]
    Metadata(#[from] gguf::MetadataError),
    #[error("the model's tokenizer")]
    Tokenizer(#[from] LoadTokenizerError),
}

/// Why a conversation is no prompt for this model.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ChatError {
    #[error("{reason}")]
    NoTemplate { reason: String },
    #[error(transparent)]
    Render(#[from] RenderError),
    #[error(transparent)]
    Encode(#[from] EncodeError),
}

impl Model {
    pub(crate) fn load(description: Description, gguf: Vec<u8>) -> Result<Self, LoadModelError> {
        let metadata = gguf::Metadata::parse(gguf)?;
        let tokenizer = Arc::new(Tokenizer::from_metadata(&metadata)?);
        let template = ChatTemplate::from_metadata(&metadata, &tokenizer);
        if let Err(error) = &template {
            tracing::info!(model = %description.key.name, reason = service::exit::one_line(error), "no chat");
        }
        let text = Arc::new(ModelText { tokenizer, template, breakers: Breakers::default() });
        Ok(Self { about: description, joined_unix_seconds: unix_seconds(), text })
    }

    /// The same content under another description: another name, generation or backend.
    pub(crate) fn with(&self, about: Description) -> Self {
        let joined_unix_seconds = match about.key == self.about.key {
            true => self.joined_unix_seconds,
            false => unix_seconds(),
        };
        Self { about, joined_unix_seconds, text: self.text.clone() }
    }

    pub(crate) fn key(&self) -> &ModelKey {
        &self.about.key
    }

    pub(crate) fn name(&self) -> &str {
        &self.about.key.name
    }

    pub(crate) fn limits(&self) -> ModelLimits {
        ModelLimits { context_tokens: self.about.context_tokens, vocabulary: self.about.vocabulary }
    }

    pub(crate) fn digest_hex(&self) -> String {
        hex(&self.about.digest)
    }

    /// Says which weights and kernels made a response, as OpenAI's `system_fingerprint` is meant to.
    pub(crate) fn system_fingerprint(&self) -> String {
        format!("ballast-{:016x}", xxhash_rust::xxh3::xxh3_64(&self.about.key.fingerprint.0))
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl ModelText {
    pub(crate) fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, EncodeError> {
        // Whoever completes raw text may write control tokens, as with llama.cpp and vLLM.
        self.tokenizer.encode(text, EncodeOptions { add_special, parse_special: true })
    }

    pub(crate) fn encode_chat(
        &self,
        messages: &[Value],
        add_generation_prompt: bool,
        variables: &Map<String, Value>,
    ) -> Result<Vec<u32>, ChatError> {
        let template = self
            .template
            .as_ref()
            .map_err(|error| ChatError::NoTemplate { reason: service::exit::one_line(error) })?;
        let input = ChatInput {
            messages,
            tools: &[],
            add_generation_prompt,
            variables,
            now_unix_seconds: unix_seconds(),
        };
        Ok(self.tokenizer.encode_chat(&template.render(&input)?)?)
    }

    /// The text of a single token: part of a character shows as U+FFFD.
    pub(crate) fn token_text(&self, id: u32) -> String {
        String::from_utf8_lossy(self.tokenizer.token_bytes(id).unwrap_or_default()).into_owned()
    }

    /// A whole text of its own, control tokens with their names.
    pub(crate) fn decode(&self, ids: &[u32]) -> String {
        let options = DetokenizeOptions { skip_special: false, at_text_start: true };
        let mut detokenizer = Detokenizer::new(self.tokenizer.clone(), options);
        let mut text: String = ids.iter().map(|&id| detokenizer.push(id)).collect();
        text.push_str(&detokenizer.finish());
        text
    }

    /// Token sequences that complete one of the words.
    pub(crate) fn dry_breakers(&self, words: &[String]) -> Arc<[Vec<u32>]> {
        self.breakers.of(words, &self.tokenizer)
    }

    pub(crate) fn token_bytes(&self, id: u32) -> &[u8] {
        self.tokenizer.token_bytes(id).unwrap_or_default()
    }
}

/// A clock before 1970 reads as 1970.
pub(crate) fn unix_seconds() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs() as i64)
}
