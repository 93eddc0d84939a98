// SPDX-License-Identifier: Apache-2.0

//! Invalid sources are refused with a reason and never cause a panic.

use grammar::{GrammarSource, MatchError};
use proptest::prelude::*;
use serde_json::json;

use crate::cases;
use crate::schemas::strict;
use crate::token_chooser::{TokenChooser, generate};
use crate::vocabularies::{DEMO, compile};

proptest! {
    #![proptest_config(cases(60))]

    /// Every text gives an error or a grammar, never a panic.
    #[test]
    fn hostile_sources_are_refused_or_compiled(text in "[\\[\\]{}()a-z0-9:|*+?.\"\\\\/^$,\n -]{0,60}") {
        for source in [
            GrammarSource::Regex(text.clone()),
            GrammarSource::Lark(text.clone()),
            GrammarSource::Lark(format!("start: {text}")),
            GrammarSource::Gbnf(format!("root ::= {text}")),
            GrammarSource::JsonSchema { schema: text.clone(), lenient: true },
            GrammarSource::Choice(vec![text.clone()]),
        ] {
            let refused = compile(&source).err().map(|error| error.to_string()).unwrap_or_default();
            // llguidance catches its own panics in builds that unwind, and reports them as errors.
            prop_assert!(!refused.contains("panic"), "{refused}");
        }
    }
}

#[test]
fn sources_that_cannot_be_enforced_or_satisfied_are_refused_with_a_reason() {
    let deep = |open: &str, close: &str| format!("{}a{}", open.repeat(200), close.repeat(200));
    for (source, expected) in [
        (strict(&json!({"type": "strin"})), "strin"),
        (GrammarSource::JsonSchema { schema: "{".into(), lenient: false }, "not JSON"),
        (GrammarSource::JsonSchema { schema: "3".into(), lenient: false }, "object or a boolean"),
        (GrammarSource::JsonSchema { schema: "false".into(), lenient: false }, "matches"),
        (strict(&json!({"type": "integer", "minimum": 5, "maximum": 4})), "minimum"),
        (strict(&json!({"type": "object", "unevaluatedProperties": false})), "unevaluatedProperties"),
        (strict(&json!({"type": "array", "contains": {"type": "integer"}})), "#/contains"),
        (GrammarSource::Regex("(".into()), "regex"),
        (GrammarSource::Regex(String::new()), "empty"),
        (GrammarSource::Regex(deep("(", ")")), "deeper"),
        (GrammarSource::Lark("start: other".into()), "other"),
        (GrammarSource::Lark(deep("start: (", ")")), "deeper"),
        (GrammarSource::Lark("start: %json {\"multipleOf\": 764913} | \"a\"".into()), "multipleOf"),
        (
            GrammarSource::Lark("start: %json {\"multipleOf\": 997} | %json {\"multipleOf\": 991}".into()),
            "multipleOf",
        ),
        (GrammarSource::Gbnf("root ::= x".into()), "\"x\""),
        (GrammarSource::Choice(vec![]), "empty"),
        (GrammarSource::Regex("a".repeat(300 << 10)), "bytes"),
    ] {
        let error = compile(&source).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(error.to_lowercase().contains(&expected.to_lowercase()), "{expected}: {error:?}");
        assert!(error.len() < 600 && !error.contains("backtrace"), "{error}");
    }
    assert!(compile(&GrammarSource::Lark("start: \"<\" %json {\"multipleOf\": 100} \">\"".into())).is_ok());
    let lenient = GrammarSource::JsonSchema {
        schema: r#"{"type": "array", "contains": {"type": "integer"}}"#.into(),
        lenient: true,
    };
    assert!(compile(&lenient).is_ok());
}

/// Each schema is well-formed, but no value satisfies it.
#[test]
fn schemas_that_no_value_satisfies_are_refused_with_a_reason() {
    for (schema, words) in [
        (json!({"type": "integer", "minimum": 5, "maximum": 3}), "minimum (5) is greater than maximum (3)"),
        (json!({"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2}), "contains no integer"),
        (json!({"type": "integer", "minimum": 7, "maximum": 9, "multipleOf": 5}), "multiple of 5"),
        (json!({"type": "number", "minimum": 1, "exclusiveMaximum": 1}), "equal to exclusiveMaximum"),
        (
            json!({"type": "string", "minLength": 5, "maxLength": 3}),
            "minLength (5) is greater than maxLength (3)",
        ),
        (json!({"type": "string", "pattern": "^a{5}$", "maxLength": 3}), "Regex is empty"),
        (json!({"type": "string", "pattern": "^x", "format": "date"}), "Regex is empty"),
        (json!({"type": "string", "enum": [1, 2]}), "incompatible types"),
        (json!({"type": "array", "minItems": 3, "maxItems": 2}), "minItems (3) is greater than maxItems (2)"),
        (json!({"type": "array", "items": false, "minItems": 1}), "required item"),
        (json!({"type": "object", "minProperties": 2, "maxProperties": 1}), "minProperties > maxProperties"),
        (json!({"type": "object", "properties": {"a": false}, "required": ["a"]}), "required property 'a'"),
        (
            json!({"type": "object", "required": ["a"], "additionalProperties": false}),
            "required property 'a'",
        ),
        (json!({"allOf": [{"type": "string"}, {"type": "integer"}]}), "incompatible types"),
        (json!({"enum": []}), "anyOf is empty"),
        (json!({"type": []}), "anyOf is empty"),
        (json!({"anyOf": []}), "anyOf is empty"),
        (json!({"oneOf": []}), "oneOf is empty"),
        (json!({"not": {}}), "#/not: the keyword \"not\" cannot be enforced"),
        (json!({"$ref": "#"}), "matches"),
        (json!({"$ref": "#/$defs/none"}), "not found"),
        (json!(false), "matches"),
    ] {
        let error = compile(&strict(&schema)).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(error.contains(words) && error.len() < 600, "{schema}: {error:?}");
    }
}

/// The automaton tracks which of the last characters were an "a". Random text visits ever more of
/// its states.
#[test]
fn a_grammar_that_becomes_too_complex_during_an_output_is_an_error() {
    for lark in [
        "start: A\nA: /[a-z ]*a[a-z ]{40}[0-9]/ & /[a-z ]*e[a-z ]{31}[a-z0-9]+/",
        "start: A\nA: /(.|\\n)*a(.|\\n){300}[0-9]/",
    ] {
        let grammar = compile(&GrammarSource::Lark(lark.to_owned())).unwrap();
        for seed in 0..3 {
            let output = generate(&DEMO, TokenChooser::Indifferent, grammar.matcher(), seed, 600);
            assert_eq!(output.err(), Some(MatchError::TooComplex), "{lark}");
        }
    }
}
