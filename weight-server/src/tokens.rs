// SPDX-License-Identifier: Apache-2.0

//! The registry of attach tokens, which decides which workers may attach.
//!
//! The supervisor registers one token per worker start; the registry keeps their digests. Until the
//! first token is registered, only the peer's user id is checked. From then on every attach needs a
//! token.

use std::collections::BTreeMap;

pub type TokenDigest = [u8; 32];

/// One per worker name; above any fleet.
pub const MAX_TOKENS: usize = 4096;

/// A shorter token could be guessed, a longer one is not a token.
pub const TOKEN_BYTES: std::ops::RangeInclusive<usize> = 16..=256;

#[derive(Debug, Default)]
pub struct TokenRegistry {
    by_name: BTreeMap<String, TokenDigest>,
    /// Tokens are required: one was registered, an adopted lease had one, or a supervisor runs,
    /// which registers them.
    expected: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    #[error("a token has {} to {} bytes", TOKEN_BYTES.start(), TOKEN_BYTES.end())]
    Length,
    #[error("at most {MAX_TOKENS} token names can be registered")]
    TooMany,
}

/// The digest of a token that a supervisor registers.
pub fn digest_of(token: &[u8]) -> Result<TokenDigest, TokenError> {
    if TOKEN_BYTES.contains(&token.len()) { Ok(token_digest(token)) } else { Err(TokenError::Length) }
}

/// Digests are compared instead of tokens, so the time of a comparison reveals nothing about a
/// token.
pub fn token_digest(token: &[u8]) -> TokenDigest {
    *blake3::hash(token).as_bytes()
}

impl TokenRegistry {
    pub fn allow(&mut self, name: String, digest: TokenDigest) -> Result<(), TokenError> {
        if self.by_name.len() >= MAX_TOKENS && !self.by_name.contains_key(&name) {
            return Err(TokenError::TooMany);
        }
        self.by_name.insert(name, digest);
        self.expected = true;
        Ok(())
    }

    /// The worker is gone for good. Tokens stay required.
    pub fn forget(&mut self, name: &str) {
        self.by_name.remove(name);
    }

    /// From now on tokens are required, even if none is registered.
    pub fn expect(&mut self) {
        self.expected = true;
    }

    pub(crate) fn len(&self) -> usize {
        self.by_name.len()
    }

    pub fn required(&self) -> bool {
        self.expected
    }

    /// The name under which the token was registered.
    pub fn name_of(&self, digest: &TokenDigest) -> Option<&str> {
        self.by_name.iter().find(|(_, known)| *known == digest).map(|(name, _)| name.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_token_replaces_the_old_one_of_the_same_name() {
        let mut tokens = TokenRegistry::default();
        let digest = |byte| digest_of(&[byte; 32]).unwrap();
        assert!(!tokens.required());
        tokens.allow("worker-0".to_owned(), digest(1)).unwrap();
        tokens.allow("worker-1".to_owned(), digest(2)).unwrap();
        tokens.allow("worker-0".to_owned(), digest(3)).unwrap();
        assert!(tokens.required());
        assert_eq!(tokens.name_of(&token_digest(&[1; 32])), None);
        assert_eq!(tokens.name_of(&token_digest(&[2; 32])), Some("worker-1"));
        assert_eq!(tokens.name_of(&token_digest(&[3; 32])), Some("worker-0"));
    }

    #[test]
    fn forgotten_token_is_not_valid_and_makes_room_for_another() {
        let mut tokens = TokenRegistry::default();
        for index in 0..MAX_TOKENS {
            tokens.allow(format!("worker-{index}"), token_digest(&index.to_le_bytes())).unwrap();
        }
        assert_eq!(tokens.allow("one-more".to_owned(), [0; 32]), Err(TokenError::TooMany));
        tokens.forget("worker-7");
        assert_eq!(tokens.name_of(&token_digest(&7usize.to_le_bytes())), None);
        tokens.allow("one-more".to_owned(), [0; 32]).unwrap();
        for index in 0..MAX_TOKENS {
            tokens.forget(&format!("worker-{index}"));
        }
        tokens.forget("one-more");
        assert!(tokens.required(), "a process without a token could attach");
    }

    #[test]
    fn tokens_of_wrong_length_are_refused() {
        assert_eq!(digest_of(b"short"), Err(TokenError::Length));
        assert_eq!(digest_of(&[0; 257]), Err(TokenError::Length));
    }
}
