// SPDX-License-Identifier: Apache-2.0

//! The client of the FD store: keeps copies of this process's descriptors in its parent (the
//! supervisor or systemd), so that they outlive the process.
//!
//! One thread sends all requests in order, because sd_notify calls may block. `stored_fds` has the
//! names and the order of the descriptors.
//!
//! If the FD store fails, the weight-server reports that and continues. The weights then do not
//! survive its death.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use memory::memfd::{MemfdError, SealedMemfd};
use service::Notify;
use service::notify::NotifyError;

use crate::events::WeightServerEvent;
use crate::held_fds::{GenerationFds, LeaseFds};
use crate::messages::{InputSender, LoopInput};
use crate::stored_fds::{
    StoredFdName, names_to_remove_generation, names_to_remove_lease, names_to_store_generation,
    names_to_store_lease,
};

/// The parent processes a thousand descriptors in about a second.
const BARRIER_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(crate) enum FdStoreRequest {
    /// Answered by `GenerationStored` when the parent has all descriptors.
    StoreGeneration {
        generation: u64,
        fds: Arc<GenerationFds>,
    },
    MarkRetired {
        generation: u64,
    },
    RemoveGeneration {
        generation: u64,
        allocations: usize,
    },
    /// Answered by `LeaseStored`.
    StoreLease {
        lease: u64,
        fds: LeaseFds,
    },
    RemoveLease {
        lease: u64,
    },
    /// Removes a descriptor that adoption dropped.
    Remove {
        name: String,
    },
    /// Stores everything again in the FD store of a new supervisor.
    Restore {
        generations: Vec<(u64, Arc<GenerationFds>)>,
        retired: Vec<u64>,
        leases: Vec<(u64, LeaseFds)>,
    },
    /// Reports the latest status text.
    ReportStatus,
}

/// Sends requests to the thread, which ends when the last client is dropped.
#[derive(Debug, Clone)]
pub(crate) struct FdStoreClient {
    jobs: mpsc::Sender<FdStoreRequest>,
    /// True if a parent exists and the last request succeeded.
    healthy: Arc<AtomicBool>,
    status: Arc<Mutex<Option<String>>>,
}

impl FdStoreClient {
    pub(crate) fn start(notify: Notify, inputs: InputSender) -> std::io::Result<Self> {
        Self::start_thread(notify, inputs).map(|(client, _)| client)
    }

    /// The thread can be joined after the last client is dropped.
    pub(crate) fn start_thread(
        notify: Notify,
        inputs: InputSender,
    ) -> std::io::Result<(Self, JoinHandle<()>)> {
        let (jobs, queue) = mpsc::channel();
        let healthy = Arc::new(AtomicBool::new(notify.has_parent()));
        let status = Arc::new(Mutex::new(None));
        let writer =
            FdStoreWriter { notify, inputs, healthy: Arc::clone(&healthy), status: Arc::clone(&status) };
        let thread = std::thread::Builder::new().name("fd_store".to_owned()).spawn(move || {
            for job in queue {
                writer.execute(job);
            }
        })?;
        Ok((Self { jobs, healthy, status }, thread))
    }

    pub(crate) fn send(&self, job: FdStoreRequest) {
        // The thread outlives every client.
        let _ = self.jobs.send(job);
    }

    /// Reports a status text. A text that still waits is replaced, so a parent that does not read
    /// costs no memory.
    pub(crate) fn report_status(&self, text: String) {
        let waiting = self.status.lock().unwrap_or_else(PoisonError::into_inner).replace(text);
        if waiting.is_none() {
            self.send(FdStoreRequest::ReportStatus);
        }
    }

    pub(crate) fn is_healthy(&self) -> bool {
        self.healthy.load(Ordering::Relaxed)
    }
}

#[derive(Debug, thiserror::Error)]
enum FdStoreError {
    #[error(transparent)]
    Notify(#[from] NotifyError),
    #[error("cannot create the marker memfd")]
    Mark(#[from] MemfdError),
}

struct FdStoreWriter {
    notify: Notify,
    inputs: InputSender,
    healthy: Arc<AtomicBool>,
    status: Arc<Mutex<Option<String>>>,
}

impl FdStoreWriter {
    fn execute(&self, job: FdStoreRequest) {
        match job {
            FdStoreRequest::StoreGeneration { generation, fds } => {
                self.record_result("store a model", self.store_generation(generation, &fds));
                self.inputs
                    .send_blocking(LoopInput::Event(WeightServerEvent::GenerationStored { generation }));
            }
            FdStoreRequest::MarkRetired { generation } => {
                self.record_result("mark a model as unloaded", self.mark_retired(generation));
            }
            FdStoreRequest::RemoveGeneration { generation, allocations } => {
                self.record_result("remove a model", self.remove_generation(generation, allocations));
            }
            FdStoreRequest::StoreLease { lease, fds } => {
                // A lease needs no barrier: the parent handles messages in order, so it has the
                // lease before anything that follows the grant.
                self.record_result("store a lease", self.store_lease(lease, &fds));
                self.inputs.send_blocking(LoopInput::Event(WeightServerEvent::LeaseStored { lease }));
            }
            FdStoreRequest::RemoveLease { lease } => {
                let forgotten = names_to_remove_lease(lease)
                    .into_iter()
                    .try_for_each(|name| self.notify.fdstore_remove(&name.to_string()));
                self.record_result("remove a lease", forgotten);
            }
            FdStoreRequest::Remove { name } => {
                self.record_result("remove a descriptor", self.notify.fdstore_remove(&name))
            }
            FdStoreRequest::Restore { generations, retired, leases } => {
                for (generation, fds) in generations {
                    self.record_result("store a model", self.store_generation(generation, &fds));
                }
                for generation in retired {
                    self.record_result("mark a model as unloaded", self.mark_retired(generation));
                }
                for (lease, fds) in leases {
                    self.record_result("store a lease", self.store_lease(lease, &fds));
                }
            }
            FdStoreRequest::ReportStatus => {
                let text =
                    self.status.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap_or_default();
                if let Err(error) = self.notify.status(&text) {
                    tracing::debug!(cause = service::exit::one_line(&error), "cannot report the status");
                }
            }
        }
    }

    fn store_generation(&self, generation: u64, fds: &GenerationFds) -> Result<(), NotifyError> {
        let stored = fds.allocations().iter().map(AsFd::as_fd).chain([fds.manifest().as_fd()]);
        for (name, fd) in names_to_store_generation(generation, fds.allocations().len()).zip(stored) {
            self.notify.fdstore(&name.to_string(), &[fd])?;
        }
        self.notify.barrier(BARRIER_TIMEOUT)
    }

    fn mark_retired(&self, generation: u64) -> Result<(), FdStoreError> {
        let mark = SealedMemfd::from_bytes("ballast-retired", &[])?;
        Ok(self.notify.fdstore(&StoredFdName::Retired { generation }.to_string(), &[mark.as_fd()])?)
    }

    fn remove_generation(&self, generation: u64, allocations: usize) -> Result<(), NotifyError> {
        names_to_remove_generation(generation, allocations)
            .try_for_each(|name| self.notify.fdstore_remove(&name.to_string()))
    }

    fn store_lease(&self, lease: u64, fds: &LeaseFds) -> Result<(), NotifyError> {
        let stored = [fds.pidfd.as_fd(), fds.record()];
        for (name, fd) in names_to_store_lease(lease).into_iter().zip(stored) {
            self.notify.fdstore(&name.to_string(), &[fd])?;
        }
        Ok(())
    }

    fn record_result(&self, what: &'static str, result: Result<(), impl Into<FdStoreError>>) {
        if !self.notify.has_parent() {
            return;
        }
        self.healthy.store(result.is_ok(), Ordering::Relaxed);
        if let Err(error) = result {
            let cause = service::exit::one_line(&error.into());
            tracing::error!(
                cause,
                "cannot {what} in the FD store: the weights would not survive this process"
            );
        }
    }
}
