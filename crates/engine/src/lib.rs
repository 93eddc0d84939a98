//! The engine: it takes requests in token ids, packs them into ragged steps of one model, and samples.
//!
//! Synchronous and owned by one thread. Time is an argument; there is no clock, lock, channel or I/O inside. Scheduler,
//! block pool and sampler are plain values that work without a model.
//!
//! Invariant I5: a request's tokens and log-probabilities depend on the model, its own prompt, parameters and seed
//! only, never on batch, chunking, prefix hits, preemption or a resume.
//!
//! The calls, on `Engine<B: ops::Backend>`:
//! ```text
//! new(model, backend, config: EngineConfig)           -> Result<Engine<B>, StartError>
//! submit(request: Request, now: Duration)             -> Result<Queued { ahead }, RefuseReason>
//! submit_score(request: ScoreRequest, now: Duration)  -> Result<Queued { ahead }, RefuseReason>
//! cancel(id, out: &mut Vec<Output>)                   -> bool      frees its blocks at once; out gets its Finished
//! hold(id, bool)                                      -> bool      a slow reader: no rows until released
//! drain()                                                          refuse new requests, finish the rest
//! has_work()                                          -> bool
//! step(now: Duration, out: &mut Vec<Output>)          -> Result<StepReport, StepError>
//! stats()                                             -> EngineStats
//! ```

#![forbid(unsafe_code)]

mod api;
mod config;
mod params;
mod refusal;

pub use api::{
    EngineStats, FinishReason, Output, Request, RequestId, SamplerState, ScoreKind, ScoreRequest, StepReport,
    StopConditions, TOP_LOGPROBS_MAX, TokenOutput, Usage,
};
pub use config::{EngineConfig, KvBudget};
pub use params::{ParamError, SamplingParams};
pub use refusal::{Queued, RefuseReason};
