//! The vault: copies of our descriptors with the parent (supervisor or systemd), so that they outlive this process.
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
//! A vault that fails costs the survival of the weights, not the service: it is reported, and everything goes on.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use memory::memfd::{MemfdError, SealedMemfd};
use service::Notify;
use service::notify::NotifyError;

use crate::driver::{Input, Inputs};
use crate::events::Event;
use crate::holdings::{GenerationFds, LeaseFds};

/// The parent works off a thousand descriptors in about a second.
const BARRIER_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(crate) enum VaultJob {
    /// Answered by `GenerationStored` when the parent has it all.
    StoreGeneration {
        generation: u64,
        fds: Arc<GenerationFds>,
    },
    MarkRetired {
        generation: u64,
    },
    ForgetGeneration {
        generation: u64,
        allocations: usize,
    },
    /// Answered by `LeaseStored`.
    StoreLease {
        lease: u64,
        fds: LeaseFds,
    },
    ForgetLease {
        lease: u64,
    },
    /// A descriptor of an earlier incarnation that belongs to nothing.
    Forget {
        name: String,
    },
    /// Stores anew what a new supervisor does not have.
    Restore {
        generations: Vec<(u64, Arc<GenerationFds>)>,
        retired: Vec<u64>,
        leases: Vec<(u64, LeaseFds)>,
    },
    /// Reports the latest status text.
    Status,
}

/// Sends jobs to the thread, which ends when this is dropped.
#[derive(Debug, Clone)]
pub(crate) struct Vault {
    jobs: mpsc::Sender<VaultJob>,
    /// The last attempt to store something succeeded, and there is somebody to store it.
    sound: Arc<AtomicBool>,
    status: Arc<Mutex<Option<String>>>,
}

impl Vault {
    pub(crate) fn start(notify: Notify, inputs: Inputs) -> std::io::Result<Self> {
        let (jobs, queue) = mpsc::channel();
        let sound = Arc::new(AtomicBool::new(notify.has_parent()));
        let status = Arc::new(Mutex::new(None));
        let writer = Writer { notify, inputs, sound: Arc::clone(&sound), status: Arc::clone(&status) };
        std::thread::Builder::new().name("vault".to_owned()).spawn(move || {
            for job in queue {
                writer.work(job);
            }
        })?;
        Ok(Self { jobs, sound, status })
    }

    pub(crate) fn send(&self, job: VaultJob) {
        // The thread ends with the last sender only.
        let _ = self.jobs.send(job);
    }

    /// Reports a status text; one that waits is replaced, so that a parent that doesn't read costs no memory.
    pub(crate) fn report(&self, text: String) {
        let waiting = self.status.lock().unwrap_or_else(PoisonError::into_inner).replace(text);
        if waiting.is_none() {
            self.send(VaultJob::Status);
        }
    }

    pub(crate) fn is_sound(&self) -> bool {
        self.sound.load(Ordering::Relaxed)
    }
}

#[derive(Debug, thiserror::Error)]
enum VaultError {
    #[error(transparent)]
    Notify(#[from] NotifyError),
    #[error("cannot make a mark")]
    Mark(#[from] MemfdError),
}

struct Writer {
    notify: Notify,
    inputs: Inputs,
    sound: Arc<AtomicBool>,
    status: Arc<Mutex<Option<String>>>,
}

impl Writer {
    fn work(&self, job: VaultJob) {
        match job {
            VaultJob::StoreGeneration { generation, fds } => {
                self.note("store a model", self.store_generation(generation, &fds));
                self.inputs.send_blocking(Input::Event(Event::GenerationStored { generation }));
            }
            VaultJob::MarkRetired { generation } => {
                self.note("mark a model as unloaded", self.mark_retired(generation));
            }
            VaultJob::ForgetGeneration { generation, allocations } => {
                self.note("forget a model", self.forget_generation(generation, allocations));
            }
            VaultJob::StoreLease { lease, fds } => {
                // No barrier: messages are worked off in order, so whatever follows the grant finds the lease stored.
                self.note("store a lease", self.store_lease(lease, &fds));
                self.inputs.send_blocking(Input::Event(Event::LeaseStored { lease }));
            }
            VaultJob::ForgetLease { lease } => {
                let forgotten = self
                    .notify
                    .fdstore_remove(&format!("l{lease}.record"))
                    .and_then(|()| self.notify.fdstore_remove(&format!("l{lease}.pidfd")));
                self.note("forget a lease", forgotten);
            }
            VaultJob::Forget { name } => self.note("forget a descriptor", self.notify.fdstore_remove(&name)),
            VaultJob::Restore { generations, retired, leases } => {
                for (generation, fds) in generations {
                    self.note("store a model", self.store_generation(generation, &fds));
                }
                for generation in retired {
                    self.note("mark a model as unloaded", self.mark_retired(generation));
                }
                for (lease, fds) in leases {
                    self.note("store a lease", self.store_lease(lease, &fds));
                }
            }
            VaultJob::Status => {
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

    fn mark_retired(&self, generation: u64) -> Result<(), VaultError> {
        let mark = SealedMemfd::from_bytes("ballast-retired", &[])?;
        Ok(self.notify.fdstore(&format!("g{generation}.retired"), &[mark.as_fd()])?)
    }

    fn forget_generation(&self, generation: u64, allocations: usize) -> Result<(), NotifyError> {
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

    fn note(&self, what: &'static str, result: Result<(), impl Into<VaultError>>) {
        if !self.notify.has_parent() {
            return;
        }
        self.sound.store(result.is_ok(), Ordering::Relaxed);
        if let Err(error) = result {
            let cause = service::exit::one_line(&error.into());
            tracing::error!(cause, "cannot {what} in the vault: the weights would not survive this process");
        }
    }
}
