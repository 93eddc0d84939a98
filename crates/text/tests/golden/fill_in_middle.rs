// SPDX-License-Identifier: Apache-2.0

//! Prompts for the middle are those that the makers of the models document.

use gguf::{Metadata, MetadataBuilder};
use text::{EncodeMiddleError, EncodeOptions, MiddlePrefix, RawVocabulary, TokenKind, Tokenizer};

use crate::files::{file_metadata, full_data, tree_data};

fn with_keys(metadata: &Metadata, keys: [&str; 3], ids: [u32; 3]) -> Tokenizer {
    let mut file = MetadataBuilder::default();
    file.copy(metadata, |_| true).unwrap();
    for (key, id) in keys.into_iter().zip(ids) {
        file.put(&format!("tokenizer.ggml.{key}_token_id"), id).unwrap();
    }
    Tokenizer::from_metadata(&Metadata::parse(file.bytes().to_vec()).unwrap()).unwrap()
}

/// The example of Qwen2.5-Coder's documentation. Qwen3 has the same tokens.
#[test]
fn the_prompt_of_qwen_is_the_documented_one() {
    let Some(folder) = full_data("data/vocab") else { return };
    let tokenizer = Tokenizer::from_metadata(&file_metadata(&folder.join("qwen3.gguf"))).unwrap();
    let prefix = "def quicksort(arr):\n    if len(arr) <= 1:\n        return arr\n    ";
    let suffix = "\n    return quicksort(left) + middle + quicksort(right)";
    let documented = format!("<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>");
    let options = EncodeOptions { add_special: true, parse_special: true };
    let expected = tokenizer.encode(&documented, options).unwrap();
    assert_eq!(tokenizer.encode_middle(MiddlePrefix::Text(prefix), suffix, true).unwrap(), expected);
    let ids = tokenizer.encode(prefix, EncodeOptions::default()).unwrap();
    assert_eq!(tokenizer.encode_middle(MiddlePrefix::Tokens(&ids), suffix, true).unwrap(), expected);
    // Code may contain the names of the tokens.
    let hostile = tokenizer.encode_middle(MiddlePrefix::Text("<|fim_middle|>"), "<|im_end|>", true).unwrap();
    assert_eq!(hostile.iter().filter(|&&id| tokenizer.kind(id) == Some(TokenKind::Control)).count(), 3);
}

/// Code Llama: `[BOS, PRE, *encode(prefix), SUF, *encode_infilling(suffix), MID]`, where the suffix
/// gets no space. Its files have keys of the older names.
#[test]
fn a_prompt_of_code_llama_has_a_space_before_the_prefix_only() {
    let metadata = file_metadata(&tree_data().join("sentencepiece.gguf"));
    let tokenizer = with_keys(&metadata, ["prefix", "suffix", "middle"], [1, 2, 0]);
    let plain = |text: &str| tokenizer.encode(text, EncodeOptions::default()).unwrap();
    let middle = |suffix: &str| tokenizer.encode_middle(MiddlePrefix::Text("a b"), suffix, false).unwrap();
    let expected = [&[1][..], &plain("a b"), &[2], &plain("a"), &[0]].concat();
    // What `encode` gets a space before is the text without its own.
    assert_eq!(middle(" a"), expected);
    assert_ne!(middle("a"), expected);
    assert_eq!(middle(""), [&[1][..], &plain("a b"), &[2, 0]].concat());
}

#[test]
fn a_prompt_begins_with_the_bos_that_the_file_asks_for() {
    let metadata = file_metadata(&tree_data().join("byte-level.gguf"));
    let tokenizer = with_keys(&metadata, ["fim_pre", "fim_suf", "fim_mid"], [5, 6, 7]);
    let middle = |add_special| tokenizer.encode_middle(MiddlePrefix::Text(""), "", add_special).unwrap();
    assert_eq!(middle(false), [5, 6, 7]);
    assert_eq!(middle(true), [tokenizer.bos().unwrap(), 5, 6, 7]);
}

#[test]
fn a_vocabulary_without_the_tokens_is_refused() {
    let vocabulary = RawVocabulary {
        model: "gpt2",
        pre: Some("qwen2"),
        tokens: vec!["a", "<|fim_prefix|>"],
        fim_pre: Some(1),
        ..RawVocabulary::default()
    };
    let tokenizer = Tokenizer::new(&vocabulary).unwrap();
    let error = tokenizer.encode_middle(MiddlePrefix::Text("a"), "a", true).unwrap_err();
    assert!(matches!(error, EncodeMiddleError::NoTokens), "{error}");
}
