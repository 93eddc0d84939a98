// SPDX-License-Identifier: Apache-2.0

//! Architectures `qwen3` and `qwen3moe`: rope pairs the halves of a head, and query and key heads
//! are normalized before rope. In `qwen3moe` every layer is a mixture of experts; the probabilities
//! of the chosen experts are scaled to sum 1.

use crate::{
    ModelConfigError,
    config::{EXPERTS_MAX, FEED_FORWARD_MAX, MetadataKeys},
    decoder::{DecoderConfig, ExpertsConfig},
};
use ops::RopePairing;

pub(crate) fn configure(keys: &MetadataKeys<'_>) -> Result<DecoderConfig, ModelConfigError> {
    let config = keys.decoder(RopePairing::Halves)?;
    Ok(DecoderConfig { head_norms: true, ..config })
}

pub(crate) fn configure_moe(keys: &MetadataKeys<'_>) -> Result<DecoderConfig, ModelConfigError> {
    let config = configure(keys)?;
    let count = keys.count("expert_count", 1..=EXPERTS_MAX)?;
    let used = keys.count("expert_used_count", 1..=count)?;
    // Old files give the total width of the experts that a token passes through.
    let shared_out = (config.feed_forward / used).max(1);
    let feed_forward = keys.count_or("expert_feed_forward_length", shared_out, 1..=FEED_FORWARD_MAX)?;
    Ok(DecoderConfig { feed_forward, experts: Some(ExpertsConfig { count, used }), ..config })
}
