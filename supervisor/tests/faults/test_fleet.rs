// SPDX-License-Identifier: Apache-2.0

//! A fleet in a temporary directory, with queries and waits for tests.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use proto::fleet::v1 as wire;
use proto::fleet::v1::fleet_client::FleetClient;
use serde::{Deserialize, Serialize};
use service::listen::InheritedFd;
use service::runtime_dir::ClaimedRuntimeDir;
use service::{ByteSize, Notify, Shutdown};
use supervisor::{
    BackoffReason, ChildState, CopyMemory, CopySpec, FleetHandle, FleetSpec, GpuDevice, ModelSpec,
    SupervisionConfig, WorkerSlot,
};
use tonic::transport::Channel;

use super::fake_child;

/// Ten times what any test here takes on an idle machine.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pid(pub(crate) u32);

impl Pid {
    pub(crate) fn kill(self) -> Result<()> {
        Ok(kill(nix::unistd::Pid::from_raw(self.0.cast_signed()), Signal::SIGKILL)?)
    }

    pub(crate) fn stop(self) -> Result<()> {
        Ok(kill(nix::unistd::Pid::from_raw(self.0.cast_signed()), Signal::SIGSTOP)?)
    }
}

/// Whether the process exists and is not a zombie.
pub(crate) fn alive(pid: Pid) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{}/stat", pid.0)) else { return false };
    stat.rsplit(')').next().is_some_and(|rest| !rest.trim_start().starts_with(['Z', 'X']))
}

pub(crate) async fn eventually<F: Future<Output = Result<bool>>>(
    what: &str,
    condition: impl Fn() -> F,
) -> Result<()> {
    let deadline = tokio::time::Instant::now() + TEST_TIMEOUT;
    while tokio::time::Instant::now() < deadline {
        if condition().await? {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    bail!("not within {TEST_TIMEOUT:?}: {what}")
}

/// The only GPU of the machine. No fleet uses it from the start.
pub(crate) const GPU: &str = "GPU-00112233-4455-6677-8899-aabbccddeeff";

pub(crate) async fn fleet_client(runtime_dir: &Path) -> Result<FleetClient<Channel>> {
    Ok(FleetClient::new(service::grpc::connect(&runtime_dir.join("supervisor.sock")).await?))
}

#[derive(Clone, Serialize, Deserialize)]
struct ChildBehaviours {
    runtime_dir: PathBuf,
    weight_server: String,
    worker: String,
    router: String,
}

pub(crate) struct SupervisedTestFleet {
    directory: tempfile::TempDir,
    behaviours: ChildBehaviours,
}

impl SupervisedTestFleet {
    pub(crate) fn new() -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let normal = || "normal".to_owned();
        let behaviours = ChildBehaviours {
            runtime_dir: directory.path().join("fleet"),
            weight_server: normal(),
            worker: normal(),
            router: normal(),
        };
        Ok(Self { directory, behaviours })
    }

    pub(crate) fn weight_server(mut self, behaviour: &str) -> Self {
        self.behaviours.weight_server = behaviour.to_owned();
        self
    }

    pub(crate) fn worker(mut self, behaviour: &str) -> Self {
        self.behaviours.worker = behaviour.to_owned();
        self
    }

    pub(crate) fn router(mut self, behaviour: &str) -> Self {
        self.behaviours.router = behaviour.to_owned();
        self
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    pub(crate) fn runtime_dir(&self) -> PathBuf {
        self.behaviours.runtime_dir.clone()
    }

    pub(crate) fn file_with(&self, text: &str) -> Result<std::fs::File> {
        let mut file = tempfile::tempfile_in(self.path())?;
        file.write_all(text.as_bytes())?;
        Ok(file)
    }

    pub(crate) async fn start(&self) -> Result<FleetHandle> {
        self.start_under(Notify::disabled(), Vec::new()).await
    }

    pub(crate) async fn start_under(&self, parent: Notify, stored: Vec<InheritedFd>) -> Result<FleetHandle> {
        let claimed = ClaimedRuntimeDir::claim(Some(&self.runtime_dir()))?;
        Ok(FleetHandle::start(fleet_spec(&self.behaviours), claimed, parent, stored).await?)
    }

    /// Starts a supervisor in a process of its own, so that a test can kill it.
    pub(crate) fn start_supervisor(&self) -> Result<Child> {
        let path = self.path().join("supervisor.toml");
        service::config::store(&path, &self.behaviours)?;
        Ok(Command::new(std::env::current_exe()?).arg("supervisor").arg(path).spawn()?)
    }

    pub(crate) async fn connected(&self) -> Result<FleetClient<Channel>> {
        let deadline = tokio::time::Instant::now() + TEST_TIMEOUT;
        loop {
            match fleet_client(&self.runtime_dir()).await {
                Ok(client) => return Ok(client),
                Err(error) if tokio::time::Instant::now() > deadline => return Err(error),
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    }

    /// Waits until exactly this many children run; returns their process ids.
    pub(crate) async fn wait_running_over_grpc(
        &self,
        client: &mut FleetClient<Channel>,
        children: usize,
    ) -> Result<BTreeMap<String, Pid>> {
        let deadline = tokio::time::Instant::now() + TEST_TIMEOUT;
        loop {
            let status = client.get_status(wire::GetStatusRequest::default()).await?.into_inner();
            let running: BTreeMap<String, Pid> = status
                .children
                .iter()
                .filter(|c| c.state() == wire::ChildState::Running)
                .map(|c| (c.name.clone(), Pid(c.pid)))
                .collect();
            if running.len() == children && status.children.len() == children {
                return Ok(running);
            }
            if tokio::time::Instant::now() > deadline {
                bail!("not {children} running children: {status:?}");
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    pub(crate) async fn wait_all_running(&self, fleet: &FleetHandle, children: usize) -> Result<()> {
        eventually("all children run", || async {
            let status = fleet.status().await?;
            let running = |c: &supervisor::ChildStatus| matches!(c.state, ChildState::Running { .. });
            Ok(status.children.len() == children && status.children.iter().all(running))
        })
        .await
    }

    pub(crate) async fn pids(&self, fleet: &FleetHandle) -> Result<BTreeMap<String, Pid>> {
        let children = fleet.status().await?.children;
        Ok(children.into_iter().filter(|c| c.pid != 0).map(|c| (c.name, Pid(c.pid))).collect())
    }

    pub(crate) async fn state(&self, fleet: &FleetHandle, child: &str) -> Result<&'static str> {
        let status = fleet.status().await?;
        let child = status.children.into_iter().find(|c| c.name == child).context("no such child")?;
        Ok(match child.state {
            ChildState::Starting { .. } => "starting",
            ChildState::Running { .. } => "running",
            ChildState::BackingOff { reason: BackoffReason::Crash, .. } => "backing off",
            ChildState::BackingOff { .. } => "failed",
            _ => "other",
        })
    }

    pub(crate) async fn text(&self, fleet: &FleetHandle, child: &str) -> Result<String> {
        let status = fleet.status().await?;
        Ok(status.children.into_iter().find(|c| c.name == child).context("no such child")?.status_text)
    }
}

fn fleet_spec(behaviours: &ChildBehaviours) -> FleetSpec {
    let runtime_dir = behaviours.runtime_dir.clone();
    let config = move |name: &str, role: &str, behaviour: &str, model: &str| {
        let config = fake_child::FakeChildConfig {
            name: name.to_owned(),
            role: role.to_owned(),
            runtime_dir: runtime_dir.clone(),
            behaviour: behaviour.to_owned(),
            model: model.to_owned(),
            device: String::new(),
            devices: Vec::new(),
        };
        toml::Table::try_from(config).expect("a configuration is a table")
    };
    let worker = behaviours.worker.clone();
    FleetSpec {
        weight_server: config("weight-server", "weight-server", &behaviours.weight_server, ""),
        router: config("router", "router", &behaviours.router, ""),
        devices: Default::default(),
        find_gpu: Arc::new(|id| match id {
            GPU => Ok(GpuDevice::new(GPU.to_owned(), Some(ByteSize(1 << 30)), None)),
            _ => Err("there is no such GPU".to_owned()),
        }),
        mps: None,
        device_monitor: Some(config("device-monitor", "device-monitor", "normal", "")),
        router_socket: None,
        http_address: "127.0.0.1:0".to_owned(),
        log: tracing::Level::ERROR,
        unusable: Vec::new(),
        models: vec![ModelSpec {
            name: "m".to_owned(),
            path: "/m.gguf".into(),
            workers: 2,
            copies: vec![CopySpec {
                device: "host".to_owned(),
                weights: String::new(),
                worker_config: toml::Table::new(),
                memory: CopyMemory::default(),
            }],
            pack: true,
            files: String::new(),
            configured_path: PathBuf::new(),
            idle_unload: None,
            on_demand: false,
            fallback: None,
            settings: toml::Table::new(),
        }],
        supervision: SupervisionConfig::default(),
        complete_worker_config: Arc::new(move |slot: &WorkerSlot, table: &mut toml::Table| {
            table.extend(config(&slot.name(), "worker", &worker, &slot.model));
            table.insert("device".to_owned(), slot.device.clone().into());
        }),
        read_again: None,
    }
}

pub(crate) fn supervisor_main(mut arguments: impl Iterator<Item = OsString>) {
    let path = arguments.next().expect("supervisor FILE");
    let behaviours: ChildBehaviours = service::config::load(path.as_ref()).expect("configuration");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
    runtime.block_on(async {
        let shutdown = Shutdown::install().expect("signals");
        let claimed = ClaimedRuntimeDir::claim(Some(&behaviours.runtime_dir)).expect("runtime directory");
        let fleet =
            FleetHandle::start(fleet_spec(&behaviours), claimed, Notify::disabled(), Vec::new()).await;
        let mut fleet = fleet.expect("fleet");
        tokio::select! {
            () = shutdown.requested() => fleet.stop().await,
            () = fleet.stopped() => return,
        }
        fleet.stopped().await;
    });
}
