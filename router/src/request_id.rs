// SPDX-License-Identifier: Apache-2.0

//! Request ids for logs and responses.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::Arc;

/// A client's id is used if it is short and plain, because it appears in logs and in the response's
/// `id`.
const BYTES_MAX: usize = 64;

/// The client's `x-request-id`, or a random id.
#[derive(Clone, Debug)]
pub(crate) struct ClientRequestId(pub(crate) Arc<str>);

impl ClientRequestId {
    pub(crate) fn from_client(given: Option<&str>) -> Self {
        let is_plain = |id: &&str| {
            (1..=BYTES_MAX).contains(&id.len())
                && id.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
        };
        given.filter(is_plain).map_or_else(Self::random, |id| Self(id.into()))
    }

    /// The standard library seeds its hash maps from the system's random source.
    pub(crate) fn random() -> Self {
        let half = || RandomState::new().hash_one("request id");
        Self(format!("{:016x}{:016x}", half(), half()).into())
    }
}
