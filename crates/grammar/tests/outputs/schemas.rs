// SPDX-License-Identifier: Apache-2.0

//! Generated JSON schemas: every finished output is JSON and valid by an independent validator.

use std::cell::Cell;

use boon::{Compiler, SchemaIndex, Schemas};
use grammar::{CompiledGrammar, GrammarSource};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::{Map, Value, json};
use text::EncodeOptions;

use crate::cases;
use crate::token_chooser::{GeneratedOutput, TOKEN_CHOOSERS, TokenChooser, accepts_text, generate};
use crate::vocabularies::{DEMO, NamedTokenizer, all, compile};

struct Validator {
    schemas: Schemas,
    whole: SchemaIndex,
}

impl Validator {
    fn of(schema: &Value) -> Self {
        const PLACE: &str = "https://schemas.invalid/whole";
        let (mut schemas, mut compiler) = (Schemas::new(), Compiler::new());
        compiler.enable_format_assertions();
        compiler.add_resource(PLACE, schema.clone()).unwrap();
        let whole = compiler.compile(PLACE, &mut schemas).unwrap();
        Self { schemas, whole }
    }

    fn check(&self, value: &Value) -> Result<(), String> {
        self.schemas.validate(value, self.whole).map_err(|error| error.to_string())
    }
}

pub(crate) fn strict(schema: &Value) -> GrammarSource {
    GrammarSource::JsonSchema { schema: schema.to_string(), lenient: false }
}

/// The value of a finished output, or `None` for a truncated output that could still become JSON.
fn output(
    words: &NamedTokenizer,
    model: TokenChooser,
    grammar: &CompiledGrammar,
    seed: u64,
) -> Result<Option<Value>, String> {
    let output = generate(words, model, grammar.matcher(), seed, 400).map_err(|error| error.to_string())?;
    let (GeneratedOutput::Finished(tokens) | GeneratedOutput::Truncated(tokens)) = &output;
    let text = words.text(tokens);
    match (serde_json::from_slice(&text), output) {
        (Ok(value), GeneratedOutput::Finished(_)) => Ok(Some(value)),
        (Ok(_), GeneratedOutput::Truncated(_)) => Ok(None),
        (Err(error), GeneratedOutput::Truncated(_)) if error.is_eof() => Ok(None),
        (Err(error), _) => Err(format!("{error}: {:?}", String::from_utf8_lossy(&text))),
    }
}

fn words() -> impl Strategy<Value = String> {
    "[a-z\"\\\\/ é\u{1F600}\n]{0,6}"
}

/// Any value that a schema may contain as a constant.
fn constants() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        (-9_999..9_999_i32, 1..4_i32).prop_map(|(n, digits)| json!(f64::from(n) / 10_f64.powi(digits))),
        words().prop_map(Value::from),
    ];
    leaf.prop_recursive(2, 6, 3, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
            prop::collection::btree_map(words(), inner, 0..3)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

fn numbers() -> impl Strategy<Value = Value> {
    let bound =
        || (-100_000..100_000_i32, 0..4_i32).prop_map(|(n, digits)| f64::from(n) / 10_f64.powi(digits));
    let names = (
        prop::sample::select(vec!["minimum", "exclusiveMinimum"]),
        prop::sample::select(vec!["maximum", "exclusiveMaximum"]),
    );
    prop_oneof![
        (-10_000_000_000..10_000_000_000_i64, 0..3_000_i64)
            .prop_map(|(least, more)| json!({"type": "integer", "minimum": least, "maximum": least + more})),
        (1..40_i64, -50..50_i64, 1..5_i64).prop_map(|(of, from, count)| {
            json!({"type": "integer", "multipleOf": of, "minimum": of * from, "exclusiveMaximum": of * (from + count)})
        }),
        (names, bound(), bound()).prop_map(|((lower, upper), a, b)| {
            json!({"type": "number", lower: a.min(b), upper: a.max(b) + 0.5})
        }),
        bound().prop_map(|most| json!({"type": ["integer", "null"], "maximum": most, "minimum": most - 10.0})),
    ]
}

fn texts() -> impl Strategy<Value = Value> {
    let formats =
        vec!["date", "date-time", "time", "duration", "uuid", "ipv4", "ipv6", "email", "hostname", "uri"];
    let patterns = vec![
        "^[A-Z]{2}-[0-9]{3,5}$",
        "^(foo|bar|ba[^z])$",
        "^\\d{1,3}(\\.\\d+)?$",
        "^[^a-z]{3}$",
        "^\\w+@\\w+\\.(de|org)$",
        "^a*b{2,}$",
        "^$",
        "^\"\\\\/\"$",
    ];
    prop_oneof![
        (0..4_usize, 0..9_usize).prop_map(
            |(least, more)| json!({"type": "string", "minLength": least, "maxLength": least + more})
        ),
        prop::sample::select(formats)
            .prop_map(|format| json!({"type": "string", "format": format, "maxLength": 40})),
        prop::sample::select(patterns)
            .prop_map(|pattern| json!({"type": "string", "pattern": pattern, "maxLength": 20})),
    ]
}

fn object(members: Vec<(String, (Value, bool))>, others: Option<Value>) -> Value {
    let required: Vec<&String> =
        members.iter().filter(|(_, (_, required))| *required).map(|(name, _)| name).collect();
    let required = json!(required);
    let all = members.iter().all(|(_, (_, required))| *required);
    let count = members.len();
    let properties: Map<String, Value> =
        members.into_iter().map(|(name, (schema, _))| (name, schema)).collect();
    let mut schema = json!({"type": "object", "properties": properties, "required": required});
    // The number of properties can be bounded only if all named properties are required.
    match others {
        Some(others) if all => {
            schema["patternProperties"] = json!({"^[0-9]{1,3}$": others});
            schema["maxProperties"] = json!(count + 2);
        }
        _ => {}
    }
    schema["additionalProperties"] = json!(false);
    schema
}

/// Everything except the digits of numbers is bounded, so most outputs end.
fn schemas() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        2 => Just(json!({"type": "boolean"})),
        4 => numbers(),
        4 => texts(),
        2 => prop::collection::vec(constants(), 1..4).prop_map(|values| json!({"enum": values})),
        2 => constants().prop_map(|value| json!({"const": value})),
        1 => Just(json!({"$ref": "#/$defs/shared"})),
    ];
    let inside = leaf.prop_recursive(3, 20, 4, |inner| {
        let schema = || inner.clone();
        let members = prop::collection::btree_map(words(), (schema(), any::<bool>()), 0..4)
            .prop_map(|members| members.into_iter().collect::<Vec<_>>());
        prop_oneof![
            3 => (schema(), 0..3_usize, 0..3_usize)
                .prop_map(|(items, least, more)| json!({"type": "array", "items": items, "minItems": least, "maxItems": least + more})),
            2 => (prop::collection::vec(schema(), 1..3), prop::option::of(schema())).prop_map(|(prefix, items)| {
                let most = prefix.len() + 2;
                json!({"type": "array", "prefixItems": prefix, "items": items.unwrap_or(json!(false)), "maxItems": most})
            }),
            4 => (members, prop::option::of(schema())).prop_map(|(members, others)| object(members, others)),
            2 => prop::collection::vec(schema(), 1..4).prop_map(|any| json!({"anyOf": any})),
            1 => (schema(), numbers()).prop_map(|(items, number)| json!({"oneOf": [
                {"type": "array", "items": items, "maxItems": 2}, number, {"type": "string", "maxLength": 3},
            ]})),
            1 => (schema(), schema()).prop_map(|(a, b)| json!({"allOf": [
                {"type": "object", "properties": {"a": a}, "required": ["a"]},
                {"properties": {"b": b, "a": true}, "additionalProperties": false},
            ]})),
        ]
    });
    (inside, texts()).prop_map(|(mut schema, shared)| {
        if let Value::Object(keywords) = &mut schema {
            keywords.insert("$defs".to_owned(), json!({"shared": shared}));
        }
        schema
    })
}

/// Whether the grammar accepts this JSON text. Three valid notations are not accepted: an unescaped
/// DEL, some exponents and -0.0, and letters with separate accents, which the tokenizer composes.
fn usual(text: &str) -> bool {
    let tokens = DEMO.tokenizer.encode(text, EncodeOptions::default()).unwrap();
    let unusual = ["\u{7f}", "-0.0", "e-"];
    !unusual.iter().any(|part| text.contains(part)) && DEMO.text(&tokens) == text.as_bytes()
}

/// Every finished output is valid JSON, and every truncated output could become JSON. Conversely,
/// the grammar accepts the same value in the notation of another writer.
#[test]
fn outputs_under_generated_schemas_are_json_that_validates() {
    let (outputs, whole) = (Cell::new(0), Cell::new(0));
    // A schema that cannot be satisfied (no multiple lies within its bounds) is replaced. The
    // number is limited.
    let config = Config { max_global_rejects: 60, ..cases(400) };
    let mut runner = TestRunner::new(config);
    let done = runner.run(&(schemas(), any::<u64>()), |(schema, seed)| {
        let grammar = match compile(&strict(&schema)) {
            Ok(grammar) => grammar,
            Err(error) => {
                prop_assert!(error.to_string().contains("nsatisfiable"), "{error}: {schema}");
                return Err(TestCaseError::reject("unsatisfiable"));
            }
        };
        let validator = Validator::of(&schema);
        for model in TOKEN_CHOOSERS {
            for seed in seed..seed.saturating_add(2) {
                let value = output(&DEMO, model, &grammar, seed)
                    .map_err(|error| TestCaseError::fail(format!("{model:?} under {schema}: {error}")))?;
                outputs.set(outputs.get() + 1);
                // The number of digits of a number is unbounded.
                let Some(value) = value else { continue };
                whole.set(whole.get() + 1);
                if let Err(error) = validator.check(&value) {
                    return Err(TestCaseError::fail(format!(
                        "{error}: {model:?} wrote {value} under {schema}"
                    )));
                }
                let text = value.to_string();
                prop_assert!(
                    !usual(&text) || accepts_text(&DEMO, grammar.matcher(), &text),
                    "{text} under {schema}"
                );
            }
        }
        Ok(())
    });
    done.unwrap_or_else(|error| panic!("{error}"));
    let (outputs, whole) = (outputs.get(), whole.get());
    assert!(whole * 10 > outputs * 8, "{whole} of {outputs} outputs came to an end");
}

/// A schema that refers to itself, and one with every kind of keyword.
#[test]
fn outputs_validate_with_every_vocabulary() {
    let tree = json!({
        "$defs": {"node": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 12},
                "kind": {"enum": ["leaf", "branch", "ünter \"quoted\""]},
                "weight": {"type": "number", "minimum": 0, "maximum": 1},
                "made": {"type": "string", "format": "date"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["name", "kind", "children"],
            "additionalProperties": false,
        }},
        "$ref": "#/$defs/node",
    });
    let any_object = json!({"type": "object"});
    for words in all() {
        let vocabulary = words.vocabulary();
        let mut ended = 0;
        for schema in [&tree, &any_object] {
            let grammar = CompiledGrammar::compile(&strict(schema), &vocabulary).unwrap();
            let validator = Validator::of(schema);
            for seed in 0..6 {
                let model = TOKEN_CHOOSERS[seed as usize % 2];
                if let Some(value) = output(&words, model, &grammar, seed).unwrap() {
                    assert_eq!(validator.check(&value), Ok(()), "{}: {value}", words.name);
                    ended += 1;
                }
            }
        }
        assert!(ended >= 4, "{}: {ended} of 12 outputs ended", words.name);
    }
}

#[test]
fn a_matcher_rebuilt_from_its_tokens_allows_the_same_tokens() {
    let grammar = compile(&strict(&json!({"type": "object"}))).unwrap();
    let tokens = DEMO.tokenizer.encode("{\"key\": [1, 2, {\"a\"", EncodeOptions::default()).unwrap();
    let mut grown = grammar.matcher();
    let (mut mask, mut again) = (Vec::new(), Vec::new());
    for (count, &token) in tokens.iter().enumerate() {
        let mut rebuilt = grammar.matcher();
        tokens[..count].iter().for_each(|&token| rebuilt.accept(token).unwrap());
        assert_eq!(grown.compute_mask(&mut mask), rebuilt.compute_mask(&mut again));
        assert_eq!(mask, again, "after {count} tokens");
        grown.accept(token).unwrap();
    }
    assert!(grown.accept(u32::MAX).is_err());
}
