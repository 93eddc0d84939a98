// SPDX-License-Identifier: Apache-2.0

//! DeepSeek's calls. V3 and R1 name the type and fence the arguments, V3.1 does neither.

use crate::cursor::{JsonSink, NoCall, OutputCursor};

const CALL_END: &str = "<｜tool▁call▁end｜>";

pub(super) async fn read(cursor: &mut OutputCursor) -> Result<(), NoCall> {
    cursor.expect("<｜tool▁calls▁begin｜>").await?;
    let mut calls = 0;
    loop {
        cursor.skip_blanks().await;
        match cursor.accept(&["<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>"]).await {
            Some(0) => read_call(cursor).await?,
            Some(_) => return Ok(()),
            // The section's end may be missing; the calls are closed.
            None if calls > 0 => return Ok(()),
            None => return Err(NoCall),
        }
        calls += 1;
    }
}

async fn read_call(cursor: &mut OutputCursor) -> Result<(), NoCall> {
    let (head, _) = cursor.read_until(&["<｜tool▁sep｜>"]).await?;
    cursor.skip_blanks().await;
    let (name, is_fenced) = match cursor.peek().await {
        Some('{') => (head, false),
        _ => (cursor.read_until(&["```json"]).await?.0, true),
    };
    cursor.skip_blanks().await;
    if name.trim().is_empty() || cursor.peek().await != Some('{') {
        return Err(NoCall);
    }
    cursor.start_call(name.trim(), None);
    cursor.read_json(JsonSink::Arguments).await?;
    cursor.skip_blanks().await;
    if is_fenced {
        cursor.expect("```").await?;
        cursor.skip_blanks().await;
    }
    cursor.expect(CALL_END).await?;
    cursor.end_call();
    Ok(())
}
