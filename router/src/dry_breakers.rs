// SPDX-License-Identifier: Apache-2.0

//! Sequence breakers of the DRY sampler: translates strings to the token sequences of a vocabulary
//! whose text completes a string.

use std::sync::{Arc, Mutex, PoisonError};

use text::{EncodeOptions, Tokenizer};

/// Longer sequences are left out, as in llama.cpp. The worker has the same limit.
const SEQUENCE_TOKENS_MAX: usize = 20;

/// Caches the sequences of the last used strings. Most requests use the default strings, and
/// searching a whole vocabulary takes time.
#[derive(Debug, Default)]
pub(crate) struct DryBreakerCache {
    last: Mutex<CachedBreakers>,
}

#[derive(Debug, Default)]
struct CachedBreakers {
    strings: Vec<String>,
    sequences: Arc<[Vec<u32>]>,
}

impl DryBreakerCache {
    pub(crate) fn sequences(&self, strings: &[String], tokenizer: &Tokenizer) -> Arc<[Vec<u32>]> {
        // The cached value is replaced as a whole, so it is consistent after a panic.
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.strings != strings {
            let sequences = find_sequences(strings, tokenizer).into();
            *last = CachedBreakers { strings: strings.to_vec(), sequences };
        }
        last.sequences.clone()
    }
}

/// Finds every token that contains a string. Finds also every token that ends with the beginning of
/// a string, and appends the tokens of the string's rest.
fn find_sequences(strings: &[String], tokenizer: &Tokenizer) -> Vec<Vec<u32>> {
    let mut sequences = Vec::new();
    for string in strings {
        // Each proper beginning of the string, with the tokens of its rest.
        let splits: Vec<(&[u8], Vec<u32>)> = string
            .char_indices()
            .skip(1)
            .filter_map(|(at, _)| Some((&string.as_bytes()[..at], encode_rest(&string[at..], tokenizer)?)))
            .collect();
        for id in 0..tokenizer.len() as u32 {
            let bytes = tokenizer.token_bytes(id).unwrap_or_default();
            if bytes.windows(string.len()).any(|window| window == string.as_bytes()) {
                sequences.push(vec![id]);
                continue;
            }
            let overlapping = splits.iter().filter(|(head, _)| bytes.ends_with(head));
            sequences.extend(overlapping.map(|(_, rest)| [&[id], &rest[..]].concat()));
        }
    }
    sequences
}

/// `None` if the tokenizer does not encode the text to these bytes, or to too many tokens.
fn encode_rest(rest: &str, tokenizer: &Tokenizer) -> Option<Vec<u32>> {
    let tokens = tokenizer.encode(rest, EncodeOptions::default()).ok()?;
    let is_exact = tokenizer.decode_bytes(&tokens) == rest.as_bytes();
    (is_exact && tokens.len() < SEQUENCE_TOKENS_MAX).then_some(tokens)
}

#[cfg(test)]
mod tests {
    use text::{RawVocabulary, TokenKind};

    use super::*;

    /// Single bytes, and "a:", "b\n", "\n\n".
    fn tokenizer() -> Tokenizer {
        let tokens = vec!["a", "b", ":", "Ċ", "a:", "bĊ", "ĊĊ"];
        let vocabulary = RawVocabulary {
            model: "gpt2",
            pre: Some("qwen2"),
            kinds: vec![TokenKind::Normal; tokens.len()],
            tokens,
            merges: vec!["a :", "b Ċ", "Ċ Ċ"],
            ..RawVocabulary::default()
        };
        Tokenizer::new(&vocabulary).unwrap()
    }

    fn sorted_sequences(strings: &[&str]) -> Vec<Vec<u32>> {
        let strings: Vec<String> = strings.iter().map(|&string| string.to_owned()).collect();
        let mut sequences = DryBreakerCache::default().sequences(&strings, &tokenizer()).to_vec();
        sequences.sort();
        sequences
    }

    #[test]
    fn a_token_that_contains_the_string_is_a_breaker_alone() {
        assert_eq!(sorted_sequences(&[":"]), [vec![2], vec![4]]);
        assert_eq!(sorted_sequences(&["\n", ":"]), [vec![2], vec![3], vec![4], vec![5], vec![6]]);
    }

    #[test]
    fn a_string_across_tokens_begins_in_the_first_token() {
        // ":\n" begins in ":" and in "a:", and continues with a newline.
        assert_eq!(sorted_sequences(&[":\n"]), [vec![2, 3], vec![4, 3]]);
    }

    #[test]
    fn the_last_sequences_are_cached() {
        let (cache, tokenizer) = (DryBreakerCache::default(), tokenizer());
        let colon = [":".to_owned()];
        let first = cache.sequences(&colon, &tokenizer);
        assert!(Arc::ptr_eq(&first, &cache.sequences(&colon, &tokenizer)));
        assert_ne!(cache.sequences(&["a".to_owned()], &tokenizer), first);
    }
}
