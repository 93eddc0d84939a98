// SPDX-License-Identifier: Apache-2.0

//! Streaming detokenization: token ids to text.
//!
//! The output never contains half a character. A byte becomes U+FFFD only if no later token can
//! complete it.

use std::sync::Arc;

use crate::tokenizer::Tokenizer;
use crate::vocabulary::TokenKind;

/// How a [`Detokenizer`] produces text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DetokenizeOptions {
    /// Control and unknown tokens produce no text.
    pub skip_special: bool,
    /// The ids start a new text (a chat reply, a whole document) instead of continuing a prompt.
    /// SentencePiece models put a space before a text when they encode it; this removes that space
    /// again.
    pub at_text_start: bool,
}

/// Detokenizes one stream. Call [`push`](Self::push) for each token and [`finish`](Self::finish) at
/// the end.
#[derive(Debug)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    strip_space: bool,
    /// The first bytes of an incomplete character: at most three.
    pending: Vec<u8>,
}

impl Detokenizer {
    pub fn new(tokenizer: Arc<Tokenizer>, options: DetokenizeOptions) -> Self {
        let strip_space = options.at_text_start && tokenizer.adds_space_prefix();
        Self { tokenizer, skip_special: options.skip_special, strip_space, pending: Vec::new() }
    }

    /// Returns the text that `id` completes, possibly none. An id outside the vocabulary (a padding
    /// row of the embedding) becomes U+FFFD.
    pub fn push(&mut self, id: u32) -> String {
        match self.tokenizer.kind(id) {
            Some(TokenKind::Control | TokenKind::Unknown) if self.skip_special => String::new(),
            _ => self.push_named(id),
        }
    }

    /// As [`push`](Self::push); a control token appears with its name, whatever the options say.
    pub fn push_named(&mut self, id: u32) -> String {
        let tokenizer = self.tokenizer.clone();
        let bytes = match tokenizer.kind(id) {
            None => "\u{fffd}".as_bytes(),
            Some(TokenKind::Unused) => &[],
            Some(_) => tokenizer.token_bytes(id).unwrap_or_default(),
        };
        if bytes.is_empty() {
            return String::new();
        }
        let bytes = match std::mem::take(&mut self.strip_space) {
            true => bytes.strip_prefix(b" ").unwrap_or(bytes),
            false => bytes,
        };
        self.pending.extend_from_slice(bytes);
        take_whole_characters(&mut self.pending)
    }

    /// Returns what is still held back: nothing, or one U+FFFD for an incomplete character.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }
}

impl Tokenizer {
    /// Concatenates the bytes of `ids`, which may split a character. Unknown ids contribute
    /// nothing.
    pub fn decode_bytes(&self, ids: &[u32]) -> Vec<u8> {
        ids.iter().flat_map(|&id| self.token_bytes(id).unwrap_or_default()).copied().collect()
    }
}

/// Removes and returns all complete characters. Each maximal invalid sequence becomes one U+FFFD,
/// as in `String::from_utf8_lossy`. An incomplete last character stays in `bytes`.
fn take_whole_characters(bytes: &mut Vec<u8>) -> String {
    let mut text = String::with_capacity(bytes.len());
    let mut taken = 0;
    while taken < bytes.len() {
        match std::str::from_utf8(&bytes[taken..]) {
            Ok(valid) => {
                text.push_str(valid);
                taken = bytes.len();
            }
            Err(error) => {
                let valid = &bytes[taken..taken + error.valid_up_to()];
                text.push_str(&String::from_utf8_lossy(valid));
                taken += valid.len();
                let Some(invalid) = error.error_len() else { break };
                text.push('\u{fffd}');
                taken += invalid;
            }
        }
    }
    bytes.drain(..taken);
    text
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::vocabulary::RawVocabulary;

    /// A vocabulary in which token `b` is byte `b`, 256 is "<s>", and 257 is "▁a".
    fn byte_tokenizer() -> Arc<Tokenizer> {
        let names: Vec<String> = (0..256).map(|byte| format!("<0x{byte:02X}>")).collect();
        let mut tokens: Vec<&str> = names.iter().map(String::as_str).collect();
        let mut kinds = vec![TokenKind::Byte; 256];
        tokens.extend(["<s>", "▁a"]);
        kinds.extend([TokenKind::Control, TokenKind::Normal]);
        let scores = vec![0.0; tokens.len()];
        let vocabulary = RawVocabulary {
            model: "llama",
            tokens,
            kinds,
            scores,
            bos: Some(256),
            ..RawVocabulary::default()
        };
        Arc::new(Tokenizer::new(&vocabulary).unwrap())
    }

    fn options(skip_special: bool, at_text_start: bool) -> DetokenizeOptions {
        DetokenizeOptions { skip_special, at_text_start }
    }

    fn stream(ids: &[u32], options: DetokenizeOptions) -> Vec<String> {
        let mut detokenizer = Detokenizer::new(byte_tokenizer(), options);
        let mut parts: Vec<String> = ids.iter().map(|&id| detokenizer.push(id)).collect();
        parts.push(detokenizer.finish());
        parts
    }

    fn bytes(text: &[u8]) -> Vec<u32> {
        text.iter().map(|&byte| u32::from(byte)).collect()
    }

    #[test]
    fn character_comes_out_whole_with_its_last_byte() {
        assert_eq!(stream(&bytes("a€".as_bytes()), options(true, false)), ["a", "", "", "€", ""]);
    }

    #[test]
    fn unfinished_character_is_replaced_at_the_end_only() {
        assert_eq!(stream(&bytes(b"\xe2\x82"), options(true, false)), ["", "", "\u{fffd}"]);
    }

    #[test]
    fn impossible_byte_is_replaced_at_once() {
        assert_eq!(
            stream(&bytes(b"\xffa\xe2b"), options(true, false)),
            ["\u{fffd}", "a", "", "\u{fffd}b", ""]
        );
    }

    #[test]
    fn space_of_the_encoder_is_taken_away_once_and_only_at_the_start_of_a_text() {
        assert_eq!(stream(&[256, 257, 257], options(true, true)).concat(), "a a");
        assert_eq!(stream(&[257, 257], options(true, false)).concat(), " a a");
        assert_eq!(stream(&[256, 257], options(false, false)).concat(), "<s> a");
    }

    #[test]
    fn id_outside_the_vocabulary_is_visible() {
        assert_eq!(stream(&[100_000], options(true, false)).concat(), "\u{fffd}");
    }

    proptest! {
        #[test]
        fn stream_equals_lossy_decoding_of_the_whole(text in prop::collection::vec(any::<u8>(), 0..64)) {
            let parts = stream(&bytes(&text), options(true, false));
            prop_assert_eq!(parts.concat(), String::from_utf8_lossy(&text).into_owned());
        }
    }
}
