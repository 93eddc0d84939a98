//! Architecture `qwen2` (Qwen 2 and 2.5): llama's graph with rope over halves and biases on query,
//! key and value.

use crate::{ModelConfigError, config::MetadataKeys, decoder::DecoderConfig};
use ops::RopePairing;

pub(crate) fn configure(keys: &MetadataKeys<'_>) -> Result<DecoderConfig, ModelConfigError> {
    keys.decoder(RopePairing::Halves)
}
