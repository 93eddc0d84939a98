// SPDX-License-Identifier: Apache-2.0

//! Calls of Gemma 4 and functiongemma: `call:f{k:<|"|>v<|"|>,n:3}`. Keys have no quotes, strings
//! have a marker on each side and no escapes.

use std::pin::Pin;

use crate::cursor::{JsonSink, NoCall, OutputCursor};
use crate::typed_value::quote;

pub(super) struct GemmaMarkers {
    begin: &'static str,
    end: &'static str,
    quote: &'static str,
}

pub(super) const GEMMA_4: GemmaMarkers =
    GemmaMarkers { begin: "<|tool_call>", end: "<tool_call|>", quote: "<|\"|>" };
pub(super) const FUNCTION_GEMMA: GemmaMarkers =
    GemmaMarkers { begin: "<start_function_call>", end: "<end_function_call>", quote: "<escape>" };

/// Deepest nesting of lists and objects.
const DEPTH_MAX: usize = 60;

pub(super) async fn read(cursor: &mut OutputCursor, markers: &GemmaMarkers) -> Result<(), NoCall> {
    cursor.expect(markers.begin).await?;
    cursor.skip_blanks().await;
    cursor.expect("call:").await?;
    let (name, _) = cursor.read_until(&["{"]).await?;
    if name.trim().is_empty() {
        return Err(NoCall);
    }
    cursor.start_call(name.trim(), None);
    let arguments = read_entries(cursor, markers, '}', 0).await?;
    cursor.write_arguments(&arguments);
    cursor.skip_blanks().await;
    cursor.expect(markers.end).await?;
    cursor.end_call();
    Ok(())
}

type ReadJson<'a> = Pin<Box<dyn Future<Output = Result<String, NoCall>> + Send + 'a>>;

/// Reads the entries of an object (`}`) or list (`]`) and its end. Returns JSON with both brackets.
fn read_entries<'a>(
    cursor: &'a mut OutputCursor,
    markers: &'a GemmaMarkers,
    end: char,
    depth: usize,
) -> ReadJson<'a> {
    Box::pin(async move {
        let mut json = String::from(if end == '}' { '{' } else { '[' });
        let mut ends = [0; 4];
        let end_text = &*end.encode_utf8(&mut ends);
        cursor.skip_blanks().await;
        if depth > DEPTH_MAX {
            return Err(NoCall);
        }
        if cursor.accept(&[end_text]).await.is_none() {
            loop {
                cursor.skip_blanks().await;
                if end == '}' {
                    let key = match cursor.accept(&[markers.quote]).await {
                        Some(_) => {
                            let key = cursor.read_until(&[markers.quote]).await?.0;
                            cursor.expect(":").await?;
                            key
                        }
                        None => cursor.read_until(&[":"]).await?.0,
                    };
                    json.push_str(&quote(key.trim()));
                    json.push(':');
                }
                json.push_str(&read_value(cursor, markers, depth).await?);
                cursor.skip_blanks().await;
                match cursor.accept(&[",", end_text]).await {
                    Some(0) => json.push(','),
                    Some(_) => break,
                    None => return Err(NoCall),
                }
            }
        }
        json.push(end);
        Ok(json)
    })
}

async fn read_value(
    cursor: &mut OutputCursor,
    markers: &GemmaMarkers,
    depth: usize,
) -> Result<String, NoCall> {
    cursor.skip_blanks().await;
    match cursor.accept(&[markers.quote, "{", "["]).await {
        Some(0) => Ok(quote(&cursor.read_until(&[markers.quote]).await?.0)),
        Some(1) => read_entries(cursor, markers, '}', depth + 1).await,
        Some(_) => read_entries(cursor, markers, ']', depth + 1).await,
        None => {
            cursor.taken.clear();
            cursor.read_json(JsonSink::Buffer).await?;
            Ok(std::mem::take(&mut cursor.taken))
        }
    }
}
