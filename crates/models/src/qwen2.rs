//! Architecture `qwen2` (Qwen 2 and 2.5): llama's graph with rope over halves and biases on query, key and value.

use crate::{ConfigError, config::Keys, decoder::DecoderConfig};
use ops::RopePairing;

pub(crate) fn configure(keys: &Keys<'_>) -> Result<DecoderConfig, ConfigError> {
    keys.decoder(RopePairing::Halves)
}
