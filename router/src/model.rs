// SPDX-License-Identifier: Apache-2.0

//! A model that workers serve: its name and limits, tokenizer and chat template. The router builds
//! it once from the GGUF metadata that a worker sends. Workers with the same content and the same
//! chat template share it.

use std::sync::Arc;

use proto::v1::Pooling;
use serde_json::{Map, Value};
use text::{
    ChatInput, ChatTemplate, DetokenizeOptions, Detokenizer, EncodeError, EncodeMiddleError, EncodeOptions,
    LoadTemplateError, LoadTokenizerError, MiddlePrefix, PairTemplate, RenderError, Tokenizer,
};

use crate::chat_syntax::ChatSyntax;
use crate::dry_breakers::DryBreakerCache;
use crate::params::TokenLimits;
use crate::routing::ModelKey;

/// A worker's description of the model that it serves.
#[derive(Debug, PartialEq)]
pub(crate) struct ServedModelInfo {
    pub(crate) key: ModelKey,
    /// Further names in requests.
    pub(crate) aliases: Vec<String>,
    /// Replaces the chat templates of the file.
    pub(crate) chat_template: Option<Arc<str>>,
    /// Values for parameters that a request leaves out.
    pub(crate) sampling_defaults: proto::v1::Sampling,
    pub(crate) digest: Vec<u8>,
    pub(crate) generation: u64,
    pub(crate) context_tokens: u32,
    pub(crate) vocabulary: u32,
    pub(crate) weight_bytes: u64,
    /// How the workers pool. `Unspecified`: they make no embeddings.
    pub(crate) pooling: Pooling,
    /// Values of a hidden state.
    pub(crate) embedding_length: u32,
}

impl ServedModelInfo {
    /// Whether workers with these descriptions serve the same, perhaps from copies of the weights
    /// on different devices.
    fn is_equal_but_for_copy(&self, other: &Self) -> bool {
        let Self {
            key,
            aliases,
            chat_template,
            sampling_defaults,
            digest,
            generation: _,
            context_tokens,
            vocabulary,
            weight_bytes,
            pooling,
            embedding_length,
        } = self;
        (key, aliases, chat_template, digest)
            == (&other.key, &other.aliases, &other.chat_template, &other.digest)
            && *sampling_defaults == other.sampling_defaults
            && (*pooling, *embedding_length) == (other.pooling, other.embedding_length)
            && (*context_tokens, *vocabulary, *weight_bytes)
                == (other.context_tokens, other.vocabulary, other.weight_bytes)
    }
}

#[derive(Debug)]
pub(crate) struct ServedModel {
    pub(crate) description: ServedModelInfo,
    pub(crate) loaded_unix_seconds: i64,
    pub(crate) text: Arc<ModelText>,
}

#[derive(Debug)]
pub(crate) struct ModelText {
    /// A model without tokenizer takes and gives token ids only.
    tokenizer: Option<Arc<Tokenizer>>,
    /// Ids of all tokens that end a generation.
    end_of_generation: Vec<u32>,
    /// A model with a missing or broken template still completes text.
    template: Result<ChatTemplate, LoadTemplateError>,
    /// How the model writes calls and reasoning: without tools, and with tools.
    syntax: Option<[ChatSyntax; 2]>,
    dry_breakers: DryBreakerCache,
    /// Of a model that scores pairs of texts.
    pair_template: PairTemplate,
}

/// A chat as the client sent it.
#[derive(Debug, Default)]
pub(crate) struct Conversation {
    pub(crate) messages: Vec<Value>,
    pub(crate) tools: Option<Vec<Value>>,
    pub(crate) add_generation_prompt: bool,
    /// The model continues the last message.
    pub(crate) continue_final_message: bool,
    /// Variables for the template (`chat_template_kwargs`).
    pub(crate) variables: Map<String, Value>,
}

/// A rendered and tokenized chat.
#[derive(Debug)]
pub(crate) struct ChatPrompt {
    pub(crate) tokens: Vec<u32>,
    pub(crate) starts_in_reasoning: bool,
}

/// The most tokens of a prompt for a pair of texts, and of its document.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PairLimits {
    pub(crate) prompt: Option<usize>,
    pub(crate) document: Option<usize>,
}

#[derive(Debug, thiserror::Error)]
#[error("the model has no tokenizer: it takes token ids instead of text")]
pub(crate) struct NoTokenizerError;

/// Why a text cannot become token ids.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EncodeTextError {
    #[error(transparent)]
    NoTokenizer(#[from] NoTokenizerError),
    #[error(transparent)]
    Encode(#[from] EncodeError),
}

/// Why there is no prompt from which the model fills in the middle.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MiddlePromptError {
    #[error(transparent)]
    NoTokenizer(#[from] NoTokenizerError),
    #[error(transparent)]
    Encode(#[from] EncodeMiddleError),
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum LoadModelError {
    #[error("cannot parse the model's metadata")]
    Metadata(#[from] gguf::MetadataError),
    #[error("cannot build the model's tokenizer")]
    Tokenizer(#[from] LoadTokenizerError),
}

/// Why a conversation cannot be rendered to a prompt.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ChatError {
    #[error(transparent)]
    NoTokenizer(#[from] NoTokenizerError),
    #[error("{reason}")]
    NoTemplate { reason: String },
    #[error(transparent)]
    Render(#[from] RenderError),
    #[error(transparent)]
    Encode(#[from] EncodeError),
}

impl ServedModel {
    /// `known` is a model with the same content and another chat template, whose tokenizer is
    /// shared.
    pub(crate) fn load(
        description: ServedModelInfo,
        gguf: Vec<u8>,
        known: Option<&Self>,
    ) -> Result<Self, LoadModelError> {
        let metadata = gguf::Metadata::parse(gguf)?;
        let text = ModelText::load(&metadata, &description, known.map(|known| &*known.text))?;
        if let (Some(_), Err(error)) = (&text.tokenizer, &text.template) {
            tracing::info!(model = %description.key.name, reason = service::exit::one_line(error), "no usable chat template");
        }
        let text = Arc::new(text);
        Ok(Self { description, loaded_unix_seconds: unix_seconds(), text })
    }

    /// Whether a model with this description can share the text of this one.
    pub(crate) fn has_text_of(&self, description: &ServedModelInfo) -> bool {
        self.description.digest == description.digest
            && self.description.chat_template == description.chat_template
    }

    /// The same text with another description: another name, generation or backend.
    pub(crate) fn with_description(&self, description: ServedModelInfo) -> Self {
        let loaded_unix_seconds = match description.key == self.description.key {
            true => self.loaded_unix_seconds,
            false => unix_seconds(),
        };
        Self { description, loaded_unix_seconds, text: self.text.clone() }
    }

    /// Whether requests for either model may go to the workers of both.
    pub(crate) fn is_equal_but_for_copy(&self, other: &Self) -> bool {
        self.description.is_equal_but_for_copy(&other.description)
    }

    pub(crate) fn key(&self) -> &ModelKey {
        &self.description.key
    }

    pub(crate) fn name(&self) -> &str {
        &self.description.key.name
    }

    /// Every name in requests, that of the model first.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::once(self.name()).chain(self.description.aliases.iter().map(String::as_str))
    }

    pub(crate) fn limits(&self) -> TokenLimits {
        TokenLimits {
            context_tokens: self.description.context_tokens,
            vocabulary: self.description.vocabulary,
        }
    }

    pub(crate) fn digest_hex(&self) -> String {
        hex(&self.description.digest)
    }

    /// OpenAI's `system_fingerprint`: identifies the weights and kernels that made a response.
    pub(crate) fn system_fingerprint(&self) -> String {
        format!("ballast-{:016x}", xxhash_rust::xxh3::xxh3_64(&self.description.key.fingerprint.0))
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl ModelText {
    fn load(
        metadata: &gguf::Metadata,
        description: &ServedModelInfo,
        known: Option<&Self>,
    ) -> Result<Self, LoadTokenizerError> {
        let dry_breakers = DryBreakerCache::default();
        let pair_template = PairTemplate::from_metadata(metadata)?;
        // A tokenizer of a large vocabulary takes 60 MiB.
        let shared = known.and_then(|known| known.tokenizer.clone());
        let tokenizer = shared.map_or_else(|| Tokenizer::from_metadata(metadata).map(Arc::new), Ok);
        match tokenizer {
            Ok(tokenizer) => {
                let template = match &description.chat_template {
                    Some(source) => ChatTemplate::from_source(source, &tokenizer),
                    None => ChatTemplate::from_metadata(metadata, &tokenizer),
                };
                let syntax = |template: &ChatTemplate| {
                    [false, true].map(|with_tools| ChatSyntax::of_template(&template.source(with_tools)))
                };
                Ok(Self {
                    end_of_generation: tokenizer.end_of_generation().to_vec(),
                    syntax: template.as_ref().ok().map(syntax),
                    template,
                    tokenizer: Some(tokenizer),
                    dry_breakers,
                    pair_template,
                })
            }
            Err(LoadTokenizerError::NoTokenizer) => {
                let mut end_of_generation = text::end_of_generation_keys(metadata)?;
                end_of_generation.retain(|&id| id < description.vocabulary);
                let template = Err(LoadTemplateError::Missing);
                Ok(Self {
                    tokenizer: None,
                    end_of_generation,
                    template,
                    syntax: None,
                    dry_breakers,
                    pair_template,
                })
            }
            Err(error) => Err(error),
        }
    }

    pub(crate) fn tokenizer(&self) -> Result<&Arc<Tokenizer>, NoTokenizerError> {
        self.tokenizer.as_ref().ok_or(NoTokenizerError)
    }

    pub(crate) fn end_of_generation(&self) -> &[u32] {
        &self.end_of_generation
    }

    pub(crate) fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, EncodeTextError> {
        // A raw prompt may contain control tokens, as in llama.cpp and vLLM.
        Ok(self.tokenizer()?.encode(text, EncodeOptions { add_special, parse_special: true })?)
    }

    /// Encodes a text whose author may not write control tokens.
    pub(crate) fn encode_plain(&self, text: &str, add_special: bool) -> Result<Vec<u32>, EncodeTextError> {
        Ok(self.tokenizer()?.encode(text, EncodeOptions { add_special, parse_special: false })?)
    }

    /// Bytes of a prompt for a pair that are neither query nor document.
    pub(crate) fn pair_template_bytes(&self) -> usize {
        self.pair_template.text_bytes()
    }

    /// The prompt with which the model scores a pair of texts. The document is cut until it and the
    /// prompt have at most as many tokens as `limits` says. A prompt that is longer without a
    /// document has none.
    pub(crate) fn encode_pair(
        &self,
        query: &str,
        document: &str,
        limits: PairLimits,
    ) -> Result<Vec<u32>, EncodeTextError> {
        let tokenizer = self.tokenizer()?;
        let document = match limits.document {
            Some(limit) => {
                let alone = EncodeOptions::default();
                let start = tokenizer.encode_start(document, limit, |text| tokenizer.encode(text, alone))?;
                start.map_or("", |(start, _)| start)
            }
            None => document,
        };
        let encode = |document: &str| tokenizer.encode_pair(&self.pair_template, query, document);
        let limit = limits.prompt.unwrap_or(usize::MAX);
        match tokenizer.encode_start(document, limit, encode)? {
            Some((_, prompt)) => Ok(prompt),
            None => Ok(encode("")?),
        }
    }

    /// The prompt for the text between `prefix` and `suffix`. Names of control tokens in both are
    /// text, as in llama.cpp.
    pub(crate) fn encode_middle(
        &self,
        prefix: MiddlePrefix<'_>,
        suffix: &str,
        add_special: bool,
    ) -> Result<Vec<u32>, MiddlePromptError> {
        Ok(self.tokenizer()?.encode_middle(prefix, suffix, add_special)?)
    }

    /// Renders a conversation and tokenizes the prompt.
    pub(crate) fn encode_chat(&self, conversation: &Conversation) -> Result<ChatPrompt, ChatError> {
        let tokenizer = self.tokenizer()?;
        let template = self
            .template
            .as_ref()
            .map_err(|error| ChatError::NoTemplate { reason: service::exit::one_line(error) })?;
        let input = ChatInput {
            messages: &conversation.messages,
            tools: conversation.tools.as_deref(),
            add_generation_prompt: conversation.add_generation_prompt,
            continue_final_message: conversation.continue_final_message,
            variables: &conversation.variables,
            now_unix_seconds: unix_seconds(),
        };
        let prompt = template.render(&input)?;
        let syntax = self.syntax(conversation.tools.is_some());
        Ok(ChatPrompt {
            starts_in_reasoning: syntax.is_some_and(|syntax| syntax.starts_in_reasoning(&prompt)),
            tokens: tokenizer.encode_chat(&prompt)?,
        })
    }

    /// The source of the chat template for chats without tools.
    pub(crate) fn template_source(&self) -> Option<String> {
        self.template.as_ref().ok().map(|template| template.source(false))
    }

    /// How the model writes calls and reasoning. `None` without a chat template.
    pub(crate) fn syntax(&self, with_tools: bool) -> Option<&ChatSyntax> {
        self.syntax.as_ref().map(|syntax| &syntax[usize::from(with_tools)])
    }

    /// The text of a single token. An incomplete character becomes U+FFFD. Without tokenizer, it is
    /// the form that vLLM uses for ids.
    pub(crate) fn token_text(&self, id: u32) -> String {
        match &self.tokenizer {
            Some(_) => String::from_utf8_lossy(self.token_bytes(id)).into_owned(),
            None => format!("token_id:{id}"),
        }
    }

    /// Detokenizes a whole text. Control tokens appear with their names.
    pub(crate) fn decode(&self, ids: &[u32]) -> Result<String, NoTokenizerError> {
        let options = DetokenizeOptions { skip_special: false, at_text_start: true };
        let mut detokenizer = Detokenizer::new(self.tokenizer()?.clone(), options);
        let mut text: String = ids.iter().map(|&id| detokenizer.push(id)).collect();
        text.push_str(&detokenizer.finish());
        Ok(text)
    }

    /// Token sequences that complete one of the strings. Without tokenizer there are no strings.
    pub(crate) fn dry_breakers(&self, strings: &[String]) -> Arc<[Vec<u32>]> {
        match &self.tokenizer {
            Some(tokenizer) => self.dry_breakers.sequences(strings, tokenizer),
            None => Arc::new([]),
        }
    }

    pub(crate) fn token_bytes(&self, id: u32) -> &[u8] {
        self.tokenizer.as_ref().and_then(|tokenizer| tokenizer.token_bytes(id)).unwrap_or_default()
    }
}

/// The current time. A clock before 1970 reads as 1970.
pub(crate) fn unix_seconds() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs() as i64)
}
