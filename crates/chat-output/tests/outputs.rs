// SPDX-License-Identifier: Apache-2.0

//! Compares parsed outputs with those that tests/data/README.md names, and checks that every cut of
//! a text gives the same events.

#![expect(clippy::unwrap_used, reason = "functions shared by tests are tests too")]

use std::io::Write;
use std::path::Path;

use chat_output::{
    CallDelivery, ChatEvent, OutputParser, OutputSyntax, ReasoningMarkers, ToolFormat, ToolSignature,
};
use proptest::prelude::*;
use serde::Deserialize;
use serde_json::Value;

#[derive(Deserialize)]
struct Expected {
    format: String,
    case: String,
    tools: Vec<Value>,
    output: String,
    #[serde(default)]
    stream_chunks: Vec<String>,
    content: Option<String>,
    #[serde(default)]
    content_alternatives: Vec<Option<String>>,
    alternative: Option<Value>,
    reasoning: Option<String>,
    reasoning_markers: Vec<String>,
    #[serde(default)]
    starts_in_reasoning: bool,
    tool_calls: Vec<Value>,
    #[serde(default)]
    invalid: bool,
}

const FORMATS: [(&str, ToolFormat); 24] = [
    ("hermes", ToolFormat::Hermes),
    ("qwen3-coder", ToolFormat::QwenXml),
    ("llama3-json", ToolFormat::Llama3),
    ("llama3-json-tag", ToolFormat::Llama3),
    ("llama3-pythonic", ToolFormat::Pythonic),
    ("llama4-pythonic", ToolFormat::Llama4),
    ("mistral-array", ToolFormat::Mistral),
    ("mistral-args", ToolFormat::Mistral),
    ("deepseek-v3", ToolFormat::DeepSeek),
    ("deepseek-r1", ToolFormat::DeepSeek),
    ("deepseek-v3.1", ToolFormat::DeepSeek),
    ("gpt-oss", ToolFormat::Harmony),
    ("gemma4", ToolFormat::Gemma4),
    ("functiongemma", ToolFormat::FunctionGemma),
    ("glm4.5", ToolFormat::Glm),
    ("glm4.7", ToolFormat::Glm),
    ("kimi-k2", ToolFormat::KimiK2),
    ("minimax-m2", ToolFormat::MiniMax),
    ("granite3", ToolFormat::Granite3),
    ("granite4", ToolFormat::Granite4),
    ("phi-4-mini", ToolFormat::Phi4Mini),
    ("command-r7b", ToolFormat::Command),
    ("olmo3", ToolFormat::Olmo3),
    ("generic-json", ToolFormat::Generic),
];

/// The events of an output, joined.
#[derive(Debug, Default, PartialEq)]
struct Joined {
    content: String,
    reasoning: String,
    calls: Vec<(String, String)>,
    ended: usize,
}

impl Joined {
    fn add(&mut self, events: Vec<ChatEvent>) {
        for event in events {
            match event {
                ChatEvent::Text(text) => self.content.push_str(&text),
                ChatEvent::Reasoning(text) => self.reasoning.push_str(&text),
                ChatEvent::CallStarted { index, name, .. } => {
                    assert_eq!(index, self.calls.len());
                    self.calls.push((name, String::new()));
                }
                ChatEvent::Arguments { index, json } => {
                    assert_eq!(index + 1, self.calls.len());
                    self.calls[index].1.push_str(&json);
                }
                ChatEvent::CallEnded { index } => {
                    assert_eq!(index, self.ended);
                    self.ended += 1;
                }
            }
        }
    }

    fn parse<'a>(syntax: &OutputSyntax, pieces: impl Iterator<Item = &'a str>) -> Self {
        let mut parser = OutputParser::new(syntax.clone());
        let mut joined = Self::default();
        pieces.for_each(|piece| joined.add(parser.push(piece)));
        joined.add(parser.finish());
        joined
    }
}

impl Expected {
    /// The pieces of a stream, or characters if there are none.
    fn pieces(&self) -> impl Iterator<Item = &str> {
        let characters = self.output.split_inclusive(|_| true).filter(|_| self.stream_chunks.is_empty());
        self.stream_chunks.iter().map(String::as_str).chain(characters)
    }

    fn syntax(&self, delivery: CallDelivery) -> OutputSyntax {
        let format = FORMATS.iter().find(|(name, _)| *name == self.format).unwrap().1;
        let [open, close] = &self.reasoning_markers[..] else { panic!("{}: two markers", self.case) };
        OutputSyntax {
            calls: Some(format),
            reasoning: Some(ReasoningMarkers { open: open.clone(), close: close.clone() }),
            starts_in_reasoning: self.starts_in_reasoning,
            delivery,
            tools: self.tools.iter().map(signature).collect(),
        }
    }

    /// What is wrong with an output that was parsed as a whole.
    fn differs(&self, joined: &Joined) -> Option<&'static str> {
        let text = |text: &str| Some(text.trim().to_owned()).filter(|text| !text.is_empty());
        let parsed = |(name, arguments): &(String, String)| serde_json::json!({"name": name, "arguments": serde_json::from_str::<Value>(arguments).unwrap()});
        let calls: Vec<Value> = joined.calls.iter().map(parsed).collect();
        if let Some(alternative) = &self.alternative
            && alternative["tool_calls"] == Value::Array(calls.clone())
        {
            let expected = alternative["reasoning"].as_str().unwrap_or_default();
            return (joined.reasoning.trim() != expected).then_some("reasoning");
        }
        let content = text(&joined.content);
        let mut contents =
            self.content_alternatives.iter().chain([&self.content]).map(|it| it.as_deref().and_then(text));
        let reasoning = text(&joined.reasoning);
        match () {
            () if calls != self.tool_calls => Some("calls"),
            () if reasoning != self.reasoning.as_deref().and_then(text) => Some("reasoning"),
            () if !contents.any(|it| it == content) => Some("content"),
            () => None,
        }
    }
}

fn signature(tool: &Value) -> ToolSignature {
    let function = &tool["function"];
    let name = function["name"].as_str().unwrap().to_owned();
    ToolSignature { name, parameters: function["parameters"].clone() }
}

fn for_each_output(mut check: impl FnMut(&Expected)) -> usize {
    let tree = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/toolcalls.jsonl");
    let full =
        std::env::var_os("BALLAST_TEST_DATA").map(|root| Path::new(&root).join("data/chat/toolcalls.jsonl"));
    if full.is_none() {
        let mut stderr = std::io::stderr();
        writeln!(stderr, "SKIPPED: BALLAST_TEST_DATA is not set, data/chat is not tested").unwrap();
    }
    let mut count = 0;
    for file in std::iter::once(tree).chain(full) {
        for line in std::fs::read_to_string(file).unwrap().lines() {
            check(&serde_json::from_str(line).unwrap());
            count += 1;
        }
    }
    count
}

#[test]
fn outputs_of_every_format_are_parsed_as_expected() {
    let mut wrong = Vec::new();
    let count = for_each_output(|row| {
        let syntax = row.syntax(CallDelivery::Complete);
        let joined = Joined::parse(&syntax, std::iter::once(&row.output[..]));
        assert_eq!(joined.ended, joined.calls.len());
        if let Some(part) = row.differs(&joined) {
            wrong.push(format!("{} {}: {part}: {joined:?}\n  of {:?}", row.format, row.case, row.output));
        }
        assert_eq!(Joined::parse(&syntax, row.pieces()), joined, "{} {}", row.format, row.case);
    });
    assert!(wrong.is_empty(), "{} of {count} differ:\n{}", wrong.len(), wrong.join("\n"));
    assert!(count > 10, "{count}");
}

#[test]
fn streamed_calls_are_those_of_the_whole_output() {
    for_each_output(|row| {
        let streamed = Joined::parse(&row.syntax(CallDelivery::Streamed), row.pieces());
        if !row.invalid {
            assert_eq!(row.differs(&streamed), None, "{} {}: {streamed:?}", row.format, row.case);
        }
        assert_eq!(streamed.ended, streamed.calls.len());
    });
}

/// Templates of the data set and the formats of their models' calls.
const TEMPLATES: [(&str, &str); 23] = [
    ("qwen2.5-7b-instruct", "hermes"),
    ("qwen3-0.6b", "hermes"),
    ("hermes-3-tool-use", "hermes"),
    ("qwq-32b", "hermes"),
    ("qwen3-coder", "qwen-xml"),
    ("qwen3.5-4b", "qwen-xml"),
    ("llama-3.1-8b", "llama3"),
    ("llama-3.2-pythonic-vllm", "pythonic"),
    ("llama-4-scout", "llama4"),
    ("mistral-nemo-2407", "mistral"),
    ("mistral-small-24b-2501", "mistral"),
    ("deepseek-r1", "deepseek"),
    ("deepseek-v3.1", "deepseek"),
    ("gpt-oss-120b", "harmony"),
    ("gemma-4-31b", "gemma4"),
    ("glm-4.6", "glm"),
    ("kimi-k2-instruct", "kimi-k2"),
    ("minimax-m2", "minimax"),
    ("granite-4.0", "granite4"),
    ("phi-4-mini", "phi4-mini"),
    ("command-a", "command"),
    ("olmo-3", "olmo3"),
    ("gemma-3", "generic"),
];

#[test]
fn the_format_of_a_model_is_found_in_its_template() {
    let Some(root) = std::env::var_os("BALLAST_TEST_DATA") else { return };
    let read = |name: &str| {
        let file = Path::new(&root).join(format!("data/chat/templates/{name}.jinja"));
        std::fs::read_to_string(file).unwrap()
    };
    for (template, format) in TEMPLATES {
        assert_eq!(ToolFormat::of_template(&read(template)).name(), format, "{template}");
        assert_eq!(ToolFormat::from_name(format).map(ToolFormat::name), Some(format));
    }
    let markers = |name: &str| ReasoningMarkers::of_template(&read(name)).map(|markers| markers.close);
    assert_eq!(markers("qwen3-0.6b").as_deref(), Some("</think>"));
    assert_eq!(markers("command-a").as_deref(), Some("<|END_THINKING|>"));
    assert_eq!(markers("llama-3.1-8b"), None);
    let r1 = read("deepseek-r1");
    assert!(ReasoningMarkers::of_template(&r1).is_some_and(|markers| markers.are_never_opened_by(&r1)));
}

#[test]
fn arguments_are_given_out_as_they_are_written() {
    let syntax = OutputSyntax {
        calls: Some(ToolFormat::Hermes),
        reasoning: None,
        starts_in_reasoning: false,
        delivery: CallDelivery::Streamed,
        tools: vec![],
    };
    let mut parser = OutputParser::new(syntax);
    assert_eq!(parser.push("<tool_call>{\"name\": \"f\", "), []);
    let started = ChatEvent::CallStarted { index: 0, id: None, name: "f".to_owned() };
    let arguments = |json: &str| ChatEvent::Arguments { index: 0, json: json.to_owned() };
    assert_eq!(parser.push("\"arguments\": {\"ci"), [started, arguments("{\"ci")]);
    assert_eq!(parser.push("ty\": \"Par"), [arguments("ty\": \"Par")]);
    assert_eq!(parser.push("is\"}}</tool_call>"), [arguments("is\"}"), ChatEvent::CallEnded { index: 0 }]);
    assert_eq!(parser.finish(), []);
}

/// Texts that are made of what formats look for.
fn hostile_text() -> impl Strategy<Value = String> {
    let mut parts: Vec<String> = FORMATS
        .iter()
        .flat_map(|(_, format)| format.markers().iter().chain(format.triggers()))
        .map(|text| (*text).to_owned())
        .collect();
    let more = [
        "<think>",
        "</think>",
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        "\"",
        "'",
        "\\",
        ",",
        ":",
        "=",
        "name",
        "arguments",
        "f",
        "1",
        "-",
        "e",
        "true",
        "null",
        " ",
        "\n",
        "é",
        "🦀",
        "<function=",
        "<parameter=",
        ">",
        "to=functions.",
        "call:",
        "{\"name\": \"f\", \"arguments\": {\"a\": [1, \"x\"]}}",
        "f(a='x')",
        "```json",
        "<tool_cal",
    ];
    parts.extend(more.map(str::to_owned));
    let part = prop_oneof![8 => prop::sample::select(parts), 1 => any::<char>().prop_map(String::from)];
    prop::collection::vec(part, 0..24).prop_map(|parts| parts.concat())
}

fn any_syntax() -> impl Strategy<Value = OutputSyntax> {
    let delivery = prop::sample::select(vec![CallDelivery::Complete, CallDelivery::Streamed]);
    (prop::sample::select(FORMATS.to_vec()), any::<bool>(), delivery).prop_map(
        |((_, calls), inside, delivery)| OutputSyntax {
            calls: Some(calls),
            reasoning: Some(ReasoningMarkers { open: "<think>".to_owned(), close: "</think>".to_owned() }),
            starts_in_reasoning: inside,
            delivery,
            tools: vec![ToolSignature { name: "f".to_owned(), parameters: Value::Null }],
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn every_cut_of_a_text_gives_the_same_events(
        text in hostile_text(),
        syntax in any_syntax(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
    ) {
        let whole = Joined::parse(&syntax, std::iter::once(&text[..]));
        let mut bounds: Vec<usize> = cuts.iter().map(|cut| text.floor_char_boundary(cut.index(text.len() + 1))).collect();
        bounds.extend([0, text.len()]);
        bounds.sort_unstable();
        let pieces = bounds.windows(2).map(|pair| &text[pair[0]..pair[1]]);
        prop_assert_eq!(&Joined::parse(&syntax, pieces), &whole);
        if syntax.delivery == CallDelivery::Complete {
            for (_, arguments) in &whole.calls {
                let parsed: Result<serde_json::Map<String, Value>, _> = serde_json::from_str(arguments);
                prop_assert!(parsed.is_ok(), "{}", arguments);
            }
        }
    }

    #[test]
    fn a_text_without_markers_passes_as_it_is(text in "[a-z \n{}<|>\"é🦀]{0,40}", syntax in any_syntax()) {
        let syntax = OutputSyntax { starts_in_reasoning: false, ..syntax };
        let joined = Joined::parse(&syntax, std::iter::once(&text[..]));
        prop_assert_eq!(joined.content, text);
        prop_assert!(joined.calls.is_empty() && joined.reasoning.is_empty());
    }

    #[test]
    fn calls_that_are_cut_off_are_text_without_a_lost_character(
        at in any::<prop::sample::Index>(),
        (_, format) in prop::sample::select(FORMATS.to_vec()),
    ) {
        let call = match format {
            ToolFormat::Hermes | ToolFormat::Granite4 => "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>",
            ToolFormat::Llama3 => "{\"name\": \"f\", \"parameters\": {\"a\": 1}}",
            ToolFormat::Mistral => "[TOOL_CALLS]f[ARGS]{\"a\": 1}",
            ToolFormat::KimiK2 => "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"a\": 1}<|tool_call_end|>",
            _ => return Ok(()),
        };
        let syntax = OutputSyntax {
            calls: Some(format),
            reasoning: None,
            starts_in_reasoning: false,
            delivery: CallDelivery::Complete,
            tools: vec![ToolSignature { name: "f".to_owned(), parameters: Value::Null }],
        };
        let cut = &call[..at.index(call.len())];
        let joined = Joined::parse(&syntax, std::iter::once(cut));
        prop_assert!(joined.calls.len() == 1 || joined.content == cut, "{cut:?}: {joined:?}");
    }
}
