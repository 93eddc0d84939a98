// SPDX-License-Identifier: Apache-2.0

//! Architecture `qwen2` (Qwen 2 and 2.5): as llama, but rope pairs the halves of a head, and query,
//! key and value have biases.

use crate::{ModelConfigError, config::MetadataKeys, decoder::DecoderConfig};
use ops::RopePairing;

pub(crate) fn configure(keys: &MetadataKeys<'_>) -> Result<DecoderConfig, ModelConfigError> {
    keys.decoder(RopePairing::Halves)
}
