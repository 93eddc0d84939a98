//! DRY's sequence breakers: from words to the token sequences of a vocabulary in whose text a word is complete.

use std::sync::{Arc, Mutex, PoisonError};

use text::{EncodeOptions, Tokenizer};

/// Longer sequences are left out, as in llama.cpp; the worker's bound is the same.
const SEQUENCE_TOKENS_MAX: usize = 20;

/// The sequences of the words that were asked for last: most requests keep the default ones, and a vocabulary is large.
#[derive(Debug, Default)]
pub(crate) struct Breakers {
    last: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    words: Vec<String>,
    sequences: Arc<[Vec<u32>]>,
}

impl Breakers {
    pub(crate) fn of(&self, words: &[String], tokenizer: &Tokenizer) -> Arc<[Vec<u32>]> {
        // What is in there is whole at any time.
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.words != words {
            *last = Known { words: words.to_vec(), sequences: sequences(words, tokenizer).into() };
        }
        last.sequences.clone()
    }
}

/// Tokens that contain a word, and tokens that end with the beginning of one, each with the tokens of the word's rest.
fn sequences(words: &[String], tokenizer: &Tokenizer) -> Vec<Vec<u32>> {
    let mut sequences = Vec::new();
    for word in words {
        // By how many bytes of the word a token ends with: tokens of what is left.
        let rests: Vec<(&[u8], Vec<u32>)> = word
            .char_indices()
            .skip(1)
            .filter_map(|(at, _)| Some((&word.as_bytes()[..at], encode(&word[at..], tokenizer)?)))
            .collect();
        for id in 0..tokenizer.len() as u32 {
            let bytes = tokenizer.token_bytes(id).unwrap_or_default();
            if bytes.windows(word.len()).any(|window| window == word.as_bytes()) {
                sequences.push(vec![id]);
                continue;
            }
            let overlapping = rests.iter().filter(|(head, _)| bytes.ends_with(head));
            sequences.extend(overlapping.map(|(_, rest)| [&[id], &rest[..]].concat()));
        }
    }
    sequences
}

/// `None` for what the tokenizer would not put in the middle of a text.
fn encode(rest: &str, tokenizer: &Tokenizer) -> Option<Vec<u32>> {
    let tokens = tokenizer.encode(rest, EncodeOptions::default()).ok()?;
    let whole = tokenizer.decode_bytes(&tokens) == rest.as_bytes();
    (whole && tokens.len() < SEQUENCE_TOKENS_MAX).then_some(tokens)
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

    fn found(words: &[&str]) -> Vec<Vec<u32>> {
        let words: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
        let mut found = Breakers::default().of(&words, &tokenizer()).to_vec();
        found.sort();
        found
    }

    #[test]
    fn a_token_that_contains_the_word_is_a_breaker_by_itself() {
        assert_eq!(found(&[":"]), [vec![2], vec![4]]);
        assert_eq!(found(&["\n", ":"]), [vec![2], vec![3], vec![4], vec![5], vec![6]]);
    }

    #[test]
    fn a_word_across_tokens_is_found_from_the_token_that_it_begins_in() {
        // ":\n" begins in ":" and in "a:", and goes on with a newline.
        assert_eq!(found(&[":\n"]), [vec![2, 3], vec![4, 3]]);
    }

    #[test]
    fn asking_again_gives_the_same_sequences() {
        let (breakers, tokenizer) = (Breakers::default(), tokenizer());
        let word = [":".to_owned()];
        let first = breakers.of(&word, &tokenizer);
        assert!(Arc::ptr_eq(&first, &breakers.of(&word, &tokenizer)));
        assert_ne!(breakers.of(&["a".to_owned()], &tokenizer), first);
    }
}
