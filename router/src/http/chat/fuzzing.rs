// SPDX-License-Identifier: Apache-2.0

//! Does with a parsed chat what [`post`](super::post) does before it calls a worker, and writes the
//! grammar of its tools for models of all formats. Behind the feature `fuzzing`.

use std::sync::{Arc, LazyLock};

use super::{ArgumentsCheck, Chat, ParsedChat, tool_grammar};
use crate::chat_syntax::ChatSyntax;
use crate::fuzzing::check_calls;
use crate::http::error::ApiError;
use crate::http::request::RequestMetadata;
use crate::model::ServedModel;

/// Marks that a template of each format contains.
const TEMPLATES: [&str; 10] = [
    "<tool_call></tool_call><think></think>",
    "<|start_header_id|>",
    "[TOOL_CALLS]",
    "[TOOL_CALLS][ARGS]",
    "<\u{ff5c}tool\u{2581}calls\u{2581}begin\u{ff5c}>```json",
    "<\u{ff5c}tool\u{2581}calls\u{2581}begin\u{ff5c}>",
    "<|tool_calls_section_begin|>",
    "<|tool_call|>",
    "<arg_key>",
    "<|channel|>analysis<|start|>",
];
static SYNTAXES: LazyLock<[ChatSyntax; 10]> = LazyLock::new(|| TEMPLATES.map(ChatSyntax::of_template));
const CHECKS: [ArgumentsCheck; 2] = [ArgumentsCheck::Schema, ArgumentsCheck::AnyObject];

pub(in crate::http) fn check_chat(
    model: &Arc<ServedModel>,
    metadata: &RequestMetadata,
    parsed: ParsedChat,
) -> Result<(), ApiError> {
    let ParsedChat { params, conversation, tools, .. } = parsed;
    let prompt = model.text.encode_chat(&conversation)?;
    let chat = Chat { model: model.clone(), prompt, params, tools, may_reason: true };
    check_tool_grammars(&chat);
    for check in CHECKS {
        let (syntax, grammar) = chat.output_syntax(check)?;
        let visible = chat.visible_tokens(&syntax);
        check_calls(&chat.request(grammar, metadata)?.with_visible_tokens(visible));
    }
    Ok(())
}

fn check_tool_grammars(chat: &Chat) {
    let Ok(tokenizer) = chat.model.text.tokenizer() else { return };
    let answer = chat.params.grammar.as_ref().and_then(|grammar| grammar.source.kind.as_ref());
    for syntax in &*SYNTAXES {
        for check in CHECKS {
            let grammar = tool_grammar(syntax, tokenizer, &chat.tools, false, answer, check);
            assert!(grammar.is_none_or(|grammar| grammar.lark.starts_with("start: ")), "{syntax:?}");
        }
    }
}
