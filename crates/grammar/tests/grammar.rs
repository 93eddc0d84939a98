//! What is generated under a grammar parses and validates, whatever the model says: tokens are drawn at random among
//! those that are allowed, with the demo model's vocabulary.

#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::path::Path;
use std::sync::OnceLock;

use grammar::{CompileError, Grammar, Matcher, Next, Source, Vocabulary};
use proptest::prelude::*;
use serde_json::{Map, Value, json};
use text::{EncodeOptions, Tokenizer};

fn tokenizer() -> &'static Tokenizer {
    static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
    TOKENIZER.get_or_init(|| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo/pycoder-7m-q8_0.gguf");
        let file = std::fs::File::open(path).unwrap();
        let length = file.metadata().unwrap().len();
        let header = gguf::Header::read(std::io::BufReader::new(file), length).unwrap();
        Tokenizer::from_metadata(header.metadata()).unwrap()
    })
}

fn compile(source: &Source) -> Result<Grammar, CompileError> {
    Grammar::compile(source, &Vocabulary::new(tokenizer()).unwrap())
}

fn schema(schema: &Value) -> Source {
    Source::JsonSchema { schema: schema.to_string(), lenient: false }
}

/// A linear congruential generator: as good as a model without weights.
struct Random(u64);

impl Random {
    fn below(&mut self, count: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % count
    }
}

fn tokens_of(mask: &[u32]) -> Vec<u32> {
    let bits = mask.iter().enumerate().flat_map(|(word, bits)| {
        (0..32).filter(move |bit| bits >> bit & 1 == 1).map(move |bit| word as u32 * 32 + bit)
    });
    bits.collect()
}

/// An output of at most so many tokens; `None` if it did not come to its end by then.
fn generate(mut matcher: Matcher, seed: u64, tokens_max: usize) -> Option<String> {
    let mut random = Random(seed);
    let mut output = Vec::new();
    let mut mask = Vec::new();
    for drawn in 0..tokens_max {
        if matcher.allowed(&mut mask).unwrap() == Next::End {
            return Some(text(&output));
        }
        let allowed = tokens_of(&mask);
        let ends: Vec<u32> =
            allowed.iter().copied().filter(|&id| tokenizer().is_end_of_generation(id)).collect();
        // A model's bias towards an end: from the middle on, and among short tokens.
        if !ends.is_empty() && (drawn > tokens_max / 2 || allowed.len() == ends.len()) {
            return Some(text(&output));
        }
        let candidates: Vec<u32> = allowed.into_iter().filter(|id| !ends.contains(id)).collect();
        let token = candidates[random.below(candidates.len())];
        output.push(token);
        matcher.accept(token).unwrap();
    }
    None
}

fn text(output: &[u32]) -> String {
    String::from_utf8(tokenizer().decode_bytes(output)).unwrap()
}

/// A schema, and what it accepts by a reading of its own.
#[derive(Clone, Debug)]
enum Shape {
    Null,
    Boolean,
    Integer { least: i64, most: i64 },
    Text { least: usize, most: usize },
    Enum(Vec<String>),
    Constant(i64),
    List { item: Box<Shape>, least: usize, most: usize },
    Object(Vec<(String, Shape, bool)>),
    Either(Box<Shape>, Box<Shape>),
}

impl Shape {
    fn schema(&self) -> Value {
        match self {
            Shape::Null => json!({"type": "null"}),
            Shape::Boolean => json!({"type": "boolean"}),
            Shape::Integer { least, most } => json!({"type": "integer", "minimum": least, "maximum": most}),
            Shape::Text { least, most } => json!({"type": "string", "minLength": least, "maxLength": most}),
            Shape::Enum(values) => json!({"enum": values}),
            Shape::Constant(value) => json!({"const": value}),
            Shape::List { item, least, most } => {
                json!({"type": "array", "items": item.schema(), "minItems": least, "maxItems": most})
            }
            Shape::Object(members) => {
                let properties: Map<String, Value> =
                    members.iter().map(|(name, shape, _)| (name.clone(), shape.schema())).collect();
                let required: Vec<&String> =
                    members.iter().filter(|(_, _, required)| *required).map(|(name, ..)| name).collect();
                json!({
                    "type": "object", "properties": properties, "required": required,
                    "additionalProperties": false,
                })
            }
            Shape::Either(one, other) => json!({"anyOf": [one.schema(), other.schema()]}),
        }
    }

    fn accepts(&self, value: &Value) -> bool {
        match self {
            Shape::Null => value.is_null(),
            Shape::Boolean => value.is_boolean(),
            // "-0" is an integer too.
            Shape::Integer { least, most } => value
                .as_f64()
                .is_some_and(|n| n.fract() == 0.0 && (*least as f64..=*most as f64).contains(&n)),
            Shape::Text { least, most } => {
                value.as_str().is_some_and(|text| (*least..=*most).contains(&text.chars().count()))
            }
            Shape::Enum(values) => value.as_str().is_some_and(|text| values.iter().any(|v| v == text)),
            Shape::Constant(constant) => value.as_f64() == Some(*constant as f64),
            Shape::List { item, least, most } => value.as_array().is_some_and(|items| {
                (*least..=*most).contains(&items.len()) && items.iter().all(|value| item.accepts(value))
            }),
            Shape::Object(members) => value.as_object().is_some_and(|object| {
                object.keys().all(|key| members.iter().any(|(name, ..)| name == key))
                    && members.iter().all(|(name, shape, required)| match object.get(name) {
                        Some(value) => shape.accepts(value),
                        None => !required,
                    })
            }),
            Shape::Either(one, other) => one.accepts(value) || other.accepts(value),
        }
    }
}

fn shapes() -> impl Strategy<Value = Shape> {
    let leaf = prop_oneof![
        Just(Shape::Null),
        Just(Shape::Boolean),
        (-1000..1000_i64, 0..2000_i64).prop_map(|(least, more)| Shape::Integer { least, most: least + more }),
        (0..3_usize, 0..6_usize).prop_map(|(least, more)| Shape::Text { least, most: least + more }),
        prop::collection::vec("[a-z\"\\\\ é]{0,6}", 1..4).prop_map(Shape::Enum),
        any::<i32>().prop_map(|constant| Shape::Constant(constant.into())),
    ];
    leaf.prop_recursive(3, 16, 4, |inner| {
        let members = prop::collection::btree_map("[a-z_\" ]{1,5}", (inner.clone(), any::<bool>()), 0..4);
        prop_oneof![
            (inner.clone(), 0..2_usize, 0..3_usize).prop_map(|(item, least, more)| Shape::List {
                item: Box::new(item),
                least,
                most: least + more
            }),
            members.prop_map(|members| {
                let member = |(name, (shape, required))| (name, shape, required);
                Shape::Object(members.into_iter().map(member).collect())
            }),
            (inner.clone(), inner).prop_map(|(one, other)| Shape::Either(Box::new(one), Box::new(other))),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn random_tokens_under_a_schema_are_json_that_validates(shape in shapes(), seed in any::<u64>()) {
        let grammar = compile(&schema(&shape.schema())).unwrap();
        for round in 0..3 {
            let output = generate(grammar.matcher(), seed.wrapping_add(round), 2_000);
            let output = output.expect("everything in these schemas is bounded");
            let value: Value = serde_json::from_str(&output)
                .map_err(|error| TestCaseError::fail(format!("{error}: {output:?}")))?;
            prop_assert!(shape.accepts(&value), "{value} under {}", shape.schema());
        }
    }

    /// Whatever is sent: an error or a grammar, never a panic.
    #[test]
    fn hostile_sources_are_refused_or_compiled(text in "[\\[\\]{}()a-z0-9:|*+?.\"\\\\/^$,\n -]{0,60}") {
        for source in [
            Source::Regex(text.clone()),
            Source::Lark(text.clone()),
            Source::Lark(format!("start: {text}")),
            Source::Gbnf(format!("root ::= {text}")),
            Source::JsonSchema { schema: text.clone(), lenient: true },
            Source::Choice(vec![text.clone()]),
        ] {
            drop(compile(&source));
        }
    }
}

#[test]
fn regex_lark_gbnf_and_choice_say_what_the_output_is() {
    type Holds = fn(&str) -> bool;
    let cases: [(Source, Holds); 6] = [
        (Source::Regex(r"(\d{3}-){2}\d{4}".into()), |text| {
            text.len() == 12 && text.chars().enumerate().all(|(at, c)| if at == 3 || at == 7 { c == '-' } else { c.is_ascii_digit() })
        }),
        (Source::Choice(vec!["yes".into(), "no \"never\"".into(), "ünter\n".into()]), |text| {
            ["yes", "no \"never\"", "ünter\n"].contains(&text)
        }),
        (Source::Lark("start: \"<\" (NAME \",\")~1..3 \">\"\nNAME: /[a-c]{2}/".into()), |text| {
            text.starts_with('<') && text.ends_with(",>") && text.len() <= 12
        }),
        (Source::Gbnf("root ::= pair (\",\" ws pair){0,3}\npair ::= [a-f]+ \"=\" num\nnum ::= \"-\"? [0-9]{1,3}\nws ::= [ \\t]{0,2}".into()), |text| {
            text.split(',').all(|pair| pair.trim_start_matches([' ', '\t']).split_once('=').is_some_and(|(name, number)| {
                !name.is_empty() && name.chars().all(|c| ('a'..='f').contains(&c)) && number.parse::<i32>().is_ok()
            }))
        }),
        // Recursive: brackets in balance.
        (Source::Gbnf("root ::= list\nlist ::= \"[\" (item (\",\" item){0,2})? \"]\"\nitem ::= [0-9]{1,2} | list".into()), |text| {
            let mut depth = 0_i32;
            text.chars().all(|c| {
                depth += i32::from(c == '[') - i32::from(c == ']');
                depth >= 0 && "[],0123456789".contains(c)
            }) && depth == 0
        }),
        (Source::Gbnf("root ::= \"a\" opt \"b\"\nopt ::= (\"x\" | )".into()), |text| text == "ab" || text == "axb"),
    ];
    for (source, holds) in cases {
        let grammar = compile(&source).map_err(|error| format!("{source:?}: {error}")).unwrap();
        let mut ended = 0;
        for seed in 0..20 {
            if let Some(output) = generate(grammar.matcher(), seed, 400) {
                assert!(holds(&output), "{source:?} gave {output:?}");
                ended += 1;
            }
        }
        assert!(ended >= 10, "{source:?}: {ended} of 20 outputs came to an end");
    }
}

/// Every text of the language is allowed, token by token, as the tokenizer would write it; and ends where it may end.
#[test]
fn texts_of_the_language_are_accepted_and_others_are_not() {
    let object = schema(&json!({
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"$ref": "#/$defs/age"}},
        "required": ["name"],
        "$defs": {"age": {"type": "integer"}},
    }));
    for (source, good, bad) in [
        (object, r#"{"name": "Ann \"A\" é", "age": 41}"#, r#"{"age": 41}"#),
        (Source::JsonSchema { schema: "true".into(), lenient: false }, "[1, {\"a\": null}]", "[1, }"),
        (Source::Gbnf("root ::= [a-z]* \"end\"".into()), "the end".trim_start_matches("the "), "en"),
        (Source::Regex("(ab|c)*d".into()), "ababcd", "abad"),
    ] {
        let accepts = |text: &str| {
            let mut matcher = compile(&source).unwrap().matcher();
            let mut mask = Vec::new();
            for token in tokenizer().encode(text, EncodeOptions::default()).unwrap() {
                if matcher.allowed(&mut mask).unwrap() == Next::End || !tokens_of(&mask).contains(&token) {
                    return false;
                }
                matcher.accept(token).unwrap();
            }
            let next = matcher.allowed(&mut mask).unwrap();
            let may_end = tokens_of(&mask).iter().any(|&id| tokenizer().is_end_of_generation(id));
            next == Next::End || may_end
        };
        assert!(accepts(good), "{source:?} {good:?}");
        assert!(!accepts(bad), "{source:?} {bad:?}");
    }
}

#[test]
fn what_cannot_be_enforced_or_satisfied_is_refused_with_a_reason() {
    let deep = |open: &str, close: &str| format!("{}a{}", open.repeat(200), close.repeat(200));
    for (source, expected) in [
        (schema(&json!({"type": "strin"})), "strin"),
        (Source::JsonSchema { schema: "{".into(), lenient: false }, "not JSON"),
        (Source::JsonSchema { schema: "3".into(), lenient: false }, "object or a boolean"),
        (Source::JsonSchema { schema: "false".into(), lenient: false }, "matches"),
        (schema(&json!({"type": "integer", "minimum": 5, "maximum": 4})), "minimum"),
        (schema(&json!({"type": "object", "unevaluatedProperties": false})), "unevaluatedProperties"),
        (schema(&json!({"type": "array", "uniqueItems": true})), "uniqueItems"),
        (Source::Regex("(".into()), "regex"),
        (Source::Regex(String::new()), "empty"),
        (Source::Regex(deep("(", ")")), "deeper"),
        (Source::Lark("start: other".into()), "other"),
        (Source::Lark(deep("start: (", ")")), "deeper"),
        (Source::Gbnf("root ::= x".into()), "\"x\""),
        (Source::Choice(vec![]), "empty"),
        (Source::Regex("a".repeat(300 << 10)), "bytes"),
    ] {
        let error = compile(&source).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(error.to_lowercase().contains(&expected.to_lowercase()), "{expected}: {error:?}");
        assert!(error.len() < 600 && !error.contains("backtrace"), "{error}");
    }
    let lenient =
        Source::JsonSchema { schema: r#"{"type": "array", "uniqueItems": true}"#.into(), lenient: true };
    assert!(compile(&lenient).is_ok());
}

#[test]
fn a_matcher_built_again_from_its_tokens_goes_on_the_same() {
    let grammar = compile(&schema(&json!({"type": "object"}))).unwrap();
    let tokens = tokenizer().encode("{\"key\": [1, 2, {\"a\"", EncodeOptions::default()).unwrap();
    let mut grown = grammar.matcher();
    let (mut mask, mut again) = (Vec::new(), Vec::new());
    for (count, &token) in tokens.iter().enumerate() {
        let mut rebuilt = grammar.matcher();
        tokens[..count].iter().for_each(|&token| rebuilt.accept(token).unwrap());
        assert_eq!(grown.allowed(&mut mask), rebuilt.allowed(&mut again));
        assert_eq!(mask, again, "after {count} tokens");
        grown.accept(token).unwrap();
    }
    assert!(grown.accept(u32::MAX).is_err());
}
