//! `ballast loader`: the child that reads one model into memory that can be shared, hands it over, and exits.
//!
//! It gets a connected hand-off socket as its standard input and the open model files through it, so it needs no path,
//! no network and no privilege, and drops what it can of each before it looks at the first byte of a file; for a GPU it
//! makes the driver's context before that (`sandbox` says what stays open to it then). Everything it has is
//! descriptors: if it dies, or the weight-server does, nothing is left.
//!
//! ```text
//! weight-server                          loader
//!   LoadJob + open files        ->       checks the headers, plans
//!                               <-       LoadPlan
//!   Proceed (reserved)          ->       allocates, reads, checksums, seals
//!                               <-       LoadedBytes, ten a second
//!                               <-       FdBatch + descriptors (manifest first)
//!   BatchReceived               ->
//!                               <-       LoadDone
//! ```
//! Any failure is one LoadFailed frame instead, and a clean exit: the weight-server answers for it. With a VerifyJob in
//! place of the LoadJob it checks a resident model (`verify`).

mod checksum;
mod file_parts;
#[cfg(any(feature = "cuda", test))]
mod file_reader;
#[cfg_attr(not(feature = "cuda"), path = "no_gpu.rs")]
mod gpu;
mod gpu_error;
mod host_reader;
mod job;
mod sandbox;
mod target;
mod verify;

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::Duration;

use cuda::PinError;
use handoff::fd_batches::fd_batches;
use handoff::manifest::file_identity_from_wire;
use handoff::seqpacket::{Connection, FrameError};
use memory::device::AllocateError;
use memory::manifest::FileIdentity;
use memory::memfd::MemfdError;
use memory::pack::Packing;
use proto::weights::v1::{
    self as wire, LoadFailure, LoaderCommand, LoaderFrame, loader_command, loader_frame,
};
use service::exit::one_line;
use service::{Exit, HasExit};

use gpu_error::GpuLoadError;
use host_reader::{ReadProgress, TensorReadError};
use job::{LoadedModel, LoaderJob, ModelLoadError, PreparedLoad};
use sandbox::SandboxProfile;
use target::{LoadTarget, LoadTargetError};

pub(crate) use target::layout_for_device;

/// The weight-server has the job ready before it starts a loader, and answers a plan from its tables.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(30);

const SEND_TIMEOUT: Duration = Duration::from_secs(10);

/// Device memory of a process with a context: 525 MiB seen on an H200 with driver 580, and the loader's two modules with
/// their results. What others take is less.
pub(crate) const CONTEXT_BYTES: u64 = 544 << 20;

/// Host memory that a load onto a GPU has pinned before it has a plan, at most.
pub(crate) const PINNED_BYTES: u64 = 97 << 20;

/// How often progress is reported; also how soon a loader notices that nobody wants its work any more.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

#[derive(Debug, thiserror::Error)]
pub enum LoaderError {
    #[error("a loader is started by the weight-server: its standard input is no hand-off socket")]
    NotStartedByWeightServer(#[source] std::io::Error),
    #[error("cannot give up privileges")]
    Sandbox(#[source] sandbox::SandboxError),
    #[error("the connection to the weight-server broke")]
    Connection(#[from] FrameError),
    #[error("the weight-server sent {found} where {expected} was due")]
    Unexpected { expected: &'static str, found: &'static str },
    #[error("cannot start the thread that reads")]
    Thread(#[source] std::io::Error),
}

impl HasExit for LoaderError {
    fn exit(&self) -> Exit {
        match self {
            Self::NotStartedByWeightServer(_) => Exit::Usage,
            Self::Connection(_) => Exit::PeerLost,
            Self::Sandbox(_) | Self::Unexpected { .. } => Exit::Internal,
            Self::Thread(_) => Exit::OutOfResources,
        }
    }
}

/// Body of the process. A load that fails is reported to the weight-server and is no failure of this function.
pub fn run() -> Result<(), LoaderError> {
    let not_started = LoaderError::NotStartedByWeightServer;
    let socket = std::io::stdin().as_fd().try_clone_to_owned().map_err(not_started)?;
    let connection = Connection::from(socket);
    connection.peer().map_err(not_started)?;
    connection.set_timeouts(Some(COMMAND_TIMEOUT), Some(SEND_TIMEOUT)).map_err(not_started)?;
    let (job, files) = match command(&connection)? {
        (loader_command::Kind::Job(job), files) => (job, files),
        (loader_command::Kind::Verify(job), _) => return verify::run(&connection, &job),
        (other, _) => return Err(unexpected("a job", &other)),
    };
    let Some(files) = with_identities(&job, files) else {
        return Err(LoaderError::Unexpected { expected: "one open file per path", found: "another number" });
    };
    let place = match LoadTarget::open(&job.device, job.layout, &files) {
        Ok(place) => place,
        Err(error) => return fail(&connection, &ModelLoadError::Target(error)),
    };
    let profile = match place {
        LoadTarget::Host => SandboxProfile::Host,
        LoadTarget::Gpu(_) => SandboxProfile::Gpu,
    };
    let job = job_of(job, files, place);
    sandbox::enter(profile).map_err(LoaderError::Sandbox)?;
    let prepared = match job.prepare() {
        Ok(prepared) => prepared,
        Err(error) => return fail(&connection, &error),
    };
    send(&connection, loader_frame::Kind::Plan(plan_frame(&prepared)), &[])?;
    match command(&connection)? {
        (loader_command::Kind::Proceed(_), _) => {}
        (other, _) => return Err(unexpected("leave to proceed", &other)),
    }
    let outcome = match load(&connection, &prepared)? {
        Ok(loaded) => hand_over(&connection, &loaded),
        Err(error) => fail(&connection, &error),
    };
    // A context goes with its process in 40 ms; the driver's own way takes 70, and whoever waits for the model waits for
    // that.
    std::mem::forget(prepared);
    outcome
}

/// Loads on a thread beside this one, which reports progress until it ends.
fn load(
    connection: &Connection,
    prepared: &PreparedLoad,
) -> Result<Result<LoadedModel, ModelLoadError>, LoaderError> {
    let progress = &ReadProgress::default();
    std::thread::scope(|scope| {
        let (done, wait) = std::sync::mpsc::channel();
        let worker = std::thread::Builder::new()
            .name("load".to_owned())
            .spawn_scoped(scope, move || {
                let result = prepared.load(progress);
                // The other end waits until this is here.
                let _ = done.send(result);
            })
            .map_err(LoaderError::Thread)?;
        loop {
            match wait.recv_timeout(PROGRESS_INTERVAL) {
                Ok(result) => return Ok(result),
                Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {}
                // Its sender is gone without a result: it panicked, and joining passes that on.
                Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => match worker.join() {
                    Err(panic) => std::panic::resume_unwind(panic),
                    Ok(()) => return Ok(Err(ModelLoadError::Read(TensorReadError::Cancelled))),
                },
            }
            let done_bytes = progress.done_bytes.load(Ordering::Relaxed);
            let report = loader_frame::Kind::Progress(wire::LoadedBytes { done_bytes });
            if let Err(error) = send(connection, report, &[]) {
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
        send(connection, loader_frame::Kind::Fds(batch), part)?;
        match command(connection)? {
            (loader_command::Kind::BatchReceived(receipt), _) if receipt.batch == batch.batch => {}
            (other, _) => return Err(unexpected("the receipt of a batch", &other)),
        }
    }
    send(connection, loader_frame::Kind::Done(wire::LoadDone {}), &[])?;
    tracing::info!("handed over");
    Ok(())
}

fn fail(connection: &Connection, error: &ModelLoadError) -> Result<(), LoaderError> {
    let failed = wire::LoadFailed { failure: failure_of(error).into(), text: one_line(error) };
    send(connection, loader_frame::Kind::Failed(failed), &[])
}

fn send(
    connection: &Connection,
    kind: loader_frame::Kind,
    fds: &[BorrowedFd<'_>],
) -> Result<(), LoaderError> {
    Ok(connection.send(&LoaderFrame { kind: Some(kind) }, fds)?)
}

fn command(connection: &Connection) -> Result<(loader_command::Kind, Vec<OwnedFd>), LoaderError> {
    let (frame, fds) = connection.receive::<LoaderCommand>()?;
    match frame.kind {
        Some(kind) => Ok((kind, fds)),
        None => Err(LoaderError::Unexpected { expected: "a command", found: "an unknown kind" }),
    }
}

fn unexpected(expected: &'static str, found: &loader_command::Kind) -> LoaderError {
    let found = match found {
        loader_command::Kind::Job(_) => "a job",
        loader_command::Kind::Proceed(_) => "leave to proceed",
        loader_command::Kind::BatchReceived(_) => "a receipt",
        loader_command::Kind::Verify(_) => "a generation to verify",
        loader_command::Kind::Fds(_) => "descriptors",
    };
    LoaderError::Unexpected { expected, found }
}

/// The files with what the weight-server saw of them; none where they are not as many.
fn with_identities(job: &wire::LoadJob, files: Vec<OwnedFd>) -> Option<Vec<(FileIdentity, File)>> {
    let identities = job.files.iter().cloned().map(file_identity_from_wire);
    (files.len() == job.files.len()).then(|| identities.zip(files.into_iter().map(File::from)).collect())
}

fn job_of(job: wire::LoadJob, files: Vec<(FileIdentity, File)>, place: LoadTarget) -> LoaderJob {
    LoaderJob {
        generation: job.generation,
        model: job.model,
        files,
        packing: if job.pack { Packing::Slabs } else { Packing::OnePerTensor },
        place,
        threads: job.threads as usize,
    }
}

fn plan_frame(prepared: &PreparedLoad) -> wire::LoadPlan {
    let pack = &prepared.plan.pack;
    let (staging_bytes, host_bytes) = prepared.needs();
    wire::LoadPlan {
        tensor_bytes: pack.tensor_bytes,
        allocation_bytes: pack.allocation_bytes(),
        manifest_bytes: prepared.manifest_bytes(),
        allocations: pack.allocations.len() as u32,
        tensors: pack.placements.len() as u32,
        staging_bytes,
        host_bytes,
    }
}

fn failure_of(error: &ModelLoadError) -> LoadFailure {
    match error {
        ModelLoadError::Target(LoadTargetError::Layout { .. } | LoadTargetError::Name { .. })
        | ModelLoadError::Tiles { .. }
        | ModelLoadError::Rows(_) => LoadFailure::Unsupported,
        ModelLoadError::Open(gguf::OpenError::Io { .. }) | ModelLoadError::Inspect { .. } => {
            LoadFailure::File
        }
        ModelLoadError::Open(_) | ModelLoadError::Model { .. } | ModelLoadError::Pack { .. } => {
            LoadFailure::ModelRefused
        }
        ModelLoadError::TooLarge { .. } => LoadFailure::OutOfMemory,
        ModelLoadError::Changed { .. } => LoadFailure::FileChanged,
        ModelLoadError::Allocate { source, .. } | ModelLoadError::Seal(source) => memory_failure(source),
        ModelLoadError::Read(error) => read_failure(error),
        ModelLoadError::Gpu(error) | ModelLoadError::Target(LoadTargetError::Gpu(error)) => {
            gpu_failure(error)
        }
    }
}

fn read_failure(error: &TensorReadError) -> LoadFailure {
    match error {
        TensorReadError::Memory { source, .. } => memory_failure(source),
        TensorReadError::Io { .. } | TensorReadError::Cancelled => LoadFailure::File,
        TensorReadError::Truncated { .. } => LoadFailure::Truncated,
    }
}

fn gpu_failure(error: &GpuLoadError) -> LoadFailure {
    match error {
        GpuLoadError::Driver(_) | GpuLoadError::Device(_) => LoadFailure::Unsupported,
        GpuLoadError::Allocate(AllocateError::OutOfFds { .. }) => LoadFailure::OutOfFds,
        GpuLoadError::Allocate(AllocateError::OutOfMemory { .. } | AllocateError::TooLarge { .. })
        | GpuLoadError::Pin(PinError::Driver { .. }) => LoadFailure::OutOfMemory,
        #[cfg(feature = "cuda")]
        GpuLoadError::Pages(_) => LoadFailure::OutOfMemory,
        GpuLoadError::Read(error) => read_failure(error),
        _ => LoadFailure::Device,
    }
}

fn memory_failure(error: &MemfdError) -> LoadFailure {
    match error {
        MemfdError::OutOfFds { .. } => LoadFailure::OutOfFds,
        _ => LoadFailure::OutOfMemory,
    }
}
