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

pub mod admission;
mod api;
mod batch;
pub mod blocks;
mod books;
mod config;
mod constraint;
pub mod draft;
mod engine;
pub mod events;
pub mod integrity;
mod late;
mod output_rows;
mod params;
mod plan;
pub mod pool;
pub mod queue;
mod refusal;
mod row_time;
pub mod sampler;
pub mod scheduler;
pub mod sequence;
mod task;
mod validate;

pub use api::{
    EngineStats, FinishReason, KvUse, Output, Request, RequestId, SamplerState, ScoreKind, ScoreRequest,
    StepReport, StopConditions, TOP_LOGPROBS_MAX, TokenOutput, Usage,
};
pub use config::{ConfigError, EngineConfig, KvBudget, QUEUE_MAX, RUNNING_MAX, STEP_TOKENS, check_draft};
pub use constraint::{Allowed, Constraint, ConstraintError};
pub use draft::{DRAFT_DEPTH_MAX, DraftModel, DraftStats, Drafter, Lookup};
pub use engine::{Engine, StartError, StepError};
pub use params::{Dry, DryBreakers, Mirostat, MirostatVersion, ParamError, SamplingParams};
pub use refusal::{Queued, RefuseReason};
pub use sampler::SampleError;
