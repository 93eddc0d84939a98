//! `ballast ps`: the processes of a running fleet and their memory.

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use proto::fleet::v1::fleet_client::FleetClient;
use proto::fleet::v1::{Child, ChildState, GetStatusRequest, Memory, ModelState, Role, Status};
use serde_json::json;
use service::{Bytes, RuntimeDir};
use tonic::transport::Channel;

use crate::failure::{Failure, Outcome, Trying};
use crate::running_fleet::{block_on, find};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Directory of the fleet [default: the only one that runs]
    #[arg(long, value_name = "DIR")]
    runtime_dir: Option<PathBuf>,
    /// One process a line, as JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: Arguments) -> Outcome {
    block_on(async {
        let directory = find(arguments.runtime_dir.as_deref())?;
        let mut client = connect(&directory).await?;
        let status = client
            .get_status(GetStatusRequest { memory: true })
            .await
            .map_err(|status| Failure::answer("the supervisor", &status))?
            .into_inner();
        let text = if arguments.json { json_lines(&status) } else { table(&status) };
        std::io::stdout().write_all(text.as_bytes()).trying(|| "cannot write".to_owned())
    })
}

/// A client of the supervisor in this directory.
pub(crate) async fn connect(directory: &RuntimeDir) -> Outcome<FleetClient<Channel>> {
    Ok(FleetClient::new(service::grpc::connect(&directory.supervisor_socket()).await?))
}

fn json_lines(status: &Status) -> String {
    let memory = service::smaps::rollup_of_process(status.supervisor_pid).unwrap_or_default();
    let supervisor = json!({
        "name": "supervisor",
        "role": "supervisor",
        "pid": status.supervisor_pid,
        "state": "ready",
        "restarts": 0,
        "memory": {"resident": memory.rss, "proportional": memory.pss, "anonymous": memory.anonymous, "swap": memory.swap},
        "vault_fds": status.vault_fds,
        "runtime_dir": status.runtime_dir,
    });
    let children = status.children.iter().map(|child| {
        json!({
            "name": child.name,
            "role": role(child),
            "pid": child.pid,
            "state": state(child),
            "restarts": child.crashes,
            "uptime_ms": child.uptime_ms,
            "status": child.status_text,
            "last_end": child.last_end,
            "model": child.model,
            "memory": child.memory.map(memory_json),
        })
    });
    std::iter::once(supervisor).chain(children).map(|line| format!("{line}\n")).collect()
}

fn memory_json(memory: Memory) -> serde_json::Value {
    json!({
        "resident": memory.resident,
        "proportional": memory.proportional,
        "anonymous": memory.anonymous,
        "swap": memory.swap,
        "weights_resident": memory.weights_resident,
        "weights_proportional": memory.weights_proportional,
        "weights_anonymous": memory.weights_anonymous,
    })
}

fn table(status: &Status) -> String {
    let mut text = format!(
        "{:<14} {:>8} {:<12} {:>9} {:>10} {:>10} {:>10}  STATUS\n",
        "NAME", "PID", "STATE", "RESTARTS", "UPTIME", "OWN", "WEIGHTS"
    );
    for child in &status.children {
        let own = child.memory.map_or_else(String::new, |m| Bytes(m.anonymous).rounded());
        let weights = child.memory.filter(|m| m.weights_resident > 0);
        let weights = weights.map_or_else(String::new, |m| Bytes(m.weights_resident).rounded());
        let words = if child.pid == 0 { &child.last_end } else { &child.status_text };
        text += &format!(
            "{:<14} {:>8} {:<12} {:>9} {:>10} {:>10} {:>10}  {words}\n",
            child.name,
            child.pid,
            state(child),
            child.crashes,
            uptime(child.uptime_ms),
            own,
            weights,
        );
    }
    for model in &status.models {
        let state = match model.state() {
            ModelState::Loading => format!(
                "loading {} of {}",
                Bytes(model.done_bytes).rounded(),
                Bytes(model.total_bytes).rounded()
            ),
            ModelState::Ready => "ready".to_owned(),
            ModelState::Failed => format!("failed: {}", model.failure),
            ModelState::Unspecified => "unknown".to_owned(),
        };
        text += &format!("model {}: {state}, {}\n", model.name, model.path);
    }
    text += &format!(
        "supervisor {} in {}, {} descriptors in the vault\n",
        status.supervisor_pid, status.runtime_dir, status.vault_fds
    );
    text
}

fn uptime(milliseconds: u64) -> String {
    let seconds = Duration::from_millis(milliseconds).as_secs();
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        _ => format!("{}h{:02}m", seconds / 3600, seconds / 60 % 60),
    }
}

fn role(child: &Child) -> &'static str {
    match child.role() {
        Role::WeightServer => "weight-server",
        Role::Worker => "worker",
        Role::Router => "router",
        Role::Unspecified => "unknown",
    }
}

fn state(child: &Child) -> &'static str {
    match child.state() {
        ChildState::Starting => "starting",
        ChildState::Running => "ready",
        ChildState::Stopping => "stopping",
        ChildState::BackingOff => "backing-off",
        ChildState::Failed => "failed",
        ChildState::Stopped => "stopped",
        ChildState::Orphaned => "orphaned",
        ChildState::Unspecified => "unknown",
    }
}
