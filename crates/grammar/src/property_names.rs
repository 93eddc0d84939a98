// SPDX-License-Identifier: Apache-2.0

//! Expresses `propertyNames` as `patternProperties`, which the compiler enforces. Pydantic writes
//! it for the keys of a dictionary:
//!
//! ```text
//! {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": S}
//! {"patternProperties": {"^(?:a|b)$": S}, "additionalProperties": false}
//! ```

use serde_json::{Map, Value, json};

/// References from one schema to the next. More are a circle.
const REFERENCES_MAX: usize = 8;

/// Keywords of a schema for names that say nothing more.
const NEUTRAL: [&str; 5] = ["type", "title", "description", "default", "examples"];

/// Replaces the keyword. Returns false, and removes it, if it cannot be expressed.
pub(crate) fn to_patterns(keywords: &mut Map<String, Value>, root: &Value) -> bool {
    let Some(names) = keywords.remove("propertyNames") else { return true };
    let Some(restriction) = restriction(&names, root) else { return false };
    let Some(pattern) = restriction else { return true };
    if keywords.contains_key("patternProperties") {
        return false;
    }
    let values = keywords.insert("additionalProperties".to_owned(), json!(false)).unwrap_or(json!(true));
    keywords.insert("patternProperties".to_owned(), json!({pattern: values}));
    true
}

/// The pattern of the allowed names. `Some(None)`: all are allowed. `None`: no pattern says it.
fn restriction(names: &Value, root: &Value) -> Option<Option<String>> {
    let mut names = names;
    for _ in 0..REFERENCES_MAX {
        let Some(reference) = names.get("$ref") else { break };
        names = root.pointer(reference.as_str()?.strip_prefix('#')?)?;
    }
    let keywords = match names {
        Value::Bool(true) => return Some(None),
        Value::Object(keywords) => keywords,
        _ => return None,
    };
    let has_lengths = |name: &&String| matches!(name.as_str(), "minLength" | "maxLength");
    let told: Vec<&String> = keywords.keys().filter(|name| !NEUTRAL.contains(&name.as_str())).collect();
    match &told[..] {
        [] => Some(None),
        [only] if *only == "enum" => {
            let texts: Option<Vec<String>> =
                keywords["enum"].as_array()?.iter().map(|name| name.as_str().map(escaped)).collect();
            Some(Some(format!("^(?:{})$", texts?.join("|"))))
        }
        [only] if *only == "const" => Some(Some(format!("^{}$", escaped(keywords["const"].as_str()?)))),
        [only] if *only == "pattern" => Some(Some(keywords["pattern"].as_str()?.to_owned())),
        lengths if lengths.iter().all(has_lengths) => {
            let bound = |name: &str| keywords.get(name).and_then(Value::as_u64);
            let most = bound("maxLength").map(|most| most.to_string()).unwrap_or_default();
            Some(Some(format!("^(?:.|\\n){{{},{most}}}$", bound("minLength").unwrap_or(0))))
        }
        _ => None,
    }
}

fn escaped(text: &str) -> String {
    let mut pattern = String::with_capacity(text.len());
    for character in text.chars() {
        if !character.is_alphanumeric() && character.is_ascii() && !character.is_ascii_control() {
            pattern.push('\\');
        }
        pattern.push(character);
    }
    // An escaped blank is no escape of regular expressions.
    pattern.replace("\\ ", " ").replace("\\_", "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_a_pattern_where_one_says_the_same() {
        let root =
            json!({"$defs": {"Color": {"enum": ["red", "dark blue"], "title": "Color", "type": "string"}}});
        for (names, pattern) in [
            (json!({"$ref": "#/$defs/Color"}), Some("^(?:red|dark blue)$")),
            (json!({"const": "a.b"}), Some("^a\\.b$")),
            (json!({"pattern": "^x", "type": "string"}), Some("^x")),
            (json!({"minLength": 2}), Some("^(?:.|\\n){2,}$")),
            (json!({"minLength": 1, "maxLength": 3}), Some("^(?:.|\\n){1,3}$")),
            (json!({"type": "string"}), None),
        ] {
            let schema = json!({"propertyNames": names, "additionalProperties": {"type": "integer"}});
            let mut keywords = schema.as_object().unwrap().clone();
            assert!(to_patterns(&mut keywords, &root), "{schema}");
            let expected = match pattern {
                Some(pattern) => {
                    json!({"additionalProperties": false, "patternProperties": {pattern: {"type": "integer"}}})
                }
                None => json!({"additionalProperties": {"type": "integer"}}),
            };
            assert_eq!(Value::Object(keywords), expected);
        }
        for names in
            [json!({"format": "date"}), json!({"$ref": "#/$defs/none"}), json!({"enum": [1]}), json!(false)]
        {
            let mut keywords = json!({"propertyNames": names}).as_object().unwrap().clone();
            assert!(!to_patterns(&mut keywords, &root), "{names}");
        }
    }
}
