// SPDX-License-Identifier: Apache-2.0

//! The inference engine: continuous batching of token sequences over one model, with a paged KV
//! cache.
//!
//! The engine takes requests in token ids, schedules them into steps of mixed prefill and decode
//! rows, runs the model, and samples.
//!
//! The engine is synchronous and one thread owns it. Time is an argument; the crate has no clock,
//! lock, channel or I/O. The scheduler, the block pool and the sampler are plain values that work
//! without a model.
//!
//! Invariant I5: the tokens and log-probabilities of a request depend only on the model, the
//! prompt, the parameters and the seed. Batch neighbours, chunked prefill, prefix cache hits,
//! preemption, draft tokens and a resume change nothing.
//!
//! One step:
//!
//! ```text
//! submit ─> request::validate ─> schedule::admission ─> WaitingQueue
//!                                                           │
//! step ─────────────> schedule::scheduler ──> StepPlan <────┘
//!                       │  kv::block_pool        │
//!                       │  kv::block_tables      ├─ draft: adds draft tokens
//!                                                v
//!                                          schedule::batch ──> Model::forward
//!                                                                   │ logits
//! EngineOutput <── request::state <── sample::sampler <── sample::output_rows
//!                         └── sample::deferred_logits: the token mask is not ready
//! ```
//!
//! Where to look:
//!
//! - `engine`: [`Engine`], which owns the model and joins the parts, and steps in flight.
//! - [`schedule`]: the waiting queue, admission control, the scheduler and its step plan.
//! - [`kv`]: the block pool, block tables and KV cache events.
//! - [`sample`]: sampling parameters, logits processors, the sampler, structured output.
//! - [`draft`]: speculative decoding with draft tokens.
//! - [`beam`]: beam search.
//! - `request`: requests, outputs, refusals and the engine's state of each request.
//!
//! The scheduler by itself, with a prompt of 20 tokens, blocks of 16 and no model:
//!
//! ```
//! use engine::schedule::scheduler::Scheduler;
//! use engine::schedule::sequence::{NewSequence, SequenceKind};
//! use engine::schedule::step_plan::SchedulerLimits;
//! use prefix::Scope;
//!
//! let limits = SchedulerLimits {
//!     block_tokens: 16,
//!     step_tokens: 64,
//!     running_max: 8,
//!     score_rows_max: 8,
//!     draft_rows_max: 0,
//!     prefix_cache: true,
//!     can_fork: true,
//! };
//! let mut scheduler = Scheduler::new(limits, 100);
//! let sequence_id = scheduler.add(NewSequence {
//!     kind: SequenceKind::Generate,
//!     priority: 0,
//!     tenant: 0,
//!     tokens: (0..20).collect(),
//!     tokens_max: 40,
//!     scope: &Scope::default(),
//! });
//! // The first step prefills the prompt, in two blocks.
//! assert_eq!(scheduler.schedule(usize::MAX).rows, 20);
//! scheduler.commit();
//! assert_eq!(scheduler.pool().used_blocks(), 2);
//! // The caller samples a token; the second step decodes it.
//! scheduler.push_token(sequence_id, 7);
//! assert_eq!(scheduler.schedule(usize::MAX).decode_rows, 1);
//! scheduler.commit();
//! // After the end, the full block of the prompt stays in the prefix cache.
//! scheduler.remove(sequence_id);
//! assert_eq!((scheduler.pool().used_blocks(), scheduler.pool().cached_blocks()), (0, 1));
//! ```

#![forbid(unsafe_code)]

pub mod beam;
mod config;
pub mod draft;
mod engine;
mod error;
mod integrity;
pub mod kv;
mod request;
pub mod sample;
pub mod schedule;
mod stats;

pub use config::{
    EngineConfig, EngineConfigError, KvBudget, QUEUE_MAX, RUNNING_MAX, STEP_TOKENS, check_draft,
};
pub use draft::draft_model::DraftModel;
pub use draft::draft_tokens::DRAFT_DEPTH_MAX;
pub use draft::drafter::Drafter;
pub use draft::prompt_lookup::PromptLookup;
pub use draft::speculation::DraftStats;
pub use engine::Engine;
pub use error::{EngineStartError, StepError};
pub use request::input::{
    BEAM_WIDTH_MAX, BeamParams, BeamRequest, EmbedRequest, LENGTH_PENALTY_MAX, Request, RequestId, ScoreKind,
    ScoreRequest, StopConditions, TOP_LOGPROBS_MAX,
};
pub use request::output::{Beam, BeamToken, EngineOutput, FinishReason, TokenOutput, TokenUsage};
pub use request::refusal::{Queued, RefuseReason};
pub use sample::constraint::{Constraint, ConstraintError, TokenMask};
pub use sample::error::SampleError;
pub use sample::params::{
    DryBreakers, DryParams, MirostatParams, MirostatVersion, SamplingParamError, SamplingParams,
};
pub use sample::sampler_state::SamplerState;
pub use schedule::integrity::IntegrityError;
pub use stats::{EngineStats, KvCacheUsage, StepReport};
