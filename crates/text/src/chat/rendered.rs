// SPDX-License-Identifier: Apache-2.0

//! Compares the chat templates of real models with the prompts that Hugging Face's code renders.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value};

use super::{ChatInput, ChatTemplate};
use crate::chat::content::copy_reasoning;
use crate::chat::error::RenderError;

/// 2025-03-14 15:09:26 UTC, as in make.py.
const NOW: i64 = 1_741_964_966;

#[derive(Deserialize)]
struct Rendered {
    template: String,
    case: String,
    messages: Vec<Value>,
    tools: Option<Vec<Value>>,
    kwargs: Map<String, Value>,
    text: Option<String>,
    kind: Option<String>,
}

/// The vectors and the folder of their templates: those of the tree and of the large data set.
fn data_sets() -> Vec<(PathBuf, PathBuf)> {
    let tree = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let full = std::env::var_os("BALLAST_TEST_DATA").map(|root| Path::new(&root).join("data/chat"));
    if full.is_none() {
        // Bypasses the test runner, which shows the output of failed tests only.
        let mut stderr = std::io::stderr();
        writeln!(stderr, "SKIPPED: BALLAST_TEST_DATA is not set, data/chat is not tested").unwrap();
    }
    let full = full.map(|full| (full.join("render.jsonl"), full.join("templates")));
    std::iter::once((tree.join("rendered.jsonl"), tree)).chain(full).collect()
}

fn load(folder: &Path, name: &str) -> ChatTemplate {
    let read = |extension: &str| std::fs::read_to_string(folder.join(format!("{name}.{extension}"))).unwrap();
    let facts: Value = serde_json::from_str(&read("json")).unwrap();
    let token = |name: &str| facts["special_tokens"][name].as_str().unwrap_or_default().to_owned();
    ChatTemplate::new(&read("jinja"), None, &token("bos_token"), &token("eos_token")).unwrap()
}

/// Calls `check` with each vector and with its template and input.
fn for_each_vector(mut check: impl FnMut(&Rendered, &ChatTemplate, &ChatInput<'_>)) {
    for (vectors, folder) in data_sets() {
        let lines = std::fs::read_to_string(vectors).unwrap();
        let mut templates: BTreeMap<String, ChatTemplate> = BTreeMap::new();
        for line in lines.lines() {
            let row: Rendered = serde_json::from_str(line).unwrap();
            let template =
                templates.entry(row.template.clone()).or_insert_with(|| load(&folder, &row.template));
            let mut variables = row.kwargs.clone();
            let mut flag = |name: &str| variables.remove(name).is_some_and(|value| value == true);
            let (add_generation_prompt, continue_final_message) =
                (flag("add_generation_prompt"), flag("continue_final_message"));
            let input = ChatInput {
                messages: &row.messages,
                tools: row.tools.as_deref(),
                add_generation_prompt,
                continue_final_message,
                variables: &variables,
                now_unix_seconds: NOW,
            };
            check(&row, template, &input);
        }
    }
}

fn compare(row: &Rendered, rendered: &Result<String, RenderError>) -> Option<String> {
    let is_right = match (rendered, &row.text, row.kind.as_deref()) {
        (Ok(text), Some(expected), _) => text == expected,
        // Where Jinja2 fails, this engine may render.
        (Ok(_), None, kind) => kind != Some("raise"),
        (Err(RenderError::Refused { .. }), None, _) => true,
        (Err(_), expected, kind) => expected.is_none() && kind != Some("raise"),
    };
    let difference = || {
        let shown =
            |text: &str| text.chars().rev().take(2000).collect::<Vec<_>>().iter().rev().collect::<String>();
        format!(
            "{} {}: {:?}\nexpected {:?}\n",
            row.template,
            row.case,
            rendered.as_ref().map(|text| shown(text)),
            row.text.as_ref().map(|text| shown(text))
        )
    };
    (!is_right).then(difference)
}

fn assert_none(wrong: &[String], checked: usize) {
    let first = &wrong[..wrong.len().min(3)];
    assert!(wrong.is_empty(), "{} of {checked} prompts differ:\n{}", wrong.len(), first.join("\n"));
    assert!(checked >= 5, "{checked}");
}

#[test]
fn templates_of_real_models_render_as_in_hugging_faces_code() {
    let (mut checked, mut wrong) = (0, Vec::new());
    for_each_vector(|row, template, input| {
        let mut messages = row.messages.clone();
        messages.iter_mut().filter_map(Value::as_object_mut).for_each(copy_reasoning);
        wrong.extend(compare(row, &template.render_adapted(messages, input)));
        checked += 1;
    });
    assert_none(&wrong, checked);
}

/// Messages that Hugging Face's code hands to a template as they are, and this server does not.
const ADAPTED: [&str; 5] =
    ["content_parts", "image_part", "developer", "tool_call_string_args", "tool_call_null_content"];

#[test]
fn adapting_messages_changes_nothing_where_a_template_accepts_them() {
    let (mut checked, mut wrong) = (0, Vec::new());
    for_each_vector(|row, template, input| {
        if !ADAPTED.contains(&row.case.as_str()) {
            wrong.extend(compare(row, &template.render(input)));
            checked += 1;
        }
    });
    assert_none(&wrong, checked);
}
