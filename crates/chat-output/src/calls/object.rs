// SPDX-License-Identifier: Apache-2.0

//! Calls that are JSON objects with a name and arguments: `{"name": "f", "arguments": {..}}`.

use super::is_allowed;
use crate::cursor::{JsonSink, NoCall, OutputCursor};
use crate::parser::ToolSignature;

/// The keys of a call's object.
pub(super) struct CallKeys {
    name: &'static str,
    arguments: [&'static str; 2],
}

pub(super) const JSON_KEYS: CallKeys = CallKeys { name: "name", arguments: ["arguments", "parameters"] };
pub(super) const COMMAND_KEYS: CallKeys =
    CallKeys { name: "tool_name", arguments: ["parameters", "arguments"] };

/// Reads the object of one call, and leaves the call open. `tools`: the name must be one of them,
/// and there must be arguments.
pub(super) async fn read_object(
    cursor: &mut OutputCursor,
    keys: &CallKeys,
    tools: Option<&[ToolSignature]>,
) -> Result<(), NoCall> {
    cursor.skip_blanks().await;
    cursor.expect("{").await?;
    let (mut name, mut id): (Option<String>, Option<String>) = (None, None);
    // Arguments that came before the name.
    let mut early = None;
    let mut has_arguments = false;
    loop {
        let key = cursor.read_text().await?;
        cursor.skip_blanks().await;
        cursor.expect(":").await?;
        if key == keys.name && name.is_none() {
            let text = cursor.read_text().await?;
            if !is_allowed(tools, &text) {
                return Err(NoCall);
            }
            name = Some(text);
        } else if key == "id" {
            cursor.skip_blanks().await;
            match cursor.peek().await {
                Some('"') => id = Some(cursor.read_text().await?),
                _ => cursor.read_json(JsonSink::Nowhere).await?,
            }
        } else if keys.arguments.contains(&key.as_str()) && !has_arguments {
            cursor.skip_blanks().await;
            if cursor.peek().await != Some('{') {
                return Err(NoCall);
            }
            has_arguments = true;
            match &name {
                Some(name) => {
                    cursor.start_call(name, id.clone());
                    cursor.read_json(JsonSink::Arguments).await?;
                }
                None => {
                    cursor.taken.clear();
                    cursor.read_json(JsonSink::Buffer).await?;
                    early = Some(std::mem::take(&mut cursor.taken));
                }
            }
        } else {
            cursor.read_json(JsonSink::Nowhere).await?;
        }
        cursor.skip_blanks().await;
        match cursor.accept(&[",", "}"]).await {
            Some(0) => continue,
            Some(_) => break,
            None => return Err(NoCall),
        }
    }
    let name = name.ok_or(NoCall)?;
    if tools.is_some() && !has_arguments {
        return Err(NoCall);
    }
    if !has_arguments || early.is_some() {
        cursor.start_call(&name, id);
        cursor.write_arguments(early.as_deref().unwrap_or("{}"));
    }
    Ok(())
}

/// Reads `[call, call]`.
pub(super) async fn read_list(cursor: &mut OutputCursor, keys: &CallKeys) -> Result<(), NoCall> {
    cursor.skip_blanks().await;
    cursor.expect("[").await?;
    cursor.skip_blanks().await;
    if cursor.accept(&["]"]).await.is_some() {
        return Ok(());
    }
    loop {
        read_object(cursor, keys, None).await?;
        cursor.end_call();
        cursor.skip_blanks().await;
        match cursor.accept(&[",", "]"]).await {
            Some(0) => {}
            Some(_) => return Ok(()),
            None => return Err(NoCall),
        }
    }
}

/// Reads `call; call`.
pub(super) async fn read_sequence(
    cursor: &mut OutputCursor,
    tools: Option<&[ToolSignature]>,
) -> Result<(), NoCall> {
    loop {
        read_object(cursor, &JSON_KEYS, tools).await?;
        cursor.end_call();
        if cursor.peek().await != Some(';') {
            return Ok(());
        }
        cursor.expect(";").await?;
    }
}

/// Reads `<tool_call>call</tool_call>` or `<tool_call>[call, call]`. `is_strict`: without its end
/// marker it is no call.
pub(super) async fn read_tagged(cursor: &mut OutputCursor, is_strict: bool) -> Result<(), NoCall> {
    cursor.expect("<tool_call>").await?;
    cursor.skip_blanks().await;
    if cursor.peek().await == Some('[') {
        read_list(cursor, &JSON_KEYS).await?;
        cursor.skip_blanks().await;
        cursor.accept(&["</tool_call>"]).await;
        return Ok(());
    }
    read_object(cursor, &JSON_KEYS, None).await?;
    cursor.skip_blanks().await;
    let is_closed = cursor.accept(&["</tool_call>"]).await.is_some();
    if !is_closed && (is_strict || cursor.peek().await.is_some()) {
        return Err(NoCall);
    }
    cursor.end_call();
    Ok(())
}
