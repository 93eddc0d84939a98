// SPDX-License-Identifier: Apache-2.0

//! Follows random outputs through the grammar of each format, and parses them.

use std::path::Path;
use std::sync::OnceLock;

use super::*;
use crate::http::tools::ToolFields;
use chat_output::{CallDelivery, ChatEvent, OutputParser, OutputSyntax};
use grammar::{CompiledGrammar, GrammarSource, GrammarVocabulary, MatcherStatus};

/// Random numbers that are the same in every run (xorshift).
struct RandomTokens(u64);

impl RandomTokens {
    /// One of the tokens of a mask, with equal chances.
    fn pick(&mut self, mask: &[u32]) -> u32 {
        let allowed: Vec<u32> =
            (0..mask.len() as u32 * 32).filter(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1).collect();
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        allowed[(self.0 % allowed.len() as u64) as usize]
    }
}

fn tokenizer() -> &'static Tokenizer {
    static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
    TOKENIZER.get_or_init(|| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../demo/pycoder-7m-q8_0.gguf");
        Tokenizer::from_metadata(gguf::GgufModel::open(&path).unwrap().metadata()).unwrap()
    })
}

fn tools(choice: Value, parallel: bool) -> RequestTools {
    let tool = |name: &str, properties: Value| {
        let required: Vec<&String> = properties.as_object().unwrap().keys().collect();
        let schema = json!({
            "type": "object", "properties": properties, "required": required, "additionalProperties": false,
        });
        json!({"type": "function", "function": {"name": name, "parameters": schema, "strict": true}})
    };
    let listed = [
        tool("get_weather", json!({"city": {"type": "string", "maxLength": 6}, "days": {"enum": [1, 2]}})),
        tool("now", json!({})),
    ];
    let fields = json!({"tools": listed, "tool_choice": choice, "parallel_tool_calls": parallel});
    let fields: ToolFields = serde_json::from_value(fields).unwrap();
    RequestTools::parse(fields).unwrap()
}

fn compile(lark: &str) -> CompiledGrammar {
    static VOCABULARY: OnceLock<std::sync::Mutex<GrammarVocabulary>> = OnceLock::new();
    let vocabulary =
        VOCABULARY.get_or_init(|| std::sync::Mutex::new(GrammarVocabulary::new(tokenizer()).unwrap()));
    let compiled =
        CompiledGrammar::compile(&GrammarSource::Lark(lark.to_owned()), &vocabulary.lock().unwrap());
    compiled.unwrap_or_else(|error| panic!("{error}\n{lark}"))
}

/// A random output of the grammar, at most `tokens` long, and whether it is complete.
fn random_output(grammar: &CompiledGrammar, tokens: usize, random: &mut RandomTokens) -> (String, bool) {
    let (mut matcher, mut mask, mut output) = (grammar.matcher(), Vec::new(), Vec::new());
    for _ in 0..tokens {
        if matcher.compute_mask(&mut mask).unwrap() == MatcherStatus::Finished {
            return (String::from_utf8(output).unwrap(), true);
        }
        let token = random.pick(&mask);
        if tokenizer().is_end_of_generation(token) {
            return (String::from_utf8(output).unwrap(), true);
        }
        matcher.accept(token).unwrap();
        output.extend_from_slice(tokenizer().token_bytes(token).unwrap());
    }
    (String::from_utf8_lossy(&output).into_owned(), false)
}

fn parse(
    output: &str,
    grammar: &ToolGrammar,
    tools: &RequestTools,
    syntax: &ChatSyntax,
) -> Vec<(String, Value)> {
    let mut parser = OutputParser::new(OutputSyntax {
        calls: Some(grammar.format),
        reasoning: syntax.reasoning.clone(),
        starts_in_reasoning: false,
        delivery: CallDelivery::Streamed,
        tools: tools.signatures(),
    });
    let mut events = parser.push(output);
    events.extend(parser.finish());
    let mut calls: Vec<(String, String)> = Vec::new();
    for event in events {
        match event {
            ChatEvent::CallStarted { name, .. } => calls.push((name, String::new())),
            ChatEvent::Arguments { index, json } => calls[index].1.push_str(&json),
            _ => {}
        }
    }
    calls.into_iter().map(|(name, json)| (name, serde_json::from_str(&json).unwrap())).collect()
}

const TEMPLATES: [(&str, &str); 10] = [
    ("hermes", "<tool_call>"),
    ("hermes with reasoning", "<tool_call></tool_call><think></think>"),
    ("llama3", "<|start_header_id|>"),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral v11", "[TOOL_CALLS][ARGS]"),
    ("deepseek", "<｜tool▁calls▁begin｜>```json"),
    ("deepseek v3.1", "<｜tool▁calls▁begin｜>"),
    ("kimi", "<|tool_calls_section_begin|>"),
    ("granite3", "<|tool_call|>"),
    ("glm: a list of calls", "<arg_key>"),
];

#[test]
fn forced_calls_parse_and_match_their_schema_in_every_format() {
    let mut random = RandomTokens(7);
    for (name, template) in TEMPLATES {
        let syntax = ChatSyntax::of_template(template);
        let named = json!({"type": "function", "function": {"name": "get_weather"}});
        for (choice, parallel) in [(json!("required"), true), (json!("required"), false), (named, true)] {
            let tools = tools(choice.clone(), parallel);
            let grammar =
                tool_grammar(&syntax, tokenizer(), &tools, false, None, ArgumentsCheck::Schema).unwrap();
            let compiled = compile(&grammar.lark);
            let mut complete = 0;
            // Random reasoning hardly ever ends.
            let attempts = if syntax.reasoning.is_some() { 2 } else { 60 };
            for _ in 0..attempts {
                let (output, is_complete) = random_output(&compiled, 300, &mut random);
                if !is_complete {
                    continue;
                }
                complete += 1;
                if complete == 3 {
                    break;
                }
                let calls = parse(&output, &grammar, &tools, &syntax);
                assert!(!calls.is_empty(), "{name}: {output:?}");
                assert!(calls.len() == 1 || (parallel && choice == "required"), "{name}: {output:?}");
                for (function, arguments) in calls {
                    let is_weather = function == "get_weather" && arguments["city"].is_string();
                    assert!(is_weather || function == "now", "{name}: {output:?}");
                    assert!(choice == "required" || function == "get_weather", "{name}: {output:?}");
                }
            }
            assert!(complete > 0 || syntax.reasoning.is_some(), "{name} {choice}: no output is complete");
        }
    }
}

/// Follows a given text through the grammar of `auto`.
fn allows(lark: &str, text: &str) -> bool {
    let mut matcher = compile(lark).matcher();
    let options = EncodeOptions { add_special: false, parse_special: false };
    let mut mask = Vec::new();
    let ids = tokenizer().encode(text, options).unwrap();
    ids.iter().all(|&id| {
        let status = matcher.compute_mask(&mut mask).unwrap();
        let is_allowed = status == MatcherStatus::Active && mask[id as usize / 32] >> (id % 32) & 1 == 1;
        is_allowed && matcher.accept(id).is_ok()
    })
}

#[test]
fn a_free_answer_may_be_any_text_until_a_call_begins() {
    let tools = tools(json!("auto"), true);
    let call = |name: &str, arguments: &str| {
        format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {arguments}}}\n</tool_call>")
    };
    let syntax = ChatSyntax::of_template("<tool_call>");
    let grammar = tool_grammar(&syntax, tokenizer(), &tools, false, None, ArgumentsCheck::Schema).unwrap();
    let good = call("get_weather", "{\"city\": \"Rome\", \"days\": 2}");
    for text in ["Hello, <tool_cal is text.", "a\n{\"b\": 1}", &good, &format!("I look.\n{good}\n{good}")] {
        assert!(allows(&grammar.lark, text), "{text}");
    }
    for text in [
        call("other", "{}"),
        call("get_weather", "{\"city\": 5}"),
        "I look. <tool_call>no call".to_owned(),
        "<tool_call></tool_call>".to_owned(),
    ] {
        assert!(!allows(&grammar.lark, &text), "{text}");
    }
    let schema = Kind::JsonSchema(json!({"type": "integer"}).to_string());
    let either =
        tool_grammar(&syntax, tokenizer(), &tools, false, Some(&schema), ArgumentsCheck::Schema).unwrap();
    assert!(allows(&either.lark, "17") && allows(&either.lark, &good) && !allows(&either.lark, "text"));
    assert!(
        tool_grammar(
            &ChatSyntax::of_template("<arg_key>"),
            tokenizer(),
            &tools,
            false,
            None,
            ArgumentsCheck::Schema
        )
        .is_none()
    );
}
