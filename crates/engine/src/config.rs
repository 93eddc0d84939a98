// SPDX-License-Identifier: Apache-2.0

//! Configuration of one engine. The KV budget is explicit: nothing is sized from "free memory".

use crate::draft::draft_tokens::DRAFT_DEPTH_MAX;
use ops::{AttentionSpan, KvLayer, KvLayout, KvTypes, KvTypesError};
use std::time::Duration;

/// The size of the KV cache.
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
    /// Storage types of keys and values, by layer. A draft model's cache uses the default type,
    /// which is not tied to a layer.
    pub kv_types: KvTypes,
    /// Token budget of a step: most rows over all sequences. It is at least `running_max`, so every
    /// running sequence decodes in every step.
    pub step_tokens: usize,
    /// The longest time by which prefill rows may lengthen a step in which sequences decode. The
    /// engine estimates it from the prefill rate of earlier steps.
    pub max_prefill_stall: Duration,
    /// Most sequences that hold KV blocks at once.
    pub running_max: usize,
    /// Most waiting requests of ordinary priority. [`crate::schedule::admission`] derives the
    /// limits of other priorities.
    pub queue_max: usize,
    /// Shortens the model's context length; `None` keeps it.
    pub context_tokens: Option<usize>,
    /// Whether requests with equal prefixes share KV blocks.
    pub prefix_cache: bool,
    /// Most draft tokens of a sequence in a step, if the engine has a drafter. 0: no drafts.
    pub draft_depth_max: usize,
}

/// Default token budget of a step.
pub const STEP_TOKENS: usize = 512;
/// Default of `running_max`: 64 sequences, and 16 that a router's defaults reserve for urgent and
/// batch requests.
pub const RUNNING_MAX: usize = 80;
/// Default of `queue_max`.
pub const QUEUE_MAX: usize = 256;
/// A person who reads a stream hardly notices a gap of this length.
const MAX_PREFILL_STALL: Duration = Duration::from_millis(100);
/// Bytes of logits that scoring adds to a step: 13 rows with a vocabulary of 150,000, 524 rows with
/// one of 4,000.
const SCORE_LOGITS_BYTES: usize = 8 << 20;
/// Bytes of logits that draft tokens add to a step: 55 rows with a vocabulary of 150,000.
const DRAFT_LOGITS_BYTES: usize = 32 << 20;

/// [`crate::kv::block_key::BlockKey`] stores the group in one byte.
const GROUPS_MAX: usize = 256;

/// A configuration that no engine can run with.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngineConfigError {
    #[error("{field} is 0, it must be at least 1")]
    Zero { field: &'static str },
    #[error("draft depth is {depth}, the limit is {DRAFT_DEPTH_MAX}")]
    DraftDepth { depth: usize },
    #[error(
        "step_tokens is {step_tokens}, below running_max of {running_max}: a step could not decode every running sequence"
    )]
    StepBelowRunning { step_tokens: usize, running_max: usize },
    #[error("the KV budget is {budget_bytes} bytes, but one block and the null block take {needed_bytes}")]
    BudgetTooSmall { budget_bytes: u64, needed_bytes: u64 },
    #[error("the KV budget is {tokens} tokens, at most {max} can be addressed")]
    BudgetTooLarge { tokens: u64, max: u64 },
    #[error("the model has no layer with a KV cache")]
    NoLayers,
    #[error(
        "{whose} attends only to the last {tokens} tokens, but a draft model stores its keys and values in blocks of layers \
         with full attention; use prompt lookup drafts, or none"
    )]
    DraftWindow { whose: &'static str, tokens: usize },
    #[error("the model needs {groups} KV cache groups, the limit is {max}")]
    Groups { groups: usize, max: usize },
    #[error(transparent)]
    KvTypes(#[from] KvTypesError),
}

impl EngineConfig {
    /// Defaults for every field but the KV budget.
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

    /// The layout of the KV cache that the budget pays for, the null block included. Its memory is
    /// `blocks * block_bytes()`.
    pub fn kv_layout(&self, layers: Vec<KvLayer>) -> Result<KvLayout, EngineConfigError> {
        self.kv_layout_with_drafts(layers, 0)
    }

    /// As `kv_layout`, where each block also pays `draft_block_bytes` for a draft model's cache. A
    /// budget in tokens buys blocks of every KV cache group for these tokens, whatever part of them
    /// a group's layers read.
    pub(crate) fn kv_layout_with_drafts(
        &self,
        layers: Vec<KvLayer>,
        draft_block_bytes: usize,
    ) -> Result<KvLayout, EngineConfigError> {
        let mut layout = KvLayout { block_tokens: self.block_tokens, blocks: 0, layers };
        let block_bytes = (layout.block_bytes() + draft_block_bytes) as u64;
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
        // The index of a token in the cache (a KV slot) is a u32.
        let tokens = blocks.saturating_mul(self.block_tokens as u64);
        if tokens > u64::from(u32::MAX) {
            return Err(EngineConfigError::BudgetTooLarge { tokens, max: u64::from(u32::MAX) });
        }
        layout.blocks = blocks as usize;
        Ok(layout)
    }

    /// The step limits that the engine's model must be built with.
    pub fn model_limits(&self, vocab_size: usize) -> models::ForwardLimits {
        models::ForwardLimits {
            rows_max: self.step_tokens,
            outputs_max: self.running_max + self.score_rows_max(vocab_size) + self.draft_rows_max(vocab_size),
        }
    }

    /// Most rows of logits that the engine keeps in host memory: the rows of one step, and one
    /// deferred row for each running request.
    pub fn kept_rows_max(&self, vocab_size: usize) -> usize {
        self.model_limits(vocab_size).outputs_max + self.running_max
    }

    /// Most rows of draft tokens in a step.
    pub fn draft_rows_max(&self, vocab_size: usize) -> usize {
        match self.draft_depth_max {
            0 => 0,
            depth => {
                (DRAFT_LOGITS_BYTES / (size_of::<f32>() * vocab_size.max(1))).max(depth).min(self.step_tokens)
            }
        }
    }

    /// Most scored rows in a step, and so most `EngineOutput::Logits` or `Scored` outputs of one
    /// step.
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

/// Checks that a draft model with layers `draft_layers` can share the block tables of a model with
/// layers `model_layers`. The draft model stores the keys and values of all its layers in the
/// blocks of the first KV cache group. These blocks must stay allocated while the sequence lives.
pub fn check_draft(model_layers: &[KvLayer], draft_layers: &[KvLayer]) -> Result<(), EngineConfigError> {
    let window = |whose, layers: &[KvLayer]| {
        layers.iter().find_map(|layer| match layer.span {
            AttentionSpan::Full => None,
            AttentionSpan::Window { tokens } => Some(EngineConfigError::DraftWindow { whose, tokens }),
        })
    };
    let refused = match draft_layers {
        [] => None,
        _ if model_layers.iter().all(|layer| layer.span != AttentionSpan::Full) => {
            window("each layer of the model", model_layers)
        }
        _ => window("a layer of the draft model", draft_layers),
    };
    refused.map_or(Ok(()), Err)
}
