// SPDX-License-Identifier: Apache-2.0

//! The worker process: attaches a model's weights read-only, computes, and serves token ids to the
//! router (`ballast.worker.v1`).
//!
//! ```text
//! run --> grpc (all calls, one thread)          engine_thread (attaches, then steps)
//!           | commands, TokenChannel                |
//!           +-----------> engine_loop <-------------+
//!                            ^
//!     grammar_compiler --> grammar_constraint (masks, on WorkerPool threads)
//! ```
//!
//! | module | does |
//! |---|---|
//! | `config`, `reservation` | configuration; what a worker reserves at the weight-server |
//! | `run`, `run_error` | socket first, then weights; drains on a stop |
//! | `engine_thread`, `attach`, `attach_error` | requests the weights, builds the engine |
//! | `backend`, `gpu` | [`DeviceRuntime`](backend::DeviceRuntime) of the host and of a GPU |
//! | `engine_loop` | owns the engine: commands in, outputs out, one step at a time |
//! | `token_channel` | bounded queue of outputs from the engine loop to one call |
//! | `call_trace`, `stream_trace` | names of a call in log lines; its spans |
//! | `grpc`, `wire` | `ballast.worker.v1`; its messages to and from engine types |
//! | `grammar_compiler`, `grammar_denylist` | compiles grammars before requests are queued |
//! | `grammar_constraint` | computes the next token bitmask while the engine steps |
//! | `worker_pool`, `panic_isolation` | threads whose jobs may panic or hang |
//! | `step_watchdog` | ends a worker whose step does not end |
//! | `use_report` | tells the supervisor that requests use this worker |
//! | `draft_vocabulary` | whether one model can draft for another |
//! | `memory_plan`, `workspace` | device memory of a worker, computed before its start |
//! | `process_memory`, `startup_timeline` | private memory; duration of each startup stage |
//! | `kv_types` | how a configuration file writes KV cache types |
//!
//! The worker does not own the weights. When it dies, the fleet loses one KV cache and one socket.
//! When the weight-server dies, the worker keeps serving, and the successor adopts its lease.

#![forbid(unsafe_code)]

mod attach;
mod attach_error;
mod backend;
mod call_trace;
mod config;
mod draft_vocabulary;
mod engine_loop;
mod engine_thread;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod gpu;
mod grammar_compiler;
mod grammar_constraint;
mod grammar_denylist;
mod grpc;
pub mod kv_types;
mod memory_plan;
mod panic_isolation;
mod pooling;
mod process_memory;
mod reservation;
mod run;
mod run_error;
mod startup_timeline;
mod step_watchdog;
mod stream_trace;
mod token_channel;
mod use_report;
mod wire;
mod worker_pool;
mod workspace;

pub use attach_error::WorkerAttachError;
pub use config::{
    ChatTemplateSetting, CheckedChatTemplate, ComputeDevice, DraftSource, WorkerConfig, draft_depth,
};
pub use draft_vocabulary::DraftVocabularyError;
pub use memory_plan::MemoryPlan;
pub use pooling::{PoolingSetting, PoolingSettingError};
pub use run::{run, serve};
pub use run_error::WorkerRunError;
pub use workspace::WorkspaceBytes;
