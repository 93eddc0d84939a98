// SPDX-License-Identifier: Apache-2.0

//! Fuzzes [`ChatTemplate`]: any source is refused or makes a template, and any conversation is
//! refused or rendered.
//!
//! The work runs on a thread with the stack of the router's threads, so that deep recursion is
//! found here. Templates that ask for much memory are not found here: minijinja has no limit on
//! memory, so the child that checks a model has one. `-malloc_limit_mb` would only report what is
//! known.

#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::{Corpus, fuzz_target};
use serde_json::{Map, Value, json};
use text::{ChatInput, ChatTemplate};

const STACK_BYTES: usize = 2 << 20;

#[derive(Arbitrary, Debug)]
struct Input<'a> {
    source: &'a str,
    tool_use: Option<&'a str>,
    /// Role and content of each message.
    messages: Vec<(u8, Option<&'a str>, bool)>,
    has_tools: bool,
    variable: Option<(&'a str, &'a str)>,
}

const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

fn message((role, content, as_parts): &(u8, Option<&str>, bool)) -> Value {
    let content = match as_parts {
        true => content.map(|text| json!([{"type": "text", "text": text}])),
        false => content.map(Value::from),
    };
    json!({"role": ROLES[usize::from(*role) % ROLES.len()], "content": content})
}

/// Sources that may ask for much memory, which only the child's limit bounds.
fn may_grow(source: &str) -> bool {
    let contains = |words: &[&str]| words.iter().any(|word| source.contains(word));
    contains(&["*", "indent", "center", "format", "slice", "batch"])
        || contains(&["for", "macro"]) && contains(&["~", "+", "join", "replace", "append", "range"])
}

fn render(input: &Input<'_>) {
    let Ok(template) = ChatTemplate::new(input.source, input.tool_use, "<s>", "</s>") else { return };
    let messages: Vec<Value> = input.messages.iter().map(message).collect();
    let tools = vec![json!({"type": "function", "function": {"name": "f"}}); usize::from(input.has_tools)];
    let variables: Map<String, Value> =
        input.variable.iter().map(|(name, value)| ((*name).to_owned(), json!(value))).collect();
    let rendered = template.render(&ChatInput {
        messages: &messages,
        tools: &tools,
        add_generation_prompt: true,
        variables: &variables,
        now_unix_seconds: 1_719_979_509,
    });
    if let Err(error) = rendered {
        assert!(!error.to_string().is_empty());
    }
}

fuzz_target!(|input: Input<'_>| -> Corpus {
    if may_grow(input.source) || input.tool_use.is_some_and(may_grow) {
        return Corpus::Reject;
    }
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(STACK_BYTES);
        let thread = thread.spawn_scoped(scope, || render(&input)).expect("a thread starts");
        thread.join().expect("rendering does not panic");
    });
    Corpus::Keep
});
