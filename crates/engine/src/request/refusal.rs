// SPDX-License-Identifier: Apache-2.0

//! The answer to a submission: queued, or refused with a reason.

use crate::request::input::RequestId;
use crate::sample::params::SamplingParamError;
use crate::schedule::admission::QueueFullError;
use std::time::Duration;

/// The request waits in the queue. The next step may admit it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queued {
    /// Requests before it in the waiting queue.
    pub ahead: usize,
}

/// Why a request was refused. The first three reasons are conditions of this worker; the others are
/// mistakes of the caller.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RefuseReason {
    #[error("{waiting} requests wait, the limit is {max}; retry in {} s", .retry_after.as_secs())]
    QueueFull { waiting: usize, max: usize, retry_after: Duration },
    #[error("{waiting} requests of this tenant wait, the limit is {max}; retry in {} s", .retry_after.as_secs())]
    TenantQueueFull { waiting: usize, max: usize, retry_after: Duration },
    #[error("the worker is draining and takes no new requests")]
    Draining,
    #[error("{0} has the id of a request that has not finished")]
    DuplicateId(RequestId),
    #[error("the prompt is empty; give at least one token")]
    EmptyPrompt,
    #[error(
        "prompt of {prompt_tokens} tokens does not fit in the context of {context_tokens} with its output"
    )]
    PromptTooLong { prompt_tokens: usize, context_tokens: usize },
    #[error(
        "prior_output is {prior_output} of {prompt_tokens} prompt tokens; at least one token must not be output"
    )]
    PriorOutput { prior_output: usize, prompt_tokens: usize },
    #[error(
        "prior_output of {prior_output} tokens reaches max_tokens of {max_tokens}: nothing is left to generate"
    )]
    NothingToGenerate { prior_output: usize, max_tokens: u32 },
    #[error("{field}[{index}] is token {token}, the vocabulary has {vocab_size}")]
    TokenId { field: &'static str, index: usize, token: u32, vocab_size: usize },
    #[error(
        "{tokens} tokens of prompt and output need {needed} KV blocks of {block_tokens} tokens, the budget is {blocks}; \
         ask for fewer tokens or give the worker a larger KV budget"
    )]
    NeverFits { tokens: usize, needed: usize, block_tokens: usize, blocks: usize },
    #[error(transparent)]
    Param(#[from] SamplingParamError),
}

impl From<QueueFullError> for RefuseReason {
    fn from(full: QueueFullError) -> Self {
        let QueueFullError { waiting, max, is_tenant_limit, retry_after } = full;
        match is_tenant_limit {
            true => RefuseReason::TenantQueueFull { waiting, max, retry_after },
            false => RefuseReason::QueueFull { waiting, max, retry_after },
        }
    }
}
