// SPDX-License-Identifier: Apache-2.0

//! Closes objects whose schema names properties and says nothing of others: the output has the
//! named ones only (decision 0037).
//!
//! An object stays open if several schemas describe it together, because each would forbid the
//! properties of the others:
//!
//! ```text
//! {"allOf": [{"properties": {"a": ..}}, {"properties": {"b": ..}}]}
//! {"properties": {"a": ..}, "anyOf": [{"properties": {"b": ..}}, ..]}
//! ```

use std::collections::HashSet;

use serde_json::{Map, Value};

/// How often references from open schemas to further ones are followed.
const PASSES_MAX: usize = 16;

pub(crate) fn close_objects(schema: &mut Value) {
    let mut open = HashSet::new();
    for _ in 0..PASSES_MAX {
        let before = open.len();
        collect_open(schema, "#", false, &mut open);
        if open.len() == before {
            break;
        }
    }
    close(schema, "#", false, &open);
}

const ALTERNATIVES: [&str; 3] = ["allOf", "anyOf", "oneOf"];
/// Keywords of named schemas, and of one schema.
const NAMED: [&str; 4] = ["$defs", "definitions", "properties", "patternProperties"];
const SINGLE: [&str; 3] = ["items", "additionalItems", "additionalProperties"];

/// Whether the schema describes its object together with its own subschemas.
fn is_composed(keywords: &Map<String, Value>) -> bool {
    let parts = |name: &str| keywords.get(name).and_then(Value::as_array).map_or(0, Vec::len);
    let has_own = keywords.contains_key("properties") || keywords.contains_key("required");
    let has_others = ALTERNATIVES.iter().any(|name| parts(name) > 0) || keywords.contains_key("$ref");
    parts("allOf") > 1 || has_own && has_others
}

/// Whether the schema names the properties of an object and leaves others unsaid.
fn is_unsaid(keywords: &Map<String, Value>) -> bool {
    let Some(properties) = keywords.get("properties").and_then(Value::as_object) else { return false };
    let says = ["additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"];
    let required = keywords.get("required").and_then(Value::as_array).into_iter().flatten();
    let names_all = required.filter_map(Value::as_str).all(|name| properties.contains_key(name));
    let least = keywords.get("minProperties").and_then(Value::as_u64).unwrap_or(0);
    names_all && least <= properties.len() as u64 && !says.iter().any(|name| keywords.contains_key(*name))
}

/// Subschemas with their paths, and whether each describes the same object as `keywords`.
fn subschemas(keywords: &mut Map<String, Value>) -> Vec<(String, bool, &mut Value)> {
    let mut found = Vec::new();
    for (name, value) in keywords {
        let is_same = ALTERNATIVES.contains(&name.as_str());
        if value.is_object() && SINGLE.contains(&name.as_str()) {
            found.push((format!("/{name}"), false, value));
            continue;
        }
        match value {
            Value::Array(parts) if is_same || matches!(name.as_str(), "prefixItems" | "items") => {
                let parts = parts.iter_mut().enumerate();
                found.extend(parts.map(|(at, part)| (format!("/{name}/{at}"), is_same, part)));
            }
            Value::Object(parts) if NAMED.contains(&name.as_str()) => {
                found.extend(parts.iter_mut().map(|(key, part)| (format!("/{name}/{key}"), false, part)));
            }
            _ => {}
        }
    }
    found
}

/// Recursive. The JSON parser limits the depth to 128.
fn collect_open(schema: &mut Value, path: &str, is_part: bool, open: &mut HashSet<String>) {
    let Value::Object(keywords) = schema else { return };
    let is_open = is_part || open.contains(path) || is_composed(keywords);
    if let (true, Some(reference)) = (is_open, keywords.get("$ref").and_then(Value::as_str)) {
        open.insert(reference.to_owned());
    }
    for (step, is_same, part) in subschemas(keywords) {
        collect_open(part, &format!("{path}{step}"), is_same && is_open, open);
    }
}

fn close(schema: &mut Value, path: &str, is_part: bool, open: &HashSet<String>) {
    let Value::Object(keywords) = schema else { return };
    let is_open = is_part || open.contains(path) || is_composed(keywords);
    for (step, is_same, part) in subschemas(keywords) {
        close(part, &format!("{path}{step}"), is_same && is_open, open);
    }
    if !is_open && is_unsaid(keywords) {
        keywords.insert("additionalProperties".to_owned(), Value::Bool(false));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn closed(mut schema: Value) -> Value {
        close_objects(&mut schema);
        schema
    }

    #[test]
    fn an_object_that_names_its_properties_has_no_others() {
        let inner = json!({"properties": {"b": {}}});
        let with = |schema: &Value| {
            let mut schema = schema.clone();
            schema["additionalProperties"] = json!(false);
            schema
        };
        let outer = json!({"type": "object", "properties": {"a": {"items": inner}}, "required": ["a"]});
        let expected =
            with(&json!({"type": "object", "properties": {"a": {"items": with(&inner)}}, "required": ["a"]}));
        assert_eq!(closed(outer), expected);
        let union = json!({"anyOf": [{"$ref": "#/$defs/A"}, inner], "$defs": {"A": inner}});
        let expected = json!({"anyOf": [{"$ref": "#/$defs/A"}, with(&inner)], "$defs": {"A": with(&inner)}});
        assert_eq!(closed(union), expected);
        // Older pydantic wraps a reference.
        let wrapped = json!({"properties": {"a": {"allOf": [{"$ref": "#/definitions/A"}]}}, "definitions": {"A": inner}});
        assert_eq!(closed(wrapped)["definitions"]["A"], with(&inner));
    }

    #[test]
    fn what_asks_for_other_properties_or_is_described_by_several_schemas_stays_open() {
        let named = json!({"properties": {"b": {}}});
        for schema in [
            json!({"type": "object"}),
            json!({"properties": {"a": {}}, "additionalProperties": true}),
            json!({"properties": {"a": {}}, "patternProperties": {"x": {}}}),
            json!({"properties": {"a": {}}, "required": ["b"]}),
            json!({"properties": {"a": {}}, "minProperties": 2}),
            json!({"allOf": [named, {"properties": {"c": {}}}]}),
            json!({"properties": {"a": {}}, "anyOf": [named, {"required": ["a"]}]}),
            json!({"allOf": [{"$ref": "#/$defs/A"}, named], "$defs": {"A": {"allOf": [{"$ref": "#/$defs/B"}]}, "B": named}}),
        ] {
            assert_eq!(closed(schema.clone()), schema);
        }
    }
}
