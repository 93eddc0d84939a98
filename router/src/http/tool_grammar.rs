// SPDX-License-Identifier: Apache-2.0

//! The grammar of an output with tool calls, in llguidance's Lark.
//!
//! ```text
//! auto       text without the format's trigger, or text up to the trigger and then calls
//! required   reasoning if the model reasons, then one or more calls
//! named      as required, one call of that tool
//! ```
//!
//! 1. Arguments match the tool's schema.
//! 2. A marker that is a control token of the vocabulary is written as a token id, because control
//!    tokens have no text.
//! 3. A format whose values have no JSON types is not constrained with `auto`. With the other
//!    choices, the output is a JSON list of calls ([`ToolFormat::Generic`]).

use chat_output::ToolFormat;
use proto::v1::grammar::Kind;
use serde_json::{Value, json};
use text::{EncodeOptions, Tokenizer};

use super::tools::{CallableTool, RequestTools, ToolChoice};
use crate::chat_syntax::{ChatSyntax, control_tokens};

/// White space in arguments, as in other structured output. The limit ends a run of blanks.
const JSON_WHITESPACE: &str = r"([ ]|\r?\n{1,2}[ \t]{0,20})";

/// What the grammar asks of arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ArgumentsCheck {
    /// They match the tool's schema.
    Schema,
    /// They are an object: for schemas that cannot be compiled.
    AnyObject,
}

/// A grammar, and the format that reads what it allows.
pub(super) struct ToolGrammar {
    pub(super) lark: String,
    pub(super) format: ToolFormat,
}

/// Symbols of a rule: literals, token ids, names of rules.
type Symbols = Vec<String>;

/// How a format writes several calls: `begin call separator call end`.
struct CallShape {
    begin: Symbols,
    separator: Option<&'static str>,
    end: Symbols,
    /// Before and after the arguments of each tool.
    calls: Vec<(Symbols, Symbols)>,
}

struct GrammarBuilder<'a> {
    syntax: &'a ChatSyntax,
    tokenizer: &'a Tokenizer,
    tools: &'a RequestTools,
    check: ArgumentsCheck,
}

/// Returns `None` if the output is free. `answer`: the client's grammar for an answer without
/// calls.
pub(super) fn tool_grammar(
    syntax: &ChatSyntax,
    tokenizer: &Tokenizer,
    tools: &RequestTools,
    starts_in_reasoning: bool,
    answer: Option<&Kind>,
    check: ArgumentsCheck,
) -> Option<ToolGrammar> {
    let builder = GrammarBuilder { syntax, tokenizer, tools, check };
    let native = builder.shape(syntax.format);
    match (tools.choice, native) {
        (ToolChoice::None, _) => None,
        (ToolChoice::Auto, native) => {
            let shape = native.filter(|_| syntax.format != ToolFormat::Llama3)?;
            Some(ToolGrammar { lark: builder.auto(&shape, answer)?, format: syntax.format })
        }
        (_, Some(shape)) => {
            let lark = builder.forced(&shape, starts_in_reasoning);
            Some(ToolGrammar { lark, format: syntax.format })
        }
        (_, None) => {
            let shape = builder.shape(ToolFormat::Generic)?;
            let lark = builder.forced(&shape, starts_in_reasoning);
            Some(ToolGrammar { lark, format: ToolFormat::Generic })
        }
    }
}

fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

impl GrammarBuilder<'_> {
    /// A marker as its token, if it is a control token, else as text.
    fn marker(&self, text: &str) -> String {
        let options = EncodeOptions { add_special: false, parse_special: true };
        let ids = self.tokenizer.encode(text, options).unwrap_or_default();
        match (&ids[..], &control_tokens(self.tokenizer, text)[..]) {
            (&[id], &[_]) => format!("<[{id}]>"),
            _ => literal(text),
        }
    }

    fn shape(&self, format: ToolFormat) -> Option<CallShape> {
        let names = || self.tools.callable.iter().map(|tool| &*tool.signature.name);
        let shape = |begin: Symbols, separator, end: Symbols, call: &dyn Fn(&str) -> (Symbols, Symbols)| {
            Some(CallShape { begin, separator, end, calls: names().map(call).collect() })
        };
        let object = |name_key: &str, arguments_key: &str, name: &str| {
            (
                vec![literal(&format!("{{\"{name_key}\": \"{name}\", \"{arguments_key}\": "))],
                vec![literal("}")],
            )
        };
        let json_call = |name: &str| object("name", "arguments", name);
        match format {
            ToolFormat::Hermes | ToolFormat::Granite4 => shape(vec![], Some("\n"), vec![], &|name| {
                let begin = literal(&format!("\n{{\"name\": \"{name}\", \"arguments\": "));
                let end = vec![literal("}\n"), self.marker("</tool_call>")];
                (vec![self.marker("<tool_call>"), begin], end)
            }),
            ToolFormat::Llama3 => {
                shape(vec![], Some("; "), vec![], &|name| object("name", "parameters", name))
            }
            ToolFormat::Mistral if self.syntax.has_argument_marks => shape(vec![], None, vec![], &|name| {
                (vec![self.marker("[TOOL_CALLS]"), literal(name), self.marker("[ARGS]")], vec![])
            }),
            ToolFormat::Mistral => {
                let begin = vec![self.marker("[TOOL_CALLS]"), literal(" [")];
                shape(begin, Some(", "), vec![literal("]")], &json_call)
            }
            ToolFormat::DeepSeek => {
                let (begin, end) = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>");
                shape(vec![self.marker(begin)], None, vec![self.marker(end)], &|name| {
                    self.deepseek_call(name)
                })
            }
            ToolFormat::KimiK2 => {
                let (begin, end) = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>");
                shape(vec![self.marker(begin)], None, vec![self.marker(end)], &|name| {
                    let id = vec![literal(&format!("functions.{name}:")), "CALL_INDEX".to_owned()];
                    let begin = [vec![self.marker("<|tool_call_begin|>")], id].concat();
                    let begin = [begin, vec![self.marker("<|tool_call_argument_begin|>")]].concat();
                    (begin, vec![self.marker("<|tool_call_end|>")])
                })
            }
            ToolFormat::Granite3 => {
                let begin = vec![self.marker("<|tool_call|>"), literal("[")];
                shape(begin, Some(", "), vec![literal("]")], &json_call)
            }
            ToolFormat::Phi4Mini => {
                shape(vec![literal("functools[")], Some(", "), vec![literal("]")], &json_call)
            }
            ToolFormat::Command => {
                let begin = vec![self.marker("<|START_ACTION|>"), literal("[")];
                let end = vec![literal("]"), self.marker("<|END_ACTION|>")];
                shape(begin, Some(", "), end, &|name| object("tool_name", "parameters", name))
            }
            ToolFormat::Generic => shape(vec![literal("[")], Some(", "), vec![literal("]")], &json_call),
            _ => None,
        }
    }

    fn deepseek_call(&self, name: &str) -> (Symbols, Symbols) {
        let begin = self.marker("<｜tool▁call▁begin｜>");
        let (separator, end) = (self.marker("<｜tool▁sep｜>"), self.marker("<｜tool▁call▁end｜>"));
        match self.syntax.has_fences {
            true => {
                let name = literal(&format!("{name}\n```json\n"));
                (vec![begin, literal("function"), separator, name], vec![literal("\n```"), end])
            }
            false => (vec![begin, literal(name), separator], vec![end]),
        }
    }

    /// Arguments are an object, whatever else the schema says.
    fn arguments_schema(&self, tool: &CallableTool) -> Value {
        let mut schema = match self.check {
            ArgumentsCheck::Schema => tool.signature.parameters.clone(),
            ArgumentsCheck::AnyObject => json!({}),
        };
        schema["type"] = json!("object");
        with_options(schema, tool.is_strict)
    }

    fn allows_several(&self) -> bool {
        self.tools.parallel && self.tools.choice != ToolChoice::Named
    }

    /// The rules `calls` and `call`. `after_trigger`: the first symbol has been read.
    fn call_rules(&self, shape: &CallShape, after_trigger: bool) -> String {
        let calls = |skipped: usize| {
            let alternatives = shape.calls.iter().enumerate().map(|(index, (before, after))| {
                [&before[skipped..], &[format!("arguments{index}")], after].concat().join(" ")
            });
            alternatives.collect::<Vec<_>>().join("\n  | ")
        };
        let separator = shape.separator.map_or_else(String::new, literal);
        let more = if self.allows_several() { format!("({separator} call)*") } else { String::new() };
        let skips_begin = after_trigger && !shape.begin.is_empty();
        let skips_first = after_trigger && shape.begin.is_empty();
        let begin = shape.begin[usize::from(skips_begin)..].join(" ");
        let mut rules = format!("calls: {begin} first_call {more} {}\n", shape.end.join(" "));
        rules.push_str(&format!("first_call: {}\n", calls(usize::from(skips_first))));
        if self.allows_several() {
            rules.push_str(&format!("call: {}\n", calls(0)));
        }
        for (index, tool) in self.tools.callable.iter().enumerate() {
            rules.push_str(&format!("arguments{index}: %json {}\n", self.arguments_schema(tool)));
        }
        if rules.contains("CALL_INDEX") {
            rules.push_str("CALL_INDEX: /[0-9]{1,3}/\n");
        }
        rules
    }

    /// Calls, after reasoning if the model reasons.
    fn forced(&self, shape: &CallShape, starts_in_reasoning: bool) -> String {
        let mut lark = String::new();
        let reasoning = self.syntax.reasoning.as_ref().map(|markers| {
            let close = self.marker(&markers.close);
            let rules = match close.starts_with("<[") {
                true => format!("thought: TEXT? {close}\n"),
                false => format!("thought[lazy]: /(.|\\n)*/ {close}\n"),
            };
            (rules, self.marker(markers.open.trim_end()))
        });
        match reasoning {
            None => lark.push_str("start: calls\n"),
            Some((rules, _)) if starts_in_reasoning => {
                lark.push_str(&format!("start: thought BLANKS? calls\n{rules}"));
            }
            Some((rules, open)) => {
                lark.push_str(&format!("start: ({open} thought BLANKS?)? calls\n{rules}"));
            }
        }
        lark.push_str(&self.call_rules(shape, false));
        lark.push_str("BLANKS: /[ \\n]{1,4}/\nTEXT: /(.|\\n)+/\n");
        lark
    }

    /// Free text, or text up to the trigger and then calls. Returns `None` if the client's grammar
    /// for an answer cannot stand beside calls.
    fn auto(&self, shape: &CallShape, answer: Option<&Kind>) -> Option<String> {
        let first = shape.begin.first().or(shape.calls.first()?.0.first())?;
        let answer = match answer {
            None => None,
            Some(Kind::JsonSchema(schema)) => Some(serde_json::from_str(schema).ok()?),
            Some(Kind::JsonObject(_)) => Some(json!({"type": "object"})),
            Some(_) => return None,
        };
        if let Some(schema) = answer {
            let rules = self.call_rules(shape, false);
            return Some(format!(
                "start: calls | answer\nanswer: %json {}\n{rules}",
                with_options(schema, false)
            ));
        }
        if first.starts_with("<[") {
            let markers = self.syntax.reasoning.iter().flat_map(|markers| [&markers.open, &markers.close]);
            let ids = markers.flat_map(|marker| control_tokens(self.tokenizer, marker));
            let others: String = ids.map(|id| format!(" | <[{id}]>")).collect();
            let rules = self.call_rules(shape, false);
            return Some(format!("start: free calls?\nfree: (TEXT{others})*\nTEXT: /(.|\\n)+/\n{rules}"));
        }
        let rules = self.call_rules(shape, true);
        Some(format!(
            "start: TEXT? | head calls\nhead[lazy]: /(.|\\n)*/ {first}\n\
             TEXT: /(.|\\n)+/ & ~(/(.|\\n)*/ {first} /(.|\\n)*/)\n{rules}"
        ))
    }
}

fn with_options(schema: Value, is_strict: bool) -> Value {
    let Value::Object(mut keywords) = schema else { return schema };
    let options = json!({"whitespace_pattern": JSON_WHITESPACE, "lenient": !is_strict});
    keywords.insert("x-guidance".to_owned(), options);
    Value::Object(keywords)
}

#[cfg(test)]
#[path = "tool_grammar_tests.rs"]
mod tests;
