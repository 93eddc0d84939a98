// SPDX-License-Identifier: Apache-2.0

//! Adds patterns to string formats that the compiler checks incompletely. The compiler allows
//! February 29 in every year and second 60 in every minute. The patterns exclude both, real leap
//! seconds included.

use serde_json::{Map, Value, json};

/// A valid date at the start of a text.
macro_rules! date {
    () => {
        concat!(
            "^(?:[0-9]{4}-(?:0[13-9]|1[0-2])|[0-9]{4}-02-(?:[01][0-9]|2[0-8])|",
            "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
        )
    };
}

/// The pattern that a text of a format must match too.
const FORMAT_PATTERNS: [(&str, &str); 3] = [
    ("date", date!()),
    ("date-time", concat!(date!(), "[-0-9]*[tT][0-9:]{6}[0-5]")),
    ("time", "^[0-9:]{6}[0-5]"),
];

/// The formats that the compiler enforces. Others are annotations, as JSON Schema has it: pydantic
/// writes `binary`, `password` and `path`.
const ENFORCED_FORMATS: [&str; 10] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

/// Whether a format is an annotation only.
pub(crate) fn is_annotation(format: &Value) -> bool {
    format.as_str().is_some_and(|name| !ENFORCED_FORMATS.contains(&name))
}

/// Adds the pattern to a schema with these keywords. Does not descend into subschemas.
pub(crate) fn add_format_patterns(keywords: &mut Map<String, Value>) {
    let Some(format) = keywords.get("format").and_then(Value::as_str) else { return };
    let Some((_, pattern)) = FORMAT_PATTERNS.iter().find(|(name, _)| *name == format) else { return };
    let also = json!({"pattern": pattern});
    match keywords.get_mut("allOf") {
        Some(Value::Array(all)) => all.push(also),
        _ => drop(keywords.insert("allOf".to_owned(), json!([also]))),
    }
}
