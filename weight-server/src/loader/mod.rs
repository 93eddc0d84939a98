// SPDX-License-Identifier: Apache-2.0

//! `ballast loader`: the child process that reads one model into shareable memory, hands it over,
//! and exits.
//!
//! The loader gets a connected hand-off socket as its standard input, and the open model files
//! through it. It needs no path, no network and no privilege, so it enters a sandbox before it
//! reads the first byte of a file. For a GPU it creates the driver's context before that; `sandbox`
//! describes what stays accessible. The memory of a load is held by descriptors only: if the loader
//! or the weight-server dies, nothing is left.
//!
//! ```text
//! weight-server                          loader
//!   LoadJob + open files        ->       checks the headers, plans
//!                               <-       LoadPlan
//!   Proceed (reserved)          ->       allocates, reads, checksums, seals
//!                               <-       LoadedBytes, ten per second
//!                               <-       FdBatch + descriptors (manifest first)
//!   BatchReceived               ->
//!                               <-       LoadDone
//! ```
//! Instead of Proceed may come a CopyJob: the loader then copies a resident generation of the same
//! files from another device (`copy`). AwaitSource frames may come before.
//! A failure is one LoadFailed frame and a clean exit. If the first command is a VerifyJob, the
//! loader verifies a resident generation instead (`verify`). If it is a TextCheckJob, the loader
//! checks tokenizer and chat template within limits on memory and time (`text_check`).

mod channel;
mod checksum;
mod copy;
mod device;
mod host;
mod host_reader;
mod job;
mod load_error;
mod memory_bounds;
mod sandbox;
mod target;
mod text_check;
mod verify;

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::Duration;

use handoff::fd_batches::fd_batches;
use handoff::manifest::file_identity_from_wire;
use handoff::seqpacket::{Connection, FrameError};
use memory::manifest::FileIdentity;
use memory::pack::Packing;
use proto::weights::v1::{self as wire, LoadFailure, loader_command, loader_frame};
use service::exit::one_line;
use service::process_limits::StartError;
use service::{Exit, HasExit};

use channel::{receive_command, send_failure, send_frame, unexpected_command};
use copy::{CopyError, SourceGeneration};
use device::open_target;
use host_reader::{ReadProgress, TensorReadError};
use job::{LoadedModel, LoaderJob, PreparedLoad};
use load_error::ModelLoadError;
use target::LoadTarget;

pub use channel::LoaderError;
pub(crate) use device::layout_for_device;
pub(crate) use memory_bounds::{CONTEXT_BYTES, PINNED_BYTES};
pub(crate) use text_check::{CHECK_CPU_SECONDS, CHECK_MEMORY_BYTES};

/// The weight-server prepares the job before it starts a loader, and answers a plan from memory.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(30);

const SEND_TIMEOUT: Duration = Duration::from_secs(10);

/// The interval of progress reports. A loader also notices the end of the weight-server that soon.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// Runs the process. A failed load is reported to the weight-server and is not an error here. Nor
/// is a weight-server that has ended: no process waits for this job.
pub fn run() -> Result<(), LoaderError> {
    let not_started = LoaderError::NotStartedByWeightServer;
    let socket = std::io::stdin().as_fd().try_clone_to_owned().map_err(not_started)?;
    let connection = Connection::from(socket);
    connection.peer().map_err(not_started)?;
    connection.set_timeouts(Some(COMMAND_TIMEOUT), Some(SEND_TIMEOUT)).map_err(not_started)?;
    match run_job(&connection) {
        Err(LoaderError::Connection(FrameError::Closed)) => {
            tracing::info!("the weight-server closed the connection, the job is abandoned");
            Ok(())
        }
        Err(error) if error.exit() == Exit::OutOfResources => {
            send_failure(&connection, LoadFailure::OutOfMemory, one_line(&error))
        }
        result => result,
    }
}

fn run_job(connection: &Connection) -> Result<(), LoaderError> {
    let (job, files) = match receive_command(connection)? {
        (loader_command::Kind::Job(job), files) => (job, files),
        (loader_command::Kind::Verify(job), _) => return verify::run(connection, &job),
        (loader_command::Kind::TextCheck(job), files) => return text_check::run(connection, &job, files),
        (other, _) => return Err(unexpected_command("LoadJob or VerifyJob", &other)),
    };
    let Some(files) = with_identities(&job, files) else {
        return Err(LoaderError::Unexpected {
            expected: "one open file per path",
            found: "another number of files",
        });
    };
    let target = match open_target(&job.device, job.layout, job.unified_memory, &files) {
        Ok(target) => target,
        Err(error) => return report_failure(connection, &ModelLoadError::Target(error)),
    };
    let profile = target.sandbox_profile();
    let job = loader_job(job, files, target);
    sandbox::enter(profile).map_err(LoaderError::Sandbox)?;
    service::logging::start_thread();
    let prepared = match job.prepare() {
        Ok(prepared) => prepared,
        Err(error) => return report_failure(connection, &error),
    };
    send_frame(connection, loader_frame::Kind::Plan(plan_frame(&prepared)), &[])?;
    let result = match receive_permit(connection)? {
        LoadWork::ReadFiles => load(connection, |progress| prepared.load(progress))?,
        LoadWork::Copy(source) => load(connection, |progress| prepared.copy((*source)?, progress))?,
    };
    let result = match result {
        Ok(loaded) => hand_over(connection, &loaded),
        Err(error) => report_failure(connection, &error),
    };
    // The exit of the process releases a context in 40 ms; the driver's own release takes 70 ms,
    // and callers wait for this exit.
    std::mem::forget(prepared);
    result
}

/// What a loader with a plan may do.
enum LoadWork {
    ReadFiles,
    Copy(Box<Result<SourceGeneration, CopyError>>),
}

/// Waits for the permit to allocate. The weight-server sends a frame at least every 10 s.
fn receive_permit(connection: &Connection) -> Result<LoadWork, LoaderError> {
    loop {
        match receive_command(connection)?.0 {
            loader_command::Kind::AwaitSource(_) => {}
            loader_command::Kind::Proceed(_) => return Ok(LoadWork::ReadFiles),
            loader_command::Kind::Copy(job) => {
                return Ok(LoadWork::Copy(Box::new(SourceGeneration::receive(connection, job)?)));
            }
            other => return Err(unexpected_command("Proceed", &other)),
        }
    }
}

/// Runs `work` on a second thread. This thread reports progress until the work ends.
fn load(
    connection: &Connection,
    work: impl FnOnce(&ReadProgress) -> Result<LoadedModel, ModelLoadError> + Send,
) -> Result<Result<LoadedModel, ModelLoadError>, LoaderError> {
    let progress = &ReadProgress::default();
    std::thread::scope(|scope| {
        let (done, wait) = std::sync::mpsc::channel();
        let worker = std::thread::Builder::new()
            .name("load".to_owned())
            .spawn_scoped(scope, move || {
                let result = work(progress);
                // The receiver waits until the result arrives.
                let _ = done.send(result);
            })
            .map_err(|error| LoaderError::Thread(StartError(error)))?;
        loop {
            match wait.recv_timeout(PROGRESS_INTERVAL) {
                Ok(result) => return Ok(result),
                Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {}
                // The sender is dropped without a result: the thread panicked. Joining passes that
                // on.
                Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => match worker.join() {
                    Err(panic) => std::panic::resume_unwind(panic),
                    Ok(()) => return Ok(Err(ModelLoadError::Read(TensorReadError::Cancelled))),
                },
            }
            let done_bytes = progress.done_bytes.load(Ordering::Relaxed);
            let report = loader_frame::Kind::Progress(wire::LoadedBytes { done_bytes });
            if let Err(error) = send_frame(connection, report, &[]) {
                progress.cancelled.store(true, Ordering::Relaxed);
                return Err(error);
            }
        }
    })
}

fn hand_over(connection: &Connection, loaded: &LoadedModel) -> Result<(), LoaderError> {
    let allocations = loaded.allocations.iter().map(AsFd::as_fd);
    let all: Vec<BorrowedFd<'_>> = std::iter::once(loaded.manifest.as_fd()).chain(allocations).collect();
    for batch in fd_batches(all.len() as u32) {
        let part = &all[batch.first as usize..(batch.first + batch.count) as usize];
        send_frame(connection, loader_frame::Kind::Fds(batch), part)?;
        match receive_command(connection)? {
            (loader_command::Kind::BatchReceived(receipt), _) if receipt.batch == batch.batch => {}
            (other, _) => return Err(unexpected_command("BatchReceived", &other)),
        }
    }
    let copy_microseconds = u64::try_from(loaded.copy_time.as_micros()).unwrap_or(u64::MAX);
    send_frame(connection, loader_frame::Kind::Done(wire::LoadDone { copy_microseconds }), &[])?;
    tracing::info!("handed over the model");
    Ok(())
}

fn report_failure(connection: &Connection, error: &ModelLoadError) -> Result<(), LoaderError> {
    send_failure(connection, error.failure(), one_line(error))
}

/// Pairs the files with the identities that the weight-server saw; `None` if the numbers differ.
fn with_identities(job: &wire::LoadJob, files: Vec<OwnedFd>) -> Option<Vec<(FileIdentity, File)>> {
    let identities = job.files.iter().cloned().map(file_identity_from_wire);
    (files.len() == job.files.len()).then(|| identities.zip(files.into_iter().map(File::from)).collect())
}

fn loader_job(
    job: wire::LoadJob,
    files: Vec<(FileIdentity, File)>,
    target: Box<dyn LoadTarget>,
) -> LoaderJob {
    LoaderJob {
        generation: job.generation,
        model: job.model,
        files,
        packing: if job.pack { Packing::Slabs } else { Packing::OnePerTensor },
        target,
        threads: job.threads as usize,
    }
}

fn plan_frame(prepared: &PreparedLoad) -> wire::LoadPlan {
    let pack = &prepared.plan.pack;
    let overhead = prepared.overhead();
    wire::LoadPlan {
        tensor_bytes: pack.tensor_bytes,
        allocation_bytes: pack.allocation_bytes(),
        manifest_bytes: prepared.manifest_bytes(),
        allocations: pack.allocations.len() as u32,
        tensors: pack.placements.len() as u32,
        staging_bytes: overhead.device_bytes,
        host_bytes: overhead.host_bytes,
        peer_devices: prepared.peer_devices(),
    }
}
