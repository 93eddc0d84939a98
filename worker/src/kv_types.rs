// SPDX-License-Identifier: Apache-2.0

//! Serializes [`KvTypes`] as the text that configuration files use, for `#[serde(with =
//! "worker::kv_types")]`.

use ops::KvTypes;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serializer};

pub fn serialize<S: Serializer>(types: &KvTypes, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(types)
}

pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<KvTypes, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
}
