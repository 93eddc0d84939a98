//! Formats of strings of which the compiler knows less than they say: it has a 29th of February in every year, and a 60th
//! second in every minute. A pattern beside the format takes those away (the leap seconds that there were, too).

use serde_json::{Map, Value, json};

/// The first date of a text.
macro_rules! date {
    () => {
        concat!(
            "^(?:[0-9]{4}-(?:0[13-9]|1[0-2])|[0-9]{4}-02-(?:[01][0-9]|2[0-8])|",
            "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
        )
    };
}

/// What a text of a format also matches.
const FORMAT_PATTERNS: [(&str, &str); 3] = [
    ("date", date!()),
    ("date-time", concat!(date!(), "[-0-9]*[tT][0-9:]{6}[0-5]")),
    ("time", "^[0-9:]{6}[0-5]"),
];

/// Completes the schema that has these keywords, not the schemas in it.
pub(crate) fn add_format_patterns(keywords: &mut Map<String, Value>) {
    let Some(format) = keywords.get("format").and_then(Value::as_str) else { return };
    let Some((_, pattern)) = FORMAT_PATTERNS.iter().find(|(name, _)| *name == format) else { return };
    let also = json!({"pattern": pattern});
    match keywords.get_mut("allOf") {
        Some(Value::Array(all)) => all.push(also),
        _ => drop(keywords.insert("allOf".to_owned(), json!([also]))),
    }
}
