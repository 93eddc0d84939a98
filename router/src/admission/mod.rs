// SPDX-License-Identifier: Apache-2.0

//! Admission control: decides which requests may use the workers of a model, and when.
//!
//! [`AdmissionPolicy`] is a plain value without a clock. [`crate::admission_control`] owns it,
//! tells it about events and carries out its decisions.
//!
//! ```text
//! request arrives -- permits are free ------------> Admit: holds its permits until each stream ends
//!              \---- has to wait, a limit is hit -> Refuse, with a retry time
//!               \--- waits -- permits are free ---> Admit
//!                         \-- deadline, no worker > Refuse
//!                          \- client gone --------> leaves the waiting queue at once
//! ```
//!
//! A model whose workers restart has no permits. Its requests wait in the same queue, each for at
//! most [`AdmissionLimits::worker_wait`]. A request is refused at once if no worker can be ready by
//! then ([`WorkerAvailability`]).
//!
//! A permit entitles a request to one stream on a worker. If a class has a reserved floor, a worker
//! gives as many permits as it runs sequences at once, so a reserved permit is computed in the next
//! step. Otherwise a worker gives a quarter more permits. So it finds the next request in its own
//! queue when a stream ends.
//!
//! All other requests wait here and not at a worker. A worker's death therefore costs no request
//! its turn, a new worker helps at once, and tenants share the whole fleet. The engine orders the
//! requests that a worker has.
//!
//! Order of admission to a model ([`model`]):
//! 1. The highest priority class comes first.
//! 2. Within a class, the tenant that holds the fewest permits comes first ([`class_queue`]).
//! 3. Within a tenant, the most urgent request comes first, then the oldest.
//! 4. One in [`OLDEST_FIRST_EVERY`] admissions goes to the oldest request of all.
//! 5. No request overtakes one that needs more permits than are free, except in a class below its
//!    floor.
//!
//! Bounds, in admissions to a model. [`tests`] and [`simulation`] check them. They exclude
//! admissions within a class's own floor, and the time in which a larger request waits for permits.
//! 1. A request behind `m` older ones is admitted after at most `OLDEST_FIRST_EVERY * (m + 1)`
//!    admissions, whatever arrives after it.
//! 2. Each other tenant of its class overtakes a tenant without permits at most once. A tenant that
//!    came to wait later does not overtake it. Oldest-first admissions come on top.

mod capacity;
mod class_queue;
mod limits;
mod model;
mod policy;
mod request;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;

pub use capacity::{CapacityExceeded, ModelCapacity, WorkerCapacity};
pub use limits::AdmissionLimits;
#[cfg(test)]
pub(crate) use model::OLDEST_FIRST_EVERY;
pub use model::{ClassStats, ModelAdmissionStats};
pub use policy::{AdmissionEvent, AdmissionPolicy};
pub(crate) use request::waited_text;
pub use request::{
    AdmissionDecision, AdmissionError, AdmissionId, AdmissionRequest, PriorityClass, Tenant, Uptime,
    WorkerAvailability,
};
