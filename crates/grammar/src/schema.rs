// SPDX-License-Identifier: Apache-2.0

//! Checks a JSON schema before it is compiled: every keyword is known, and its value has the right
//! type.
//!
//! The compiler ignores unknown keywords as annotations: a mistyped `maxlength` would have no
//! effect and no error. Its errors also locate wrong values less precisely.

use serde_json::{Deserializer, Map, Value};

use crate::closed_objects::close_objects;
use crate::formats;
use crate::property_names;

/// Largest count or length, which is the largest repetition that the compiler accepts. Schemas
/// generated from 32-bit types use this bound.
const COUNT_MAX: u64 = u32::MAX as u64;
/// Bounds and constants are compared as doubles. Beyond this value not every integer is a double.
const EXACT_MAX: f64 = 9_007_199_254_740_992.0;
/// Named and required properties of the whole schema. The size of the compiled form grows with
/// their square.
const PROPERTIES_MAX: usize = 2_000;
/// Regular expressions of the whole schema. If several apply to one string, their automata
/// multiply.
const PATTERNS_MAX: usize = 200;
/// Regular expressions in the schemas of one `allOf`.
const PATTERNS_ALL_OF_MAX: usize = 8;
/// Least common multiple of all `multipleOf` values, without their decimal points (2.5 counts as
/// 25). The automaton distinguishes that many remainders. Compiling a million of them takes a
/// second and 150 MB.
const MULTIPLE_MAX: u64 = 100_000;
/// Longest path in a message. The names in a path come from the client.
const PATH_BYTES_MAX: usize = 200;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SchemaError {
    #[error("{at}: a schema is an object or a boolean")]
    NotASchema { at: String },
    #[error("{at}: the keyword {keyword:?} is unknown; own annotations begin with \"x-\"")]
    Unknown { at: String, keyword: String },
    #[error("{at}: the keyword {keyword:?} cannot be enforced")]
    NotEnforced { at: String, keyword: &'static str },
    #[error("{at}: {keyword} must be {expected}")]
    Type { at: String, keyword: &'static str, expected: &'static str },
    #[error("{at}: {keyword} is {value}, allowed are integers from 0 to {COUNT_MAX}")]
    Count { at: String, keyword: &'static str, value: String },
    #[error("{at}: the schema, or one of its allOf, has more than {max} {what}")]
    TooMany { at: String, what: &'static str, max: usize },
    #[error(
        "{at}: the least common multiple of {value} and the other multipleOf of the schema is above {MULTIPLE_MAX} (2.5 counts as 25)"
    )]
    Multiple { at: String, value: String },
    #[error("{at}: {value} cannot be represented exactly, allowed are numbers between -2^53 and 2^53")]
    Inexact { at: String, value: String },
}

/// The type that a keyword's value must have.
#[derive(Clone, Copy)]
enum KeywordForm {
    Schema,
    Schemas,
    /// The keyword `items` of older drafts.
    SchemaOrSchemas,
    NamedSchemas,
    Count,
    Number,
    /// In draft 4, `exclusiveMinimum` is a boolean.
    NumberOrBoolean,
    AboveZero,
    Text,
    Texts,
    TextOrTexts,
    Constant,
    Constants,
    /// A restriction that cannot be enforced.
    NotEnforced,
    /// As `NotEnforced`, but `false` is no restriction.
    NotEnforcedIfTrue,
    Annotation,
}

const KEYWORDS: &[(&str, KeywordForm)] = &[
    ("$ref", KeywordForm::Text),
    ("$defs", KeywordForm::NamedSchemas),
    ("definitions", KeywordForm::NamedSchemas),
    ("allOf", KeywordForm::Schemas),
    ("anyOf", KeywordForm::Schemas),
    ("oneOf", KeywordForm::Schemas),
    ("const", KeywordForm::Constant),
    ("enum", KeywordForm::Constants),
    ("type", KeywordForm::TextOrTexts),
    ("items", KeywordForm::SchemaOrSchemas),
    ("additionalItems", KeywordForm::Schema),
    ("prefixItems", KeywordForm::Schemas),
    ("minItems", KeywordForm::Count),
    ("maxItems", KeywordForm::Count),
    ("properties", KeywordForm::NamedSchemas),
    ("patternProperties", KeywordForm::NamedSchemas),
    ("additionalProperties", KeywordForm::Schema),
    ("required", KeywordForm::Texts),
    ("minProperties", KeywordForm::Count),
    ("maxProperties", KeywordForm::Count),
    ("minLength", KeywordForm::Count),
    ("maxLength", KeywordForm::Count),
    ("pattern", KeywordForm::Text),
    ("format", KeywordForm::Text),
    ("minimum", KeywordForm::Number),
    ("maximum", KeywordForm::Number),
    ("exclusiveMinimum", KeywordForm::NumberOrBoolean),
    ("exclusiveMaximum", KeywordForm::NumberOrBoolean),
    ("multipleOf", KeywordForm::AboveZero),
    // Clients read such an array into a set, where duplicates do no harm.
    ("uniqueItems", KeywordForm::Annotation),
    ("not", KeywordForm::NotEnforced),
    ("if", KeywordForm::NotEnforced),
    ("then", KeywordForm::NotEnforced),
    ("else", KeywordForm::NotEnforced),
    ("contains", KeywordForm::NotEnforced),
    ("minContains", KeywordForm::NotEnforced),
    ("maxContains", KeywordForm::NotEnforced),
    // Becomes a pattern, where that is possible.
    ("propertyNames", KeywordForm::Schema),
    ("dependencies", KeywordForm::NotEnforced),
    ("dependentRequired", KeywordForm::NotEnforced),
    ("dependentSchemas", KeywordForm::NotEnforced),
    ("unevaluatedItems", KeywordForm::NotEnforced),
    ("unevaluatedProperties", KeywordForm::NotEnforced),
    ("$dynamicRef", KeywordForm::NotEnforced),
    ("$dynamicAnchor", KeywordForm::NotEnforced),
    ("$recursiveRef", KeywordForm::NotEnforced),
    ("$recursiveAnchor", KeywordForm::NotEnforced),
    // OpenAPI: also allows null.
    ("nullable", KeywordForm::NotEnforcedIfTrue),
    // OpenAPI: selects a schema of `oneOf`. The schemas there contain the same condition.
    ("discriminator", KeywordForm::Annotation),
    ("$schema", KeywordForm::Text),
    ("$id", KeywordForm::Text),
    ("id", KeywordForm::Text),
    ("$anchor", KeywordForm::Annotation),
    ("$comment", KeywordForm::Annotation),
    ("$vocabulary", KeywordForm::Annotation),
    ("title", KeywordForm::Annotation),
    ("description", KeywordForm::Annotation),
    ("default", KeywordForm::Annotation),
    ("example", KeywordForm::Annotation),
    ("examples", KeywordForm::Annotation),
    ("deprecated", KeywordForm::Annotation),
    ("readOnly", KeywordForm::Annotation),
    ("writeOnly", KeywordForm::Annotation),
    ("contentMediaType", KeywordForm::Annotation),
    ("contentEncoding", KeywordForm::Annotation),
    ("contentSchema", KeywordForm::Annotation),
];

/// Checks a schema, removes keywords without effect, adds patterns to formats, and closes objects.
/// If `lenient` is set, unknown keywords and keywords that cannot be enforced are accepted, and
/// objects stay open.
pub(crate) fn adapt_schema(schema: &mut Value, lenient: bool) -> Result<(), SchemaError> {
    SchemaChecker::new(lenient).whole_schema(schema)?;
    if !lenient {
        close_objects(schema);
    }
    Ok(())
}

/// The same for all schemas of a Lark source, whose limits count together. Their own options say
/// how the compiler treats keywords. Leaves text after `%json` that is not JSON: the compiler
/// refuses it, or it is part of a string.
pub(crate) fn adapt_embedded_schemas(lark: &str) -> Result<String, SchemaError> {
    let mut check = SchemaChecker::new(true);
    let (mut adapted, mut copied) = (String::with_capacity(lark.len()), 0);
    for (at, keyword) in lark.match_indices("%json") {
        let begin = at + keyword.len();
        if begin < copied {
            // Inside a schema that has been adapted.
            continue;
        }
        let mut values = Deserializer::from_str(&lark[begin..]).into_iter::<Value>();
        if let Some(Ok(mut schema)) = values.next() {
            check.whole_schema(&mut schema)?;
            close_objects(&mut schema);
            adapted.push_str(&lark[copied..begin]);
            adapted.push(' ');
            adapted.push_str(&schema.to_string());
            copied = begin + values.byte_offset();
        }
    }
    adapted.push_str(&lark[copied..]);
    Ok(adapted)
}

/// Recursive. The JSON parser limits the depth to 128.
struct SchemaChecker {
    lenient: bool,
    path: String,
    /// The whole schema, for `$ref`.
    root: Value,
    properties: usize,
    patterns: usize,
    multiple: u64,
}

impl SchemaChecker {
    fn new(lenient: bool) -> Self {
        let root = Value::Null;
        Self { lenient, path: String::from("#"), root, properties: 0, patterns: 0, multiple: 1 }
    }

    fn whole_schema(&mut self, schema: &mut Value) -> Result<(), SchemaError> {
        self.root = schema.clone();
        self.schema(schema)
    }

    fn schema(&mut self, schema: &mut Value) -> Result<(), SchemaError> {
        match schema {
            Value::Bool(_) => Ok(()),
            Value::Object(keywords) => self.keywords(keywords),
            _ => Err(SchemaError::NotASchema { at: self.at() }),
        }
    }

    fn keywords(&mut self, keywords: &mut Map<String, Value>) -> Result<(), SchemaError> {
        keywords.retain(|name, value| {
            let is_neutral = *value == Value::Bool(false)
                && KEYWORDS
                    .iter()
                    .any(|(k, form)| k == name && matches!(form, KeywordForm::NotEnforcedIfTrue));
            let is_annotation = name == "uniqueItems" || name == "format" && formats::is_annotation(value);
            !is_neutral && !is_annotation
        });
        for (name, value) in &mut *keywords {
            match KEYWORDS.iter().find(|(keyword, _)| keyword == name) {
                Some(&(keyword, form)) => self.inside(name, |check| check.value(keyword, form, value))?,
                None if self.lenient || name.starts_with("x-") => {}
                None => {
                    return Err(SchemaError::Unknown { at: self.at(), keyword: shortened(name).to_owned() });
                }
            }
        }
        formats::add_format_patterns(keywords);
        match property_names::to_patterns(keywords, &self.root) {
            false if !self.lenient => {
                let at = self.at() + "/propertyNames";
                Err(SchemaError::NotEnforced { at, keyword: "propertyNames" })
            }
            _ => Ok(()),
        }
    }

    fn count(&mut self, keyword: &str, value: &Value) -> Result<(), SchemaError> {
        let members = value.as_object().map(Map::len).or(value.as_array().map(Vec::len)).unwrap_or(0);
        match keyword {
            "properties" | "required" => self.properties += members,
            "patternProperties" => self.patterns += members,
            "pattern" | "format" => self.patterns += 1,
            _ => {}
        }
        if self.properties > PROPERTIES_MAX {
            return Err(SchemaError::TooMany { at: self.at(), what: "properties", max: PROPERTIES_MAX });
        }
        if self.patterns > PATTERNS_MAX {
            return Err(SchemaError::TooMany { at: self.at(), what: "patterns", max: PATTERNS_MAX });
        }
        Ok(())
    }

    fn value(
        &mut self,
        keyword: &'static str,
        form: KeywordForm,
        value: &mut Value,
    ) -> Result<(), SchemaError> {
        self.count(keyword, value)?;
        let before = self.patterns;
        self.form(keyword, form, value)?;
        if keyword == "allOf" && self.patterns - before > PATTERNS_ALL_OF_MAX {
            return Err(SchemaError::TooMany { at: self.at(), what: "patterns", max: PATTERNS_ALL_OF_MAX });
        }
        Ok(())
    }

    fn form(
        &mut self,
        keyword: &'static str,
        form: KeywordForm,
        value: &mut Value,
    ) -> Result<(), SchemaError> {
        let expected = match (form, value) {
            (
                KeywordForm::Schema | KeywordForm::SchemaOrSchemas,
                value @ (Value::Object(_) | Value::Bool(_)),
            ) => {
                return self.schema(value);
            }
            (KeywordForm::Schemas | KeywordForm::SchemaOrSchemas, Value::Array(schemas)) => {
                for (index, schema) in schemas.iter_mut().enumerate() {
                    self.inside(&index.to_string(), |check| check.schema(schema))?;
                }
                return Ok(());
            }
            (KeywordForm::NamedSchemas, Value::Object(schemas)) => {
                for (name, schema) in schemas {
                    self.inside(name, |check| check.schema(schema))?;
                }
                return Ok(());
            }
            (KeywordForm::Count, value) if value.is_number() => {
                if value.as_u64().is_some_and(|count| count <= COUNT_MAX) {
                    return Ok(());
                }
                return Err(SchemaError::Count { at: self.at(), keyword, value: value.to_string() });
            }
            (KeywordForm::AboveZero, value) if value.as_f64().is_some_and(|number| number > 0.0) => {
                self.exact(value)?;
                return self.multiple(value);
            }
            (KeywordForm::Number | KeywordForm::NumberOrBoolean, value) if value.is_number() => {
                return self.exact(value);
            }
            (KeywordForm::NumberOrBoolean, Value::Bool(_)) => return Ok(()),
            (KeywordForm::Text | KeywordForm::TextOrTexts, Value::String(_)) => return Ok(()),
            (KeywordForm::Texts | KeywordForm::TextOrTexts, Value::Array(texts))
                if texts.iter().all(Value::is_string) =>
            {
                return Ok(());
            }
            (KeywordForm::Constant, value) => return self.exact(value),
            (KeywordForm::Constants, Value::Array(values)) => {
                return values.iter().try_for_each(|v| self.exact(v));
            }
            (KeywordForm::NotEnforced | KeywordForm::NotEnforcedIfTrue, _) if self.lenient => return Ok(()),
            (KeywordForm::NotEnforced | KeywordForm::NotEnforcedIfTrue, _) => {
                return Err(SchemaError::NotEnforced { at: self.at(), keyword });
            }
            (KeywordForm::Annotation, _) => return Ok(()),
            (KeywordForm::Schema, _) => "a schema",
            (KeywordForm::Schemas, _) => "an array of schemas",
            (KeywordForm::SchemaOrSchemas, _) => "a schema or an array of schemas",
            (KeywordForm::NamedSchemas, _) => "an object of schemas",
            (KeywordForm::Count, _) => "an integer",
            (KeywordForm::Number, _) => "a number",
            (KeywordForm::NumberOrBoolean, _) => "a number or a boolean",
            (KeywordForm::AboveZero, _) => "a number above 0",
            (KeywordForm::Text, _) => "a string",
            (KeywordForm::Texts, _) => "an array of strings",
            (KeywordForm::TextOrTexts, _) => "a string or an array of strings",
            (KeywordForm::Constants, _) => "an array",
        };
        Err(SchemaError::Type { at: self.at(), keyword, expected })
    }

    fn multiple(&mut self, value: &Value) -> Result<(), SchemaError> {
        let text = value.to_string();
        let digits = text.split('e').next().unwrap_or_default().trim_end_matches(".0").replace('.', "");
        let digits = digits.parse().unwrap_or(u64::MAX).max(1);
        self.multiple = (self.multiple / common_divisor(self.multiple, digits)).saturating_mul(digits);
        match self.multiple > MULTIPLE_MAX {
            true => Err(SchemaError::Multiple { at: self.at(), value: text }),
            false => Ok(()),
        }
    }

    fn exact(&self, value: &Value) -> Result<(), SchemaError> {
        match value {
            Value::Number(number) if number.as_f64().is_none_or(|n| n.abs() >= EXACT_MAX) => {
                Err(SchemaError::Inexact { at: self.at(), value: number.to_string() })
            }
            Value::Array(values) => values.iter().try_for_each(|value| self.exact(value)),
            Value::Object(values) => values.values().try_for_each(|value| self.exact(value)),
            _ => Ok(()),
        }
    }

    fn inside<T>(&mut self, name: &str, visit: impl FnOnce(&mut Self) -> T) -> T {
        let length = self.path.len();
        self.path.push('/');
        self.path.push_str(name);
        let result = visit(self);
        self.path.truncate(length);
        result
    }

    fn at(&self) -> String {
        shortened(&self.path).to_owned()
    }
}

/// Euclid's algorithm.
fn common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

fn shortened(text: &str) -> &str {
    let end = (0..=PATH_BYTES_MAX.min(text.len())).rev().find(|&at| text.is_char_boundary(at));
    &text[..end.unwrap_or(0)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn refused(mut schema: Value) -> String {
        adapt_schema(&mut schema, false).unwrap_err().to_string()
    }

    #[test]
    fn errors_name_the_path_and_the_allowed_values() {
        for (schema, words) in [
            (json!(3), "#: a schema is an object"),
            (json!({"properties": {"a": []}}), "#/properties/a: a schema is"),
            (json!({"maxlength": 3}), "#: the keyword \"maxlength\""),
            (json!({"items": {"not": {}}}), "#/items/not: the keyword \"not\" cannot be enforced"),
            (
                json!({"items": {"propertyNames": {"not": {}}}}),
                "#/items/propertyNames/not: the keyword \"not\"",
            ),
            (
                json!({"items": {"propertyNames": {"format": "date"}}}),
                "#/items/propertyNames: the keyword \"propertyNames\" cannot be enforced",
            ),
            (
                json!({"minItems": -1}),
                "#/minItems: minItems is -1, allowed are integers from 0 to 4294967295",
            ),
            (json!({"maxLength": 1.5}), "maxLength is 1.5, allowed are"),
            (json!({"maxLength": 1u64 << 40}), "maxLength is 1099511627776, allowed are"),
            (json!({"maxLength": "9"}), "#/maxLength: maxLength must be an integer"),
            (json!({"minimum": "1"}), "#/minimum: minimum must be a number"),
            (json!({"multipleOf": 0}), "multipleOf must be a number above 0"),
            (
                json!({"anyOf": [true, {"type": 5}]}),
                "#/anyOf/1/type: type must be a string or an array of strings",
            ),
            (json!({"required": ["a", 1]}), "required must be an array of strings"),
            (json!({"pattern": ["é".repeat(60)]}), "pattern must be a string"),
            (
                json!({"const": {"a": [9_007_199_254_740_993_u64]}}),
                "9007199254740993 cannot be represented exactly",
            ),
        ] {
            let error = refused(schema.clone());
            assert!(error.contains(words), "{schema}: {error}");
        }
    }

    #[test]
    fn limits_on_properties_and_patterns_are_named() {
        let properties = |count: usize| {
            let named: Map<String, Value> = (0..count).map(|name| (name.to_string(), json!({}))).collect();
            json!({"items": {"properties": named}})
        };
        assert_eq!(adapt_schema(&mut properties(2_000), false), Ok(()));
        assert!(refused(properties(2_001)).contains("more than 2000 properties"));
        let all = |count| json!({"allOf": vec![json!({"pattern": "a"}); count]});
        assert_eq!(adapt_schema(&mut all(8), false), Ok(()));
        assert!(refused(all(9)).contains("more than 8 patterns"));
        assert!(
            refused(json!({"anyOf": vec![json!({"pattern": "a"}); 201]})).contains("more than 200 patterns")
        );
    }

    #[test]
    fn the_common_multiple_of_a_schema_is_bounded() {
        let any = |multiples: &[f64]| {
            let schemas: Vec<Value> = multiples.iter().map(|of| json!({"multipleOf": of})).collect();
            json!({"anyOf": schemas})
        };
        for few in [any(&[2.0, 5.0, 60.0, 0.25, 1000.0]), any(&[1e5, 0.01]), any(&[1e-7, 1e-300])] {
            assert_eq!(adapt_schema(&mut few.clone(), false), Ok(()), "{few}");
        }
        for many in [any(&[100_001.0]), any(&[997.0, 991.0]), any(&[0.123456]), any(&[1e15])] {
            let error = refused(many.clone());
            assert!(error.contains("multipleOf") && error.contains("above 100000"), "{many}: {error}");
        }
    }

    #[test]
    fn long_names_are_truncated_between_characters() {
        for length in 195..205 {
            let error = refused(json!({"x".repeat(length) + &"é".repeat(300): {}}));
            assert!(error.len() < 400, "{error}");
        }
    }

    #[test]
    fn what_is_not_enforced_passes_where_that_was_asked_for_and_what_asks_for_nothing_always() {
        let mut schema = json!({"not": {}, "maxlength": 3, "items": {"nullable": true}});
        assert_eq!(adapt_schema(&mut schema, true), Ok(()));
        let mut schema =
            json!({"type": "array", "uniqueItems": false, "x-order": 1, "title": 5, "items": true});
        assert_eq!(adapt_schema(&mut schema, false), Ok(()));
        assert_eq!(schema, json!({"type": "array", "x-order": 1, "title": 5, "items": true}));
    }
}
