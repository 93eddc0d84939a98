// SPDX-License-Identifier: Apache-2.0

//! The measured fleet: `ballast serve` as a child process, addressed by its runtime directory.

use std::io::{self, BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use proto::fleet::v1::fleet_client::FleetClient;
use proto::fleet::v1::{GetStatusRequest, Status as FleetStatus, StopFleetRequest};
use proto::v1::inference_client::InferenceClient;
use serde_json::Value;
use service::RuntimeDir;
use tonic::transport::Channel;

/// A fleet stops within its own grace periods, which are shorter.
const STOP_TIMEOUT: Duration = Duration::from_secs(40);
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// How to start a fleet.
#[derive(Clone, Debug)]
pub struct StartOptions {
    pub executable: PathBuf,
    pub model: PathBuf,
    /// An empty or missing directory.
    pub runtime_dir: PathBuf,
    pub workers: u32,
    /// Further arguments of `ballast serve`, such as `--threads 2`.
    pub arguments: Vec<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum FleetError {
    #[error("cannot start {}", executable.display())]
    Start { executable: PathBuf, source: io::Error },
    #[error("the fleet exited before it served; see its standard error")]
    Ended,
    #[error("cannot read the output or state of the fleet")]
    Read(#[source] io::Error),
    #[error(transparent)]
    Connect(#[from] service::grpc::ConnectError),
    #[error("{call} failed")]
    Call { call: &'static str, source: Box<tonic::Status> },
    #[error("the fleet did not stop within {} s", STOP_TIMEOUT.as_secs())]
    StopTimeout,
}

/// A running fleet. [`MeasuredFleet::stop`] drains it. Dropping the value kills it.
pub struct MeasuredFleet {
    child: Child,
    directory: RuntimeDir,
    http: String,
}

impl MeasuredFleet {
    /// Starts a fleet and waits until it serves. Blocks while the model loads.
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
        let directory = RuntimeDir::at(&options.runtime_dir);
        let mut fleet = Self { child, directory, http: String::new() };
        let mut line = String::new();
        if let Some(stdout) = stdout {
            BufReader::new(stdout).read_line(&mut line).map_err(FleetError::Read)?;
        }
        // The fleet prints one line of JSON when it serves.
        let ready: Value = serde_json::from_str(&line).map_err(|_| FleetError::Ended)?;
        fleet.http = ready["http"].as_str().unwrap_or_default().to_owned();
        Ok(fleet)
    }

    /// The base URL of the router.
    pub fn http(&self) -> &str {
        &self.http
    }

    pub fn directory(&self) -> &RuntimeDir {
        &self.directory
    }

    /// A client of the router, over its Unix socket.
    pub async fn client(&self) -> Result<InferenceClient<Channel>, FleetError> {
        Ok(InferenceClient::new(service::grpc::connect(&self.directory.router_socket()).await?))
    }

    pub(crate) async fn supervisor(&self) -> Result<FleetClient<Channel>, FleetError> {
        Ok(FleetClient::new(service::grpc::connect(&self.directory.supervisor_socket()).await?))
    }

    pub async fn status(&self) -> Result<FleetStatus, FleetError> {
        let status =
            self.supervisor().await?.get_status(GetStatusRequest { memory: true, ledger: false }).await;
        Ok(status.map_err(call_error("GetStatus"))?.into_inner())
    }

    pub async fn stop(mut self) -> Result<(), FleetError> {
        self.supervisor().await?.stop_fleet(StopFleetRequest {}).await.map_err(call_error("StopFleet"))?;
        let deadline = tokio::time::Instant::now() + STOP_TIMEOUT;
        while tokio::time::Instant::now() < deadline {
            if self.child.try_wait().map_err(FleetError::Read)?.is_some() {
                return Ok(());
            }
            tokio::time::sleep(STOP_POLL_INTERVAL).await;
        }
        Err(FleetError::StopTimeout)
    }
}

pub(crate) fn call_error(call: &'static str) -> impl FnOnce(tonic::Status) -> FleetError {
    move |source| FleetError::Call { call, source: Box::new(source) }
}

impl Drop for MeasuredFleet {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            // The children of the supervisor notice its death and exit.
            let _: io::Result<()> = self.child.kill();
            let _: io::Result<std::process::ExitStatus> = self.child.wait();
        }
    }
}
