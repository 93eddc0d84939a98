//! The FD store: copies of our descriptors with the parent (supervisor or systemd), so that they outlive this process.
//!
//! One thread writes, in order, since sd_notify calls may block. Names:
//!
//! ```text
//! g<generation>.a<index>    an allocation
//! g<generation>.manifest    the commit record of a generation: stored last, removed first
//! g<generation>.retired     an empty memfd: the model was unloaded or replaced while workers still held it
//! l<lease>.pidfd            the worker's process
//! l<lease>.record           the commit record of a lease: stored last, removed first
//! ```
//! A FD store that fails costs the survival of the weights, not the service: it is reported, and everything goes on.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use memory::memfd::{MemfdError, SealedMemfd};
use service::Notify;
use service::notify::NotifyError;

use crate::event_loop::{InputSender, LoopInput};
use crate::events::WeightServerEvent;
use crate::held_fds::{GenerationFds, LeaseFds};

/// The parent works off a thousand descriptors in about a second.
const BARRIER_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(crate) enum FdStoreRequest {
    /// Answered by `GenerationStored` when the parent has it all.
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
    /// A descriptor of an earlier incarnation that belongs to nothing.
    Remove {
        name: String,
    },
    /// Stores anew what a new supervisor does not have.
    Restore {
        generations: Vec<(u64, Arc<GenerationFds>)>,
        retired: Vec<u64>,
        leases: Vec<(u64, LeaseFds)>,
    },
    /// Reports the latest status text.
    ReportStatus,
}

/// Sends jobs to the thread, which ends when this is dropped.
#[derive(Debug, Clone)]
pub(crate) struct FdStoreClient {
    jobs: mpsc::Sender<FdStoreRequest>,
    /// The last attempt to store something succeeded, and there is somebody to store it.
    healthy: Arc<AtomicBool>,
    status: Arc<Mutex<Option<String>>>,
}

impl FdStoreClient {
    pub(crate) fn start(notify: Notify, inputs: InputSender) -> std::io::Result<Self> {
        let (jobs, queue) = mpsc::channel();
        let healthy = Arc::new(AtomicBool::new(notify.has_parent()));
        let status = Arc::new(Mutex::new(None));
        let writer =
            FdStoreWriter { notify, inputs, healthy: Arc::clone(&healthy), status: Arc::clone(&status) };
        std::thread::Builder::new().name("fd_store".to_owned()).spawn(move || {
            for job in queue {
                writer.execute(job);
            }
        })?;
        Ok(Self { jobs, healthy, status })
    }

    pub(crate) fn send(&self, job: FdStoreRequest) {
        // The thread ends with the last sender only.
        let _ = self.jobs.send(job);
    }

    /// Reports a status text; one that waits is replaced, so that a parent that doesn't read costs no memory.
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
    #[error("cannot make a mark")]
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
                self.inputs.send_blocking(LoopInput::WeightServerEvent(
                    WeightServerEvent::GenerationStored { generation },
                ));
            }
            FdStoreRequest::MarkRetired { generation } => {
                self.record_result("mark a model as unloaded", self.mark_retired(generation));
            }
            FdStoreRequest::RemoveGeneration { generation, allocations } => {
                self.record_result("forget a model", self.remove_generation(generation, allocations));
            }
            FdStoreRequest::StoreLease { lease, fds } => {
                // No barrier: messages are worked off in order, so whatever follows the grant finds the lease stored.
                self.record_result("store a lease", self.store_lease(lease, &fds));
                self.inputs
                    .send_blocking(LoopInput::WeightServerEvent(WeightServerEvent::LeaseStored { lease }));
            }
            FdStoreRequest::RemoveLease { lease } => {
                let forgotten = self
                    .notify
                    .fdstore_remove(&format!("l{lease}.record"))
                    .and_then(|()| self.notify.fdstore_remove(&format!("l{lease}.pidfd")));
                self.record_result("forget a lease", forgotten);
            }
            FdStoreRequest::Remove { name } => {
                self.record_result("forget a descriptor", self.notify.fdstore_remove(&name))
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
        for (index, allocation) in fds.allocations().iter().enumerate() {
            self.notify.fdstore(&format!("g{generation}.a{index}"), &[allocation.as_fd()])?;
        }
        self.notify.fdstore(&format!("g{generation}.manifest"), &[fds.manifest().as_fd()])?;
        self.notify.barrier(BARRIER_TIMEOUT)
    }

    fn mark_retired(&self, generation: u64) -> Result<(), FdStoreError> {
        let mark = SealedMemfd::from_bytes("ballast-retired", &[])?;
        Ok(self.notify.fdstore(&format!("g{generation}.retired"), &[mark.as_fd()])?)
    }

    fn remove_generation(&self, generation: u64, allocations: usize) -> Result<(), NotifyError> {
        self.notify.fdstore_remove(&format!("g{generation}.manifest"))?;
        self.notify.fdstore_remove(&format!("g{generation}.retired"))?;
        for index in 0..allocations {
            self.notify.fdstore_remove(&format!("g{generation}.a{index}"))?;
        }
        Ok(())
    }

    fn store_lease(&self, lease: u64, fds: &LeaseFds) -> Result<(), NotifyError> {
        self.notify.fdstore(&format!("l{lease}.pidfd"), &[fds.pidfd.as_fd()])?;
        self.notify.fdstore(&format!("l{lease}.record"), &[fds.record()])
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
