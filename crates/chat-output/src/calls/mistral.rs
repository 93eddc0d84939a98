// SPDX-License-Identifier: Apache-2.0

//! Mistral's calls: `[TOOL_CALLS] [{..}]`, or `[TOOL_CALLS]f[CALL_ID]id[ARGS]{..}` since v11.

use super::object::{JSON_KEYS, read_list};
use crate::cursor::{JsonSink, NoCall, OutputCursor};

pub(super) async fn read(cursor: &mut OutputCursor) -> Result<(), NoCall> {
    cursor.expect("[TOOL_CALLS]").await?;
    cursor.skip_blanks().await;
    if cursor.peek().await == Some('[') {
        return read_list(cursor, &JSON_KEYS).await;
    }
    let (name, mark) = cursor.read_until(&["[CALL_ID]", "[ARGS]", "{"]).await?;
    let id = match mark {
        0 => Some(cursor.read_until(&["[ARGS]"]).await?.0.trim().to_owned()),
        1 => None,
        _ => return Err(NoCall),
    };
    let name = name.trim();
    cursor.skip_blanks().await;
    if name.is_empty() || cursor.peek().await != Some('{') {
        return Err(NoCall);
    }
    cursor.start_call(name, id);
    cursor.read_json(JsonSink::Arguments).await?;
    cursor.end_call();
    Ok(())
}
