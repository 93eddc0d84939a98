// SPDX-License-Identifier: Apache-2.0

//! Load generator behind `ballast bench`: measures a fleet from outside, as clients and operators
//! see it.
//!
//! 1. It starts the real executable and calls its sockets. No process of the fleet is linked in.
//!    [`serving`] instead measures a server that runs already.
//! 2. Times are wall-clock times at the client side of the sockets.
//! 3. Every run does the same work: streams do not stop early, unless the user lets them. They
//!    share a prefix only where prefix sharing is measured.

#![forbid(unsafe_code)]

mod burst;
mod drafts;
mod fleet;
mod report;
mod router_overhead;
pub mod serving;
mod streams;
mod structured;
mod worker_startup;

pub use burst::{PrefixBurst, PrefixBurstReport, compare_prefix_sharing};
pub use drafts::{DraftError, DraftLoad, DraftReport, compare_drafting};
pub use fleet::{FleetError, MeasuredFleet, StartOptions};
pub use report::{LatencySummary, summarize};
pub use router_overhead::{
    PathCost, PathSpeed, RouterLoad, RouterOverheadError, RouterOverheadReport, measure_router_overhead,
};
pub use streams::{StreamLoad, StreamLoadError, StreamLoadReport, received_tokens, run_load};
pub use structured::{DecodeSpeed, StructuredReport, compare_structured_output};
pub use worker_startup::{
    WorkerStartup, WorkerStartupError, add_worker, attach_times, replace_killed_worker, vocabulary_size,
};
