// SPDX-License-Identifier: Apache-2.0

//! Hostile input: long runs, huge texts, and vocabularies that contradict themselves.

use std::time::{Duration, Instant};

use proptest::prelude::*;

use crate::files::{file_metadata, tree_data};
use text::{
    EncodeError, EncodeOptions, LoadTokenizerError, MAX_INPUT_BYTES, MiddlePrefix, RawVocabulary, TokenKind,
    Tokenizer,
};

fn tokenizer(name: &str) -> Tokenizer {
    Tokenizer::from_metadata(&file_metadata(&tree_data().join(format!("{name}.gguf")))).unwrap()
}

#[test]
fn a_megabyte_of_anything_takes_about_linear_time() {
    let patterns = [
        " ",
        "a",
        "\n",
        " \n",
        "1",
        "!",
        "\u{301}",
        "e\u{301}\u{327}",
        "A",
        "aA",
        "'s",
        "\u{3000}",
        "<|im_start|",
        "é",
        " a",
    ];
    for name in ["byte-level", "sentencepiece"] {
        let tokenizer = tokenizer(name);
        for pattern in patterns {
            let time = |bytes: usize| {
                let text = pattern.repeat(bytes / pattern.len());
                let start = Instant::now();
                let ids = tokenizer
                    .encode(&text, EncodeOptions { add_special: false, parse_special: true })
                    .unwrap();
                assert!(!ids.is_empty());
                start.elapsed()
            };
            // The lower bound keeps a busy machine from failing the test. Quadratic time would be
            // 256 times as long.
            let short = time(1 << 16).max(Duration::from_millis(20));
            let long = time(1 << 20);
            assert!(long < short * 100, "{name}, {pattern:?}: 64 KiB in {short:?}, 1 MiB in {long:?}");
        }
    }
}

#[test]
fn input_above_the_bound_is_refused() {
    let error = tokenizer("byte-level")
        .encode(&"a".repeat(MAX_INPUT_BYTES + 1), EncodeOptions::default())
        .unwrap_err();
    assert!(matches!(error, EncodeError::TooLong { bytes } if bytes == MAX_INPUT_BYTES + 1));
}

fn small() -> RawVocabulary<'static> {
    RawVocabulary {
        model: "gpt2",
        pre: Some("gpt-2"),
        tokens: vec!["a", "b", "ab", "<s>"],
        kinds: vec![TokenKind::Normal, TokenKind::Normal, TokenKind::Normal, TokenKind::Control],
        merges: vec!["a b"],
        ..RawVocabulary::default()
    }
}

fn refused(change: impl FnOnce(&mut RawVocabulary<'static>)) -> LoadTokenizerError {
    let mut vocabulary = small();
    change(&mut vocabulary);
    Tokenizer::new(&vocabulary).unwrap_err()
}

#[test]
fn contradictory_vocabularies_are_refused_by_name() {
    use LoadTokenizerError as E;
    assert!(Tokenizer::new(&small()).is_ok());
    assert!(matches!(refused(|v| v.model = "bert"), E::UnknownModel { model } if model == "bert"));
    assert!(matches!(refused(|v| v.pre = Some("gpt-3")), E::UnknownPre { pre } if pre == "gpt-3"));
    assert!(matches!(refused(|v| v.pre = None), E::MissingKey { key: "tokenizer.ggml.pre" }));
    assert!(matches!(refused(|v| v.tokens.clear()), E::MissingKey { key: "tokenizer.ggml.tokens" }));
    assert!(matches!(refused(|v| v.kinds.truncate(2)), E::LengthMismatch { found: 2, tokens: 4, .. }));
    assert!(matches!(refused(|v| v.tokens[1] = "a"), E::DuplicateToken { first: 0, second: 1 }));
    assert!(matches!(refused(|v| v.eos = Some(4)), E::SpecialOutOfRange { id: 4, tokens: 4, .. }));
    assert!(matches!(refused(|v| v.add_bos = Some(true)), E::SpecialMissing { .. }));
    for merge in ["a", "a c", "b a", "", " ", "a  b"] {
        assert!(matches!(refused(|v| v.merges.push(merge)), E::BadMerge { rank: 1, .. }), "{merge:?}");
    }
    let spm = |v: &mut RawVocabulary<'static>| (v.model, v.bos, v.scores) = ("llama", Some(3), vec![0.0; 4]);
    assert!(matches!(
        refused(|v| {
            spm(v);
            v.scores[2] = f32::NAN
        }),
        E::BadScore { id: 2 }
    ));
    assert!(matches!(
        refused(|v| {
            spm(v);
            v.scores.pop();
        }),
        E::LengthMismatch { found: 3, .. }
    ));
    assert!(matches!(
        refused(|v| {
            spm(v);
            v.kinds[2] = TokenKind::Byte
        }),
        E::BadByteToken { id: 2 }
    ));
}

#[test]
fn text_without_a_token_is_an_error_not_a_gap() {
    let tokenizer = Tokenizer::new(&small()).unwrap();
    assert_eq!(tokenizer.encode("abba", EncodeOptions::default()).unwrap(), [2, 1, 0]);
    let error = tokenizer.encode("abc", EncodeOptions::default()).unwrap_err();
    assert!(matches!(error, EncodeError::NoTokenForByte { byte: b'c' }));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    /// Any vocabulary gives an error or a working tokenizer.
    #[test]
    fn any_vocabulary_loads_or_is_refused(
        model in prop::sample::select(vec!["gpt2", "llama", "gemma4"]),
        pre in prop::option::weighted(0.9, prop::sample::select(vec!["qwen2", "smollm", "llama-bpe"])),
        tokens in prop::collection::btree_set("[abĠ▁ <>é]{0,3}|[abĠ▁]", 4..12),
        kinds in prop::collection::vec(prop_oneof![4 => Just(1), 1 => 2i32..=5], 12..14),
        scores in prop::collection::vec(-9f32..9.0, 12),
        merges in prop::collection::vec("[abĠ▁] [abĠ▁]", 0..2),
        ids in prop::collection::vec(prop::option::weighted(0.4, 0u32..5), 8),
        flags in prop::collection::vec(prop::option::of(prop::bool::weighted(0.2)), 3),
        text in "[abĠ▁ <>é\n0x4]{0,20}",
    ) {
        let vocabulary = RawVocabulary {
            model,
            pre,
            tokens: tokens.iter().map(String::as_str).collect(),
            kinds: kinds.into_iter().map(|kind| TokenKind::from_number(kind).unwrap()).collect(),
            scores: scores[..tokens.len()].to_vec(),
            merges: merges.iter().map(String::as_str).collect(),
            bos: ids[0], eos: ids[1], eot: ids[2], eom: ids[3], unknown: ids[4],
            fim_pre: ids[5], fim_suf: ids[6], fim_mid: ids[7],
            fim_pad: ids[5], fim_rep: ids[6], fim_sep: ids[7],
            add_bos: flags[0], add_eos: flags[1], add_space_prefix: flags[2],
        };
        if let Ok(tokenizer) = Tokenizer::new(&vocabulary) {
            let options = EncodeOptions { add_special: true, parse_special: true };
            if let Ok(ids) = tokenizer.encode(&text, options) {
                prop_assert!(ids.iter().all(|&id| tokenizer.token_bytes(id).is_some()));
                tokenizer.decode_bytes(&ids);
            }
            if let Ok(ids) = tokenizer.encode_middle(MiddlePrefix::Text(&text), &text, true) {
                prop_assert!(ids.iter().all(|&id| tokenizer.token_bytes(id).is_some()));
            }
        }
    }
}
