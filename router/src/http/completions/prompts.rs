// SPDX-License-Identifier: Apache-2.0

//! Tokenizes the prompts of a completion.
//!
//! | `suffix` | prompt of the model |
//! |---|---|
//! | absent or empty | `prompt`, in which names of control tokens become those tokens |
//! | a text | prefix token, `prompt`, suffix token, `suffix`, middle token; names are plain text |

use text::{EncodeMiddleError, MiddlePrefix};

use crate::generate::CHOICES_MAX;
use crate::http::error::ApiError;
use crate::http::prompt_field::{GivenPrompt, PromptField};
use crate::model::{MiddlePromptError, ServedModel};

#[derive(Debug)]
pub(super) struct CompletionPrompts {
    pub(super) field: PromptField,
    /// The text after the gap. Empty: the prompts are continued.
    pub(super) suffix: String,
    pub(super) add_special: bool,
    pub(super) echo: bool,
}

impl CompletionPrompts {
    /// Token ids of each prompt and, for `echo`, its text.
    pub(super) fn tokenize(self, model: &ServedModel) -> Result<(Vec<Vec<u32>>, Vec<String>), ApiError> {
        let given = self.field.prompts("prompt", CHOICES_MAX, model.limits())?;
        let mut encoded = Vec::with_capacity(given.len());
        for prompt in &given {
            encoded.push(match self.suffix.as_str() {
                "" => encode(prompt, self.add_special, model)?,
                suffix => encode_middle(prompt, suffix, self.add_special, model)?,
            });
        }
        let echoes = match self.echo {
            true => given.into_iter().map(|prompt| echo(prompt, model)).collect::<Result<_, _>>()?,
            false => vec![],
        };
        Ok((encoded, echoes))
    }
}

fn encode(prompt: &GivenPrompt, add_special: bool, model: &ServedModel) -> Result<Vec<u32>, ApiError> {
    match prompt {
        GivenPrompt::Text(text) => {
            let encoded = model.text.encode(text, add_special);
            encoded.map_err(|error| ApiError::invalid(Some("prompt"), error.to_string()))
        }
        GivenPrompt::Tokens(ids) => Ok(ids.clone()),
    }
}

fn encode_middle(
    prompt: &GivenPrompt,
    suffix: &str,
    add_special: bool,
    model: &ServedModel,
) -> Result<Vec<u32>, ApiError> {
    let prefix = match prompt {
        GivenPrompt::Text(text) => MiddlePrefix::Text(text),
        GivenPrompt::Tokens(ids) => MiddlePrefix::Tokens(ids),
    };
    model.text.encode_middle(prefix, suffix, add_special).map_err(|error| {
        let param = match error {
            MiddlePromptError::Encode(EncodeMiddleError::Prefix(_)) => "prompt",
            _ => "suffix",
        };
        ApiError::invalid(Some(param), format!("`{param}`: {error}"))
    })
}

fn echo(prompt: GivenPrompt, model: &ServedModel) -> Result<String, ApiError> {
    match prompt {
        GivenPrompt::Text(text) => Ok(text),
        GivenPrompt::Tokens(ids) => {
            let text = model.text.decode(&ids);
            text.map_err(|error| ApiError::invalid(Some("echo"), format!("`echo`: {error}")))
        }
    }
}
