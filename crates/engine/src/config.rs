//! QueueLimits of one engine. Nothing is sized from "free memory": the KV budget is explicit.

use crate::draft::draft_tokens::DRAFT_DEPTH_MAX;
use ops::{AttentionSpan, KvLayer, KvLayout, KvTypes, KvTypesError};
use std::time::Duration;

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
    /// What keys and values are stored as. A draft model's are of the type that has no layers of its own.
    pub kv_types: KvTypes,
    /// Most rows of a step, over all sequences. Not below `running_max`, so that every decode moves in every step.
    pub step_tokens: usize,
    /// What prompts may add to a step in which sequences decode, as far as earlier steps tell.
    pub max_prefill_stall: Duration,
    /// Most sequences that hold KV blocks at once.
    pub running_max: usize,
    /// Most requests of ordinary priority that wait; `admission` says what that means for others.
    pub queue_max: usize,
    /// Cuts the model's context length; `None` keeps it.
    pub context_tokens: Option<usize>,
    /// Reuse the KV blocks of equal prefixes between requests.
    pub prefix_cache: bool,
    /// Most tokens that are drafted for a sequence in a step, if the engine has a drafter; 0: none.
    pub draft_depth_max: usize,
}

/// Rows of a step.
pub const STEP_TOKENS: usize = 512;
/// 64 sequences at once, and what a router keeps of them for urgent requests and batches unless it is told otherwise.
pub const RUNNING_MAX: usize = 80;
/// Requests that wait.
pub const QUEUE_MAX: usize = 256;
/// Who reads a stream along hardly notices.
const MAX_PREFILL_STALL: Duration = Duration::from_millis(100);
/// Bytes of the logits that scoring adds to a step: a vocabulary of 150,000 gets 13 rows, one of 4,000 gets 524.
const SCORE_LOGITS_BYTES: usize = 8 << 20;
/// Bytes of the logits that drafts add to a step: 55 drafted tokens with a vocabulary of 150,000.
const DRAFT_LOGITS_BYTES: usize = 32 << 20;

/// A name in the cache has a byte for its group.
const GROUPS_MAX: usize = 256;

/// A configuration that no engine can run with.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngineConfigError {
    #[error("{field} is 0, it must be at least 1")]
    Zero { field: &'static str },
    #[error("a draft depth of {depth} is asked for, at most {DRAFT_DEPTH_MAX} is possible")]
    DraftDepth { depth: usize },
    #[error(
        "step_tokens is {step_tokens}, below running_max of {running_max}: a step could not move every sequence"
    )]
    StepBelowRunning { step_tokens: usize, running_max: usize },
    #[error(
        "the KV budget of {budget_bytes} bytes holds no block; one and the trash block take {needed_bytes}"
    )]
    BudgetTooSmall { budget_bytes: u64, needed_bytes: u64 },
    #[error("the KV budget has {tokens} tokens, at most {max} can be addressed")]
    BudgetTooLarge { tokens: u64, max: u64 },
    #[error("the model has no layer with keys and values")]
    NoLayers,
    #[error(
        "{whose} sees only the last {tokens} tokens: a draft model keeps all of its keys and values, in the blocks of layers \
         that see everything; draft by lookup, or not at all"
    )]
    DraftWindow { whose: &'static str, tokens: usize },
    #[error(
        "the model's layers are {groups} groups that see different parts of the span, at most {max} are possible"
    )]
    Groups { groups: usize, max: usize },
    #[error(transparent)]
    KvTypes(#[from] KvTypesError),
}

impl EngineConfig {
    /// Defaults for everything but the budget.
    pub fn new(kv: KvBudget) -> Self {
        Self {
            block_tokens: 16,
            kv,
            kv_types: KvTypes::default(),
            step_tokens: STEP_TOKENS,
            max_prefill_stall: MAX_PREFILL_STALL,
            running_max: RUNNING_MAX,
            queue_max: QUEUE_MAX,
            context_tokens: None,
            prefix_cache: true,
            draft_depth_max: 0,
        }
    }

    /// The cache that the budget buys, its trash block included. What it takes: `blocks * block_bytes()`.
    pub fn kv_layout(&self, layers: Vec<KvLayer>) -> Result<KvLayout, EngineConfigError> {
        self.kv_layout_beside(layers, 0)
    }

    /// The same where as many blocks of `others` bytes have to be paid for too. A budget in tokens buys blocks for these
    /// tokens whatever part of them its layers see: for one sequence or for many.
    pub(crate) fn kv_layout_beside(
        &self,
        layers: Vec<KvLayer>,
        others: usize,
    ) -> Result<KvLayout, EngineConfigError> {
        let mut layout = KvLayout { block_tokens: self.block_tokens, blocks: 0, layers };
        let block_bytes = (layout.block_bytes() + others) as u64;
        let groups = layout.groups().len();
        if groups > GROUPS_MAX {
            return Err(EngineConfigError::Groups { groups, max: GROUPS_MAX });
        }
        if self.block_tokens == 0 {
            return Err(EngineConfigError::Zero { field: "block_tokens" });
        }
        if block_bytes == 0 {
            return Err(EngineConfigError::NoLayers);
        }
        let needed_bytes = 2 * block_bytes;
        let blocks = match self.kv {
            KvBudget::Tokens(0) => return Err(EngineConfigError::Zero { field: "kv_tokens" }),
            KvBudget::Tokens(tokens) => {
                (tokens.div_ceil(self.block_tokens) as u64).saturating_mul(groups as u64).saturating_add(1)
            }
            KvBudget::Bytes(budget_bytes) if budget_bytes < needed_bytes => {
                return Err(EngineConfigError::BudgetTooSmall { budget_bytes, needed_bytes });
            }
            KvBudget::Bytes(budget_bytes) => budget_bytes / block_bytes,
        };
        // A KV slot, the index of a token in the cache, is a u32.
        let tokens = blocks.saturating_mul(self.block_tokens as u64);
        if tokens > u64::from(u32::MAX) {
            return Err(EngineConfigError::BudgetTooLarge { tokens, max: u64::from(u32::MAX) });
        }
        layout.blocks = blocks as usize;
        Ok(layout)
    }

    /// How large the steps get: the limits that the engine's model is built with.
    pub fn model_limits(&self, vocab_size: usize) -> models::ForwardLimits {
        models::ForwardLimits {
            rows_max: self.step_tokens,
            outputs_max: self.running_max + self.score_rows_max(vocab_size) + self.draft_rows_max(vocab_size),
        }
    }

    /// Most rows of logits that the engine keeps in the host's memory: those of a step, and one for each running request that
    /// waits for its constraint.
    pub fn kept_rows_max(&self, vocab_size: usize) -> usize {
        self.model_limits(vocab_size).outputs_max + self.running_max
    }

    /// Most rows of a step that drafts get.
    pub fn draft_rows_max(&self, vocab_size: usize) -> usize {
        match self.draft_depth_max {
            0 => 0,
            depth => {
                (DRAFT_LOGITS_BYTES / (size_of::<f32>() * vocab_size.max(1))).max(depth).min(self.step_tokens)
            }
        }
    }

    /// Most rows of a step that scoring gets: the longest run of `EngineOutput::Logits` or `Scored` from one step.
    pub fn score_rows_max(&self, vocab_size: usize) -> usize {
        (SCORE_LOGITS_BYTES / (size_of::<f32>() * vocab_size.max(1))).clamp(1, self.step_tokens.max(1))
    }

    pub(crate) fn check(&self) -> Result<(), EngineConfigError> {
        for (field, value) in [
            ("step_tokens", self.step_tokens),
            ("running_max", self.running_max),
            ("queue_max", self.queue_max),
        ] {
            if value == 0 {
                return Err(EngineConfigError::Zero { field });
            }
        }
        if self.draft_depth_max > DRAFT_DEPTH_MAX {
            return Err(EngineConfigError::DraftDepth { depth: self.draft_depth_max });
        }
        let (step_tokens, running_max) = (self.step_tokens, self.running_max);
        if step_tokens < running_max {
            return Err(EngineConfigError::StepBelowRunning { step_tokens, running_max });
        }
        Ok(())
    }
}

/// Whether a model with layers `drafts` can draft for one with layers `own`. It uses the tables of the first group, and the
/// blocks there for all of its own layers: nothing in them may be given back while the sequence lives.
pub fn check_draft(own: &[KvLayer], drafts: &[KvLayer]) -> Result<(), EngineConfigError> {
    let window = |whose, layers: &[KvLayer]| {
        layers.iter().find_map(|layer| match layer.span {
            AttentionSpan::Full => None,
            AttentionSpan::Window { tokens } => Some(EngineConfigError::DraftWindow { whose, tokens }),
        })
    };
    let refused = match drafts {
        [] => None,
        _ if own.iter().all(|layer| layer.span != AttentionSpan::Full) => {
            window("each layer of the model", own)
        }
        _ => window("a layer of the draft model", drafts),
    };
    refused.map_or(Ok(()), Err)
}
