//! The engine: it takes requests in token ids, packs them into ragged steps of one model, and samples.
//!
//! Synchronous and owned by one thread. Time is an argument; there is no clock, lock, channel or I/O inside. Scheduler,
//! block pool and sampler are plain values that work without a model.
//!
//! Invariant I5: a request's tokens and log-probabilities depend on the model, its own prompt, parameters and seed
//! only, never on batch, chunking, prefix hits, preemption, drafts or a resume.
//!
//! Code map: `engine` owns the model and joins the parts; `validate` refuses; `admission` bounds the `queue`;
//! `row_time` says how many rows of prompts streams can bear; `scheduler` plans a step over `sequence`s, their `blocks` and
//! the `pool` of them all, and `events` tells what the pool finds; `draft` extends the plan by guesses; `batch` turns it into
//! rows; `output_rows` brings what they need of the logits to the host; `task` turns that into outputs with `sampler`, or
//! `late` keeps it until a `constraint` says what is allowed.

#![forbid(unsafe_code)]

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
pub use request::input::{Request, RequestId, ScoreKind, ScoreRequest, StopConditions, TOP_LOGPROBS_MAX};
pub use request::output::{EngineOutput, FinishReason, TokenOutput, TokenUsage};
pub use request::refusal::{Queued, RefuseReason};
pub use sample::constraint::{Constraint, ConstraintError, TokenMask};
pub use sample::error::SampleError;
pub use sample::params::{
    DryBreakers, DryParams, MirostatParams, MirostatVersion, SamplingParamError, SamplingParams,
};
pub use sample::sampler_state::SamplerState;
pub use schedule::integrity::IntegrityError;
pub use stats::{EngineStats, KvCacheUsage, StepReport};
