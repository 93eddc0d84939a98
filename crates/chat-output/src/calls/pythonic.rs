// SPDX-License-Identifier: Apache-2.0

//! Calls as Python writes them: `f(k='v', n=3)`. Values are literals; nothing is evaluated.

use std::pin::Pin;

use serde_json::Value;

use super::is_allowed;
use crate::cursor::{NoCall, OutputCursor};
use crate::parser::ToolSignature;
use crate::typed_value::quote;

/// Deepest nesting of lists and dicts.
const DEPTH_MAX: usize = 60;

/// Reads `[call, call]`.
pub(super) async fn read_list(
    cursor: &mut OutputCursor,
    tools: Option<&[ToolSignature]>,
) -> Result<(), NoCall> {
    cursor.skip_blanks().await;
    cursor.expect("[").await?;
    loop {
        cursor.skip_blanks().await;
        read_call(cursor, tools).await?;
        cursor.skip_blanks().await;
        match cursor.accept(&[",", "]"]).await {
            Some(0) => {}
            Some(_) => break,
            None => return Err(NoCall),
        }
    }
    Ok(())
}

/// Reads Olmo 3's block: one call a line.
pub(super) async fn read_lines(cursor: &mut OutputCursor) -> Result<(), NoCall> {
    cursor.expect("<function_calls>").await?;
    loop {
        cursor.skip_blanks().await;
        if cursor.accept(&["</function_calls>"]).await.is_some() {
            return Ok(());
        }
        read_call(cursor, None).await?;
    }
}

async fn read_name(cursor: &mut OutputCursor) -> Result<String, NoCall> {
    let mut name = String::new();
    while let Some(next) = cursor.peek().await.filter(|c| c.is_alphanumeric() || matches!(c, '_' | '.' | '-'))
    {
        name.push(next);
        cursor.next().await;
    }
    let is_name = name.chars().next().is_some_and(|first| first.is_alphabetic() || first == '_');
    if is_name { Ok(name) } else { Err(NoCall) }
}

async fn read_call(cursor: &mut OutputCursor, tools: Option<&[ToolSignature]>) -> Result<(), NoCall> {
    let name = read_name(cursor).await?;
    cursor.expect("(").await?;
    if !is_allowed(tools, &name) {
        return Err(NoCall);
    }
    cursor.start_call(&name, None);
    cursor.write_arguments("{");
    cursor.skip_blanks().await;
    let mut is_first = true;
    while cursor.accept(&[")"]).await.is_none() {
        let key = read_name(cursor).await?;
        cursor.skip_blanks().await;
        cursor.expect("=").await?;
        let value = read_literal(cursor, 0).await?;
        let comma = if is_first { "" } else { ", " };
        cursor.write_arguments(&format!("{comma}{}: {value}", quote(&key)));
        is_first = false;
        cursor.skip_blanks().await;
        if cursor.accept(&[","]).await.is_none() && cursor.looking_at(&[")"]).await.is_none() {
            return Err(NoCall);
        }
        cursor.skip_blanks().await;
    }
    cursor.write_arguments("}");
    cursor.end_call();
    Ok(())
}

type ReadJson<'a> = Pin<Box<dyn Future<Output = Result<String, NoCall>> + Send + 'a>>;

/// Reads a literal, and returns it as JSON.
fn read_literal(cursor: &mut OutputCursor, depth: usize) -> ReadJson<'_> {
    Box::pin(async move {
        cursor.skip_blanks().await;
        if depth > DEPTH_MAX {
            return Err(NoCall);
        }
        match cursor.accept(&["'", "\"", "[", "{"]).await {
            Some(0) => read_string(cursor, '\'').await,
            Some(1) => read_string(cursor, '"').await,
            Some(2) => read_items(cursor, ']', depth).await,
            Some(_) => read_items(cursor, '}', depth).await,
            None => read_word(cursor).await,
        }
    })
}

/// Reads the rest of a list or dict.
async fn read_items(cursor: &mut OutputCursor, end: char, depth: usize) -> Result<String, NoCall> {
    let mut items = Vec::new();
    let mut ends = [0; 4];
    let end_text = &*end.encode_utf8(&mut ends);
    cursor.skip_blanks().await;
    while cursor.accept(&[end_text]).await.is_none() {
        let mut item = read_literal(cursor, depth + 1).await?;
        if end == '}' {
            cursor.skip_blanks().await;
            cursor.expect(":").await?;
            if !item.starts_with('"') {
                return Err(NoCall);
            }
            item.push_str(": ");
            item.push_str(&read_literal(cursor, depth + 1).await?);
        }
        items.push(item);
        cursor.skip_blanks().await;
        if cursor.accept(&[","]).await.is_none() && cursor.looking_at(&[end_text]).await.is_none() {
            return Err(NoCall);
        }
        cursor.skip_blanks().await;
    }
    let begin = if end == ']' { '[' } else { '{' };
    Ok(format!("{begin}{}{end}", items.join(", ")))
}

async fn read_word(cursor: &mut OutputCursor) -> Result<String, NoCall> {
    let mut word = String::new();
    while let Some(next) =
        cursor.peek().await.filter(|c| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.'))
    {
        word.push(next);
        cursor.next().await;
    }
    match word.as_str() {
        "True" | "true" => Ok("true".to_owned()),
        "False" | "false" => Ok("false".to_owned()),
        "None" | "null" => Ok("null".to_owned()),
        number => match serde_json::from_str::<Value>(number) {
            Ok(Value::Number(_)) => Ok(word),
            _ => Err(NoCall),
        },
    }
}

async fn read_string(cursor: &mut OutputCursor, quotes: char) -> Result<String, NoCall> {
    let mut text = String::new();
    loop {
        match cursor.next().await.ok_or(NoCall)? {
            end if end == quotes => return Ok(quote(&text)),
            '\\' => match cursor.next().await.ok_or(NoCall)? {
                'n' => text.push('\n'),
                't' => text.push('\t'),
                'r' => text.push('\r'),
                '0' => text.push('\0'),
                'x' => text.push(read_code(cursor, 2).await?),
                'u' => text.push(read_code(cursor, 4).await?),
                'U' => text.push(read_code(cursor, 8).await?),
                same @ ('\\' | '\'' | '"') => text.push(same),
                '\n' => {}
                // Python keeps a backslash that escapes nothing.
                other => text.extend(['\\', other]),
            },
            next => text.push(next),
        }
    }
}

async fn read_code(cursor: &mut OutputCursor, digits: usize) -> Result<char, NoCall> {
    let mut code = 0_u32;
    for _ in 0..digits {
        let digit = cursor.next().await.and_then(|next| next.to_digit(16)).ok_or(NoCall)?;
        code = code.checked_mul(16).ok_or(NoCall)? + digit;
    }
    char::from_u32(code).ok_or(NoCall)
}
