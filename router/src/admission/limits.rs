// SPDX-License-Identifier: Apache-2.0

//! The configured limits of admission control.

use std::time::Duration;

use super::capacity::ModelCapacity;
use super::request::PriorityClass;

/// The configured limits. `config.rs` documents the allowed values.
#[derive(Clone, Copy, Debug)]
pub struct AdmissionLimits {
    /// Streams of all models that run or wait in this process.
    pub streams_max: u32,
    /// Requests that wait for one model.
    pub queue_max: u32,
    /// Requests of one tenant that wait for one model.
    pub tenant_queue_max: u32,
    /// Percent of a model's permits and of its waiting queue that are reserved for the class.
    pub interactive_floor: u32,
    pub batch_floor: u32,
    /// How long a request waits for a worker of a model that has none.
    pub worker_wait: Duration,
}

impl AdmissionLimits {
    /// The part of `total` that is reserved for `class`.
    pub(super) fn floor(&self, class: PriorityClass, total: u32) -> u32 {
        let percent = match class {
            PriorityClass::Interactive => self.interactive_floor,
            PriorityClass::Default => 0,
            PriorityClass::Batch => self.batch_floor,
        };
        (u64::from(total) * u64::from(percent) / 100) as u32
    }

    /// Number of permits for a model whose workers have `capacity`.
    pub fn permits(&self, capacity: ModelCapacity) -> u32 {
        let has_floor = |class| self.floor(class, capacity.running_max) > 0;
        if PriorityClass::ALL.into_iter().any(has_floor) { capacity.running_max } else { capacity.window }
    }
}
