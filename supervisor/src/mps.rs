// SPDX-License-Identifier: Apache-2.0

//! The MPS process: runs NVIDIA's MPS control daemon for the workers of this fleet, in a directory
//! of their own.
//!
//! ```text
//! supervisor --> ballast mps --> nvidia-cuda-mps-control -f --> nvidia-cuda-mps-server
//!                                                                   ^ clients: the workers
//! ```
//!
//! The process is ready once the daemon accepts clients. If the daemon ends, the process ends with
//! an error, and the supervisor starts it again. The workers have then lost their contexts, and
//! start again too. No setting of a GPU is changed.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use service::exit::{Exit, HasExit, exit_for_io_error};
use service::listen::ListenError;
use service::notify::NotifyError;
use service::{Notify, Shutdown};
use tokio::io::AsyncWriteExt;
use tokio::process::{Child, Command};

use crate::spec::ChildRole;

/// Found through PATH; a part of the driver.
const CONTROL_DAEMON: &str = "nvidia-cuda-mps-control";
/// The pipe that the daemon makes in its directory when it accepts clients.
pub const MPS_CONTROL_PIPE: &str = "control";
/// The driver reads the daemon's directories from these variables.
pub const MPS_PIPE_DIRECTORY: &str = "CUDA_MPS_PIPE_DIRECTORY";
const MPS_LOG_DIRECTORY: &str = "CUDA_MPS_LOG_DIRECTORY";

/// The daemon starts within milliseconds.
const START_WAIT: Duration = Duration::from_secs(10);
const START_POLL: Duration = Duration::from_millis(10);
/// Less than the supervisor gives a stopping child. The workers have ended before.
const QUIT_WAIT: Duration = Duration::from_secs(3);

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct MpsConfig {
    /// Directory of the daemon's pipes and logs. It is emptied at the start.
    pub directory: PathBuf,
}

#[derive(Debug, thiserror::Error)]
pub enum MpsError {
    #[error("cannot start the async runtime of the MPS process")]
    Runtime(#[source] io::Error),
    #[error("cannot listen for signals")]
    Signals(#[source] io::Error),
    #[error(transparent)]
    Notify(#[from] NotifyError),
    #[error(transparent)]
    Inherit(#[from] ListenError),
    #[error("cannot create the directory {} for MPS", path.display())]
    Directory { path: PathBuf, source: io::Error },
    #[error("cannot start {CONTROL_DAEMON}: install the driver's tools, or set `mps = false`")]
    Start(#[source] io::Error),
    #[error(
        "{CONTROL_DAEMON} accepts no clients after {} s: see its logs in {}",
        START_WAIT.as_secs(),
        directory.display()
    )]
    NotReady { directory: PathBuf },
    #[error("{CONTROL_DAEMON} ended with {status}: see its logs in {}", directory.display())]
    Ended { status: ExitStatus, directory: PathBuf },
    #[error("cannot wait for {CONTROL_DAEMON}")]
    Wait(#[source] io::Error),
}

impl HasExit for MpsError {
    fn exit(&self) -> Exit {
        match self {
            MpsError::Runtime(source)
            | MpsError::Signals(source)
            | MpsError::Directory { source, .. }
            | MpsError::Start(source) => exit_for_io_error(source),
            MpsError::Notify(error) => error.exit(),
            MpsError::Inherit(error) => error.exit(),
            MpsError::NotReady { .. } | MpsError::Ended { .. } => Exit::PeerLost,
            MpsError::Wait(_) => Exit::Internal,
        }
    }
}

/// Runs the daemon until the fleet stops.
pub fn run(config: MpsConfig) -> Result<(), MpsError> {
    service::logging::init("mps", tracing::Level::INFO);
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(MpsError::Runtime)?;
    runtime.block_on(async {
        let shutdown = Shutdown::install().map_err(MpsError::Signals)?;
        let notify = Notify::from_env()?;
        let role = ChildRole::Mps.subcommand();
        let _supervisor = service::supervision::watch_supervisor(role, role, None, &notify, &shutdown)?;
        let directory = &config.directory;
        create_empty(directory).map_err(|source| MpsError::Directory { path: directory.clone(), source })?;
        let mut daemon = command(directory).arg("-f").spawn().map_err(MpsError::Start)?;
        wait_until_ready(&mut daemon, directory).await?;
        notify.status("MPS accepts clients")?;
        notify.ready()?;
        let ended = |status| MpsError::Ended { status, directory: directory.clone() };
        tokio::select! {
            status = daemon.wait() => return Err(ended(status.map_err(MpsError::Wait)?)),
            () = shutdown.requested() => {}
        }
        notify.stopping()?;
        quit(daemon, directory).await;
        // Without the directory, a worker that starts late knows that there is no daemon.
        if let Err(error) = std::fs::remove_dir_all(directory) {
            tracing::debug!(directory = %directory.display(), %error, "cannot remove the directory of MPS");
        }
        Ok(())
    })
}

/// Removes what an earlier daemon has left, so that its pipe is not taken for this one's.
fn create_empty(directory: &Path) -> io::Result<()> {
    match std::fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Ok(()) | Err(_) => {}
    }
    std::fs::create_dir(directory)
}

/// The daemon, or with input a client of it.
fn command(directory: &Path) -> Command {
    let mut command = Command::new(CONTROL_DAEMON);
    command.env(MPS_PIPE_DIRECTORY, directory).env(MPS_LOG_DIRECTORY, directory);
    for private in service::env::PRIVATE {
        command.env_remove(private);
    }
    command.stdin(Stdio::null()).kill_on_drop(true);
    command
}

async fn wait_until_ready(daemon: &mut Child, directory: &Path) -> Result<(), MpsError> {
    let deadline = tokio::time::Instant::now() + START_WAIT;
    let control = directory.join(MPS_CONTROL_PIPE);
    while !control.exists() {
        if let Some(status) = daemon.try_wait().map_err(MpsError::Wait)? {
            return Err(MpsError::Ended { status, directory: directory.to_owned() });
        }
        if tokio::time::Instant::now() >= deadline {
            return Err(MpsError::NotReady { directory: directory.to_owned() });
        }
        tokio::time::sleep(START_POLL).await;
    }
    Ok(())
}

/// Asks the daemon to end its servers and itself. Kills it if it does not.
async fn quit(mut daemon: Child, directory: &Path) {
    let ask = async {
        let mut client = command(directory).stdin(Stdio::piped()).spawn()?;
        if let Some(mut input) = client.stdin.take() {
            input.write_all(b"quit\n").await?;
        }
        client.wait().await?;
        daemon.wait().await
    };
    match tokio::time::timeout(QUIT_WAIT, ask).await {
        Ok(Ok(status)) => tracing::info!(%status, "MPS has ended"),
        Ok(Err(error)) => tracing::warn!(%error, "cannot ask MPS to end"),
        Err(_) => tracing::warn!("MPS does not end, it is killed"),
    }
    if let Err(error) = daemon.kill().await {
        tracing::debug!(%error, "MPS has ended already");
    }
}
