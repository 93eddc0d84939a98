// SPDX-License-Identifier: Apache-2.0

//! Weight-server, worker and router without a supervisor, as the units of
//! `deploy/systemd/ballast.target` run them.

use std::path::Path;
use std::process::Child;

use proto::v1::ListModelsRequest;
use proto::v1::inference_client::InferenceClient;
use tokio::runtime::Runtime;
use tonic::transport::Channel;

use super::api::runtime;
use super::{ballast, eventually};

/// Dropping it kills the processes.
pub(crate) struct SeparateProcesses {
    children: Vec<Child>,
    directory: tempfile::TempDir,
    /// Clients live as long as their runtime.
    pub(crate) runtime: Runtime,
}

impl SeparateProcesses {
    /// Starts one worker of the model on the host and waits until the router serves it. `worker` is
    /// what the worker's configuration holds besides names, sockets and sizes.
    pub(crate) fn start(model: &Path, worker: &str) -> Self {
        let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
        let mut processes = Self { children: Vec::new(), directory, runtime: runtime() };
        let folder = processes.directory.path().to_owned();
        let runtime_dir = format!("runtime-dir = {folder:?}\n");
        let weights = format!("{runtime_dir}[[models]]\nname = \"m\"\npath = {model:?}\n");
        processes.run("weight-server", &weights);
        processes.run("worker", &worker_config(&folder, worker));
        processes.run("router", &runtime_dir);
        eventually("the router serves the worker", || {
            let mut client = processes.client()?;
            let models = processes.runtime.block_on(client.list_models(ListModelsRequest {})).ok()?;
            (!models.into_inner().models.is_empty()).then_some(())
        });
        processes
    }

    fn run(&mut self, process: &str, config: &str) {
        let file = self.directory.path().join(format!("{process}-config.toml"));
        std::fs::write(&file, config).unwrap();
        self.children.push(ballast().args([process, "--config"]).arg(&file).spawn().unwrap());
    }

    /// A client of the router's Unix socket, once it exists.
    pub(crate) fn client(&self) -> Option<InferenceClient<Channel>> {
        let socket = self.directory.path().join("router.sock");
        let channel = self.runtime.block_on(service::grpc::connect(&socket)).ok()?;
        Some(InferenceClient::new(channel))
    }
}

/// The configuration of a worker in a directory of its own choice.
pub(crate) fn worker_config(folder: &Path, more: &str) -> String {
    let (weights, listen) = (folder.join("weights.sock"), folder.join("worker-0.sock"));
    format!(
        "name = \"worker-0\"\nmodel = \"m\"\nweights-socket = {weights:?}\nlisten = {listen:?}\n\
         kv-bytes = \"16MiB\"\nthreads = 1\n{more}"
    )
}

impl Drop for SeparateProcesses {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
