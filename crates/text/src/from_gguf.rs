// SPDX-License-Identifier: Apache-2.0

//! Reads the tokenizer and chat-template keys of a GGUF file. Strings are borrowed, not copied.

use gguf::Metadata;

use crate::chat::{ChatTemplate, LoadTemplateError};
use crate::tokenizer::Tokenizer;
use crate::tokenizer_error::LoadTokenizerError;
use crate::vocabulary::{RawVocabulary, TokenKind};

const MODEL: &str = "tokenizer.ggml.model";
/// The value of [`MODEL`] in the file of a model that works with token ids only, as in llama.cpp.
const NO_TOKENIZER: &str = "none";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TOKEN_TYPE: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
pub const CHAT_TEMPLATE: &str = "tokenizer.chat_template";
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
        let (bos, eos) = sequence_ends(tokenizer);
        Self::new(source, tool_use, &bos, &eos)
    }

    /// A template that replaces those of the file, for chats with and without tools. `tokenizer` is
    /// the tokenizer of the model.
    pub fn from_source(source: &str, tokenizer: &Tokenizer) -> Result<Self, LoadTemplateError> {
        let (bos, eos) = sequence_ends(tokenizer);
        Self::new(source, None, &bos, &eos)
    }
}

/// The texts of the tokens that begin and end a sequence.
fn sequence_ends(tokenizer: &Tokenizer) -> (String, String) {
    let text = |id: Option<u32>| {
        let bytes = id.and_then(|id| tokenizer.token_bytes(id)).unwrap_or_default();
        String::from_utf8_lossy(bytes).into_owned()
    };
    (text(tokenizer.bos()), text(tokenizer.eos()))
}

/// The ids that the file names as ends of a generation, sorted. For a model without tokenizer;
/// [`Tokenizer::end_of_generation`] finds more.
pub fn end_of_generation_keys(metadata: &Metadata) -> Result<Vec<u32>, LoadTokenizerError> {
    let mut ids = Vec::new();
    for key in ["eos", "eot", "eom"] {
        ids.extend(token_id(metadata, &format!("tokenizer.ggml.{key}_token_id"))?);
    }
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

fn vocabulary(metadata: &Metadata) -> Result<RawVocabulary<'_>, LoadTokenizerError> {
    let model: &str = metadata.get(MODEL)?.ok_or(LoadTokenizerError::MissingKey { key: MODEL })?;
    if model == NO_TOKENIZER {
        return Err(LoadTokenizerError::NoTokenizer);
    }
    let tokens = strings(metadata, TOKENS)?.ok_or(LoadTokenizerError::MissingKey { key: TOKENS })?;
    let kinds = metadata.get::<Vec<i32>>(TOKEN_TYPE)?.unwrap_or_default();
    let kinds = kinds.into_iter().enumerate().map(|(id, number)| {
        TokenKind::from_number(number).ok_or(LoadTokenizerError::BadTokenType { id, number })
    });
    Ok(RawVocabulary {
        model,
        pre: metadata.get("tokenizer.ggml.pre")?,
        tokens,
        kinds: kinds.collect::<Result<_, _>>()?,
        scores: metadata.get("tokenizer.ggml.scores")?.unwrap_or_default(),
        merges: strings(metadata, MERGES)?.unwrap_or_default(),
        bos: token_id(metadata, "tokenizer.ggml.bos_token_id")?,
        eos: token_id(metadata, "tokenizer.ggml.eos_token_id")?,
        eot: token_id(metadata, "tokenizer.ggml.eot_token_id")?,
        eom: token_id(metadata, "tokenizer.ggml.eom_token_id")?,
        unknown: token_id(metadata, "tokenizer.ggml.unknown_token_id")?,
        fim_pre: middle_token_id(metadata, "fim_pre", "prefix")?,
        fim_suf: middle_token_id(metadata, "fim_suf", "suffix")?,
        fim_mid: middle_token_id(metadata, "fim_mid", "middle")?,
        fim_pad: token_id(metadata, "tokenizer.ggml.fim_pad_token_id")?,
        fim_rep: token_id(metadata, "tokenizer.ggml.fim_rep_token_id")?,
        fim_sep: token_id(metadata, "tokenizer.ggml.fim_sep_token_id")?,
        add_bos: metadata.get("tokenizer.ggml.add_bos_token")?,
        add_eos: metadata.get("tokenizer.ggml.add_eos_token")?,
        add_space_prefix: metadata.get("tokenizer.ggml.add_space_prefix")?,
    })
}

/// Converters write -1 if a model has no such token.
fn token_id(metadata: &Metadata, key: &str) -> Result<Option<u32>, LoadTokenizerError> {
    Ok(metadata.get::<u32>(key)?.filter(|&id| id != u32::MAX))
}

/// A key has another name in files of 2023 and 2024.
fn middle_token_id(metadata: &Metadata, name: &str, older: &str) -> Result<Option<u32>, LoadTokenizerError> {
    let id = |name: &str| token_id(metadata, &format!("tokenizer.ggml.{name}_token_id"));
    id(name)?.map_or_else(|| id(older), |id| Ok(Some(id)))
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
