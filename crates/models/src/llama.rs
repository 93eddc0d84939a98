// SPDX-License-Identifier: Apache-2.0

//! Architecture `llama`: Llama 1 to 3, Mistral, Mixtral, SmolLM and others.
//!
//! Rope rotates adjacent pairs, since the GGUF converter permutes the rows of the query and key
//! projections. Query and key heads have no norms. Biases are applied if the file has them.
//! `rope_freqs.weight` has the frequency factors of Llama 3.1 and later.
//!
//! The key `attention.sliding_window` is ignored, as in llama.cpp.

use crate::{
    ModelConfigError,
    config::{EXPERTS_MAX, MetadataKeys},
    decoder::{DecoderConfig, ExpertsConfig},
};
use ops::RopePairing;

pub(crate) fn configure(keys: &MetadataKeys<'_>) -> Result<DecoderConfig, ModelConfigError> {
    let mut config = keys.decoder(RopePairing::Adjacent)?;
    if config.rope.rotated != config.head_dim {
        let (value, head_dim) = (config.rope.rotated, config.head_dim);
        return Err(keys.range("rope.dimension_count", value, head_dim, head_dim));
    }
    let count = keys.count_or("expert_count", 0, 0..=EXPERTS_MAX)?;
    if count > 0 {
        config.experts = Some(ExpertsConfig { count, used: keys.count("expert_used_count", 1..=count)? });
    }
    Ok(config)
}
