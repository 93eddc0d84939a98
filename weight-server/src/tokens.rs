// SPDX-License-Identifier: Apache-2.0

//! The registry of attach tokens, which decides which workers may attach.
//!
//! The supervisor registers one token per worker start; the registry keeps their digests. Until the
//! first token is registered, only the peer's user id is checked. From then on every attach needs a
//! token.

use std::collections::BTreeMap;

pub(crate) type TokenDigest = [u8; 32];

/// One per worker name; above any fleet.
pub(crate) const MAX_TOKENS: usize = 4096;

/// A shorter token could be guessed, a longer one is not a token.
pub(crate) const TOKEN_BYTES: std::ops::RangeInclusive<usize> = 16..=256;

#[derive(Debug, Default)]
pub(crate) struct TokenRegistry {
    by_name: BTreeMap<String, TokenDigest>,
    /// Adopted leases had tokens, so a supervisor exists that will register tokens again.
    expected: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum TokenError {
    #[error("a token has {} to {} bytes", TOKEN_BYTES.start(), TOKEN_BYTES.end())]
    Length,
    #[error("at most {MAX_TOKENS} token names can be registered")]
    TooMany,
}

/// Digests are compared instead of tokens, so the time of a comparison reveals nothing about a
/// token.
pub(crate) fn token_digest(token: &[u8]) -> TokenDigest {
    *blake3::hash(token).as_bytes()
}

impl TokenRegistry {
    pub(crate) fn allow(&mut self, name: String, token: &[u8]) -> Result<(), TokenError> {
        if !TOKEN_BYTES.contains(&token.len()) {
            return Err(TokenError::Length);
        }
        if self.by_name.len() >= MAX_TOKENS && !self.by_name.contains_key(&name) {
            return Err(TokenError::TooMany);
        }
        self.by_name.insert(name, token_digest(token));
        Ok(())
    }

    /// From now on tokens are required, even if none is registered.
    pub(crate) fn expect(&mut self) {
        self.expected = true;
    }

    pub(crate) fn required(&self) -> bool {
        self.expected || !self.by_name.is_empty()
    }

    /// The name under which the token was registered.
    pub(crate) fn name_of(&self, digest: &TokenDigest) -> Option<&str> {
        self.by_name.iter().find(|(_, known)| *known == digest).map(|(name, _)| name.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_token_replaces_the_old_one_of_the_same_name() {
        let mut tokens = TokenRegistry::default();
        assert!(!tokens.required());
        tokens.allow("worker-0".to_owned(), &[1; 32]).unwrap();
        tokens.allow("worker-1".to_owned(), &[2; 32]).unwrap();
        tokens.allow("worker-0".to_owned(), &[3; 32]).unwrap();
        assert!(tokens.required());
        assert_eq!(tokens.name_of(&token_digest(&[1; 32])), None);
        assert_eq!(tokens.name_of(&token_digest(&[2; 32])), Some("worker-1"));
        assert_eq!(tokens.name_of(&token_digest(&[3; 32])), Some("worker-0"));
    }

    #[test]
    fn tokens_of_wrong_length_are_refused() {
        assert_eq!(TokenRegistry::default().allow("w".to_owned(), b"short"), Err(TokenError::Length));
        assert_eq!(TokenRegistry::default().allow("w".to_owned(), &[0; 257]), Err(TokenError::Length));
    }
}
