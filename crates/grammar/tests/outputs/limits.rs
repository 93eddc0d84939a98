// SPDX-License-Identifier: Apache-2.0

//! Large grammars work, and a grammar that exceeds a limit is refused with that limit when it is
//! compiled.

use std::collections::HashSet;

use grammar::{CHOICE_BYTES_MAX, CompiledGrammar, GrammarSource};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

use crate::cases;
use crate::schemas::strict;
use crate::token_chooser::{GeneratedOutput, TOKEN_CHOOSERS, accepts_text, generate};
use crate::vocabularies::{DEMO, all, compile};

/// Outputs of the grammar: several of every chooser. None fails.
fn outputs(grammar: &CompiledGrammar) -> Vec<String> {
    let choosers = TOKEN_CHOOSERS.into_iter().flat_map(|chooser| (0..4).map(move |seed| (chooser, seed)));
    let outputs = choosers.filter_map(|(chooser, seed)| {
        match generate(&DEMO, chooser, grammar.matcher(), seed, 2000).unwrap() {
            GeneratedOutput::Finished(tokens) => Some(String::from_utf8(DEMO.text(&tokens)).unwrap()),
            GeneratedOutput::Truncated(_) => None,
        }
    });
    outputs.collect()
}

fn compiled(source: &GrammarSource) -> CompiledGrammar {
    compile(source).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn an_output_is_one_of_fifty_thousand_choices() {
    let choices: Vec<String> = (0..50_000).map(|n| format!("product {}", n * 7919 % 100_000)).collect();
    let known: HashSet<&String> = choices.iter().collect();
    let grammar = compiled(&GrammarSource::Choice(choices.clone()));
    let found = outputs(&grammar);
    assert!(!found.is_empty() && found.iter().all(|text| known.contains(text)), "{found:?}");
    for text in choices.iter().step_by(5000) {
        assert!(accepts_text(&DEMO, grammar.matcher(), text), "{text}");
    }
    for other in ["product", "product 100000"] {
        assert!(!accepts_text(&DEMO, grammar.matcher(), other), "{other}");
    }
}

#[test]
fn schemas_and_grammars_with_thousands_of_alternatives_are_served() {
    let object = |n: usize| {
        let properties = (0..15).map(|p| (format!("field{n}_{p}"), json!({"type": "integer"})));
        let properties: Map<String, Value> = properties.collect();
        json!({"type": "object", "properties": properties, "additionalProperties": false})
    };
    let any_of: Vec<Value> = (0..50).map(object).collect();
    for text in outputs(&compiled(&strict(&json!({"anyOf": any_of})))) {
        assert!(serde_json::from_str::<Value>(&text).unwrap().is_object(), "{text}");
    }
    let rules: String = (0..2000).map(|n| format!("r{n}: \"word{n} \" /[a-z]{{1,5}}/\n")).collect();
    let names: Vec<String> = (0..2000).map(|n| format!("r{n}")).collect();
    let lark = GrammarSource::Lark(format!("start: {}\n{rules}", names.join(" | ")));
    let found = outputs(&compiled(&lark));
    assert!(!found.is_empty() && found.iter().all(|text| text.starts_with("word")), "{found:?}");
}

#[test]
fn a_grammar_that_exceeds_a_limit_is_refused_with_the_limit() {
    let names: Vec<String> = (0..3900).map(|n| format!("r{n}")).collect();
    // Each alternative takes several items.
    let rules: String = (0..3900).map(|n| format!("r{n}: s\n")).collect();
    let wide = format!("start: {}\n{rules}s: \"a\" | \"b\" start\n", names.join(" | "));
    for (source, expected) in [
        (GrammarSource::Choice(vec!["x".repeat(CHOICE_BYTES_MAX)]), "allowed are at most 1048576"),
        (GrammarSource::Lark("x".repeat(300 << 10)), "allowed are at most 262144"),
        (GrammarSource::Lark(wide), "max is 10000"),
    ] {
        let error = compile(&source).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(error.contains(expected) && error.len() < 600, "{expected}: {error:?}");
    }
}

proptest! {
    #![proptest_config(cases(60))]

    /// Every chooser ends with one of the texts, whatever prefixes they share.
    #[test]
    fn an_output_is_one_of_the_choices(
        choices in proptest::collection::vec("[abäü🙂]{0,6}", 1..30),
        seed in any::<u64>(),
    ) {
        let grammar = compiled(&GrammarSource::Choice(choices.clone()));
        for chooser in TOKEN_CHOOSERS {
            let Ok(GeneratedOutput::Finished(tokens)) = generate(&DEMO, chooser, grammar.matcher(), seed, 100)
            else {
                panic!("{chooser:?} did not finish one of {choices:?}")
            };
            let text = String::from_utf8(DEMO.text(&tokens)).unwrap();
            prop_assert!(choices.contains(&text), "{text:?} of {choices:?}");
        }
        for text in &choices {
            prop_assert!(accepts_text(&DEMO, grammar.matcher(), text), "{text:?} of {choices:?}");
        }
    }
}

#[test]
fn choices_work_in_every_vocabulary() {
    for words in all() {
        let choices: Vec<String> = ["yes", "yes, but", "no", "über", "🙂"].map(String::from).into();
        let source = GrammarSource::Choice(choices.clone());
        let grammar = CompiledGrammar::compile(&source, &words.vocabulary()).unwrap();
        for chooser in TOKEN_CHOOSERS {
            let Ok(GeneratedOutput::Finished(tokens)) = generate(&words, chooser, grammar.matcher(), 3, 100)
            else {
                panic!("{}: {chooser:?} did not finish", words.name)
            };
            let text = String::from_utf8(words.text(&tokens)).unwrap();
            assert!(choices.contains(&text), "{}: {text:?}", words.name);
        }
    }
}
