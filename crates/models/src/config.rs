// SPDX-License-Identifier: Apache-2.0

//! Reads hyperparameters from metadata. Each value has a type and bounds, and each error names its
//! key.

use crate::{decoder::DecoderConfig, pooling::Pooling, rope::RopeConfig};
use gguf::{KeyError, Metadata, StringArray, Value};
use ops::{Activation, AttentionSpan, RopePairing};
use std::ops::RangeInclusive;

/// Upper bounds of hyperparameters. The first two are llama.cpp's. The others are well above every
/// published model, and products of them fit 64 bits.
pub(crate) const LAYERS_MAX: usize = 512;
pub(crate) const EXPERTS_MAX: usize = 1024;
pub(crate) const HEADS_MAX: usize = 4096;
pub(crate) const HEAD_DIM_MAX: usize = 4096;
pub(crate) const EMBEDDING_MAX: usize = 1 << 17;
pub(crate) const FEED_FORWARD_MAX: usize = 1 << 20;
pub(crate) const VOCAB_MAX: usize = 1 << 24;
/// A classifier of pairs of texts has one label, or yes and no.
pub(crate) const LABELS_MAX: usize = 1 << 10;
pub(crate) const CONTEXT_MAX: usize = 1 << 30;

/// Why metadata does not describe a model that can be run.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ModelConfigError {
    #[error(transparent)]
    Key(#[from] KeyError),
    #[error("key {key} is {value}, outside {lowest} to {highest}")]
    Range { key: String, value: f64, lowest: f64, highest: f64 },
    #[error("key {key} differs between layers ({first} and {other}), which is not supported")]
    Differs { key: String, first: u32, other: u32 },
    #[error("key {key} is {found:?}; known are {}", known.join(", "))]
    Choice { key: String, found: String, known: &'static [&'static str] },
    #[error("tokenizer.ggml.tokens has {tokens} entries, more than the vocabulary: {key} is {size}")]
    ExcessTokens { tokens: usize, key: String, size: usize },
    #[error("key {key} is {value}, which does not go with {other_key} = {other}")]
    Relation { key: String, value: usize, other_key: String, other: usize },
}

/// The metadata keys of one architecture, which begin with its name.
pub(crate) struct MetadataKeys<'a> {
    metadata: &'a Metadata,
    architecture: &'a str,
}

impl<'a> MetadataKeys<'a> {
    pub(crate) fn new(metadata: &'a Metadata) -> Result<Self, ModelConfigError> {
        Ok(Self { metadata, architecture: metadata.architecture()? })
    }

    pub(crate) fn architecture(&self) -> &'a str {
        self.architecture
    }

    /// Reads the keys that all decoder architectures share.
    pub(crate) fn decoder(&self, pairing: RopePairing) -> Result<DecoderConfig, ModelConfigError> {
        let layers = self.count("block_count", 1..=LAYERS_MAX)?;
        let embedding = self.count("embedding_length", 1..=EMBEDDING_MAX)?;
        let context_length = self.count("context_length", 1..=CONTEXT_MAX)?;
        let heads = self.uniform("attention.head_count", layers, HEADS_MAX)?;
        let heads = self.required("attention.head_count", heads)?;
        let kv_heads = self.uniform("attention.head_count_kv", layers, heads)?.unwrap_or(heads);
        if !heads.is_multiple_of(kv_heads) {
            return Err(self.relation("attention.head_count_kv", kv_heads, "attention.head_count", heads));
        }
        let head_dim = self.count_or("attention.key_length", embedding / heads, 1..=HEAD_DIM_MAX)?;
        let value_dim = self.count_or("attention.value_length", embedding / heads, 1..=HEAD_DIM_MAX)?;
        if value_dim != head_dim {
            return Err(self.relation("attention.value_length", value_dim, "attention.key_length", head_dim));
        }
        let feed_forward = self.uniform("feed_forward_length", layers, FEED_FORWARD_MAX)?;
        let feed_forward = self.required("feed_forward_length", feed_forward)?;
        let norm_epsilon = self.number("attention.layer_norm_rms_epsilon", 0.0..=1.0)?;
        let norm_epsilon = self.required("attention.layer_norm_rms_epsilon", norm_epsilon)?;
        let pooling = Pooling::read(self)?;
        Ok(DecoderConfig {
            vocab_size: self.vocab_size()?,
            context_length,
            embedding,
            layers,
            heads,
            kv_heads,
            head_dim,
            feed_forward,
            experts: None,
            activation: Activation::Silu,
            norm_epsilon,
            head_norms: false,
            post_norms: false,
            embedding_scale: None,
            attention_scale: 1.0 / (head_dim as f32).sqrt(),
            rope: RopeConfig::read(self, pairing, head_dim, context_length)?,
            window_rope: None,
            attention_spans: vec![AttentionSpan::Full; layers],
            pooling,
            labels: if pooling == Some(Pooling::Rank) { self.labels()? } else { 0 },
        })
    }

    /// The number of the classifier's labels, which a file of one label need not name.
    fn labels(&self) -> Result<usize, ModelConfigError> {
        let name = "classifier.output_labels";
        let labels = self.metadata.get::<StringArray<'_>>(&self.key(name))?.map(|labels| labels.len());
        self.within(name, labels.unwrap_or(1), &(1..=LABELS_MAX))
    }

    pub(crate) fn count(&self, name: &str, range: RangeInclusive<usize>) -> Result<usize, ModelConfigError> {
        let value = self.optional_count(name, range)?;
        self.required(name, value)
    }

    /// The range applies to the default as well.
    pub(crate) fn count_or(
        &self,
        name: &str,
        default: usize,
        range: RangeInclusive<usize>,
    ) -> Result<usize, ModelConfigError> {
        match self.optional_count(name, range.clone())? {
            Some(value) => Ok(value),
            None => self.within(name, default, &range),
        }
    }

    pub(crate) fn number(
        &self,
        name: &str,
        range: RangeInclusive<f32>,
    ) -> Result<Option<f32>, ModelConfigError> {
        let key = self.key(name);
        match self.metadata.get::<f32>(&key)? {
            Some(value) if !range.contains(&value) => {
                let [value, lowest, highest] = [value, *range.start(), *range.end()].map(f64::from);
                Err(ModelConfigError::Range { key, value, lowest, highest })
            }
            value => Ok(value),
        }
    }

    pub(crate) fn text(&self, name: &str) -> Result<Option<&'a str>, ModelConfigError> {
        Ok(self.metadata.get(&self.key(name))?)
    }

    /// One flag per layer. `None` if the key is absent or holds a single number.
    pub(crate) fn flags(&self, name: &str, layers: usize) -> Result<Option<Vec<bool>>, ModelConfigError> {
        let key = self.key(name);
        match self.metadata.value(&key) {
            Some(Value::Array(_)) => Ok(self.metadata.per_layer(&key, layers)?),
            _ => Ok(None),
        }
    }

    pub(crate) fn range(&self, name: &str, value: usize, lowest: usize, highest: usize) -> ModelConfigError {
        let [value, lowest, highest] = [value, lowest, highest].map(|value| value as f64);
        ModelConfigError::Range { key: self.key(name), value, lowest, highest }
    }

    pub(crate) fn choice(&self, name: &str, found: &str, known: &'static [&'static str]) -> ModelConfigError {
        ModelConfigError::Choice { key: self.key(name), found: found.to_owned(), known }
    }

    fn relation(&self, name: &str, value: usize, other_name: &str, other: usize) -> ModelConfigError {
        ModelConfigError::Relation { key: self.key(name), value, other_key: self.key(other_name), other }
    }

    fn required<T>(&self, name: &str, value: Option<T>) -> Result<T, ModelConfigError> {
        value.ok_or_else(|| KeyError::Missing { key: self.key(name) }.into())
    }

    pub(crate) fn optional_count(
        &self,
        name: &str,
        range: RangeInclusive<usize>,
    ) -> Result<Option<usize>, ModelConfigError> {
        match self.metadata.get::<u32>(&self.key(name))? {
            Some(value) => self.within(name, value as usize, &range).map(Some),
            None => Ok(None),
        }
    }

    /// A value that a file may give once or per layer. It must be the same in all layers.
    fn uniform(&self, name: &str, layers: usize, highest: usize) -> Result<Option<usize>, ModelConfigError> {
        let key = self.key(name);
        let Some(values) = self.metadata.per_layer::<u32>(&key, layers)? else { return Ok(None) };
        let Some(&first) = values.first() else { return Ok(None) };
        if let Some(&other) = values.iter().find(|&&other| other != first) {
            return Err(ModelConfigError::Differs { key, first, other });
        }
        self.within(name, first as usize, &(1..=highest)).map(Some)
    }

    /// The vocabulary size, or else the length of the token list.
    fn vocab_size(&self) -> Result<usize, ModelConfigError> {
        const TOKENS: &str = "tokenizer.ggml.tokens";
        let tokens = self.metadata.get::<StringArray<'_>>(TOKENS)?.map(|tokens| tokens.len());
        match (self.optional_count("vocab_size", 1..=VOCAB_MAX)?, tokens) {
            // The tokenizer would produce ids that have no embedding.
            (Some(size), Some(tokens)) if tokens > size => {
                Err(ModelConfigError::ExcessTokens { tokens, key: self.key("vocab_size"), size })
            }
            (Some(size), _) => Ok(size),
            (None, Some(tokens)) => self.within("vocab_size", tokens, &(1..=VOCAB_MAX)),
            (None, None) => self.required("vocab_size", None),
        }
    }

    fn within(
        &self,
        name: &str,
        value: usize,
        range: &RangeInclusive<usize>,
    ) -> Result<usize, ModelConfigError> {
        if range.contains(&value) {
            return Ok(value);
        }
        Err(self.range(name, value, *range.start(), *range.end()))
    }

    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }
}
