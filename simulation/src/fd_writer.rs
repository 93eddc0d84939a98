// SPDX-License-Identifier: Apache-2.0

//! The thread of the weight-server that writes to the FD store: one job after the other, and a wait
//! for the answer to each barrier.

use std::collections::VecDeque;

use handoff::lease_record::LeaseRecord;
use weight_server::catalog::GenerationPhase;
use weight_server::events::WeightServerEvent;
use weight_server::stored_fds::{
    StoredFdName, names_to_remove_generation, names_to_remove_lease, names_to_store_generation,
    names_to_store_lease,
};

use crate::fleet::Fleet;
use crate::messages::{Message, Notice, StoredItem, ToWeightServer};
use crate::network::{Micros, SECOND, SimPid};
use crate::weight_server_process::HeldGeneration;
use crate::weights::ALLOCATIONS;

const BARRIER_TIMEOUT: Micros = 10 * SECOND;

#[derive(Debug)]
pub(crate) enum FdJob {
    /// `is_new`: the state machine waits for the answer.
    StoreGeneration {
        held: HeldGeneration,
        is_new: bool,
    },
    MarkRetired(u64),
    RemoveGeneration(u64),
    StoreLease {
        record: LeaseRecord,
    },
    RestoreLease {
        record: LeaseRecord,
    },
    RemoveLease(u64),
    RemoveName(String),
}

#[derive(Debug, Default)]
pub(crate) struct FdWriter {
    jobs: VecDeque<FdJob>,
    /// The barrier that the thread waits for, with the generation to report afterwards.
    barrier: Option<(u64, Option<u64>)>,
}

impl Fleet {
    pub(crate) fn write_fds(&mut self, job: FdJob) {
        if let Some(server) = self.weight_server.as_mut() {
            server.writer.jobs.push_back(job);
            self.run_fd_jobs();
        }
    }

    /// A new supervisor runs, whose FD store is empty.
    pub(crate) fn restore_fd_store(&mut self) {
        let Some(server) = self.running_server() else { return };
        let held = server.generations.values().cloned();
        let mut jobs: Vec<FdJob> = held.map(|held| FdJob::StoreGeneration { held, is_new: false }).collect();
        let retired = server.state.generations().filter(|g| g.phase == GenerationPhase::Retiring);
        jobs.extend(retired.map(|generation| FdJob::MarkRetired(generation.id)));
        jobs.extend(server.leases.values().map(|record| FdJob::RestoreLease { record: record.clone() }));
        jobs.into_iter().for_each(|job| self.write_fds(job));
    }

    pub(crate) fn end_barrier(&mut self, number: u64) {
        let Some(server) = self.weight_server.as_mut() else { return };
        let Some((_, generation)) = server.writer.barrier.take_if(|(barrier, _)| *barrier == number) else {
            return;
        };
        if let Some(generation) = generation {
            self.handle_weight_server_event(WeightServerEvent::GenerationStored { generation });
        }
        self.run_fd_jobs();
    }

    fn run_fd_jobs(&mut self) {
        while let Some(server) = self.weight_server.as_mut()
            && server.writer.barrier.is_none()
            && let Some(job) = server.writer.jobs.pop_front()
        {
            let pid = server.pid;
            self.run_fd_job(pid, job);
        }
    }

    fn run_fd_job(&mut self, pid: SimPid, job: FdJob) {
        match job {
            FdJob::StoreGeneration { held, is_new } => {
                let id = held.manifest.generation;
                for name in names_to_store_generation(id, ALLOCATIONS) {
                    let item = match name {
                        StoredFdName::Allocation { index, .. } => {
                            StoredItem::Allocation { copy: held.copy.clone(), index }
                        }
                        _ => StoredItem::Manifest(held.manifest.clone()),
                    };
                    self.notify(pid, Notice::Store { name: name.to_string(), item });
                }
                let number = self.number();
                let generation = is_new.then_some(id);
                let server = self.weight_server.as_mut().expect("it runs a job");
                server.writer.barrier = Some((number, generation));
                self.notify(pid, Notice::Barrier { number });
                // Without a parent, the send fails at once.
                let wait = if self.supervisor.is_some() { BARRIER_TIMEOUT } else { 20 };
                let timeout = ToWeightServer::BarrierTimeout { number };
                self.net.timer(pid, wait, Message::WeightServer(timeout));
            }
            FdJob::MarkRetired(generation) => {
                let name = StoredFdName::Retired { generation }.to_string();
                self.notify(pid, Notice::Store { name, item: StoredItem::Retired });
            }
            FdJob::RemoveGeneration(generation) => {
                for name in names_to_remove_generation(generation, ALLOCATIONS) {
                    self.notify(pid, Notice::Remove { name: name.to_string() });
                }
            }
            FdJob::StoreLease { record } => {
                let lease = record.lease;
                self.store_lease(pid, record);
                let stored = ToWeightServer::Event(Box::new(WeightServerEvent::LeaseStored { lease }));
                self.net.timer(pid, 20, Message::WeightServer(stored));
            }
            FdJob::RestoreLease { record } => self.store_lease(pid, record),
            FdJob::RemoveLease(lease) => {
                for name in names_to_remove_lease(lease) {
                    self.notify(pid, Notice::Remove { name: name.to_string() });
                }
            }
            FdJob::RemoveName(name) => self.notify(pid, Notice::Remove { name }),
        }
    }

    fn store_lease(&mut self, pid: SimPid, record: LeaseRecord) {
        for name in names_to_store_lease(record.lease) {
            let item = match name {
                StoredFdName::Pidfd { .. } => StoredItem::Pidfd(record.pid.cast_unsigned()),
                _ => StoredItem::Record(record.clone()),
            };
            self.notify(pid, Notice::Store { name: name.to_string(), item });
        }
    }
}
