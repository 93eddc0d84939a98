// SPDX-License-Identifier: Apache-2.0

//! Fields for structured output: OpenAI's `response_format`, vLLM's `structured_outputs` and
//! `guided_*`, llama.cpp's `json_schema` and `grammar`. A request has at most one grammar, but may
//! say it in several fields: clients write for several versions of vLLM at once.

use proto::v1::grammar::Kind;
use proto::v1::{self as wire, StringList};
use serde::Deserialize;
use serde_json::Value;

use super::error::ApiError;
use crate::params::RequestGrammar;

pub(crate) const STRUCTURED_OUTPUT_FIELDS: [&str; 8] = [
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "json_schema",
    "grammar",
];

#[derive(Debug, Default, Deserialize)]
pub(crate) struct StructuredOutputFields {
    response_format: Option<ResponseFormat>,
    structured_outputs: Option<StructuredOutputs>,
    /// A JSON schema, as an object or as a string.
    guided_json: Option<Value>,
    guided_regex: Option<String>,
    guided_choice: Option<Vec<String>>,
    guided_grammar: Option<String>,
    json_schema: Option<Value>,
    grammar: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ResponseFormat {
    Text,
    /// llama.cpp accepts a schema here too.
    JsonObject {
        schema: Option<Value>,
    },
    JsonSchema {
        json_schema: NamedSchema,
    },
}

#[derive(Debug, Deserialize)]
struct NamedSchema {
    schema: Option<Value>,
    /// If `false`, keywords that cannot be enforced are ignored. Otherwise they are errors.
    strict: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct StructuredOutputs {
    json: Option<Value>,
    json_object: Option<bool>,
    regex: Option<String>,
    choice: Option<Vec<String>>,
    grammar: Option<String>,
    /// vLLM: whether another compiler may be tried. There is one.
    #[serde(rename = "disable_fallback")]
    _disable_fallback: Option<bool>,
}

impl StructuredOutputFields {
    pub(crate) fn grammar(self) -> Result<Option<RequestGrammar>, ApiError> {
        let mut given: Vec<RequestGrammar> = Vec::new();
        let mut add =
            |param, kind: Option<Kind>, lenient| {
                given.extend(kind.map(|kind| RequestGrammar {
                    param,
                    source: wire::Grammar { kind: Some(kind), lenient },
                }));
            };
        if let Some(format) = self.response_format {
            let (kind, lenient) = format.kind();
            add("response_format", kind, lenient);
        }
        if let Some(outputs) = self.structured_outputs {
            let kinds = outputs.kinds();
            if kinds.len() != 1 {
                let message =
                    "`structured_outputs` needs exactly one of json, json_object, regex, choice, grammar";
                return Err(ApiError::invalid(Some("structured_outputs"), message));
            }
            kinds.into_iter().for_each(|kind| add("structured_outputs", Some(kind), false));
        }
        add("guided_json", self.guided_json.map(schema), false);
        add("guided_regex", self.guided_regex.map(Kind::Regex), false);
        add("guided_choice", self.guided_choice.map(choice), false);
        add("guided_grammar", self.guided_grammar.map(grammar), false);
        add("json_schema", self.json_schema.map(schema), false);
        add("grammar", self.grammar.map(grammar), false);
        let mut given = given.into_iter();
        let Some(first) = given.next() else { return Ok(None) };
        match given.find(|other| !is_same(&first.source, &other.source)) {
            Some(second) => {
                let message =
                    format!("`{}` and `{}` differ and cannot be used together", first.param, second.param);
                Err(ApiError::invalid(Some(second.param), message))
            }
            None => Ok(Some(first)),
        }
    }
}

/// Whether two fields ask for the same. A schema may be an object in one and a text in the other.
fn is_same(first: &wire::Grammar, second: &wire::Grammar) -> bool {
    let schema = |text: &str| serde_json::from_str::<Value>(text).ok();
    match (&first.kind, &second.kind) {
        (Some(Kind::JsonSchema(a)), Some(Kind::JsonSchema(b))) => {
            first.lenient == second.lenient && (a == b || schema(a).is_some_and(|a| Some(a) == schema(b)))
        }
        _ => first == second,
    }
}

impl ResponseFormat {
    fn kind(self) -> (Option<Kind>, bool) {
        match self {
            Self::Text => (None, false),
            Self::JsonObject { schema: None } => (Some(Kind::JsonObject(wire::JsonObject {})), false),
            Self::JsonObject { schema: Some(given) } => (Some(schema(given)), false),
            Self::JsonSchema { json_schema: NamedSchema { schema: given, strict } } => {
                // OpenAI allows to leave out `schema`. The output is then any JSON value.
                (Some(given.map_or(Kind::JsonSchema("true".to_owned()), schema)), strict == Some(false))
            }
        }
    }
}

impl StructuredOutputs {
    fn kinds(self) -> Vec<Kind> {
        let object = self.json_object.filter(|&on| on).map(|_| Kind::JsonObject(wire::JsonObject {}));
        let all = [
            self.json.map(schema),
            object,
            self.regex.map(Kind::Regex),
            self.choice.map(choice),
            self.grammar.map(grammar),
        ];
        all.into_iter().flatten().collect()
    }
}

fn schema(given: Value) -> Kind {
    Kind::JsonSchema(match given {
        Value::String(text) => text,
        other => other.to_string(),
    })
}

fn choice(words: Vec<String>) -> Kind {
    Kind::Choice(StringList { values: words })
}

/// A grammar with `::=` is GBNF. Lark has no `::=`.
fn grammar(text: String) -> Kind {
    if text.contains("::=") { Kind::Gbnf(text) } else { Kind::Lark(text) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(fields: Value) -> Result<Option<(&'static str, Kind, bool)>, String> {
        let fields: StructuredOutputFields =
            serde_json::from_value(fields).map_err(|error| error.to_string())?;
        let grammar = fields.grammar().map_err(|error| error.to_string())?;
        Ok(grammar.map(|grammar| (grammar.param, grammar.source.kind.unwrap(), grammar.source.lenient)))
    }

    #[test]
    fn each_field_gives_its_grammar() {
        let object = || Kind::JsonObject(wire::JsonObject {});
        let json = |text: &str| Kind::JsonSchema(text.to_owned());
        let schema = json!({"type": "integer"});
        let table = [
            (json!({}), None),
            (json!({"response_format": {"type": "text"}}), None),
            (json!({"response_format": {"type": "json_object"}}), Some(("response_format", object(), false))),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": true}}}),
                Some(("response_format", json(r#"{"type":"integer"}"#), false)),
            ),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": false}}}),
                Some(("response_format", json("true"), true)),
            ),
            (
                json!({"structured_outputs": {"regex": "a+"}}),
                Some(("structured_outputs", Kind::Regex("a+".into()), false)),
            ),
            (json!({"guided_json": schema}), Some(("guided_json", json(r#"{"type":"integer"}"#), false))),
            (json!({"guided_json": "{}"}), Some(("guided_json", json("{}"), false))),
            (
                json!({"guided_choice": ["a", "b"]}),
                Some((
                    "guided_choice",
                    Kind::Choice(StringList { values: vec!["a".into(), "b".into()] }),
                    false,
                )),
            ),
            (
                json!({"structured_outputs": {"json": schema, "disable_fallback": true}, "guided_json": "{ \"type\": \"integer\" }"}),
                Some(("structured_outputs", json(r#"{"type":"integer"}"#), false)),
            ),
            (
                json!({"structured_outputs": {"grammar": "start: \"a\""}, "guided_grammar": "start: \"a\""}),
                Some(("structured_outputs", Kind::Lark("start: \"a\"".into()), false)),
            ),
            (
                json!({"grammar": "root ::= \"a\""}),
                Some(("grammar", Kind::Gbnf("root ::= \"a\"".into()), false)),
            ),
            (
                json!({"guided_grammar": "start: \"a\""}),
                Some(("guided_grammar", Kind::Lark("start: \"a\"".into()), false)),
            ),
        ];
        for (fields, expected) in table {
            assert_eq!(parse(fields.clone()), Ok(expected), "{fields}");
        }
    }

    #[test]
    fn two_grammars_and_malformed_grammars_are_refused() {
        for fields in [
            json!({"guided_regex": "a", "grammar": "start: \"a\""}),
            json!({"structured_outputs": {"regex": "a"}, "guided_regex": "b"}),
            json!({"guided_json": {"type": "integer"}, "json_schema": {"type": "null"}}),
            json!({"structured_outputs": {}}),
            json!({"structured_outputs": {"regex": "a", "choice": ["a"]}}),
            json!({"structured_outputs": {"structural_tag": "x"}}),
            json!({"response_format": {"type": "yaml"}}),
            json!({"response_format": {}}),
        ] {
            assert!(parse(fields.clone()).is_err(), "{fields}");
        }
    }
}
