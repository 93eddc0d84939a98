// SPDX-License-Identifier: Apache-2.0

//! [`check_model`]: checks the metadata values that an engine uses as sizes and divisors.
//!
//! A file without these keys (a vocabulary, a projector) passes.

use crate::metadata::{KeyError, Metadata};
use crate::value::StringArray;

/// Most layers of a model; the largest known have 126.
const MAX_LAYERS: u32 = 512;
/// Most experts of a layer; the largest known have 512.
const MAX_EXPERTS: u32 = 1024;
/// Most tokens of a vocabulary; the largest known have 262,144.
const MAX_TOKENS: u32 = 1 << 20;
/// Most bytes of one token's text; tokens of blanks have some hundred.
const MAX_TOKEN_BYTES: usize = 1 << 16;

/// Why no engine should run a model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModelCheckError {
    #[error(transparent)]
    Key(#[from] KeyError),
    #[error("key {key} is 0")]
    Zero { key: String },
    #[error("key {key} is {found}; the limit is {most}")]
    TooLarge { key: String, found: u64, most: u64 },
    #[error("{key} is {found}, but the model has {experts} experts")]
    ExpertsUsed { key: String, found: u32, experts: u32 },
    #[error("layer {layer}: {heads} attention heads are no multiple of {kv_heads} KV heads")]
    HeadGroups { layer: usize, heads: u32, kv_heads: u32 },
    #[error(
        "the embedding of {embedding} values does not divide into {heads} heads, and attention.key_length is missing"
    )]
    HeadSize { embedding: u32, heads: u32 },
    #[error("rope.dimension_count is {found} but must be even and at most the head size")]
    RopeDims { found: u32 },
    #[error("token {token} has a text of {len} bytes; the limit is {MAX_TOKEN_BYTES}")]
    LongToken { token: usize, len: usize },
    #[error("key {key} has {found} values, but the vocabulary has {tokens} tokens")]
    VocabularyArray { key: &'static str, found: usize, tokens: usize },
    #[error("key {key} names token {found}, but the vocabulary has {tokens} tokens")]
    TokenId { key: String, found: u64, tokens: usize },
}

/// Checks layer count, experts, heads, RoPE dimensions, and the arrays of the vocabulary.
pub fn check_model(metadata: &Metadata) -> Result<(), ModelCheckError> {
    check_vocabulary(metadata)?;
    let Some(architecture) = metadata.get::<&str>("general.architecture")? else { return Ok(()) };
    let key = |name: &str| format!("{architecture}.{name}");

    let Some(layers) = positive(metadata, &key("block_count"), MAX_LAYERS)? else { return Ok(()) };
    let embedding = positive(metadata, &key("embedding_length"), u32::MAX)?;
    positive(metadata, &key("context_length"), u32::MAX)?;
    positive(metadata, &key("vocab_size"), MAX_TOKENS)?;
    check_experts(metadata, &key)?;
    check_heads(metadata, &key, layers as usize, embedding)
}

/// Reads an optional count, which must not be 0.
fn positive(metadata: &Metadata, key: &str, most: u32) -> Result<Option<u32>, ModelCheckError> {
    match metadata.get::<u32>(key)? {
        Some(0) => Err(ModelCheckError::Zero { key: key.into() }),
        Some(found) if found > most => {
            Err(ModelCheckError::TooLarge { key: key.into(), found: found.into(), most: most.into() })
        }
        found => Ok(found),
    }
}

fn check_experts(metadata: &Metadata, key: &impl Fn(&str) -> String) -> Result<(), ModelCheckError> {
    let experts = metadata.get::<u32>(&key("expert_count"))?.unwrap_or(0);
    if experts > MAX_EXPERTS {
        let (found, most) = (experts.into(), MAX_EXPERTS.into());
        return Err(ModelCheckError::TooLarge { key: key("expert_count"), found, most });
    }
    let key = key("expert_used_count");
    match metadata.get::<u32>(&key)? {
        Some(found) if found > experts => Err(ModelCheckError::ExpertsUsed { key, found, experts }),
        Some(0) if experts > 0 => Err(ModelCheckError::Zero { key }),
        _ => Ok(()),
    }
}

fn check_heads(
    metadata: &Metadata,
    key: &impl Fn(&str) -> String,
    layers: usize,
    embedding: Option<u32>,
) -> Result<(), ModelCheckError> {
    let heads_key = key("attention.head_count");
    let Some(heads) = metadata.per_layer::<u32>(&heads_key, layers)? else { return Ok(()) };
    // An array may contain zeros for layers without attention. One value for all layers may not be
    // zero.
    if metadata.get::<u32>(&heads_key).is_ok() && heads.contains(&0) {
        return Err(ModelCheckError::Zero { key: heads_key });
    }
    let kv_heads = metadata.per_layer::<u32>(&key("attention.head_count_kv"), layers)?;
    let kv_heads = kv_heads.unwrap_or_else(|| heads.clone());
    for (layer, (&heads, &kv_heads)) in heads.iter().zip(&kv_heads).enumerate() {
        // A layer without KV heads has no attention.
        if kv_heads != 0 && heads % kv_heads != 0 {
            return Err(ModelCheckError::HeadGroups { layer, heads, kv_heads });
        }
    }
    let key_length = positive(metadata, &key("attention.key_length"), u32::MAX)?;
    let most_heads = heads.into_iter().max().unwrap_or(0).max(1);
    let head_size = match (key_length, embedding) {
        (Some(key_length), _) => Some(key_length),
        (None, Some(embedding)) if embedding % most_heads != 0 => {
            return Err(ModelCheckError::HeadSize { embedding, heads: most_heads });
        }
        (None, embedding) => embedding.map(|embedding| embedding / most_heads),
    };
    let rope_key = key("rope.dimension_count");
    match positive(metadata, &rope_key, u32::MAX)? {
        Some(found) if found % 2 != 0 || head_size.is_some_and(|head_size| found > head_size) => {
            Err(ModelCheckError::RopeDims { found })
        }
        _ => Ok(()),
    }
}

fn check_vocabulary(metadata: &Metadata) -> Result<(), ModelCheckError> {
    let Some(tokens) = metadata.get::<StringArray<'_>>("tokenizer.ggml.tokens")? else { return Ok(()) };
    let count = tokens.len();
    if count > MAX_TOKENS as usize {
        let (found, most) = (count as u64, MAX_TOKENS.into());
        return Err(ModelCheckError::TooLarge { key: "tokenizer.ggml.tokens".into(), found, most });
    }
    for (token, text) in tokens.iter().enumerate() {
        if text.len() > MAX_TOKEN_BYTES {
            return Err(ModelCheckError::LongToken { token, len: text.len() });
        }
    }
    let check_len = |key: &'static str, found: Option<usize>| match found {
        Some(found) if found != count => Err(ModelCheckError::VocabularyArray { key, found, tokens: count }),
        _ => Ok(()),
    };
    check_len("tokenizer.ggml.scores", metadata.get::<Vec<f32>>("tokenizer.ggml.scores")?.map(|x| x.len()))?;
    let types = metadata.get::<Vec<i32>>("tokenizer.ggml.token_type")?.map(|x| x.len());
    check_len("tokenizer.ggml.token_type", types)?;
    metadata.get::<StringArray<'_>>("tokenizer.ggml.merges")?;
    check_token_ids(metadata, count)
}

/// Checks that every `tokenizer.ggml.*_token_id` is an id of the vocabulary.
fn check_token_ids(metadata: &Metadata, tokens: usize) -> Result<(), ModelCheckError> {
    for (key, _) in metadata.iter() {
        if !(key.starts_with("tokenizer.ggml.") && key.ends_with("_token_id")) {
            continue;
        }
        let found: u64 = metadata.require(key)?;
        // Converters store u32::MAX (-1) if a model has no such token.
        if found >= tokens as u64 && found != u64::from(u32::MAX) {
            return Err(ModelCheckError::TokenId { key: key.into(), found, tokens });
        }
    }
    Ok(())
}
