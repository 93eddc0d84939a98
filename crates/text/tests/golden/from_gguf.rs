// SPDX-License-Identifier: Apache-2.0

//! Loading fails with the key's name if tokenizer keys are missing, of the wrong type, or not
//! UTF-8.

use gguf::{Metadata, MetadataBuilder};
use text::{LoadTokenizerError, Tokenizer};

fn load(change: impl FnOnce(&mut MetadataBuilder), without: &str) -> Result<Tokenizer, LoadTokenizerError> {
    let mut complete = MetadataBuilder::default();
    complete.put("tokenizer.ggml.model", "gpt2").unwrap();
    complete.put("tokenizer.ggml.pre", "gpt-2").unwrap();
    complete.put("tokenizer.ggml.tokens", &["a", "b", "ab"][..]).unwrap();
    complete.put("tokenizer.ggml.merges", &["a b"][..]).unwrap();
    let complete = Metadata::parse(complete.bytes().to_vec()).unwrap();
    let mut changed = MetadataBuilder::default();
    changed.copy(&complete, |key| key != without).unwrap();
    change(&mut changed);
    Tokenizer::from_metadata(&Metadata::parse(changed.bytes().to_vec()).unwrap())
}

#[test]
fn complete_file_loads() {
    assert_eq!(load(|_| (), "").unwrap().len(), 3);
}

#[test]
fn missing_keys_are_named() {
    for key in ["tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens"] {
        let error = load(|_| (), key).unwrap_err();
        assert!(
            matches!(error, LoadTokenizerError::MissingKey { key: missing } if missing == key),
            "{key}: {error}"
        );
    }
}

#[test]
fn keys_of_the_wrong_type_are_named() {
    for key in ["tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.model"] {
        let error = load(|file| file.put(key, 5u32).unwrap(), key).unwrap_err();
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert!(source.contains(key), "{source}");
    }
    let error = load(|file| file.put("tokenizer.ggml.add_bos_token", "yes").unwrap(), "").unwrap_err();
    assert!(matches!(error, LoadTokenizerError::Metadata { .. }), "{error}");
}

#[test]
fn unknown_types_of_tokens_are_named() {
    let error =
        load(|file| file.put("tokenizer.ggml.token_type", &[1i32, 7, 1][..]).unwrap(), "").unwrap_err();
    assert!(matches!(error, LoadTokenizerError::BadTokenType { id: 1, number: 7 }), "{error}");
}

#[test]
fn tokens_that_are_not_text_are_named() {
    let tokens = [b"a".to_vec(), b"b".to_vec(), b"\xff".to_vec()];
    let error = load(|file| file.put("tokenizer.ggml.tokens", &tokens[..]).unwrap(), "tokenizer.ggml.tokens")
        .unwrap_err();
    assert!(
        matches!(error, LoadTokenizerError::NotUtf8 { key: "tokenizer.ggml.tokens", index: 2 }),
        "{error}"
    );
}

#[test]
fn a_file_may_say_that_its_model_has_no_tokenizer() {
    let error = load(|file| file.put("tokenizer.ggml.model", "none").unwrap(), "tokenizer.ggml.model");
    assert!(matches!(error, Err(LoadTokenizerError::NoTokenizer)), "{error:?}");
    let mut file = MetadataBuilder::default();
    file.put("tokenizer.ggml.eot_token_id", 3u32).unwrap();
    file.put("tokenizer.ggml.eos_token_id", 5u32).unwrap();
    file.put("tokenizer.ggml.eom_token_id", u32::MAX).unwrap();
    let file = Metadata::parse(file.bytes().to_vec()).unwrap();
    assert_eq!(text::end_of_generation_keys(&file).unwrap(), [3, 5]);
}

/// Converters write -1, as `gguf::check_model` allows.
#[test]
fn a_special_token_of_minus_one_is_absent() {
    let tokenizer = load(|file| file.put("tokenizer.ggml.eos_token_id", u32::MAX).unwrap(), "").unwrap();
    assert_eq!(tokenizer.eos(), None);
    assert!(tokenizer.end_of_generation().is_empty());
}
