// SPDX-License-Identifier: Apache-2.0

//! Calls of Qwen3-Coder, GLM and MiniMax: parameters between tags, values without JSON types.

use crate::cursor::{NoCall, OutputCursor};
use crate::parser::ToolSignature;
use crate::typed_value::{quote, to_json};

/// The arguments of a call, written as they are read.
struct ArgumentWriter<'a> {
    tools: &'a [ToolSignature],
    function: String,
    keys: Vec<String>,
}

impl<'a> ArgumentWriter<'a> {
    fn start(cursor: &mut OutputCursor, tools: &'a [ToolSignature], function: &str) -> Result<Self, NoCall> {
        if function.is_empty() {
            return Err(NoCall);
        }
        cursor.start_call(function, None);
        cursor.write_arguments("{");
        Ok(Self { tools, function: function.to_owned(), keys: Vec::new() })
    }

    fn write(&mut self, cursor: &mut OutputCursor, key: &str, value: &str) -> Result<(), NoCall> {
        if self.keys.iter().any(|known| known == key) {
            return Err(NoCall);
        }
        let comma = if self.keys.is_empty() { "" } else { ", " };
        let value = to_json(self.tools, &self.function, key, value);
        cursor.write_arguments(&format!("{comma}{}: {value}", quote(key)));
        self.keys.push(key.to_owned());
        Ok(())
    }
}

/// Reads `<tool_call><function=f><parameter=k>v</parameter></function></tool_call>`. Several end
/// tags may be missing.
pub(super) async fn read_qwen(cursor: &mut OutputCursor, tools: &[ToolSignature]) -> Result<(), NoCall> {
    cursor.accept(&["<tool_call>"]).await;
    cursor.skip_blanks().await;
    cursor.expect("<function=").await?;
    let (name, _) = cursor.read_until(&[">"]).await?;
    let mut arguments = ArgumentWriter::start(cursor, tools, name.trim())?;
    cursor.skip_blanks().await;
    let mut next = cursor.accept(&["<parameter=", "</function>"]).await.ok_or(NoCall)?;
    while next == 0 {
        let (key, _) = cursor.read_until(&[">"]).await?;
        let (value, end) = cursor.read_until(&["</parameter>", "<parameter=", "</function>"]).await?;
        let value = value.strip_prefix('\n').unwrap_or(&value);
        arguments.write(cursor, key.trim(), value.strip_suffix('\n').unwrap_or(value))?;
        next = match end {
            0 => {
                cursor.skip_blanks().await;
                cursor.accept(&["<parameter=", "</function>"]).await.ok_or(NoCall)?
            }
            1 => 0,
            _ => 1,
        };
    }
    cursor.write_arguments("}");
    cursor.end_call();
    if cursor.looking_at(&["\n</tool_call>", "</tool_call>"]).await.is_some() {
        cursor.accept(&["\n</tool_call>", "</tool_call>"]).await;
    }
    Ok(())
}

/// Reads `<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>`.
pub(super) async fn read_glm(cursor: &mut OutputCursor, tools: &[ToolSignature]) -> Result<(), NoCall> {
    cursor.expect("<tool_call>").await?;
    let (name, mut next) = cursor.read_until(&["<arg_key>", "</tool_call>"]).await?;
    let name = name.trim();
    if name.contains(char::is_whitespace) {
        return Err(NoCall);
    }
    let mut arguments = ArgumentWriter::start(cursor, tools, name)?;
    while next == 0 {
        let (key, _) = cursor.read_until(&["</arg_key>"]).await?;
        cursor.skip_blanks().await;
        cursor.expect("<arg_value>").await?;
        let (value, _) = cursor.read_until(&["</arg_value>"]).await?;
        arguments.write(cursor, key.trim(), &value)?;
        cursor.skip_blanks().await;
        next = cursor.accept(&["<arg_key>", "</tool_call>"]).await.ok_or(NoCall)?;
    }
    cursor.write_arguments("}");
    cursor.end_call();
    Ok(())
}

/// Reads `<minimax:tool_call>` with one `<invoke name="f">` for each call.
pub(super) async fn read_minimax(cursor: &mut OutputCursor, tools: &[ToolSignature]) -> Result<(), NoCall> {
    cursor.expect("<minimax:tool_call>").await?;
    loop {
        cursor.skip_blanks().await;
        match cursor.accept(&["<invoke name=", "</minimax:tool_call>"]).await {
            Some(0) => read_invocation(cursor, tools).await?,
            Some(_) => return Ok(()),
            None => return Err(NoCall),
        }
    }
}

async fn read_invocation(cursor: &mut OutputCursor, tools: &[ToolSignature]) -> Result<(), NoCall> {
    let (name, _) = cursor.read_until(&[">"]).await?;
    let unquoted = |text: &str| text.trim().trim_matches(['"', '\'']).to_owned();
    let mut arguments = ArgumentWriter::start(cursor, tools, &unquoted(&name))?;
    loop {
        cursor.skip_blanks().await;
        match cursor.accept(&["<parameter name=", "</invoke>"]).await {
            Some(0) => {
                let (key, _) = cursor.read_until(&[">"]).await?;
                let (value, _) = cursor.read_until(&["</parameter>"]).await?;
                arguments.write(cursor, &unquoted(&key), &value)?;
            }
            Some(_) => break,
            None => return Err(NoCall),
        }
    }
    cursor.write_arguments("}");
    cursor.end_call();
    Ok(())
}
