// SPDX-License-Identifier: Apache-2.0

//! Compares token ids with those of HF `tokenizers`, for full and for reduced vocabularies
//! (tests/data/README.md).

use std::path::Path;
use std::sync::{Arc, LazyLock};

use crate::files::{file_metadata, full_data, tree_data};
use proptest::prelude::*;
use serde::Deserialize;
use text::{DetokenizeOptions, Detokenizer, EncodeOptions, Tokenizer};

#[derive(Deserialize)]
struct GoldenIds {
    text: String,
    parse_special: bool,
    add_special: bool,
    ids: Vec<u32>,
}

fn tokenizer(folder: &Path, name: &str) -> Tokenizer {
    Tokenizer::from_metadata(&file_metadata(&folder.join(format!("{name}.gguf")))).unwrap()
}

/// Checks every line of NAME.jsonl and returns the number of lines.
fn check(folder: &Path, name: &str) -> usize {
    let lines = std::fs::read_to_string(folder.join(format!("{name}.jsonl"))).unwrap();
    check_lines(&tokenizer(folder, name), name, &lines)
}

fn check_lines(tokenizer: &Tokenizer, name: &str, lines: &str) -> usize {
    let mut wrong = vec![];
    for (number, line) in (1..).zip(lines.lines()) {
        let vector: GoldenIds = serde_json::from_str(line).unwrap();
        let options = EncodeOptions { add_special: vector.add_special, parse_special: vector.parse_special };
        let ids = tokenizer.encode(&vector.text, options).unwrap();
        if ids != vector.ids {
            let (text, expected) = (&vector.text, &vector.ids);
            wrong.push(format!(
                "{name}:{number}: {text:.200?}\n  expected {expected:.300?}\n  got      {ids:.300?}"
            ));
        }
    }
    assert!(wrong.is_empty(), "{} lines differ:\n{}", wrong.len(), wrong.join("\n"));
    lines.lines().count()
}

#[test]
fn small_vocabularies_give_the_expected_ids() {
    assert_eq!(check(&tree_data(), "byte-level"), 356);
    assert_eq!(check(&tree_data(), "sentencepiece"), 326);
}

#[test]
fn full_vocabularies_give_the_expected_ids() {
    let Some(folder) = full_data("data/vocab") else { return };
    for (name, lines) in
        [("qwen3", 338), ("llama3", 314), ("tekken", 314), ("mistral-spm", 314), ("gemma", 344)]
    {
        assert_eq!(check(&folder, name), lines);
    }
}

/// Gemma 3's vocabulary as its files store it: model "llama", one score per token, no space prefix,
/// and runs of blanks as user-defined tokens.
#[test]
fn gemma_3_gives_the_expected_ids_by_scores() {
    const USER_DEFINED: i32 = 4;
    let Some(folder) = full_data("data/vocab") else { return };
    let merging = file_metadata(&folder.join("gemma.gguf"));
    let tokens = merging.require::<gguf::StringArray<'_>>("tokenizer.ggml.tokens").unwrap();
    // An earlier token has a higher score; HF derives the list of merges from scores in this order.
    let mut scores: Vec<f32> = (0..tokens.len()).map(|id| -(id as f32)).collect();
    let mut types: Vec<i32> = merging.require("tokenizer.ggml.token_type").unwrap();
    for (id, token) in tokens.iter().enumerate() {
        let text = std::str::from_utf8(token).unwrap();
        if text.chars().count() > 1
            && ["\u{2581}", "\n", "\t"].iter().any(|&blank| text.replace(blank, "").is_empty())
        {
            // SentencePiece gives user-defined tokens the score zero.
            (types[id], scores[id]) = (USER_DEFINED, 0.0);
        }
    }
    let replaced = ["model", "pre", "merges", "scores", "token_type", "add_space_prefix"];
    let replaced = replaced.map(|key| format!("tokenizer.ggml.{key}"));
    let mut builder = gguf::MetadataBuilder::default();
    builder.copy(&merging, |key| !replaced.iter().any(|replaced| replaced == key)).unwrap();
    builder.put("tokenizer.ggml.model", "llama").unwrap();
    builder.put("tokenizer.ggml.scores", &scores[..]).unwrap();
    builder.put("tokenizer.ggml.token_type", &types[..]).unwrap();
    builder.put("tokenizer.ggml.add_space_prefix", false).unwrap();
    let by_scores = gguf::Metadata::parse(builder.bytes().to_vec()).unwrap();
    let lines = std::fs::read_to_string(folder.join("gemma.jsonl")).unwrap();
    assert_eq!(check_lines(&Tokenizer::from_metadata(&by_scores).unwrap(), "gemma by scores", &lines), 344);
}

#[test]
fn full_vocabularies_end_generations_where_their_models_do() {
    let Some(folder) = full_data("data/vocab") else { return };
    for (name, ends) in [
        // llama.cpp also has 128247 here, Qwen3's ordinary token "</s>".
        ("qwen3", &[151_643, 151_645, 151_662, 151_663, 151_664][..]),
        ("llama3", &[128_001, 128_009]),
        ("tekken", &[2]),
        ("mistral-spm", &[2]),
    ] {
        assert_eq!(tokenizer(&folder, name).end_of_generation(), ends, "{name}");
    }
}

fn stream(tokenizer: &Arc<Tokenizer>, ids: &[u32]) -> String {
    let options = DetokenizeOptions { skip_special: false, at_text_start: true };
    let mut detokenizer = Detokenizer::new(Arc::clone(tokenizer), options);
    let mut text: String = ids.iter().map(|&id| detokenizer.push(id)).collect();
    text.push_str(&detokenizer.finish());
    text
}

#[test]
fn full_vocabularies_give_the_text_back() {
    let Some(folder) = full_data("data/vocab") else { return };
    // qwen3 is left out because it normalizes text.
    for name in ["llama3", "tekken", "mistral-spm", "gemma"] {
        let tokenizer = Arc::new(tokenizer(&folder, name));
        for line in std::fs::read_to_string(folder.join(format!("{name}.jsonl"))).unwrap().lines() {
            let text = serde_json::from_str::<GoldenIds>(line).unwrap().text;
            let ids = tokenizer.encode(&text, EncodeOptions::default()).unwrap();
            // A U+2581 in the text decodes to a space. tekken's file has user-defined tokens that
            // contain U+2581.
            if !text.contains('\u{2581}') {
                assert_eq!(stream(&tokenizer, &ids), text, "{name}");
            }
        }
    }
}

#[test]
fn chat_prompts_get_one_bos() {
    let tokenizer = tokenizer(&tree_data(), "byte-level");
    let without = tokenizer.encode_chat("<|im_start|>user").unwrap();
    assert_eq!(without[..2], [0, 1]);
    assert_eq!(tokenizer.encode_chat("<|endoftext|><|im_start|>user").unwrap(), without);
}

static SMALL: LazyLock<[(&str, Arc<Tokenizer>); 2]> = LazyLock::new(|| {
    ["byte-level", "sentencepiece"].map(|name| (name, Arc::new(tokenizer(&tree_data(), name))))
});

proptest! {
    #[test]
    fn any_text_survives_both_ways(text in "(\\PC|[ \n\t<|>a-f]|[\u{0}-\u{1f}]){0,40}") {
        for (name, tokenizer) in SMALL.iter() {
            let ids = tokenizer.encode(&text, EncodeOptions::default()).unwrap();
            let back = stream(tokenizer, &ids);
            if *name == "byte-level" {
                prop_assert_eq!(back, unicode_normalization::UnicodeNormalization::nfc(text.as_str()).collect::<String>());
            } else if !text.contains('\u{2581}') && !text.contains("<extra>") {
                prop_assert_eq!(&back, &text);
            }
        }
    }
}
