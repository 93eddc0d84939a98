//! A fleet to be measured: `ballast serve` as a child, known by its runtime directory.

use std::io::{self, BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use proto::fleet::v1::fleet_client::FleetClient;
use proto::fleet::v1::{GetStatusRequest, Status as FleetStatus, StopFleetRequest};
use proto::v1::inference_client::InferenceClient;
use service::RuntimeDir;
use tonic::transport::Channel;

/// A drained fleet is gone within its own graces, which are shorter.
const STOP_WAIT: Duration = Duration::from_secs(40);
const STOP_POLL: Duration = Duration::from_millis(20);

/// What to start.
#[derive(Clone, Debug)]
pub struct StartOptions {
    pub executable: PathBuf,
    pub model: PathBuf,
    /// An empty directory, or one that does not exist.
    pub runtime_dir: PathBuf,
    pub workers: u32,
    /// Further arguments of `ballast serve`, such as `--threads 2`.
    pub arguments: Vec<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum FleetError {
    #[error("cannot start {}", executable.display())]
    Start { executable: PathBuf, source: io::Error },
    #[error("the fleet ended before it served; it says why on standard error")]
    Ended,
    #[error("cannot read what the fleet says")]
    Read(#[source] io::Error),
    #[error(transparent)]
    Connect(#[from] service::grpc::ConnectError),
    #[error("{call} failed")]
    Call { call: &'static str, source: Box<tonic::Status> },
    #[error("the fleet did not stop within {} s", STOP_WAIT.as_secs())]
    NotStopped,
}

/// A fleet that serves. Killed when dropped; [`MeasuredFleet::stop`] is the civil way.
pub struct MeasuredFleet {
    child: Child,
    directory: RuntimeDir,
}

impl MeasuredFleet {
    /// Starts it and waits until it serves. Blocks for as long as the model takes to load.
    pub fn start(options: &StartOptions) -> Result<Self, FleetError> {
        let mut child = Command::new(&options.executable)
            .arg("serve")
            .arg(&options.model)
            .args(["--json", "--listen", "127.0.0.1:0", "--workers"])
            .arg(options.workers.to_string())
            .arg("--runtime-dir")
            .arg(&options.runtime_dir)
            .args(&options.arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|source| FleetError::Start { executable: options.executable.clone(), source })?;
        let stdout = child.stdout.take();
        let fleet = Self { child, directory: RuntimeDir::at(&options.runtime_dir) };
        let mut line = String::new();
        let announced = match stdout {
            Some(stdout) => BufReader::new(stdout).read_line(&mut line).map_err(FleetError::Read)?,
            None => 0,
        };
        // The one line of JSON comes when requests are served.
        if announced == 0 { Err(FleetError::Ended) } else { Ok(fleet) }
    }

    pub fn directory(&self) -> &RuntimeDir {
        &self.directory
    }

    /// A client of the router, by its socket.
    pub async fn client(&self) -> Result<InferenceClient<Channel>, FleetError> {
        Ok(InferenceClient::new(service::grpc::connect(&self.directory.router_socket()).await?))
    }

    pub(crate) async fn supervisor(&self) -> Result<FleetClient<Channel>, FleetError> {
        Ok(FleetClient::new(service::grpc::connect(&self.directory.supervisor_socket()).await?))
    }

    pub async fn status(&self) -> Result<FleetStatus, FleetError> {
        let status = self.supervisor().await?.get_status(GetStatusRequest { memory: true }).await;
        Ok(status.map_err(call("GetStatus"))?.into_inner())
    }

    pub async fn stop(mut self) -> Result<(), FleetError> {
        self.supervisor().await?.stop_fleet(StopFleetRequest {}).await.map_err(call("StopFleet"))?;
        let deadline = tokio::time::Instant::now() + STOP_WAIT;
        while tokio::time::Instant::now() < deadline {
            if self.child.try_wait().map_err(FleetError::Read)?.is_some() {
                return Ok(());
            }
            tokio::time::sleep(STOP_POLL).await;
        }
        Err(FleetError::NotStopped)
    }
}

pub(crate) fn call(call: &'static str) -> impl FnOnce(tonic::Status) -> FleetError {
    move |source| FleetError::Call { call, source: Box::new(source) }
}

impl Drop for MeasuredFleet {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            // The supervisor's children notice and end by themselves.
            let _: io::Result<()> = self.child.kill();
            let _: io::Result<std::process::ExitStatus> = self.child.wait();
        }
    }
}
