// SPDX-License-Identifier: Apache-2.0

//! Load on any OpenAI-compatible server, as `vllm bench serve` measures it.
//!
//! Schedule, mixes, statistics and files are plain values. [`driver`] has the tasks and the clock,
//! [`client`] the connections.

mod answer;
mod arrivals;
mod bootstrap;
mod calibration;
mod client;
mod compare;
mod driver;
mod goodput;
mod metrics;
mod mix;
mod plots;
mod prose;
mod report_page;
mod result;
mod result_file;
mod sharegpt;
mod sse;
mod statistics;
mod target;

pub use answer::{RequestFailure, StreamedAnswer};
pub use arrivals::{ArrivalError, Arrivals, RequestRate};
pub use calibration::measure_token_scale;
pub use client::{ListedModel, ServerError, ServingClient};
pub use compare::{CompareError, Comparison, ComparisonRow, ComparisonVerdict, compare};
pub use driver::{CONVERSATIONS_MAX, SentRequest, ServingLoad, ServingRun, drive};
pub use goodput::{LatencyMetric, Objective, RequestLatencies, meets};
pub use metrics::{FailureCount, ServingMetrics};
pub use mix::{ConversationTurn, MixKind, RandomLengths, ServingMix};
pub use plots::PlotError;
pub use prose::TokenScale;
pub use report_page::report_page;
pub use result::{PERCENTILES, ServingSettings, date_of_now, result_json};
pub use result_file::{ResultFileError, StoredRequest, StoredResult};
pub use sharegpt::{ShareGptError, ShareGptPair, read_sharegpt};
pub(crate) use sse::SseReader;
pub use statistics::SortedSample;
pub use target::{RequestTemplate, ServingBackend};
