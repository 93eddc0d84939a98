// SPDX-License-Identifier: Apache-2.0

//! Why a parameter is refused.

use super::CACHE_SALT_BYTES_MAX;
use super::output_grammar::GRAMMAR_BYTES_MAX;

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(crate) enum RequestParamError {
    #[error("`{param}` is {value}, allowed are {allowed}")]
    OutOfRange { param: &'static str, value: String, allowed: String },
    #[error("`{param}` has {count} entries, allowed are at most {max}")]
    TooManyEntries { param: &'static str, count: usize, max: usize },
    #[error("`{param}[{index}]` is token {token}, the model's vocabulary has {vocabulary}")]
    UnknownToken { param: &'static str, index: usize, token: i64, vocabulary: u32 },
    #[error("`{param}` names token {token} twice")]
    DuplicateToken { param: &'static str, token: u32 },
    #[error("`{param}[{index}]` has {bytes} bytes, allowed are 1 to {max}")]
    StringLength { param: &'static str, index: usize, bytes: usize, max: usize },
    #[error("`cache_salt` has {bytes} bytes, allowed are at most {CACHE_SALT_BYTES_MAX}")]
    CacheSaltLength { bytes: usize },
    #[error("`{param}` has {bytes} bytes, allowed are at most {GRAMMAR_BYTES_MAX}")]
    GrammarLength { param: &'static str, bytes: usize },
    #[error("`{param}` contains text, but the model has no tokenizer: it takes token ids only")]
    NeedsTokenizer { param: &'static str },
    #[error("`{param}` cannot be used together with `{other}`")]
    TwoGrammars { param: &'static str, other: &'static str },
    #[error(
        "`{param}` cannot be used together with beam search: its outputs are the model's most probable ones"
    )]
    NotWithBeams { param: &'static str },
    #[error("`early_stopping` has an effect on beam search only")]
    EarlyStoppingAlone,
    #[error("`length_penalty` has an effect on beam search only")]
    LengthPenaltyAlone,
    #[error("`ignore_eos` cannot be combined with `{with}`: the grammar defines where the output ends")]
    IgnoreEosWithGrammar { with: &'static str },
    #[error("`{param}` is empty: the model needs at least one prompt token")]
    EmptyPrompt { param: &'static str },
    #[error(
        "this model's maximum context length is {context} tokens, but {prompt} tokens of prompt{} are requested",
        .output.map(|o| format!(" and {o} of output")).unwrap_or_default()
    )]
    ContextExceeded { param: &'static str, context: u32, prompt: usize, output: Option<u32> },
}

impl RequestParamError {
    pub(crate) fn param(&self) -> &'static str {
        match self {
            RequestParamError::OutOfRange { param, .. }
            | RequestParamError::TooManyEntries { param, .. }
            | RequestParamError::UnknownToken { param, .. }
            | RequestParamError::DuplicateToken { param, .. }
            | RequestParamError::StringLength { param, .. }
            | RequestParamError::GrammarLength { param, .. }
            | RequestParamError::NeedsTokenizer { param }
            | RequestParamError::TwoGrammars { param, .. }
            | RequestParamError::NotWithBeams { param }
            | RequestParamError::EmptyPrompt { param }
            | RequestParamError::ContextExceeded { param, .. } => param,
            RequestParamError::IgnoreEosWithGrammar { .. } => "ignore_eos",
            RequestParamError::LengthPenaltyAlone => "length_penalty",
            RequestParamError::EarlyStoppingAlone => "early_stopping",
            RequestParamError::CacheSaltLength { .. } => "cache_salt",
        }
    }
}
