//! The worker: attaches a model's weights read-only, computes, and serves token ids to the router (`ballast.worker.v1`).
//!
//! ```text
//! config    of one process
//! run       process: socket first, then weights; drain on a stop
//! attach    asks the weight-server, waits for a load, builds the engine      \
//! backend   devices: the host, a GPU; how each maps weights and computes      > a thread of their own
//! stepper   the engine's loop: commands in, frames out, one step at a time   /
//!   handle    how calls give it commands, and wait for it
//!   follower  tells a call what the cache holds
//! channel    bounded queue of frames from the stepper to one call
//! grpc      ballast.worker.v1 on the worker's socket
//! grammars  what requests may draw: compiled first
//! masks     what a request's grammar allows next, computed beside the steps
//! crew      threads for that, which may be lost at it
//! contained   work whose panic ends its thread and not the process
//! wire      messages <-> the engine's own types
//! kv_types  how a configuration writes what keys and values are stored as
//! vocabulary  whether one model can draft for another
//! demand    what a worker takes of its device, worked out beforehand
//! stats     what memory this process has for itself
//! timeline  what coming up has taken, part by part
//! ```
//!
//! The weights are somebody else's: this process may die at any time and costs its KV cache and a socket. A worker whose
//! weight-server dies serves on and claims its lease from the successor.

#![forbid(unsafe_code)]

mod attach;
mod backend;
mod config;
mod draft_vocabulary;
mod engine_loop;
mod grammar_compiler;
mod grammar_constraint;
mod grpc;
pub mod kv_types;
mod memory_plan;
mod panic_isolation;
mod process_memory;
mod run;
mod startup_timeline;
mod token_channel;
mod wire;
mod worker_pool;

pub use attach::WorkerAttachError;
pub use config::{ComputeDevice, DraftSource, WorkerConfig, draft_depth};
pub use draft_vocabulary::DraftVocabularyError;
pub use memory_plan::{MemoryPlan, Workspace};
pub use run::{WorkerRunError, run, serve};
