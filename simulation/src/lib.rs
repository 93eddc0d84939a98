// SPDX-License-Identifier: Apache-2.0

//! Deterministic simulation of a whole fleet: supervisor, weight-server, router and workers in one
//! thread. A seed decides about every delay, reordering, loss, stop and jump of the clock.
//!
//! Around each process's real state machines stands as much as its event loop does: it delivers
//! messages and carries actions out. docs/decisions/0030 has the list of what is real and what is
//! not simulated.
//!
//! ```text
//! faults --> network: one queue of events, in time order <----------------------.
//!               |                                                                |
//!               +-> supervisor_process, admin_tasks   ChildStateMachine,         |
//!               |                                     ChildDeadlines, FdStore,   |
//!               |                                     orphans, resident_models   |
//!               +-> weight_server_process, fd_writer  WeightServerState,         | messages,
//!               |                                     stored_fds                 | timers
//!               +-> worker_process                    Scheduler, BlockPool,      |
//!               |                                     AdmissionControl,          |
//!               |                                     ClaimRetry                 |
//!               +-> router_process, streams           AdmissionPolicy,           |
//!               |                                     RoutingPolicy, opening,    |
//!               |                                     QuarantinePolicy,          |
//!               |                                     ChoiceProgress ------------'
//!               '-> checks: invariants
//! ```
//!
//! After every event of the process that it concerns:
//! 1. I3, watchdog: a supervisor kills no child that was neither stopped nor slow to exit.
//! 2. I4: no loader fills memory with a file that is in memory already. Not promised, and counted:
//!    every holder was stopped, and the weight-server has waited for it.
//! 3. I4: each generation and each lease has exactly one row in the ledger, and a worker that runs
//!    does not lose its lease. No lease is granted while the ledger does not count the memory of a
//!    worker that runs.
//! 4. I6: every token of a stream is the next one of the one right output. A stream is complete, or
//!    ends with an error, or with the connection of a router that died.
//! 5. I7: the router's requests and the FD store stay within their bounds.
//! 6. A load is answered with the file that was asked for.
//! 7. A request that crashes workers ends at most four of them.
//!
//! Then the faults stop. After 90 s, in which no process may stay given up:
//! 8. Every request succeeds, and has ended at the end of the simulation.
//! 9. All children run, all workers hold leases of the weights of their model, copies in memory,
//!    generations, leases and FD store agree, and no KV block is in use.

#![forbid(unsafe_code)]

mod admin_tasks;
mod checks;
mod cures;
mod faults;
mod fd_writer;
mod fleet;
mod messages;
mod network;
mod router_process;
mod streams;
mod summary;
mod supervisor_process;
mod weight_server_process;
mod weights;
mod worker_process;

pub use cures::Cure;
use fleet::Fleet;
pub use summary::{BrokenInvariant, SimulationCounts};

/// The events that a failure shows.
const HISTORY: u64 = 60;

/// Runs one seed to its end.
pub fn run(seed: u64) -> Result<SimulationCounts, Box<BrokenInvariant>> {
    run_without(seed, None)
}

/// Runs one seed of a fleet that lacks a cure.
pub fn run_without(seed: u64, missing: Option<Cure>) -> Result<SimulationCounts, Box<BrokenInvariant>> {
    match simulate(seed, missing, u64::MAX) {
        Ok(counts) => Ok(counts),
        // Describing every event would be slow, so the seed runs once more.
        Err(found) => {
            Err(simulate(seed, missing, found.event.saturating_sub(HISTORY)).err().unwrap_or(found))
        }
    }
}

/// Describes the events from number `describe_from` on.
fn simulate(
    seed: u64,
    missing: Option<Cure>,
    describe_from: u64,
) -> Result<SimulationCounts, Box<BrokenInvariant>> {
    let mut fleet = Fleet::new(seed, missing);
    let mut history = Vec::new();
    while let Some(entry) = fleet.net.pop() {
        if fleet.net.now >= fleet.plan.end() {
            fleet.check_recovered();
        } else {
            fleet.counts.events += 1;
            if fleet.counts.events >= describe_from {
                let seconds = fleet.net.now as f64 / 1e6;
                history.push(format!("{seconds:>12.6} s, to {}: {:?}", entry.to, entry.message));
            }
            fleet.deliver(entry);
        }
        if let Some(what) = fleet.violation.take() {
            let event = fleet.counts.events;
            return Err(Box::new(BrokenInvariant { seed, event, what, history }));
        }
        if fleet.net.now >= fleet.plan.end() {
            break;
        }
    }
    Ok(fleet.counts)
}
