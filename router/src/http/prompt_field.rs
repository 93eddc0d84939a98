// SPDX-License-Identifier: Apache-2.0

//! A field with one text or several, each as a string or as token ids: `prompt` of completions,
//! `input` of embeddings.

use serde::Deserialize;

use crate::params::{RequestParamError, TokenLimits, token_ids};

#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a string, an array of strings, an array of token ids, or an array of such arrays"
)]
pub(super) enum PromptField {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<i64>),
    ManyTokens(Vec<Vec<i64>>),
}

/// A prompt as the client sent it.
pub(super) enum GivenPrompt {
    Text(String),
    Tokens(Vec<u32>),
}

impl PromptField {
    /// The prompts of the field `param`, at most `max`.
    pub(super) fn prompts(
        self,
        param: &'static str,
        max: usize,
        limits: TokenLimits,
    ) -> Result<Vec<GivenPrompt>, RequestParamError> {
        let (texts, tokens) = match self {
            PromptField::Text(text) => (vec![text], vec![]),
            PromptField::Texts(texts) => (texts, vec![]),
            PromptField::Tokens(tokens) => (vec![], vec![tokens]),
            PromptField::ManyTokens(many) => (vec![], many),
        };
        let count = texts.len() + tokens.len();
        if count > max {
            return Err(RequestParamError::TooManyEntries { param, count, max });
        }
        let mut given: Vec<GivenPrompt> = texts.into_iter().map(GivenPrompt::Text).collect();
        for ids in &tokens {
            given.push(GivenPrompt::Tokens(token_ids(param, ids, limits)?));
        }
        Ok(given)
    }
}
