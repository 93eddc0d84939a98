// SPDX-License-Identifier: Apache-2.0

//! Reads calls, one module for each family of formats.

mod bare;
mod deepseek;
mod gemma;
mod kimi;
mod mistral;
mod object;
mod pythonic;
mod xml;

use crate::cursor::{NoCall, OutputCursor};
use crate::format::ToolFormat;
use crate::parser::ToolSignature;
use object::{COMMAND_KEYS, JSON_KEYS};

/// Reads the calls that one of the format's triggers begins.
pub(crate) async fn read_marked(
    cursor: &mut OutputCursor,
    format: ToolFormat,
    tools: &[ToolSignature],
) -> Result<(), NoCall> {
    match format {
        ToolFormat::Hermes => object::read_tagged(cursor, false).await,
        ToolFormat::Granite4 => object::read_tagged(cursor, true).await,
        ToolFormat::QwenXml => xml::read_qwen(cursor, tools).await,
        ToolFormat::Glm => xml::read_glm(cursor, tools).await,
        ToolFormat::MiniMax => xml::read_minimax(cursor, tools).await,
        ToolFormat::Mistral => mistral::read(cursor).await,
        ToolFormat::DeepSeek => deepseek::read(cursor).await,
        ToolFormat::KimiK2 => kimi::read(cursor).await,
        ToolFormat::Gemma4 => gemma::read(cursor, &gemma::GEMMA_4).await,
        ToolFormat::FunctionGemma => gemma::read(cursor, &gemma::FUNCTION_GEMMA).await,
        ToolFormat::Llama3 => {
            cursor.expect("<|python_tag|>").await?;
            object::read_sequence(cursor, None).await
        }
        ToolFormat::Llama4 => {
            cursor.expect("<|python_start|>").await?;
            pythonic::read_list(cursor, None).await?;
            cursor.skip_blanks().await;
            cursor.accept(&["<|python_end|>"]).await;
            Ok(())
        }
        ToolFormat::Olmo3 => pythonic::read_lines(cursor).await,
        ToolFormat::Granite3 => {
            cursor.accept(&["<|tool_call|>", "<tool_call>"]).await;
            object::read_list(cursor, &JSON_KEYS).await
        }
        ToolFormat::Phi4Mini => {
            cursor.accept(&["functools", "<|tool_call|>"]).await;
            object::read_list(cursor, &JSON_KEYS).await?;
            cursor.skip_blanks().await;
            cursor.accept(&["<|/tool_call|>"]).await;
            Ok(())
        }
        ToolFormat::Command => {
            cursor.expect("<|START_ACTION|>").await?;
            object::read_list(cursor, &COMMAND_KEYS).await?;
            cursor.skip_blanks().await;
            cursor.accept(&["<|END_ACTION|>"]).await;
            Ok(())
        }
        ToolFormat::Harmony | ToolFormat::Pythonic | ToolFormat::Generic => Err(NoCall),
    }
}

/// Reads the calls of an answer that is a call from its first character.
pub(crate) async fn read_bare(
    cursor: &mut OutputCursor,
    format: ToolFormat,
    tools: &[ToolSignature],
) -> Result<(), NoCall> {
    match format {
        ToolFormat::Llama3 => object::read_sequence(cursor, Some(tools)).await,
        ToolFormat::Pythonic | ToolFormat::Llama4 => pythonic::read_list(cursor, Some(tools)).await,
        ToolFormat::Generic => bare::read(cursor, tools).await,
        _ => Err(NoCall),
    }
}

/// Whether a call without a marker names a tool. With a marker, every name passes: the client
/// answers for it.
fn is_allowed(tools: Option<&[ToolSignature]>, name: &str) -> bool {
    !name.is_empty() && tools.is_none_or(|tools| tools.iter().any(|tool| tool.name == name))
}
