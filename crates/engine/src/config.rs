//! Bounds of one engine. Nothing is sized from "free memory": the KV budget is explicit.

use ops::KvType;

/// How much the KV cache may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvBudget {
    Tokens(usize),
    Bytes(u64),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineConfig {
    /// Tokens per KV block.
    pub block_tokens: usize,
    pub kv: KvBudget,
    pub kv_type: KvType,
    /// Most rows of a step, over all sequences. Not below `running_max`, so that every decode moves in every step.
    pub step_tokens: usize,
    /// Most rows of one prompt in a step, so that a long prompt leaves room for others.
    pub prefill_chunk_max: usize,
    /// Most sequences that hold KV blocks at once.
    pub running_max: usize,
    /// Most requests that wait.
    pub queue_max: usize,
    /// Cuts the model's context length; `None` keeps it.
    pub context_tokens: Option<usize>,
    /// End-of-sequence tokens of the vocabulary.
    pub eos_tokens: Vec<u32>,
    /// Reuse the KV blocks of equal prefixes between requests.
    pub prefix_cache: bool,
}

impl EngineConfig {
    /// Defaults for everything but the budget.
    pub fn new(kv: KvBudget) -> Self {
        Self {
            block_tokens: 16,
            kv,
            kv_type: KvType::F16,
            step_tokens: 512,
            prefill_chunk_max: 512,
            running_max: 64,
            queue_max: 256,
            context_tokens: None,
            eos_tokens: Vec::new(),
            prefix_cache: true,
        }
    }
}
