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
//! outlet    bounded queue of frames from the stepper to one call
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
mod contained;
mod crew;
mod demand;
mod grammars;
mod grpc;
pub mod kv_types;
mod masks;
mod outlet;
mod run;
mod stats;
mod stepper;
mod timeline;
mod vocabulary;
mod wire;

pub use attach::AttachError;
pub use config::{Config, Device, Draft, draft_depth};
pub use demand::{Demand, Workspace};
pub use run::{RunError, run, serve};
pub use vocabulary::VocabularyError;
