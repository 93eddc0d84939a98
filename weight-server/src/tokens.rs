//! Attach tokens: which worker starts may take weights.
//!
//! A plain value. Tokens come from the supervisor, one per worker start, and are kept as digests. As long as none was
//! ever configured the peer's user id is the only check; from the first one on, every attach needs one.

use std::collections::BTreeMap;

pub(crate) type TokenDigest = [u8; 32];

/// Names of workers; far above any fleet.
pub(crate) const MAX_TOKENS: usize = 4096;

/// A token of fewer bytes could be guessed, one of more is no token.
pub(crate) const TOKEN_BYTES: std::ops::RangeInclusive<usize> = 16..=256;

#[derive(Debug, Default)]
pub(crate) struct TokenRegistry {
    by_name: BTreeMap<String, TokenDigest>,
    /// Leases taken over from an earlier incarnation had tokens: so there is a supervisor that will name them again.
    expected: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum TokenError {
    #[error("a token has {} to {} bytes", TOKEN_BYTES.start(), TOKEN_BYTES.end())]
    Length,
    #[error("more than {MAX_TOKENS} names of tokens")]
    TooMany,
}

/// Digests are compared, never tokens: the time that takes tells nothing about a token.
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

    /// From now on tokens are needed, though none is known yet.
    pub(crate) fn expect(&mut self) {
        self.expected = true;
    }

    pub(crate) fn required(&self) -> bool {
        self.expected || !self.by_name.is_empty()
    }

    /// Whose token this is.
    pub(crate) fn name_of(&self, digest: &TokenDigest) -> Option<&str> {
        self.by_name.iter().find(|(_, known)| *known == digest).map(|(name, _)| name.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_token_replaces_the_old_one_of_its_name() {
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
    fn guessable_tokens_are_refused() {
        assert_eq!(TokenRegistry::default().allow("w".to_owned(), b"short"), Err(TokenError::Length));
        assert_eq!(TokenRegistry::default().allow("w".to_owned(), &[0; 257]), Err(TokenError::Length));
    }
}
