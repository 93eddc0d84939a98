// SPDX-License-Identifier: Apache-2.0

//! Compares rendered chat templates with Jinja2's output (tests/data/README.md), and checks the
//! limits on hostile templates.

use crate::files::{file_metadata, full_data, tree_data};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use text::{ChatInput, ChatTemplate, LoadTemplateError, RenderError, Tokenizer};

/// 2024-07-03 04:05:09 UTC, as in make.py.
const NOW: i64 = 1_719_979_509;

#[derive(Deserialize)]
struct ExpectedPrompt {
    template: String,
    input: Map<String, Value>,
    prompt: Option<String>,
    refused: Option<String>,
}

fn render(template: &ChatTemplate, input: &Map<String, Value>) -> Result<String, RenderError> {
    let list = |name: &str| input.get(name).and_then(Value::as_array).cloned().unwrap_or_default();
    let mut variables = input.clone();
    variables.retain(|name, _| !["messages", "tools", "add_generation_prompt"].contains(&name.as_str()));
    template.render(&ChatInput {
        messages: &list("messages"),
        tools: Some(&list("tools")[..]).filter(|tools| !tools.is_empty()),
        add_generation_prompt: input["add_generation_prompt"] == true,
        continue_final_message: false,
        variables: &variables,
        now_unix_seconds: NOW,
    })
}

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new(source, None, "<bos>", "<eos>").unwrap()
}

fn check(name: &str, template: &ChatTemplate) {
    let lines = std::fs::read_to_string(tree_data().join("prompts.jsonl")).unwrap();
    let mut checked = 0;
    for line in lines.lines() {
        let expected: ExpectedPrompt = serde_json::from_str(line).unwrap();
        if expected.template != name {
            continue;
        }
        match (render(template, &expected.input), expected.prompt, expected.refused) {
            (Ok(prompt), Some(expected), None) => assert_eq!(prompt, expected, "{name}"),
            (Err(RenderError::Refused { message }), None, Some(expected)) => {
                assert_eq!(message, expected, "{name}")
            }
            (got, prompt, refused) => panic!("{name}: got {got:?}, expected {prompt:?} {refused:?}"),
        }
        checked += 1;
    }
    assert_eq!(checked, 9, "{name}");
}

#[test]
fn templates_in_the_tree_render_as_jinja_does() {
    for name in ["qwen3", "features"] {
        check(name, &template(&std::fs::read_to_string(tree_data().join(format!("{name}.jinja"))).unwrap()));
    }
}

#[test]
fn templates_of_full_vocabularies_render_as_jinja_does() {
    let Some(folder) = full_data("data/vocab") else { return };
    for name in ["qwen3", "llama3", "gemma"] {
        let metadata = file_metadata(&folder.join(format!("{name}.gguf")));
        check(name, &template(metadata.require("tokenizer.chat_template").unwrap()));
    }
}

fn user(content: Value) -> Map<String, Value> {
    let input = json!({"messages": [{"role": "user", "content": content}], "add_generation_prompt": true});
    input.as_object().unwrap().clone()
}

#[test]
fn chatml_of_a_file_is_rendered_with_its_tokens() {
    let metadata = file_metadata(&tree_data().join("byte-level.gguf"));
    let tokenizer = Tokenizer::from_metadata(&metadata).unwrap();
    let template = ChatTemplate::from_metadata(&metadata, &tokenizer).unwrap();
    let prompt = render(&template, &user(json!("Hello"))).unwrap();
    assert_eq!(prompt, "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n");
    let ids = tokenizer.encode_chat(&prompt).unwrap();
    assert_eq!(tokenizer.decode_bytes(&ids[1..]), prompt.as_bytes());
    assert_eq!(ids.iter().filter(|&&id| id < 3).copied().collect::<Vec<_>>(), [0, 1, 2, 1]);
}

#[test]
fn file_without_a_template_says_what_to_do() {
    let metadata = file_metadata(&tree_data().join("sentencepiece.gguf"));
    let tokenizer = Tokenizer::from_metadata(&metadata).unwrap();
    let error = ChatTemplate::from_metadata(&metadata, &tokenizer).unwrap_err();
    assert!(matches!(error, LoadTemplateError::Missing));
    assert!(error.to_string().contains("completions"), "{error}");
}

#[test]
fn lists_of_parts_reach_templates_in_the_shape_they_take() {
    let parts = user(json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]));
    let strings = template("{{ messages[0].content }}");
    assert_eq!(render(&strings, &parts).unwrap(), "ab");
    let lists = template("{% for part in messages[0]['content'] %}[{{ part.text }}]{% endfor %}");
    assert_eq!(render(&lists, &user(json!("a"))).unwrap(), "[a]");
    let both = template(
        "{% if messages[0].content is string %}{{ messages[0].content }}\
         {% else %}{% for part in messages[0].content %}{{ part.text }};{% endfor %}{% endif %}",
    );
    assert_eq!(render(&both, &parts).unwrap(), "a;b;");
}

#[test]
fn message_that_only_calls_tools_needs_no_content() {
    let qwen3 = template(&std::fs::read_to_string(tree_data().join("qwen3.jinja")).unwrap());
    let call = json!({"function": {"name": "f", "arguments": "{\"a\": 1}"}});
    let conversation = |assistant: Value| {
        let messages = json!([{"role": "user", "content": "a"}, assistant]);
        json!({"messages": messages, "add_generation_prompt": false}).as_object().unwrap().clone()
    };
    let expected = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n<tool_call>\n\
                    {\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call><|im_end|>\n";
    for assistant in [
        json!({"role": "assistant", "tool_calls": [call]}),
        json!({"role": "assistant", "content": null, "tool_calls": [call]}),
        json!({"role": "assistant", "content": "", "tool_calls": [call]}),
    ] {
        assert_eq!(render(&qwen3, &conversation(assistant)).unwrap(), expected);
    }
    // Some templates test for null to distinguish a tool call from a reply.
    let asks = template("{{ messages[-1].content is none }}");
    let assistant = json!({"role": "assistant", "content": null, "tool_calls": [call]});
    assert_eq!(render(&asks, &conversation(assistant)).unwrap(), "True");
}

#[test]
fn template_for_tools_is_taken_when_there_are_tools() {
    let template = ChatTemplate::new("plain", Some("with {{ tools | length }}"), "", "").unwrap();
    let mut input = user(json!("a"));
    assert_eq!(render(&template, &input).unwrap(), "plain");
    input.insert("tools".into(), json!([{"type": "function"}]));
    assert_eq!(render(&template, &input).unwrap(), "with 1");
}

#[test]
fn client_cannot_replace_what_the_server_sets() {
    let mut input = user(json!("a"));
    input.insert("bos_token".into(), json!("x"));
    let error = render(&template("{{ bos_token }}"), &input).unwrap_err();
    assert!(matches!(error, RenderError::ReservedVariable { name } if name == "bos_token"));
}

#[test]
fn hostile_templates_end_with_a_named_error() {
    let input = user(json!("a"));
    let endless =
        "{% for a in range(10000) %}{% for b in range(10000) %}{% set c = a %}{% endfor %}{% endfor %}";
    let long = "{% for a in range(100000) %}{{ 'x' * 1000 }}{% endfor %}";
    // A template that exceeds a limit with any conversation is refused at load.
    let refused = |source: &str| match ChatTemplate::new(source, None, "", "") {
        Err(LoadTemplateError::Excessive { name: "chat_template", source }) => *source,
        other => panic!("{source}: {other:?}"),
    };
    assert!(matches!(refused(endless), RenderError::TooMuchWork { .. }));
    assert!(matches!(refused(long), RenderError::TooLong));
    let tools = ChatTemplate::new("plain", Some(endless), "", "").unwrap_err();
    assert!(matches!(tools, LoadTemplateError::Excessive { name: "chat_template.tool_use", .. }), "{tools}");
    let with_input = |source: &str| {
        let condition = "{% if messages | length == 1 and messages[0].content == 'a' %}";
        render(&template(&format!("{condition}{source}{{% endif %}}")), &input)
    };
    assert!(matches!(with_input(endless), Err(RenderError::TooMuchWork { .. })));
    assert!(matches!(with_input(long), Err(RenderError::TooLong)));
    for source in [
        "{{ 'x' * 1000000000000 }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ messages | tojson(indent=1000000000) }}",
        "{{ nothing.at.all }}",
    ] {
        let result = render(&template(source), &input);
        assert!(matches!(result, Err(RenderError::Template { .. })), "{source}: {result:?}");
    }
    let broken = ChatTemplate::new("{% if %}", None, "", "").unwrap_err();
    assert!(matches!(broken, LoadTemplateError::Syntax { name: "chat_template", .. }), "{broken}");
    let huge = "x".repeat((1 << 20) + 1);
    assert!(matches!(ChatTemplate::new(&huge, None, "", ""), Err(LoadTemplateError::TooLong { .. })));
}
