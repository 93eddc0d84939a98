// SPDX-License-Identifier: Apache-2.0

//! Valid files with metadata that no engine should use.

use super::chain;
use super::raw::{RawGguf, STRING, U8, U32, array, pair};
use gguf::{Header, check_model};

#[test]
fn implausible_models_are_refused() {
    check_file_model(
        "llama.cpp#25821: 513 layers",
        RawGguf { pairs: vec![architecture(), llama("block_count", 513)], ..RawGguf::default() },
        "key llama.block_count is 513; the limit is 512",
    );
    check_file_model(
        "no layers",
        RawGguf { pairs: vec![architecture(), llama("block_count", 0)], ..RawGguf::default() },
        "key llama.block_count is 0",
    );
    check_file_model(
        "architecture that is no text",
        RawGguf { pairs: vec![pair("general.architecture", U32, &[0; 4])], ..RawGguf::default() },
        "key general.architecture has type u32 and cannot be read as UTF-8 string",
    );
    check_file_model(
        "layers as text",
        RawGguf {
            pairs: vec![architecture(), pair("llama.block_count", STRING, &text("2"))],
            ..RawGguf::default()
        },
        "key llama.block_count has type string and cannot be read as u32",
    );
    check_model_with(
        "vocabulary of four billion",
        vec![llama("vocab_size", u32::MAX)],
        "key llama.vocab_size is 4294967295; the limit is 1048576",
    );
    check_model_with("no context", vec![llama("context_length", 0)], "key llama.context_length is 0");
    check_model_with(
        "1025 experts",
        vec![llama("expert_count", 1025)],
        "key llama.expert_count is 1025; the limit is 1024",
    );
    check_model_with(
        "more experts used than there are",
        vec![llama("expert_count", 8), llama("expert_used_count", 9)],
        "llama.expert_used_count is 9, but the model has 8 experts",
    );
    check_model_with(
        "no experts used",
        vec![llama("expert_count", 8), llama("expert_used_count", 0)],
        "key llama.expert_used_count is 0",
    );
}

#[test]
fn implausible_attention_is_refused() {
    check_model_with(
        "no heads",
        vec![llama("attention.head_count", 0)],
        "key llama.attention.head_count is 0",
    );
    check_model_with(
        "heads of another number of layers",
        vec![array("llama.attention.head_count", U32, 3, &[1; 12])],
        "key llama.attention.head_count has 3 values, but 2 are needed",
    );
    check_model_with(
        "heads that do not divide the embedding",
        vec![llama("embedding_length", 64), llama("attention.head_count", 3)],
        "the embedding of 64 values does not divide into 3 heads, and attention.key_length is missing",
    );
    check_model_with(
        "heads that cannot share",
        vec![llama("attention.head_count", 8), llama("attention.head_count_kv", 3)],
        "layer 0: 8 attention heads are no multiple of 3 KV heads",
    );
    check_model_with(
        "key length 0",
        vec![llama("attention.head_count", 8), llama("attention.key_length", 0)],
        "key llama.attention.key_length is 0",
    );
    check_model_with(
        "rope of no dimensions",
        vec![llama("attention.head_count", 8), llama("rope.dimension_count", 0)],
        "key llama.rope.dimension_count is 0",
    );
    check_model_with(
        "rope beyond the head",
        vec![
            llama("embedding_length", 64),
            llama("attention.head_count", 8),
            llama("rope.dimension_count", 10),
        ],
        "rope.dimension_count is 10 but must be even and at most the head size",
    );
}

#[test]
fn implausible_vocabularies_are_refused() {
    let vocabulary = |case, pairs: Vec<Vec<u8>>, expected| {
        let tokens = array("tokenizer.ggml.tokens", STRING, 2, &[text("a"), text("b")].concat());
        check_file_model(
            case,
            RawGguf { pairs: [vec![tokens], pairs].concat(), ..RawGguf::default() },
            expected,
        );
    };
    vocabulary(
        "llama.cpp#26690: scores of the wrong type",
        vec![array("tokenizer.ggml.scores", U8, 2, &[0; 2])],
        "key tokenizer.ggml.scores has type array of 2 u8 and cannot be read as array of f32",
    );
    vocabulary(
        "llama.cpp#20735: fewer scores than tokens",
        vec![array("tokenizer.ggml.scores", 6, 1, &[0; 4])],
        "key tokenizer.ggml.scores has 1 values, but the vocabulary has 2 tokens",
    );
    vocabulary(
        "more types than tokens",
        vec![array("tokenizer.ggml.token_type", 5, 3, &[0; 12])],
        "key tokenizer.ggml.token_type has 3 values, but the vocabulary has 2 tokens",
    );
    vocabulary(
        "merges that are no texts",
        vec![array("tokenizer.ggml.merges", U32, 1, &[0; 4])],
        "key tokenizer.ggml.merges has type array of 1 u32 and cannot be read as array of strings",
    );
    vocabulary(
        "special token outside the vocabulary",
        vec![pair("tokenizer.ggml.eos_token_id", U32, &2_u32.to_le_bytes())],
        "key tokenizer.ggml.eos_token_id names token 2, but the vocabulary has 2 tokens",
    );
    let long = [70_000_u64.to_le_bytes().to_vec(), vec![b'x'; 70_000]].concat();
    check_file_model(
        "token of 70,000 bytes",
        RawGguf { pairs: vec![array("tokenizer.ggml.tokens", STRING, 1, &long)], ..RawGguf::default() },
        "token 0 has a text of 70000 bytes; the limit is 65536",
    );
    let many = array("tokenizer.ggml.tokens", STRING, 1 << 21, &vec![0; 8 << 21]);
    check_file_model(
        "two million tokens",
        RawGguf { pairs: vec![many], ..RawGguf::default() },
        "key tokenizer.ggml.tokens is 2097152; the limit is 1048576",
    );
}

fn architecture() -> Vec<u8> {
    pair("general.architecture", STRING, &text("llama"))
}

fn llama(name: &str, value: u32) -> Vec<u8> {
    pair(&format!("llama.{name}"), U32, &value.to_le_bytes())
}

/// Checks a model of two layers with these pairs in addition.
fn check_model_with(case: &str, pairs: Vec<Vec<u8>>, expected: &str) {
    let pairs = [vec![architecture(), llama("block_count", 2)], pairs].concat();
    check_file_model(case, RawGguf { pairs, ..RawGguf::default() }, expected);
}

fn text(value: &str) -> Vec<u8> {
    [&(value.len() as u64).to_le_bytes(), value.as_bytes()].concat()
}

fn check_file_model(case: &str, file: RawGguf, expected: &str) {
    let bytes = file.bytes();
    let header = Header::read(&bytes[..], bytes.len() as u64).unwrap();
    assert_eq!(chain(&check_model(header.metadata()).expect_err(case)), expected, "{case}");
}
