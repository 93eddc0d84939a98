// SPDX-License-Identifier: Apache-2.0

//! The invariants of the fleet in the simulation's terms. The head of the crate lists them.

use std::sync::Arc;

use proto::weights::v1::RefusalReason;
use supervisor::ChildState;
use weight_server::catalog::GenerationPhase;
use weight_server::lease_table::LeasePhase;
use weight_server::ledger::ReservationKey;
use weight_server::state::{RECLAIM_TIMEOUT, UNKNOWN_RESERVATIONS_WAIT};

use crate::fleet::Fleet;
use crate::network::{Micros, SECOND, SimPid};
use crate::streams::SimRequest;
use crate::weights::source_of;
use crate::worker_process::{MappedWeights, SimLease, SimWorker};

/// A process that was stopped within this time may have missed a deadline.
const AFTER_STOP: Micros = 40 * SECOND;
/// Streams that the router accepts at once.
const REQUESTS_MAX: usize = 64;

impl Fleet {
    fn was_stopped(&self, pid: SimPid) -> bool {
        let now = self.net.now;
        self.processes.get(&pid).is_some_and(|process| {
            process.stopped_since.is_some() || (process.last_stop > 0 && now < process.last_stop + AFTER_STOP)
        })
    }

    /// A supervisor kills a child only if the child was stopped, or takes long to exit.
    pub(crate) fn check_kill(&mut self, name: &Arc<str>, pid: SimPid) {
        let is_exiting = self.processes.get(&pid).is_none_or(|process| process.is_exiting);
        if !is_exiting && !self.was_stopped(pid) {
            self.break_invariant(|| format!("watchdog: the supervisor killed {name}, which was healthy"));
        }
    }

    /// I4: a loader fills memory with weights that are not there already.
    pub(crate) fn check_one_copy(&mut self, source: u64) {
        let Some(copy) = self.files.copies().find(|copy| copy.source == source) else { return };
        let server = self.weight_server.as_ref().and_then(|server| server.running.as_ref());
        let uptime = server.map_or(0, |server| server.uptime().as_micros() as Micros);
        let holders = self.workers.iter().filter(|(_, worker)| {
            worker.weights.as_ref().is_some_and(|weights| weights.copy.inode == copy.inode)
        });
        let holders: Vec<SimPid> = holders.map(|(pid, _)| *pid).collect();
        // Not promised: a holder is stopped for longer than a weight-server waits for it.
        let is_late = uptime >= RECLAIM_TIMEOUT.as_micros() as Micros;
        if is_late && holders.iter().all(|pid| self.was_stopped(*pid)) && !holders.is_empty() {
            self.counts.late_second_copies += 1;
            return;
        }
        self.break_invariant(|| {
            format!("I4: file {source} is loaded a second time although workers {holders:?} have it")
        });
    }

    /// A load is answered with the file that was asked for.
    pub(crate) fn check_load_answer(&mut self, requested: Option<u64>, found: u64) {
        if requested.is_some_and(|requested| requested != found) {
            self.break_invariant(|| {
                format!("takeover: file {requested:?} was asked for, and file {found} is served")
            });
        }
    }

    /// I4: every generation and every lease has exactly one row.
    pub(crate) fn check_weight_server(&mut self) {
        let Some(server) = self.weight_server.as_ref().and_then(|server| server.running.as_ref()) else {
            return;
        };
        let state = &server.state;
        let (mut generations, mut leases, mut orphaned) = (0, 0, 0);
        for (key, _) in state.ledger().reservations() {
            match key {
                ReservationKey::Loading(id) | ReservationKey::Weights(id) => {
                    generations += 1;
                    orphaned += usize::from(state.generation(id).is_none());
                }
                ReservationKey::Lease(id) => {
                    leases += 1;
                    orphaned += usize::from(state.lease(id).is_none());
                }
                ReservationKey::Verifying(id) | ReservationKey::Copying(id) => {
                    orphaned += usize::from(state.generation(id).is_none())
                }
            }
        }
        let is_complete = generations == state.generations().count()
            && leases == state.leases().count()
            && state.leases().all(|lease| state.generation(lease.generation).is_some());
        if orphaned > 0 || !is_complete {
            self.break_invariant(|| "I4: the ledger has a hole".to_owned());
        }
    }

    /// I4: no worker gets a lease while the ledger does not count what another one has reserved.
    /// Not promised for workers that were stopped, nor once the weight-server has waited: a stopped
    /// supervisor keeps workers from claiming, since it registers no tokens.
    pub(crate) fn check_new_lease(&mut self, id: u64) {
        let Some(server) = self.weight_server.as_ref().and_then(|server| server.running.as_ref()) else {
            return;
        };
        if server.uptime() >= UNKNOWN_RESERVATIONS_WAIT {
            return;
        }
        let state = &server.state;
        let is_new = state.lease(id).is_some_and(|lease| matches!(lease.phase, LeasePhase::Storing { .. }));
        let is_unknown = |pid: SimPid, worker: &SimWorker| {
            let is_counted = |weights: &MappedWeights| {
                state.lease(weights.lease).is_some_and(|lease| lease.worker.pid == pid.cast_signed())
            };
            worker.weights.as_ref().is_some_and(|weights| !is_counted(weights))
                && !matches!(worker.lease, SimLease::Lost)
                && !self.was_stopped(pid)
                && self.processes.get(&pid).is_some_and(|process| !process.is_exiting)
        };
        let mut workers = self.workers.iter();
        let unknown = workers.find(|(pid, worker)| is_new && is_unknown(**pid, worker)).map(|(pid, _)| *pid);
        if let Some(pid) = unknown {
            self.break_invariant(|| {
                format!("I4: lease {id} is granted, and the ledger does not count worker {pid}")
            });
        }
    }

    /// I4: a worker that loses its lease keeps memory that no ledger counts.
    pub(crate) fn check_lost_lease(&mut self, pid: SimPid, reason: RefusalReason) {
        self.counts.lost_leases += 1;
        let is_leaving = self.processes.get(&pid).is_none_or(|process| process.is_exiting);
        if !is_leaving && !self.was_stopped(pid) {
            self.break_invariant(|| format!("I4: worker {pid} lost its lease: {reason:?}"));
        }
    }

    /// I7: the router holds a bounded number of requests.
    pub(crate) fn check_router(&mut self) {
        let held = self.router.as_ref().map_or(0, |router| router.requests.len());
        if held > REQUESTS_MAX {
            self.break_invariant(|| format!("I7: the router holds {held} requests"));
        }
    }

    /// The block pool of a worker, every now and then.
    pub(crate) fn check_kv_cache(&mut self, pid: SimPid) {
        if !self.net.random.one_in(64) {
            return;
        }
        let found = self.workers.get(&pid).map(|worker| worker.scheduler.check_integrity());
        if let Some(Err(error)) = found {
            self.break_invariant(|| format!("KV cache: {error}"));
        }
    }

    /// A recovered fleet serves every request.
    pub(crate) fn check_refusal(&mut self, request: &SimRequest, why: &str) {
        let is_poison = self.poison.is_poison(request.arrival.content);
        if !is_poison && request.arrived >= self.plan.recovered_at() {
            let now = self.net.now / SECOND;
            self.break_invariant(|| format!("recovery: a request fails at {now} s: {why}"));
        }
    }

    /// The state of a fleet that nothing has disturbed for two minutes.
    pub(crate) fn check_recovered(&mut self) {
        if let Err(why) = self.find_damage() {
            self.break_invariant(|| format!("recovery: {why}"));
        }
    }

    fn find_damage(&self) -> Result<(), String> {
        let supervisor = self.supervisor.as_ref().ok_or("there is no supervisor")?;
        for (name, child) in &supervisor.children {
            if !matches!(child.machine.state(), ChildState::Running { .. }) || child.process.is_none() {
                return Err(format!("{name} is {:?}", child.machine.state()));
            }
        }
        for model in supervisor.models.keys() {
            let of_model = |worker: &&crate::worker_process::SimWorker| worker.model == *model;
            let workers = self.workers.values().filter(of_model).count();
            if workers < self.plan.workers_of(model) as usize {
                return Err(format!("model {model} has {workers} workers"));
            }
        }
        let open = self.router.as_ref().map_or(0, |router| router.requests.len());
        if open > 0 {
            return Err(format!("I6: {open} requests have no end"));
        }
        let server = self.weight_server.as_ref().and_then(|server| server.running.as_ref());
        let server = server.ok_or("no weight-server runs")?;
        let state = &server.state;
        for (pid, worker) in &self.workers {
            let weights = worker.weights.as_ref().ok_or(format!("worker {pid} has no weights"))?;
            if !matches!(worker.lease, SimLease::Held) {
                return Err(format!("I4: the lease of worker {pid} is {:?}", worker.lease));
            }
            let lease = state.lease(weights.lease).filter(|lease| lease.worker.pid == pid.cast_signed());
            let lease = lease.ok_or(format!("I4: the ledger does not count worker {pid}"))?;
            if !matches!(lease.phase, LeasePhase::Held { .. }) {
                return Err(format!("I4: the lease of worker {pid} is {:?}", lease.phase));
            }
            let digest = supervisor.models.get(&worker.model).and_then(|model| model.digest.clone());
            let source = weights.copy.source;
            if digest.is_none_or(|digest| digest[..] != crate::weights::digest_of(source)[..]) {
                return Err(format!("takeover: worker {pid} serves file {source}, not the model's"));
            }
            if worker.scheduler.pool().used_blocks() > 0 || !worker.streams.is_empty() {
                return Err(format!("worker {pid} holds KV blocks without a stream"));
            }
        }
        self.find_unaccounted(server)
    }

    fn find_unaccounted(&self, server: &crate::weight_server_process::RunningServer) -> Result<(), String> {
        let ready = |g: &&weight_server::catalog::Generation| g.phase == GenerationPhase::Ready;
        let resident: Vec<u64> =
            server.state.generations().filter(ready).map(|g| source_of(&g.key)).collect();
        let copies = self.files.copies().count();
        let generations = server.state.generations().count();
        let models = self.supervisor.as_ref().map_or(0, |supervisor| supervisor.models.len());
        if copies != models || generations != models || resident.len() != models {
            return Err(format!(
                "I4: {copies} copies and {generations} generations ({resident:?}) of {models} models"
            ));
        }
        let leases = server.state.leases().count();
        if leases != self.workers.len() {
            return Err(format!("I4: {leases} leases of {} workers", self.workers.len()));
        }
        // Two allocations and a manifest, a record and a pidfd.
        let stored = self.supervisor.as_ref().map_or(0, |supervisor| supervisor.fd_store.entries().count());
        if stored != 3 * generations + 2 * leases {
            return Err(format!("I4: the FD store has {stored} entries"));
        }
        Ok(())
    }
}
