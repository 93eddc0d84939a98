// SPDX-License-Identifier: Apache-2.0

//! `ballast ps`: lists the processes of a running fleet and their memory, on the host and on GPUs.

use std::path::PathBuf;
use std::time::Duration;

use proto::fleet::v1::fleet_client::FleetClient;
use proto::fleet::v1::{
    Child, ChildState, Device, DeviceFigures, Memory, Model, ModelState, Quarantine, Role,
};
use proto::weights::v1::{Generation, GenerationIntegrity, GenerationState};
use proto::worker::v1::StatsReply;
use serde_json::json;
use service::printable::printable_lines;
use service::{ByteSize, RuntimeDir};
use tonic::transport::Channel;

use crate::cli_error::CliResult;
use crate::fleet_choice::find_fleet;
use crate::fleet_snapshot::FleetSnapshot;
use crate::running_fleet::block_on;
use crate::terminal::print_stdout;

#[derive(clap::Args)]
pub(crate) struct PsArguments {
    /// Runtime directory of the fleet [default: that of the only running fleet]
    #[arg(long, value_name = "DIR")]
    runtime_dir: Option<PathBuf>,
    /// Print one JSON object per process
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: PsArguments) -> CliResult {
    block_on(async {
        let directory = find_fleet(arguments.runtime_dir.as_deref()).await?;
        let shown = FleetSnapshot::take(&directory, true).await?;
        let text = if arguments.json { shown.json_lines() } else { printable_lines(&shown.table()) };
        print_stdout(&text)
    })
}

/// Connects to the supervisor in this runtime directory.
pub(crate) async fn connect(directory: &RuntimeDir) -> CliResult<FleetClient<Channel>> {
    Ok(FleetClient::new(service::grpc::connect(&directory.supervisor_socket()).await?))
}

impl FleetSnapshot {
    fn json_lines(&self) -> String {
        let status = &self.status;
        let latest = status.latest_crash_report.as_str();
        let memory = service::smaps::rollup_of_process(status.supervisor_pid).unwrap_or_default();
        let supervisor = json!({
            "name": "supervisor",
            "role": "supervisor",
            "pid": status.supervisor_pid,
            "state": "ready",
            "restarts": 0,
            "memory": {"resident": memory.rss, "proportional": memory.pss, "anonymous": memory.anonymous, "swap": memory.swap},
            "stored_fds": status.stored_fds,
            "runtime_dir": status.runtime_dir,
            "log_lines_lost": status.log_lines_lost,
            "latest_crash_report": (!latest.is_empty()).then_some(latest),
            "crash_reports_lost": status.crash_reports_lost,
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
                "last_termination": child.last_termination,
                "consecutive_crashes": child.consecutive_crashes,
                "next_start_ms": child.next_start_ms,
                "model": child.model,
                "memory": child.memory.map(memory_json),
                "device": self.device(child),
                "device_memory": self.workers.get(&child.name).map(device_memory_json),
                "timeline_ms": self.workers.get(&child.name).map(timeline_json),
                "ready_ms": self.workers.get(&child.name).map(|stats| stats.ready_ms),
                "log_lines_lost": self.log_lines_lost(child),
            })
        });
        let generations = self.weight_server.generations.iter().map(|g| generation_json(g, self.users(g)));
        let models = status.models.iter().map(model_json);
        std::iter::once(supervisor)
            .chain(children)
            .chain(models)
            .chain(status.devices.iter().map(device_json))
            .chain(generations)
            .map(|line| format!("{line}\n"))
            .collect()
    }

    /// The router reports its figure on /metrics.
    fn log_lines_lost(&self, child: &Child) -> Option<u64> {
        match child.role() {
            Role::Worker => self.workers.get(&child.name).map(|stats| stats.log_lines_lost),
            Role::WeightServer => Some(self.weight_server.log_lines_lost),
            Role::Router | Role::Mps | Role::DeviceMonitor | Role::Unspecified => None,
        }
    }

    fn table(&self) -> String {
        let status = &self.status;
        let mut text = format!(
            "{:<14} {:>8} {:<12} {:>9} {:>10} {:>10} {:>10} {:>10} {:>10}  STATUS\n",
            "NAME", "PID", "STATE", "RESTARTS", "UPTIME", "PRIVATE", "WEIGHTS", "DEVICE", "RESERVED"
        );
        for child in &status.children {
            let own = child.memory.map_or_else(String::new, |m| ByteSize(m.anonymous).rounded());
            let weights = child.memory.filter(|m| m.weights_resident > 0);
            let weights = weights.map_or_else(String::new, |m| ByteSize(m.weights_resident).rounded());
            let stats = self.workers.get(&child.name);
            let words = status_words(child);
            text += &format!(
                "{:<14} {:>8} {:<12} {:>9} {:>10} {:>10} {:>10} {:>10} {:>10}  {words}\n",
                child.name,
                pid(child),
                state(child),
                child.crashes,
                uptime(child.uptime_ms),
                own,
                weights,
                self.device(child).map_or("", short),
                stats.map_or_else(String::new, |stats| ByteSize(reserved(stats)).rounded()),
            );
        }
        for model in &status.models {
            let state = load_state(model.state(), (model.done_bytes, model.total_bytes), &model.failure);
            text += &format!("model {}: {state}, {}\n", model.name, model.path);
            if !model.fallback.is_empty() {
                text += &format!("  on the host, not on a GPU: {}\n", model.fallback);
            }
            // The copy of a model on one device has the state of the model.
            for copy in model.copies.iter().filter(|_| model.copies.len() > 1) {
                let state = load_state(copy.state(), (copy.done_bytes, copy.total_bytes), &copy.failure);
                text += &format!("  on {}: {state}\n", copy.device);
            }
        }
        for generation in &self.weight_server.generations {
            let users = match self.users(generation) {
                users if users.is_empty() => "no model".to_owned(),
                users => users.join(", "),
            };
            let origin = match generation.copied_from.as_str() {
                "" => String::new(),
                device => format!("copied from {device}, "),
            };
            text += &format!(
                "weights {}: {} on {}, {}, {}, {origin}used by {users}\n",
                generation.model,
                ByteSize(generation.allocation_bytes).rounded(),
                generation.device,
                generation_state(generation),
                integrity(generation)
            );
        }
        for device in &status.devices {
            text += &device_line(device);
        }
        text += &format!(
            "supervisor {} in {}, {} descriptors in the FD store\n",
            status.supervisor_pid, status.runtime_dir, status.stored_fds
        );
        if !status.latest_crash_report.is_empty() {
            text += &format!("latest crash report: {}\n", status.latest_crash_report);
        }
        if status.crash_reports_lost > 0 {
            text += &format!("{} crash reports could not be written\n", status.crash_reports_lost);
        }
        text
    }
}

/// How far the load of a model or of one of its copies is.
fn load_state(state: ModelState, (done, total): (u64, u64), failure: &str) -> String {
    match state {
        ModelState::Loading => {
            format!("loading {} of {}", ByteSize(done).rounded(), ByteSize(total).rounded())
        }
        ModelState::Ready => "ready".to_owned(),
        ModelState::Failed => format!("failed: {failure}"),
        ModelState::Idle if failure.is_empty() => "idle".to_owned(),
        ModelState::Idle => format!("idle, could not be woken: {failure}"),
        ModelState::Unspecified => "unknown".to_owned(),
    }
}

fn model_json(model: &Model) -> serde_json::Value {
    let word = |state| match state {
        ModelState::Loading => "loading",
        ModelState::Ready => "ready",
        ModelState::Failed => "failed",
        ModelState::Idle => "idle",
        ModelState::Unspecified => "unknown",
    };
    let failure = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    let copies = model.copies.iter().map(|copy| {
        let (state, failure) = (word(copy.state()), failure(&copy.failure));
        json!({"device": copy.device, "weights": copy.weights, "state": state, "failure": failure})
    });
    json!({
        "name": model.name,
        "role": "model",
        "state": word(model.state()),
        "failure": failure(&model.failure),
        "path": model.path,
        "weights": model.weights,
        "copies": copies.collect::<Vec<_>>(),
    })
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

/// Bytes that the ledger reserves for a worker on its device.
fn reserved(stats: &StatsReply) -> u64 {
    stats.context_bytes + stats.kv_reserved_bytes + stats.workspace_bytes
}

/// Empty for a device of which nothing is known.
fn device_line(device: &Device) -> String {
    let mut facts = device.figures.as_ref().map(figure_texts).unwrap_or_default();
    let xids = device.xids.iter().map(|xid| format!("Xid {} {} times", xid.xid, xid.count));
    facts.extend(xids);
    facts.extend(device.quarantine.as_ref().map(quarantine_text));
    match facts.is_empty() {
        true => String::new(),
        false => format!("device {}: {}\n", device.device, facts.join(", ")),
    }
}

pub(crate) fn figure_texts(figures: &DeviceFigures) -> Vec<String> {
    let temperature = figures.temperature_celsius.map(|celsius| format!("{celsius} °C"));
    let power = figures.power_milliwatts.map(|power| format!("{} W", power / 1000));
    let busy = figures.utilization_percent.map(|percent| format!("{percent}% busy"));
    let memory = figures
        .memory_used_bytes
        .zip(figures.memory_total_bytes)
        .map(|(used, total)| format!("{} of {} used", ByteSize(used).rounded(), ByteSize(total).rounded()));
    let errors = figures.uncorrected_ecc_errors.filter(|errors| *errors > 0);
    let errors = errors.map(|errors| format!("{errors} ECC errors that cannot be corrected"));
    [temperature, power, busy, memory, errors].into_iter().flatten().collect()
}

pub(crate) fn quarantine_text(quarantine: &Quarantine) -> String {
    let end = match quarantine.ends_in_ms {
        Some(0) => "until the driver reports no problem".to_owned(),
        Some(left) => format!("tried again in {} s", left.div_ceil(1000)),
        None => "until a command ends it".to_owned(),
    };
    format!("quarantined for {} ({end}): {}", uptime(quarantine.since_ms), quarantine.reason)
}

fn device_json(device: &Device) -> serde_json::Value {
    let figures = device.figures.unwrap_or_default();
    let xids = device.xids.iter().map(|xid| (xid.xid.to_string(), json!(xid.count)));
    let quarantine = device.quarantine.as_ref().map(|quarantine| {
        json!({
            "reason": quarantine.reason,
            "since_ms": quarantine.since_ms,
            "ends_in_ms": quarantine.ends_in_ms,
        })
    });
    json!({
        "name": format!("device:{}", device.device),
        "role": "device",
        "device": device.device,
        "temperature_celsius": figures.temperature_celsius,
        "power_milliwatts": figures.power_milliwatts,
        "utilization_percent": figures.utilization_percent,
        "memory_used_bytes": figures.memory_used_bytes,
        "memory_total_bytes": figures.memory_total_bytes,
        "corrected_ecc_errors": figures.corrected_ecc_errors,
        "uncorrected_ecc_errors": figures.uncorrected_ecc_errors,
        "xids": xids.collect::<serde_json::Map<_, _>>(),
        "quarantine": quarantine,
    })
}

/// Shortens a UUID; "host" stays as it is.
fn short(device: &str) -> &str {
    const SHOWN: usize = "GPU-01234".len();
    device.get(..SHOWN).unwrap_or(device)
}

fn device_memory_json(stats: &StatsReply) -> serde_json::Value {
    json!({
        "context": stats.context_bytes,
        "kv_reserved": stats.kv_reserved_bytes,
        "kv_used": stats.kv_used_bytes,
        "kv_mapped": stats.kv_mapped_bytes,
        "workspace": stats.workspace_bytes,
        "workspace_used": stats.workspace_used.map(|used| json!({
            "activations": used.activations,
            "scratch": used.scratch,
            "graphs": used.graphs,
            "modules": used.modules,
            "total": used.activations + used.scratch + used.graphs + used.modules,
        })),
        "weights": stats.weight_bytes,
    })
}

fn timeline_json(stats: &StatsReply) -> serde_json::Value {
    stats
        .startup_stages
        .iter()
        .map(|stage| (stage.name.clone(), json!(stage.ms)))
        .collect::<serde_json::Map<_, _>>()
        .into()
}

fn generation_json(generation: &Generation, used_by: Vec<&str>) -> serde_json::Value {
    json!({
        "name": format!("model:{}", generation.model),
        "role": "generation",
        "generation": generation.generation,
        "device": generation.device,
        "state": generation_state(generation),
        "integrity": integrity(generation),
        "adopted": generation.adopted,
        "tensor_bytes": generation.tensor_bytes,
        "allocation_bytes": generation.allocation_bytes,
        "allocations": generation.allocations,
        "copied_from": (!generation.copied_from.is_empty()).then_some(&generation.copied_from),
        "copy_ms": (!generation.copied_from.is_empty()).then_some(generation.copy_seconds * 1e3),
        "used_by": used_by,
    })
}

fn generation_state(generation: &Generation) -> &'static str {
    match generation.state() {
        GenerationState::Queued => "queued",
        GenerationState::Loading => "loading",
        GenerationState::Storing => "storing",
        GenerationState::Ready => "ready",
        GenerationState::Retiring => "retiring",
        GenerationState::Unspecified => "unknown",
    }
}

fn integrity(generation: &Generation) -> &'static str {
    match generation.integrity() {
        GenerationIntegrity::Loaded => "loaded",
        GenerationIntegrity::Unverified => "unverified",
        GenerationIntegrity::Verified => "verified",
        GenerationIntegrity::Quarantined => "quarantined",
        GenerationIntegrity::Unspecified => "unknown",
    }
}

/// What the process last said, or why there is none and when it starts again.
fn status_words(child: &Child) -> String {
    let wait = child.next_start_ms.map(|ms| ms.div_ceil(1000));
    match (child.pid, wait) {
        (0, Some(seconds)) => format!(
            "{}; crashed {} times in a row, next start in {seconds} s",
            child.last_termination, child.consecutive_crashes
        ),
        (0, None) => child.last_termination.clone(),
        _ => child.status_text.clone(),
    }
}

/// A script that sends a signal to process 0 would hit its own process group.
fn pid(child: &Child) -> String {
    if child.pid == 0 { "-".to_owned() } else { child.pid.to_string() }
}

pub(crate) fn uptime(milliseconds: u64) -> String {
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
        Role::Mps => "mps",
        Role::DeviceMonitor => "device-monitor",
        Role::Unspecified => "unknown",
    }
}

pub(crate) fn state(child: &Child) -> &'static str {
    match child.state() {
        ChildState::Starting => "starting",
        ChildState::Running => "ready",
        ChildState::Draining => "draining",
        ChildState::Stopping => "stopping",
        ChildState::BackingOff => "backing-off",
        ChildState::Failed => "failed",
        ChildState::Stopped => "stopped",
        ChildState::Orphaned => "orphaned",
        ChildState::Unspecified => "unknown",
    }
}
