// SPDX-License-Identifier: Apache-2.0

//! Fuzzes [`Tokenizer`]: any vocabulary is refused or makes a tokenizer, and any text is refused or
//! becomes ids of the vocabulary.
//!
//! Checks that nothing panics, that all ids exist, that the detokenizer emits whole characters, and
//! that a byte-level tokenizer without normalization returns the text.

#![no_main]

use std::sync::Arc;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use text::{DetokenizeOptions, Detokenizer, EncodeOptions, MiddlePrefix, RawVocabulary, TokenKind, Tokenizer};

#[derive(Arbitrary, Debug)]
enum TokenizerModel {
    ByteLevel,
    Sentencepiece,
    Gemma,
    Other,
}

/// The fields of a vocabulary. Most values are valid, because random ones are refused at once.
#[derive(Arbitrary, Debug)]
struct Input<'a> {
    model: TokenizerModel,
    pre: u8,
    /// Text and type of each token.
    tokens: Vec<(&'a str, u8)>,
    /// Adds the 256 tokens of single bytes, so that every text has ids.
    all_bytes: bool,
    scores: Vec<i8>,
    /// Indexes of two tokens, or else any text.
    merges: Vec<Result<(u8, u8), &'a str>>,
    ids: [Option<u16>; 8],
    flags: [Option<bool>; 3],
    options: (bool, bool),
    text: &'a str,
}

const PRE: [&str; 8] =
    ["gpt-2", "qwen2", "llama-bpe", "smollm", "deepseek-v3", "gpt-4o", "default", "unknown"];

/// How a byte-level vocabulary writes a byte (GPT-2's table).
fn byte_text(byte: u8) -> char {
    match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
        0..=0x20 => char::from_u32(0x100 + u32::from(byte)).unwrap_or(' '),
        0x7f..=0xa0 => char::from_u32(0x121 + u32::from(byte) - 0x7f).unwrap_or(' '),
        0xad => '\u{143}',
    }
}

fn kind(number: u8) -> TokenKind {
    TokenKind::from_number(i32::from(number % 6) + 1).expect("1 to 6 are types of tokens")
}

fuzz_target!(|input: Input<'_>| {
    let bytes: Vec<String> = match (&input.model, input.all_bytes) {
        (_, false) => Vec::new(),
        (TokenizerModel::ByteLevel, true) => (0..=255).map(|byte| byte_text(byte).to_string()).collect(),
        (_, true) => (0..=255u8).map(|byte| format!("<0x{byte:02X}>")).collect(),
    };
    let byte_kind = if matches!(input.model, TokenizerModel::ByteLevel) { TokenKind::Normal } else { TokenKind::Byte };
    let tokens: Vec<&str> =
        input.tokens.iter().map(|(text, _)| *text).chain(bytes.iter().map(String::as_str)).collect();
    let mut kinds: Vec<TokenKind> = input.tokens.iter().map(|(_, number)| kind(*number)).collect();
    kinds.resize(tokens.len(), byte_kind);
    let mut scores: Vec<f32> = input.scores.iter().map(|&score| f32::from(score) / 4.0).collect();
    scores.resize(tokens.len(), 0.0);
    let merge = |merge: &Result<(u8, u8), &str>| match merge {
        Ok((left, right)) => {
            let token = |index: &u8| tokens.get(usize::from(*index)).copied().unwrap_or_default();
            format!("{} {}", token(left), token(right))
        }
        Err(text) => (*text).to_owned(),
    };
    let merges: Vec<String> = input.merges.iter().map(merge).collect();
    let id = |index: usize| input.ids[index].map(u32::from);
    let vocabulary = RawVocabulary {
        model: match input.model {
            TokenizerModel::ByteLevel => "gpt2",
            TokenizerModel::Sentencepiece => "llama",
            TokenizerModel::Gemma => "gemma4",
            TokenizerModel::Other => "other",
        },
        pre: Some(PRE[usize::from(input.pre) % PRE.len()]),
        tokens: tokens.clone(),
        kinds,
        scores,
        merges: merges.iter().map(String::as_str).collect(),
        bos: id(0),
        eos: id(1),
        eot: id(2),
        eom: id(3),
        unknown: id(4),
        fim_pre: id(5),
        fim_suf: id(6),
        fim_mid: id(7),
        fim_pad: id(5),
        fim_rep: id(6),
        fim_sep: id(7),
        add_bos: input.flags[0],
        add_eos: input.flags[1],
        add_space_prefix: input.flags[2],
    };
    let Ok(tokenizer) = Tokenizer::new(&vocabulary) else { return };
    let tokenizer = Arc::new(tokenizer);
    assert!(tokenizer.end_of_generation().iter().all(|&id| (id as usize) < tokenizer.len()));
    let options = EncodeOptions { add_special: input.options.0, parse_special: input.options.1 };
    let Ok(ids) = tokenizer.encode(input.text, options) else { return };
    assert!(ids.iter().all(|&id| tokenizer.token_bytes(id).is_some()));
    let _ = tokenizer.encode_chat(input.text);
    if let Ok(ids) = tokenizer.encode_middle(MiddlePrefix::Text(input.text), input.text, true) {
        assert!(ids.iter().all(|&id| tokenizer.token_bytes(id).is_some()));
    }
    let detokenize = DetokenizeOptions { skip_special: input.options.0, at_text_start: input.options.1 };
    let mut detokenizer = Detokenizer::new(tokenizer.clone(), detokenize);
    let mut text: String = ids.iter().map(|&id| detokenizer.push(id)).collect();
    text.push_str(&detokenizer.finish());
    // Pre-tokenizers normalize only characters outside ASCII.
    let is_plain = input.text.is_ascii() && input.options == (false, false);
    if is_plain && matches!(input.model, TokenizerModel::ByteLevel) {
        assert_eq!(String::from_utf8_lossy(&tokenizer.decode_bytes(&ids)), input.text);
    }
});
