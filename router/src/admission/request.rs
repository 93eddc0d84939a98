// SPDX-License-Identifier: Apache-2.0

//! Requests for admission, and the decisions about them.

use std::sync::Arc;
use std::time::Duration;

use crate::routing::ModelKey;

/// Time since the router's start.
pub type Uptime = Duration;

/// Identifies a request from its arrival to the end of its last stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AdmissionId(pub u64);

/// The tenant that a request counts for.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tenant {
    /// All requests without a tenant share as one. They have no per-tenant limit.
    #[default]
    Unnamed,
    Named(Arc<str>),
}

/// OpenAI's service tiers `priority`, `default` and `flex`; vLLM's priorities below, at and above
/// 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PriorityClass {
    Interactive,
    #[default]
    Default,
    Batch,
}

impl PriorityClass {
    /// The most urgent class first.
    pub const ALL: [PriorityClass; 3] =
        [PriorityClass::Interactive, PriorityClass::Default, PriorityClass::Batch];

    pub fn name(self) -> &'static str {
        match self {
            PriorityClass::Interactive => "interactive",
            PriorityClass::Default => "default",
            PriorityClass::Batch => "batch",
        }
    }

    pub fn of_priority(priority: i32) -> Self {
        match priority {
            ..0 => PriorityClass::Interactive,
            0 => PriorityClass::Default,
            1.. => PriorityClass::Batch,
        }
    }

    pub(super) fn others(self) -> impl Iterator<Item = PriorityClass> {
        Self::ALL.into_iter().filter(move |&other| other != self)
    }
}

/// Whether workers of a model are ready, or when one may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerAvailability {
    /// The workers give this many permits, at least one.
    Ready { permits: u32 },
    /// No worker is ready. The next one starts `not_before` this time. After `until`, no request
    /// waits for it any longer.
    Expected { not_before: Uptime, until: Option<Uptime> },
    /// No worker is ready, and none is going to start.
    Gone,
}

/// A request for permits.
#[derive(Clone, Debug)]
pub struct AdmissionRequest {
    pub model: ModelKey,
    pub tenant: Tenant,
    /// Lower is more urgent. The sign determines the class. Within a class, the value orders only
    /// the requests of one tenant.
    pub priority: i32,
    /// Permits, granted together: one for each stream.
    pub permits: u32,
    pub deadline: Uptime,
}

/// An answer of the policy. Every request gets exactly one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdmissionDecision {
    Admit(AdmissionId),
    Refuse(AdmissionId, AdmissionError),
}

/// Why a request is refused. `retry_after` is the time after which the client should try again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdmissionError {
    #[error("no worker of this model is ready{}", waited_text(*.waited))]
    NoWorker { waited: Duration, retry_after: Duration },
    #[error("the request's deadline passed before it was admitted")]
    DeadlineExceeded,
    #[error(
        "{waiting} requests are waiting for this model, the limit for class {} is {max}; try again in {} s",
        .class.name(), .retry_after.as_secs()
    )]
    QueueFull { class: PriorityClass, waiting: u32, max: u32, retry_after: Duration },
    #[error(
        "{waiting} requests of this tenant are waiting for this model, the limit is {max}; try again in {} s",
        .retry_after.as_secs()
    )]
    TenantQueueFull { waiting: u32, max: u32, retry_after: Duration },
    #[error("{streams} streams are running or waiting, the limit is {max}; try again in {} s", .retry_after.as_secs())]
    TooManyStreams { streams: u32, max: u32, retry_after: Duration },
}

/// How long a request has waited, as a part of an error.
pub(crate) fn waited_text(waited: Duration) -> String {
    /// A request that waited for less was refused at once.
    const TOLD_MIN: Duration = Duration::from_millis(100);
    match waited >= TOLD_MIN {
        true => format!(" after a wait of {:.1} s", waited.as_secs_f64()),
        false => String::new(),
    }
}
