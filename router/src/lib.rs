// SPDX-License-Identifier: Apache-2.0

//! The router: serves OpenAI's HTTP API and gRPC `ballast.v1` to clients, and calls workers over
//! `ballast.worker.v1`.
//!
//! Only the router handles text: it tokenizes prompts before it calls a worker and detokenizes the
//! output. So it knows the output of every stream, and resumes a stream on another worker when a
//! worker dies (I6).
//!
//! ```text
//! server -- listener     accepts connections
//!       \-- tls/         handshakes; certificates from files
//!       \-- intake/      limits connections and request bodies (pure)
//!       \-- access_control  runs access (pure): who may call, and how much
//!       \-- http/ (OpenAI)      -\
//!       \-- grpc  (ballast.v1) --+--> params    checks parameters
//!                                     |
//!                                  generate    admits a request as a whole, starts its choices
//!                                     |-- grammar_check        compiles a grammar before any waiting
//!                                     |-- admission_control    runs admission (pure): who runs, when
//!                                     |-- scoring              log probabilities of prompts
//!                                     |-- embedding            vectors of prompts; relevance: scores of pairs
//!                                     |-- dispatch             opens streams on workers
//!                                     |-- worker_search        finds workers that a request may enter
//!                                     |-- opening              what a worker's answer means (pure)
//!                                     |-- quarantine_control   runs quarantine (pure)
//!                                     \-- choice               one task per choice
//!                                           |-- text_stream    detokenizes, finds stop strings
//!                                           \-- failover       what to do after a loss (pure)
//!
//! fleet_watch   how the processes are, for /ready and metrics
//! discovery --> worker_link  one task per worker: registers it, removes it
//!                    |-----> kv_events  follows its prefix cache
//!                    \-----> registry  workers that serve now --> routing  chooses a worker (pure)
//! ```

#![forbid(unsafe_code)]

mod access;
mod access_control;
mod access_log;
pub mod admission;
mod admission_control;
mod beam_choices;
mod chat_syntax;
mod choice;
mod config;
mod device_gauges;
mod discovery;
mod dispatch;
mod dry_breakers;
mod embedding;
mod error;
pub mod failover;
mod fleet_watch;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod gauges;
mod generate;
mod grammar_check;
mod grpc;
mod http;
mod intake;
mod kv_events;
mod limits;
mod listener;
mod metrics;
mod metrics_text;
mod model;
mod model_wait;
mod open_connections;
pub mod opening;
mod params;
pub mod quarantine;
mod quarantine_control;
#[cfg(test)]
mod ranges;
mod refused_workers;
mod registry;
mod relevance;
mod request_id;
mod request_trace;
mod response_store;
pub mod routing;
mod run;
mod sampling_defaults;
mod scoring;
mod server;
mod tenant;
mod text_stream;
mod tls;
mod totals;
mod usage;
mod usage_log;
mod wire;
mod worker_attempts;
mod worker_link;
mod worker_outlook;
mod worker_search;

pub use access::{KeyFileError, check_key_text};
pub use config::{
    AccessConfig, AccessConfigError, AdmissionConfig, AdmissionConfigError, RouterConfig, RoutingConfig,
    RoutingMode,
};
pub use error::RouterError;
pub use http::{HostError, OriginError};
pub use limits::{RouterLimits, RouterLimitsError};
pub use run::run;
pub use server::Router;
pub use tls::{TlsConfig, TlsFileError};
