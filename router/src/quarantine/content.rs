// SPDX-License-Identifier: Apache-2.0

//! The identity of a request by what it makes a worker compute.

use std::fmt;
use std::hash::{BuildHasher, RandomState};

use prost::Message;
use proto::worker::v1::{GenerateRequest, SearchBeamsRequest};
use xxhash_rust::xxh3::Xxh3;

use crate::routing::ModelKey;

/// Hash of a request's content. Seed, tenant, priority, deadline and cache salt are no content: a
/// client that repeats a request may change them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ContentKey(pub u128);

/// Hashes contents under a secret of this process, so that a client cannot choose a request with
/// the key of another one.
#[derive(Clone, Debug)]
pub struct ContentHasher {
    secret: u64,
}

impl Default for ContentHasher {
    fn default() -> Self {
        Self { secret: RandomState::new().hash_one(std::process::id()) }
    }
}

impl ContentHasher {
    /// `request` is the call of a choice without output. `search` is the call of a beam search
    /// without its request: the same request does something else in the worker then.
    pub fn key_of_request(
        &self,
        model: &ModelKey,
        mut request: GenerateRequest,
        search: Option<&SearchBeamsRequest>,
    ) -> ContentKey {
        request.request_id.clear();
        request.cache_salt.clear();
        (request.tenant, request.priority, request.deadline_ms, request.choice) = (0, 0, 0, 0);
        let mut biases = Vec::new();
        if let Some(sampling) = &mut request.sampling {
            sampling.seed = None;
            // The encoding of a map has no fixed order.
            biases = sampling.logit_bias.drain().collect();
            biases.sort_by_key(|&(token, _)| token);
        }
        let mut hasher = self.start(model, b"request");
        for (token, bias) in biases {
            hasher.update(&token.to_le_bytes());
            hasher.update(&f32::to_le_bytes(bias));
        }
        hasher.update(&request.encode_to_vec());
        if let Some(search) = search {
            hasher.update(&search.encode_to_vec());
        }
        ContentKey(hasher.digest128())
    }

    pub fn key_of_grammar(&self, model: &ModelKey, grammar: &proto::v1::Grammar) -> ContentKey {
        let mut hasher = self.start(model, b"grammar");
        hasher.update(&grammar.encode_to_vec());
        ContentKey(hasher.digest128())
    }

    /// For a prompt whose tokens are scored or pooled.
    pub fn key_of_scored_prompt(&self, model: &ModelKey, prompt: &[u32]) -> ContentKey {
        let mut hasher = self.start(model, b"score");
        prompt.iter().for_each(|token| hasher.update(&token.to_le_bytes()));
        ContentKey(hasher.digest128())
    }

    fn start(&self, model: &ModelKey, kind: &[u8]) -> Xxh3 {
        let mut hasher = Xxh3::with_seed(self.secret);
        // A request may crash one model and not another.
        for part in [kind, model.name.as_bytes(), &model.fingerprint.0] {
            hasher.update(&part.len().to_le_bytes());
            hasher.update(part);
        }
        hasher
    }
}

impl fmt::Display for ContentKey {
    /// 16 digits suffice to find a request in logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", (self.0 >> 64) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(tokens: &[u32], seed: u64, tenant: u64) -> GenerateRequest {
        let sampling = proto::v1::Sampling {
            seed: Some(seed),
            logit_bias: (0..50).map(|token| (token, token as f32)).collect(),
            ..Default::default()
        };
        GenerateRequest {
            request_id: seed.to_string(),
            tokens: tokens.to_vec(),
            sampling: Some(sampling),
            tenant,
            ..Default::default()
        }
    }

    #[test]
    fn a_repeated_request_has_the_same_key_and_another_prompt_or_model_has_not() {
        let (hasher, model) = (ContentHasher::default(), ModelKey::numbered(1));
        let key =
            |tokens: &[u32], seed, tenant| hasher.key_of_request(&model, request(tokens, seed, tenant), None);
        assert_eq!(key(&[1, 2], 7, 1), key(&[1, 2], 8, 2));
        assert_ne!(key(&[1, 2], 7, 1), key(&[1, 3], 7, 1));
        let mut biased = request(&[1, 2], 7, 1);
        biased.sampling.as_mut().unwrap().logit_bias.insert(3, -1.0);
        assert_ne!(key(&[1, 2], 7, 1), hasher.key_of_request(&model, biased, None));
        let search = |beam_width| SearchBeamsRequest { beam_width, ..SearchBeamsRequest::default() };
        let key_of_search =
            |width| hasher.key_of_request(&model, request(&[1, 2], 7, 1), Some(&search(width)));
        assert_ne!(key(&[1, 2], 7, 1), key_of_search(2));
        assert_ne!(key_of_search(2), key_of_search(3));
        let other_model = hasher.key_of_request(&ModelKey::numbered(2), request(&[1, 2], 7, 1), None);
        assert_ne!(key(&[1, 2], 7, 1), other_model);
        let other_process = ContentHasher { secret: hasher.secret ^ 1 };
        assert_ne!(key(&[1, 2], 7, 1), other_process.key_of_request(&model, request(&[1, 2], 7, 1), None));
    }
}
