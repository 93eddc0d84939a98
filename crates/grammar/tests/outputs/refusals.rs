//! Sources that give no grammar: refused with a reason, never a panic.

use grammar::Source;
use proptest::prelude::*;
use serde_json::json;

use crate::cases;
use crate::schemas::strict;
use crate::vocabularies::compile;

proptest! {
    #![proptest_config(cases(60))]

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
            let refused = compile(&source).err().map(|error| error.to_string()).unwrap_or_default();
            // llguidance catches its panics, where panics can be caught.
            prop_assert!(!refused.contains("panic"), "{refused}");
        }
    }
}

#[test]
fn what_cannot_be_enforced_or_satisfied_is_refused_with_a_reason() {
    let deep = |open: &str, close: &str| format!("{}a{}", open.repeat(200), close.repeat(200));
    for (source, expected) in [
        (strict(&json!({"type": "strin"})), "strin"),
        (Source::JsonSchema { schema: "{".into(), lenient: false }, "not JSON"),
        (Source::JsonSchema { schema: "3".into(), lenient: false }, "object or a boolean"),
        (Source::JsonSchema { schema: "false".into(), lenient: false }, "matches"),
        (strict(&json!({"type": "integer", "minimum": 5, "maximum": 4})), "minimum"),
        (strict(&json!({"type": "object", "unevaluatedProperties": false})), "unevaluatedProperties"),
        (strict(&json!({"type": "array", "uniqueItems": true})), "uniqueItems"),
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
