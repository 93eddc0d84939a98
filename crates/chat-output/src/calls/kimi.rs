// SPDX-License-Identifier: Apache-2.0

//! Kimi K2's calls. Their ids are `functions.NAME:INDEX`.

use crate::cursor::{JsonSink, NoCall, OutputCursor};

pub(super) async fn read(cursor: &mut OutputCursor) -> Result<(), NoCall> {
    cursor.expect("<|tool_calls_section_begin|>").await?;
    let mut calls = 0;
    loop {
        cursor.skip_blanks().await;
        match cursor.accept(&["<|tool_call_begin|>", "<|tool_calls_section_end|>"]).await {
            Some(0) => read_call(cursor).await?,
            Some(_) => return Ok(()),
            None if calls > 0 => return Ok(()),
            None => return Err(NoCall),
        }
        calls += 1;
    }
}

async fn read_call(cursor: &mut OutputCursor) -> Result<(), NoCall> {
    let (head, _) = cursor.read_until(&["<|tool_call_argument_begin|>"]).await?;
    let id = head.trim();
    let name = id.rsplit_once(':').map_or(id, |(name, _)| name);
    let name = name.strip_prefix("functions.").unwrap_or(name);
    cursor.skip_blanks().await;
    if name.is_empty() || cursor.peek().await != Some('{') {
        return Err(NoCall);
    }
    cursor.start_call(name, Some(id.to_owned()));
    cursor.read_json(JsonSink::Arguments).await?;
    cursor.skip_blanks().await;
    cursor.expect("<|tool_call_end|>").await?;
    cursor.end_call();
    Ok(())
}
