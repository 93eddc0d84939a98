// SPDX-License-Identifier: Apache-2.0

//! Reads the tokenizer and chat-template keys of a GGUF file. Strings are borrowed, not copied.

use gguf::Metadata;

use crate::chat::{ChatTemplate, LoadTemplateError};
use crate::tokenizer::Tokenizer;
use crate::tokenizer_error::LoadTokenizerError;
use crate::vocabulary::{RawVocabulary, TokenKind};

const TOKENS: &str = "tokenizer.ggml.tokens";
const TOKEN_TYPE: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
const CHAT_TEMPLATE: &str = "tokenizer.chat_template";
const CHAT_TEMPLATE_TOOL_USE: &str = "tokenizer.chat_template.tool_use";

impl Tokenizer {
    pub fn from_metadata(metadata: &Metadata) -> Result<Self, LoadTokenizerError> {
        Self::new(&vocabulary(metadata)?)
    }
}

impl ChatTemplate {
    /// Loads the file's chat template. `tokenizer` is the tokenizer of the same file.
    pub fn from_metadata(metadata: &Metadata, tokenizer: &Tokenizer) -> Result<Self, LoadTemplateError> {
        let source = metadata.get(CHAT_TEMPLATE)?.ok_or(LoadTemplateError::Missing)?;
        let tool_use = metadata.get(CHAT_TEMPLATE_TOOL_USE)?;
        let text = |id: Option<u32>| {
            let bytes = id.and_then(|id| tokenizer.token_bytes(id)).unwrap_or_default();
            String::from_utf8_lossy(bytes).into_owned()
        };
        Self::new(source, tool_use, &text(tokenizer.bos()), &text(tokenizer.eos()))
    }
}

fn vocabulary(metadata: &Metadata) -> Result<RawVocabulary<'_>, LoadTokenizerError> {
    let tokens = strings(metadata, TOKENS)?.ok_or(LoadTokenizerError::MissingKey { key: TOKENS })?;
    let kinds = metadata.get::<Vec<i32>>(TOKEN_TYPE)?.unwrap_or_default();
    let kinds = kinds.into_iter().enumerate().map(|(id, number)| {
        TokenKind::from_number(number).ok_or(LoadTokenizerError::BadTokenType { id, number })
    });
    Ok(RawVocabulary {
        model: metadata
            .get("tokenizer.ggml.model")?
            .ok_or(LoadTokenizerError::MissingKey { key: "tokenizer.ggml.model" })?,
        pre: metadata.get("tokenizer.ggml.pre")?,
        tokens,
        kinds: kinds.collect::<Result<_, _>>()?,
        scores: metadata.get("tokenizer.ggml.scores")?.unwrap_or_default(),
        merges: strings(metadata, MERGES)?.unwrap_or_default(),
        bos: metadata.get("tokenizer.ggml.bos_token_id")?,
        eos: metadata.get("tokenizer.ggml.eos_token_id")?,
        eot: metadata.get("tokenizer.ggml.eot_token_id")?,
        eom: metadata.get("tokenizer.ggml.eom_token_id")?,
        unknown: metadata.get("tokenizer.ggml.unknown_token_id")?,
        fim_pad: metadata.get("tokenizer.ggml.fim_pad_token_id")?,
        fim_rep: metadata.get("tokenizer.ggml.fim_rep_token_id")?,
        fim_sep: metadata.get("tokenizer.ggml.fim_sep_token_id")?,
        add_bos: metadata.get("tokenizer.ggml.add_bos_token")?,
        add_eos: metadata.get("tokenizer.ggml.add_eos_token")?,
        add_space_prefix: metadata.get("tokenizer.ggml.add_space_prefix")?,
    })
}

fn strings<'a>(
    metadata: &'a Metadata,
    key: &'static str,
) -> Result<Option<Vec<&'a str>>, LoadTokenizerError> {
    let Some(strings) = metadata.get::<gguf::StringArray<'_>>(key)? else { return Ok(None) };
    let text =
        |(index, bytes)| std::str::from_utf8(bytes).map_err(|_| LoadTokenizerError::NotUtf8 { key, index });
    strings.iter().enumerate().map(text).collect::<Result<_, _>>().map(Some)
}
