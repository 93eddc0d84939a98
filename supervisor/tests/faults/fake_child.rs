// SPDX-License-Identifier: Apache-2.0

//! A child process that behaves like a child of the fleet, and misbehaves as its configuration
//! says.

use std::ffi::OsString;
use std::io::{Read, Seek, Write};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use serde::{Deserialize, Serialize};
use service::supervision::SupervisorState;
use service::{Notify, RuntimeDir, Shutdown};

use super::fake_weight_server;

#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct FakeChildConfig {
    pub(crate) name: String,
    pub(crate) role: String,
    pub(crate) runtime_dir: PathBuf,
    pub(crate) behaviour: String,
    #[serde(default)]
    pub(crate) model: String,
    /// Of a worker.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) device: String,
    /// Of the weight-server and of the device monitor.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) devices: Vec<toml::Value>,
}

pub(crate) fn main(mut arguments: impl Iterator<Item = OsString>) {
    let path = arguments.nth(1).expect("--config FILE");
    let config: FakeChildConfig = service::config::load(path.as_ref()).expect("configuration");
    match config.behaviour.as_str() {
        "exits-1" => std::process::exit(1),
        "hangs-on-its-device" => std::process::exit(7),
        "exits-2" => {
            let notify = Notify::from_env().expect("notify");
            notify.status("port 70000 does not exist").expect("status");
            notify.barrier(Duration::from_secs(5)).expect("barrier");
            std::process::exit(2)
        }
        _ => {}
    }
    service::logging::init(&config.name, tracing::Level::ERROR);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
    runtime.block_on(run(config)).expect("child");
    service::runtime_dir::remove_dir_if_last_child();
}

async fn run(config: FakeChildConfig) -> Result<()> {
    let inherited = service::listen::inherited_fds()?;
    let notify = Notify::from_env()?;
    let shutdown = Shutdown::install()?;
    let mut supervisor =
        service::supervision::watch_supervisor(&config.role, &config.name, None, &notify, &shutdown)?;
    let _stored_files = match config.role.as_str() {
        "weight-server" => {
            let directory = RuntimeDir::at(&config.runtime_dir);
            let server = fake_weight_server::serve(&directory, &config.behaviour)?;
            tokio::spawn(server);
            let adopted = adopt(inherited)?;
            let files = match adopted.is_empty() {
                true => store(&notify)?,
                false => {
                    let texts: Vec<String> = adopted.iter().map(|(n, t, _)| format!("{n}={t}")).collect();
                    notify.status(&format!("adopted {}", texts.join(", ")))?;
                    adopted.into_iter().map(|(name, _, file)| (name, file)).collect()
                }
            };
            let (notify, copies) = (notify.clone(), clone_all(&files)?);
            tokio::spawn(async move {
                while supervisor.changed().await.is_ok() {
                    if matches!(*supervisor.borrow(), SupervisorState::Present { .. }) {
                        for (name, file) in &copies {
                            notify.fdstore(name, &[file.as_fd()]).expect("store again");
                        }
                    }
                }
            });
            files
        }
        _ => Vec::new(),
    };
    match config.behaviour.as_str() {
        "never-ready" => {}
        "stores-a-descriptor" => {
            notify.fdstore("weights", &[std::fs::File::open("/dev/null")?.as_fd()])?;
            notify.barrier(Duration::from_secs(5))?;
            notify.ready()?;
        }
        "ignores-sigterm-with-a-grandchild" => {
            let grandchild = std::process::Command::new("sleep").arg("600").spawn()?;
            notify.status(&format!("grandchild {}", grandchild.id()))?;
            notify.ready()?;
            std::future::pending::<()>().await;
        }
        _ => notify.ready()?,
    }
    shutdown.requested().await;
    // An orphan has no parent to notify.
    let _: Result<(), _> = notify.stopping();
    Ok(())
}

type StoredFiles = Vec<(String, std::fs::File)>;

fn store(notify: &Notify) -> Result<StoredFiles> {
    let mut files = Vec::new();
    let names = [
        ("weights", "allocation 0"),
        ("weights", "allocation 1"),
        ("gone", "gone"),
        ("manifest", "manifest"),
    ];
    for (name, text) in names {
        let mut file = tempfile::tempfile()?;
        file.write_all(text.as_bytes())?;
        notify.fdstore(name, &[file.as_fd()])?;
        files.push((name.to_owned(), file));
    }
    notify.fdstore_remove("gone")?;
    notify.barrier(Duration::from_secs(5))?;
    files.retain(|(name, _)| name != "gone");
    notify.status(&format!("stored {}", files.len()))?;
    Ok(files)
}

fn adopt(inherited: Vec<service::listen::InheritedFd>) -> Result<Vec<(String, String, std::fs::File)>> {
    let read = |inherited: service::listen::InheritedFd| {
        let mut file = std::fs::File::from(inherited.fd);
        let mut text = String::new();
        file.rewind()?;
        file.read_to_string(&mut text)?;
        Ok((inherited.name, text, file))
    };
    inherited.into_iter().map(read).collect()
}

fn clone_all(files: &StoredFiles) -> Result<StoredFiles> {
    files.iter().map(|(name, file)| Ok((name.clone(), file.try_clone()?))).collect()
}
