// SPDX-License-Identifier: Apache-2.0

//! Fuzzes [`ChatTemplate`]: any source is refused or makes a template, and any conversation is
//! refused or rendered.
//!
//! The work runs on a thread with the stack of the router's threads, so that deep recursion is
//! found here. Templates that ask for much memory are not found here: minijinja has no limit on
//! memory, so the child that checks a model has one. `-malloc_limit_mb` would only report what is
//! known.

#![no_main]

use libfuzzer_sys::{Corpus, fuzz_target};
use serde_json::{Map, Value, json};
use text::{ChatInput, ChatTemplate};

const STACK_BYTES: usize = 2 << 20;

const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// A text, cut at NUL bytes: a template, a template for tools, and messages. So a plain template is
/// an input.
#[derive(Debug)]
struct Input<'a> {
    source: &'a str,
    tool_use: Option<&'a str>,
    messages: Vec<Value>,
}

impl<'a> Input<'a> {
    fn parse(text: &'a str) -> Self {
        let mut parts = text.split('\0');
        let source = parts.next().unwrap_or_default();
        Self { source, tool_use: parts.next(), messages: parts.map(message).collect() }
    }
}

/// The first byte chooses the role, and whether the content is a list.
fn message(text: &str) -> Value {
    let choice = text.bytes().next().unwrap_or(2);
    let content = match choice & 0x40 {
        0 => json!(text),
        _ => json!([{"type": "text", "text": text}]),
    };
    json!({"role": ROLES[usize::from(choice) % ROLES.len()], "content": content})
}

/// Sources that may ask for much memory, which only the child's limit bounds.
fn may_grow(source: &str) -> bool {
    let contains = |words: &[&str]| words.iter().any(|word| source.contains(word));
    contains(&["*", "indent", "center", "format", "slice", "batch"])
        || contains(&["for", "macro"]) && contains(&["join", "replace", "range"])
}

fn render(input: &Input<'_>) {
    let Ok(template) = ChatTemplate::new(input.source, input.tool_use, "<s>", "</s>") else { return };
    let tool = json!({"type": "function", "function": {"name": "f"}});
    for tools in [None, Some(&[tool][..])] {
        let rendered = template.render(&ChatInput {
            messages: &input.messages,
            tools,
            add_generation_prompt: true,
            continue_final_message: false,
            variables: &Map::new(),
            now_unix_seconds: 1_719_979_509,
        });
        if let Err(error) = rendered {
            assert!(!error.to_string().is_empty());
        }
    }
}

fuzz_target!(|text: &str| -> Corpus {
    let input = Input::parse(text);
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
