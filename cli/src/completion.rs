// SPDX-License-Identifier: Apache-2.0

//! [`PromptCompletion`]: what became of one prompt of `ballast generate`.

use serde_json::json;

/// Output and figures of one prompt.
#[derive(Default)]
pub(crate) struct PromptCompletion {
    pub(crate) prompt_tokens: Vec<u32>,
    pub(crate) tokens: Vec<u32>,
    pub(crate) text: String,
    pub(crate) seed: u64,
    pub(crate) reason: &'static str,
    pub(crate) first_token_ms: f64,
}

impl PromptCompletion {
    pub(crate) fn to_json(&self, index: usize) -> serde_json::Value {
        json!({
            "index": index,
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.tokens,
            "text": self.text,
            "finish_reason": self.reason,
            "seed": self.seed,
        })
    }
}
