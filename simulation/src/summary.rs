// SPDX-License-Identifier: Apache-2.0

//! What a simulation did, and how it failed.

use std::fmt;
use std::ops::AddAssign;

/// Counts of what happened, so that a test can check its reach.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SimulationCounts {
    pub events: u64,
    pub faults: usize,
    pub deaths: usize,
    pub requests: usize,
    pub completed: usize,
    /// Refused before the response began.
    pub refused: usize,
    /// Ended with an explicit error.
    pub failed: usize,
    /// Cut by the death of a router, which their clients see.
    pub resets: usize,
    pub resumes: usize,
    pub tokens: usize,
    pub quarantined: usize,
    pub poison_deaths: usize,
    pub full_workers: usize,
    pub preemptions: usize,
    pub loads: usize,
    pub failed_loads: usize,
    pub models_loaded: usize,
    pub adopted_generations: usize,
    pub reclaims: usize,
    pub returns: usize,
    pub lost_leases: usize,
    pub late_second_copies: usize,
}

impl AddAssign for SimulationCounts {
    fn add_assign(&mut self, other: Self) {
        self.events += other.events;
        self.faults += other.faults;
        self.deaths += other.deaths;
        self.requests += other.requests;
        self.completed += other.completed;
        self.refused += other.refused;
        self.failed += other.failed;
        self.resets += other.resets;
        self.resumes += other.resumes;
        self.tokens += other.tokens;
        self.quarantined += other.quarantined;
        self.poison_deaths += other.poison_deaths;
        self.full_workers += other.full_workers;
        self.preemptions += other.preemptions;
        self.loads += other.loads;
        self.failed_loads += other.failed_loads;
        self.models_loaded += other.models_loaded;
        self.adopted_generations += other.adopted_generations;
        self.reclaims += other.reclaims;
        self.returns += other.returns;
        self.lost_leases += other.lost_leases;
        self.late_second_copies += other.late_second_copies;
    }
}

/// A broken invariant.
#[derive(Debug)]
pub struct BrokenInvariant {
    pub seed: u64,
    /// Number of the event after which it was found.
    pub event: u64,
    pub what: String,
    /// The last events before that.
    pub history: Vec<String>,
}

impl fmt::Display for BrokenInvariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in &self.history {
            writeln!(f, "{line}")?;
        }
        writeln!(f, "seed {}, event {}: {}", self.seed, self.event, self.what)?;
        write!(
            f,
            "repeat it: BALLAST_SIMULATION_SEED={} cargo test -p simulation --test fleet one_seed -- --ignored",
            self.seed
        )
    }
}
