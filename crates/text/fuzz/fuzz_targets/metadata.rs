// SPDX-License-Identifier: Apache-2.0

//! Fuzzes the way from a file's metadata to a tokenizer and a chat template, which the child that
//! checks models and the router go: any metadata gives both, or an error that can be printed.

#![no_main]

use gguf::Metadata;
use libfuzzer_sys::fuzz_target;
use text::{ChatTemplate, EncodeOptions, LoadTokenizerError, Tokenizer};

fuzz_target!(|section: &[u8]| {
    let Ok(metadata) = Metadata::parse(section.to_vec()) else { return };
    match Tokenizer::from_metadata(&metadata) {
        Ok(tokenizer) => {
            let options = EncodeOptions { add_special: true, parse_special: true };
            for text in ["a b\n  c", "<s>é\u{2581}\u{fffd}\0", "0x41 <0x41>"] {
                if let Ok(ids) = tokenizer.encode(text, options) {
                    assert!(ids.iter().all(|&id| (id as usize) < tokenizer.len()));
                }
            }
            if let Err(error) = ChatTemplate::from_metadata(&metadata, &tokenizer) {
                assert!(!error.to_string().is_empty());
            }
        }
        Err(LoadTokenizerError::NoTokenizer) => {
            let _ = text::end_of_generation_keys(&metadata);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});
