// SPDX-License-Identifier: Apache-2.0

//! The weight-server's side of one load: starts the loader child, sends it the open files, follows
//! its progress, and takes over the descriptors it made.
//!
//! Each load has one task. Every failure ends in one `LoadFailed` event. If the child dies, its
//! memory is released, because only its descriptors held it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use handoff::event_loop::AsyncConnection;
use handoff::fd_batches::{FdBatchError, FdCollector};
use handoff::manifest::file_identity_to_wire;
use handoff::seqpacket::{Connection, FrameError};
use memory::manifest::FileIdentity;
use proto::weights::v1::{
    self as wire, LoadFailure as WireFailure, LoaderCommand, LoaderFrame, loader_command, loader_frame,
};
use service::process_limits::StartError;
use service::{Exit, HasExit};
use tokio::process::{Child, Command};
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::catalog::{GenerationContents, LoadKey};
use crate::events::WeightServerEvent;
use crate::held_fds::{GenerationFds, GenerationFdsError};
use crate::load_permit::{LoadPermit, PermitError};
use crate::messages::{InputSender, LoopInput};
use crate::model_files::{blocking, open_files};
use crate::refusal::{LoadFailure, LoaderErrorKind};
use crate::text_check_child::{TextCheckError, check_text};

const SEND_TIMEOUT: Duration = Duration::from_secs(10);

/// How often a loader hears that it has to wait for the copy that it is to read. It gives up on
/// silence, after 30 s.
const AWAIT_SOURCE_INTERVAL: Duration = Duration::from_secs(10);

/// From the last frame of a loader to its exit.
pub(crate) const EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// The command that starts a loader: this executable's `loader` role, or a test's program.
#[derive(Debug, Clone)]
pub struct LoaderProgram {
    pub program: PathBuf,
    pub arguments: Vec<String>,
    pub environment: Vec<(String, String)>,
}

impl LoaderProgram {
    /// The file that this process executes, even if its path has been replaced in the meantime.
    pub(crate) fn own() -> Self {
        let arguments = vec!["loader".to_owned()];
        Self { program: "/proc/self/exe".into(), arguments, environment: Vec::new() }
    }

    pub(crate) fn spawn(&self, socket: Connection) -> io::Result<Child> {
        self.command(socket).spawn()
    }

    /// Without log: an abort at a limit on memory is part of this child's work, and reported.
    pub(crate) fn spawn_silent(&self, socket: Connection) -> io::Result<Child> {
        self.command(socket).stderr(Stdio::null()).spawn()
    }

    fn command(&self, socket: Connection) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments).envs(self.environment.iter().map(|(name, value)| (name, value)));
        for variable in service::env::PRIVATE {
            command.env_remove(variable);
        }
        // The hand-off socket is the child's standard input, so no descriptor number has to be
        // agreed.
        command.stdin(Stdio::from(OwnedFd::from(socket))).stdout(Stdio::null()).kill_on_drop(true);
        command
    }
}

#[derive(Debug)]
pub(crate) struct LoadJob {
    pub(crate) generation: u64,
    pub(crate) model: String,
    pub(crate) key: LoadKey,
    pub(crate) threads: usize,
    /// The device is a GPU whose budget is the host's.
    pub(crate) unified_memory: bool,
}

/// Kept by the event loop. Dropping it kills the child.
#[derive(Debug)]
pub(crate) struct LoaderHandle {
    proceed: Option<oneshot::Sender<LoadPermit>>,
    task: tokio::task::JoinHandle<()>,
}

impl LoaderHandle {
    /// The loader's plan is reserved: it may allocate.
    pub(crate) fn proceed(&mut self, permit: LoadPermit) {
        if let Some(proceed) = self.proceed.take() {
            // A loader that has failed in the meantime reports that itself.
            let _ = proceed.send(permit);
        }
    }
}

impl Drop for LoaderHandle {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Why a session with a loader failed, before it is mapped to a `LoadFailure`.
#[derive(Debug, thiserror::Error)]
enum LoaderSessionError {
    #[error("{}", .0)]
    Failed(LoadFailure),
    #[error(transparent)]
    Text(#[from] TextCheckError),
    #[error("cannot start a loader")]
    Spawn(#[source] StartError),
    #[error("cannot connect to a loader")]
    Socket(#[source] io::Error),
    #[error("its connection broke")]
    Connection(#[from] FrameError),
    #[error("it broke the protocol: {what}")]
    Protocol { what: &'static str },
    #[error("it took no permit")]
    Permit(#[from] PermitError),
    #[error("its hand-off is inconsistent")]
    Handoff(#[from] FdBatchError),
    #[error("what it handed over is not usable")]
    Import(#[from] GenerationFdsError),
}

impl LoaderSessionError {
    /// The loader has exited.
    fn is_closed(&self) -> bool {
        matches!(
            self,
            Self::Connection(FrameError::Closed) | Self::Permit(PermitError::Connection(FrameError::Closed))
        )
    }
}

pub(crate) fn start(job: LoadJob, program: LoaderProgram, inputs: InputSender) -> LoaderHandle {
    let (proceed, reserved) = oneshot::channel();
    let task = tokio::spawn(async move {
        let generation = job.generation;
        let event = match load(job, &program, &inputs, reserved).await {
            Ok(()) => WeightServerEvent::LoaderEnded { generation },
            Err(failure) => WeightServerEvent::LoadFailed { generation, failure },
        };
        inputs.send(LoopInput::Event(event)).await;
    });
    LoaderHandle { proceed: Some(proceed), task }
}

async fn load(
    job: LoadJob,
    program: &LoaderProgram,
    inputs: &InputSender,
    reserved: oneshot::Receiver<LoadPermit>,
) -> Result<(), LoadFailure> {
    let generation = job.generation;
    let paths: Vec<PathBuf> = job.key.files.iter().map(|file| file.path.clone()).collect();
    let files = blocking(move || open_files(paths)).await?;
    for ((found, _), asked) in files.iter().zip(&job.key.files) {
        if !found.is_same_file(asked) {
            let text = format!("{} changed while its load was waiting: load it again", asked.path.display());
            return Err(LoadFailure::Loader { kind: LoaderErrorKind::FileChanged, text });
        }
    }
    let checked_files =
        same_files(&files[..files.len().min(1)]).map_err(|error| lost(&LoaderSessionError::Socket(error)))?;
    let (ours, theirs) = Connection::pair().map_err(|error| lost(&LoaderSessionError::Socket(error)))?;
    let child = program.spawn(theirs);
    let mut child = child.map_err(|error| lost(&LoaderSessionError::Spawn(StartError(error))))?;
    // The check runs while the loader reads the headers and creates its context.
    let may_allocate = async {
        check_text(&checked_files, program).await?;
        match reserved.await {
            Ok(permit) => Ok(permit),
            // The load was cancelled, so this task is about to be aborted.
            Err(_) => std::future::pending().await,
        }
    };
    let followed = run_session(&job, files, ours, inputs, may_allocate).await;
    if let Err(LoaderSessionError::Text(_)) = &followed {
        // The loader waits for its next command, and would report that it does not come.
        let _ = child.start_kill();
    }
    // A hand-over is reported at once: the loader has unmapped the model, and its exit takes 60 ms
    // on a GPU. A failure is reported after the exit, because the exit status tells the cause.
    let error = match followed {
        Ok((contents, fds)) => {
            inputs.send(LoopInput::LoadHandedOver { generation, contents, fds }).await;
            wait_for_exit(&mut child).await;
            return Ok(());
        }
        Err(error) => error,
    };
    let ended = wait_for_exit(&mut child).await;
    Err(match error {
        LoaderSessionError::Failed(failure) => failure,
        LoaderSessionError::Text(error) => error.into(),
        LoaderSessionError::Permit(PermitError::Reported(failed)) => reported_failure(failed),
        error if error.is_closed() && ended.lacked_resources => LoadFailure::Loader {
            kind: LoaderErrorKind::OutOfMemory,
            text: "the loader lacked memory, processes or threads, and its line in the log says which; nothing of the model is left in memory".to_owned(),
        },
        error if error.is_closed() => LoadFailure::LoaderLost { how: ended.how },
        error => lost(&error),
    })
}

/// The same open files, which share their positions: the check reads at positions of its own.
fn same_files(files: &[(FileIdentity, File)]) -> io::Result<Vec<(FileIdentity, File)>> {
    files.iter().map(|(identity, file)| Ok((identity.clone(), file.try_clone()?))).collect()
}

fn lost(error: &LoaderSessionError) -> LoadFailure {
    let text = service::exit::one_line(error);
    match error {
        LoaderSessionError::Spawn(error) if error.exit() == Exit::OutOfResources => {
            LoadFailure::Loader { kind: LoaderErrorKind::OutOfMemory, text }
        }
        _ => LoadFailure::LoaderLost { how: text },
    }
}

/// How a loader exited.
pub(crate) struct LoaderEnd {
    pub(crate) how: String,
    lacked_resources: bool,
}

/// Waits for a loader that has finished, or kills it after a timeout.
pub(crate) async fn wait_for_exit(child: &mut Child) -> LoaderEnd {
    use std::os::unix::process::ExitStatusExt;
    let status = match tokio::time::timeout(EXIT_TIMEOUT, child.wait()).await {
        Ok(status) => status,
        Err(_) => child.kill().await.and(child.wait().await),
    };
    let code = status.as_ref().ok().and_then(ExitStatus::code);
    let how = match status.map(|status| (status, status.signal())) {
        Ok((_, Some(signal @ nix::libc::SIGKILL))) => {
            format!("killed by signal {signal} (by hand, or by the kernel for lack of memory)")
        }
        Ok((_, Some(signal))) => format!("killed by signal {signal}"),
        Ok((status, None)) => format!("it exited with {status} before the load was done"),
        Err(error) => format!("its exit status cannot be read: {error}"),
    };
    LoaderEnd { how, lacked_resources: code.and_then(Exit::from_code) == Some(Exit::OutOfResources) }
}

/// Checks that the complete descriptors belong to the job.
async fn verify_fds(
    job: &LoadJob,
    collector: FdCollector,
) -> Result<(GenerationContents, GenerationFds), LoaderSessionError> {
    let (manifest, fds) = blocking(move || GenerationFds::verify(collector.into_fds())).await?;
    let elsewhere = manifest.devices.iter().any(|device| device.id != job.key.device);
    if manifest.generation != job.generation || manifest.model != job.model || elsewhere {
        return Err(LoaderSessionError::Protocol { what: "the manifest belongs to another job" });
    }
    Ok((GenerationContents::from_manifest(&manifest, fds.manifest()), fds))
}

async fn run_session(
    job: &LoadJob,
    files: Vec<(FileIdentity, File)>,
    socket: Connection,
    inputs: &InputSender,
    reserved: impl Future<Output = Result<LoadPermit, TextCheckError>>,
) -> Result<(GenerationContents, GenerationFds), LoaderSessionError> {
    tokio::pin!(reserved);
    let connection = AsyncConnection::new(socket).map_err(LoaderSessionError::Socket)?;
    let generation = job.generation;
    send_job(&connection, job, &files).await?;
    drop(files);
    let mut collector = None;
    let mut may_allocate = false;
    let mut waits = tokio::time::interval_at(Instant::now() + AWAIT_SOURCE_INTERVAL, AWAIT_SOURCE_INTERVAL);
    loop {
        let (frame, fds) = tokio::select! {
            frame = connection.receive::<LoaderFrame>() => frame?,
            permit = &mut reserved, if !may_allocate => {
                may_allocate = true;
                permit?.send(&connection).await?;
                continue;
            }
            _ = waits.tick(), if !may_allocate && collector.is_some() => {
                send_await_source(&connection).await?;
                continue;
            }
        };
        if !fds.is_empty() && !matches!(frame.kind, Some(loader_frame::Kind::Fds(_))) {
            return Err(protocol("descriptors came with a frame other than FdBatch"));
        }
        match frame.kind {
            Some(loader_frame::Kind::Plan(plan)) if collector.is_none() => {
                collector = Some(FdCollector::new(plan.allocations.saturating_add(1))?);
                let contents = contents_from_plan(&plan);
                let available_bytes = crate::system_limits::available_bytes_for(&job.key.device);
                inputs
                    .send(LoopInput::Event(WeightServerEvent::LoadPlanned {
                        generation,
                        contents,
                        available_bytes,
                    }))
                    .await;
            }
            Some(loader_frame::Kind::Progress(progress)) => {
                let done_bytes = progress.done_bytes;
                inputs
                    .send(LoopInput::Event(WeightServerEvent::LoadProgressed { generation, done_bytes }))
                    .await;
            }
            Some(loader_frame::Kind::Fds(batch)) => {
                let collector = collector.as_mut().filter(|_| may_allocate);
                let collector = collector.ok_or(protocol("descriptors came before the reservation"))?;
                let receipt = collector.accept(&batch, fds)?;
                command(&connection, loader_command::Kind::BatchReceived(receipt), &[]).await?;
            }
            Some(loader_frame::Kind::Failed(failed)) => {
                return Err(LoaderSessionError::Failed(reported_failure(failed)));
            }
            Some(loader_frame::Kind::Done(done)) => {
                let collector = collector.filter(FdCollector::is_complete);
                let collector = collector.ok_or(protocol("LoadDone came before all descriptors"))?;
                let (contents, fds) = verify_fds(job, collector).await?;
                let copy_time = Duration::from_micros(done.copy_microseconds);
                return Ok((GenerationContents { copy_time, ..contents }, fds));
            }
            Some(
                loader_frame::Kind::Plan(_)
                | loader_frame::Kind::BatchReceived(_)
                | loader_frame::Kind::Verified(_)
                | loader_frame::Kind::TextCheckStarted(_)
                | loader_frame::Kind::TextChecked(_),
            )
            | None => {
                return Err(protocol("a frame came out of order"));
            }
        }
    }
}

async fn send_await_source(connection: &AsyncConnection) -> Result<(), FrameError> {
    command(connection, loader_command::Kind::AwaitSource(wire::AwaitSource {}), &[]).await
}

fn protocol(what: &'static str) -> LoaderSessionError {
    LoaderSessionError::Protocol { what }
}

async fn send_job(
    connection: &AsyncConnection,
    job: &LoadJob,
    files: &[(FileIdentity, File)],
) -> Result<(), LoaderSessionError> {
    let frame = wire::LoadJob {
        generation: job.generation,
        model: job.model.clone(),
        files: files.iter().map(|(identity, _)| file_identity_to_wire(identity.clone())).collect(),
        pack: !job.key.one_per_tensor,
        layout: job.key.layout,
        device: job.key.device.clone(),
        threads: job.threads as u32,
        unified_memory: job.unified_memory,
    };
    let fds: Vec<_> = files.iter().map(|(_, file)| file.as_fd()).collect();
    Ok(command(connection, loader_command::Kind::Job(frame), &fds).await?)
}

pub(crate) async fn command(
    connection: &AsyncConnection,
    kind: loader_command::Kind,
    fds: &[std::os::fd::BorrowedFd<'_>],
) -> Result<(), FrameError> {
    connection.send_within(SEND_TIMEOUT, &LoaderCommand { kind: Some(kind) }, fds).await
}

fn contents_from_plan(plan: &wire::LoadPlan) -> GenerationContents {
    GenerationContents {
        digest: None,
        tensor_bytes: plan.tensor_bytes,
        allocation_bytes: plan.allocation_bytes,
        manifest_bytes: plan.manifest_bytes,
        allocations: plan.allocations,
        tensors: plan.tensors,
        staging_bytes: plan.staging_bytes,
        host_bytes: plan.host_bytes,
        peer_devices: plan.peer_devices.clone(),
        ..GenerationContents::default()
    }
}

fn reported_failure(failed: wire::LoadFailed) -> LoadFailure {
    LoadFailure::Loader { kind: error_kind(failed.failure()), text: failed.text }
}

pub(crate) fn error_kind(failure: WireFailure) -> LoaderErrorKind {
    match failure {
        WireFailure::File => LoaderErrorKind::File,
        WireFailure::FileChanged => LoaderErrorKind::FileChanged,
        WireFailure::Truncated => LoaderErrorKind::Truncated,
        WireFailure::OutOfMemory => LoaderErrorKind::OutOfMemory,
        WireFailure::OutOfFds => LoaderErrorKind::OutOfFds,
        WireFailure::Unsupported => LoaderErrorKind::Unsupported,
        WireFailure::Device => LoaderErrorKind::Device,
        WireFailure::SourceDamaged => LoaderErrorKind::SourceDamaged,
        _ => LoaderErrorKind::ModelRefused,
    }
}
