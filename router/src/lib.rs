//! The router: the fleet's public face. OpenAI's HTTP API and gRPC `ballast.v1` in front, `ballast.worker.v1` behind.
//!
//! Text lives here and only here: prompts become token ids before a worker sees them, ids become text after. So the
//! router knows what was sent of every stream, and gives a stream whose worker died to another one (I6).
//!
//! ```text
//! server --- http/ (OpenAI) --\                                  / worker_link  one task per worker: joins, leaves
//!        \-- grpc  (ballast.v1) > params -> generate -> dispatch < fleet        who serves what, now
//!                                             |   |              \ placement    which of them (pure)
//!                                  grammar_check  |              before anything waits
//!                                           gate  |
//!                                      admission  |              who enters, and when (pure)
//!                                            choice: one task per continuation
//!                                               |-- text_stream  ids -> text, stop strings
//!                                               |-- resume       what to do about a lost worker (pure)
//! ```

#![forbid(unsafe_code)]

mod admission;
mod breakers;
mod choice;
mod config;
mod discovery;
mod dispatch;
mod fleet;
mod gate;
mod generate;
mod grammar_check;
mod grpc;
mod http;
mod metrics;
mod model;
mod params;
mod placement;
#[cfg(test)]
mod ranges;
mod resume;
mod run;
mod server;
mod tenant;
mod text_stream;
mod wire;
mod worker_link;

pub use config::{AdmissionConfig, AdmissionConfigError, Config};
pub use run::{RunError, run};
pub use server::Router;
