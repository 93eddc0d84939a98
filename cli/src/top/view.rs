// SPDX-License-Identifier: Apache-2.0

//! What `ballast top` shows of a fleet, as plain values.

use std::collections::HashMap;

use proto::fleet::v1::{Child, ChildState, Device, DeviceLedger, Model, ModelState, Role};
use proto::weights::v1::{DeviceCapacity, Ledger};
use service::ByteSize;

use super::rates::WorkerTokenRates;
use crate::fleet_snapshot::FleetSnapshot;
use crate::ps::{figure_texts, quarantine_text, state, uptime};

/// One screen.
#[derive(Clone, Debug, Default)]
pub(crate) struct TopView {
    pub(crate) http_address: String,
    pub(crate) runtime_dir: String,
    pub(crate) total: WorkerTokenRates,
    pub(crate) running: u32,
    pub(crate) waiting: u32,
    pub(crate) devices: Vec<DeviceLine>,
    pub(crate) models: Vec<ModelLine>,
    pub(crate) processes: Vec<ProcessLine>,
}

/// The ledger of one device, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeviceLine {
    pub(crate) name: String,
    pub(crate) capacity: u64,
    pub(crate) weights: u64,
    /// Contexts, KV caches and workspaces of workers.
    pub(crate) workers: u64,
    /// Checks and copies.
    pub(crate) other: u64,
    /// Temperature, power and utilization, or why the device is quarantined.
    pub(crate) health: String,
    pub(crate) is_faulty: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct ModelLine {
    pub(crate) name: String,
    pub(crate) state: String,
    pub(crate) is_faulty: bool,
    /// Workers whose processes are ready, of all.
    pub(crate) workers: (usize, usize),
    pub(crate) running: u32,
    pub(crate) waiting: u32,
    pub(crate) rates: WorkerTokenRates,
    /// Of its copies of the weights; the bytes of each once.
    pub(crate) copies: String,
}

#[derive(Clone, Debug)]
pub(crate) struct ProcessLine {
    pub(crate) name: String,
    pub(crate) state: &'static str,
    pub(crate) is_faulty: bool,
    pub(crate) pid: u32,
    pub(crate) uptime: String,
    pub(crate) restarts: u32,
    /// The rest is of workers that answer.
    pub(crate) worker: Option<WorkerFigures>,
    pub(crate) model: String,
    pub(crate) device: String,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct WorkerFigures {
    pub(crate) running: u32,
    pub(crate) waiting: u32,
    pub(crate) rates: WorkerTokenRates,
    /// Part of the KV cache that running requests hold, 0 to 1.
    pub(crate) kv_used: f64,
    pub(crate) kv_tokens: u64,
}

impl TopView {
    pub(crate) fn new(snapshot: &FleetSnapshot, rates: &HashMap<String, WorkerTokenRates>) -> Self {
        let status = &snapshot.status;
        let processes: Vec<ProcessLine> =
            status.children.iter().map(|child| process_line(snapshot, child, rates)).collect();
        let figures = || processes.iter().filter_map(|process| process.worker);
        Self {
            http_address: status.http_address.clone(),
            runtime_dir: status.runtime_dir.clone(),
            total: sum(figures().map(|worker| worker.rates)),
            running: figures().map(|worker| worker.running).sum(),
            waiting: figures().map(|worker| worker.waiting).sum(),
            devices: snapshot
                .weight_server
                .ledger
                .as_ref()
                .map(|ledger| device_lines(ledger, &status.devices))
                .unwrap_or_default(),
            models: status.models.iter().map(|model| model_line(snapshot, model, &processes)).collect(),
            processes,
        }
    }
}

fn sum(rates: impl Iterator<Item = WorkerTokenRates>) -> WorkerTokenRates {
    rates.fold(WorkerTokenRates::default(), |sum, rates| WorkerTokenRates {
        output: sum.output + rates.output,
        prompt: sum.prompt + rates.prompt,
    })
}

fn process_line(
    snapshot: &FleetSnapshot,
    child: &Child,
    rates: &HashMap<String, WorkerTokenRates>,
) -> ProcessLine {
    let stats = snapshot.workers.get(&child.name).filter(|_| child.role() == Role::Worker);
    let figures = |stats: &proto::worker::v1::StatsReply| WorkerFigures {
        running: stats.running,
        waiting: stats.waiting,
        rates: rates.get(&child.name).copied().unwrap_or_default(),
        kv_used: stats.kv_used_tokens as f64 / stats.kv_total_tokens.max(1) as f64,
        kv_tokens: stats.kv_total_tokens,
    };
    ProcessLine {
        name: child.name.clone(),
        state: state(child),
        is_faulty: matches!(child.state(), ChildState::BackingOff | ChildState::Failed),
        pid: child.pid,
        uptime: uptime(child.uptime_ms),
        restarts: child.crashes,
        worker: stats.map(figures),
        model: child.model.clone(),
        device: snapshot.device(child).unwrap_or_default().to_owned(),
    }
}

fn model_line(snapshot: &FleetSnapshot, model: &Model, processes: &[ProcessLine]) -> ModelLine {
    let workers = || processes.iter().filter(|process| process.model == model.name);
    let figures = || workers().filter_map(|process| process.worker);
    let percent = |done: u64, total: u64| done.saturating_mul(100).checked_div(total).unwrap_or(0);
    let state = match model.state() {
        ModelState::Loading => format!("loading {}%", percent(model.done_bytes, model.total_bytes)),
        ModelState::Ready => "ready".to_owned(),
        ModelState::Idle if model.failure.is_empty() => "idle".to_owned(),
        ModelState::Idle | ModelState::Failed => format!("failed: {}", model.failure),
        ModelState::Unspecified => "unknown".to_owned(),
    };
    let copies = model.copies.iter().map(|copy| {
        let generations = &snapshot.weight_server.generations;
        let found = generations.iter().find(|g| g.device == copy.device && g.model == copy.weights);
        let bytes =
            found.map_or_else(String::new, |g| format!(" {}", ByteSize(g.allocation_bytes).rounded()));
        format!("{}{bytes}", copy.device)
    });
    ModelLine {
        name: model.name.clone(),
        is_faulty: !model.failure.is_empty(),
        state,
        workers: (workers().filter(|process| process.worker.is_some()).count(), workers().count()),
        running: figures().map(|worker| worker.running).sum(),
        waiting: figures().map(|worker| worker.waiting).sum(),
        rates: sum(figures().map(|worker| worker.rates)),
        copies: copies.collect::<Vec<_>>().join(", "),
    }
}

fn device_lines(ledger: &Ledger, known: &[Device]) -> Vec<DeviceLine> {
    let line = |row: DeviceLedger| {
        let is_it = |device: &&DeviceCapacity| device.device == row.device;
        let unified = ledger.devices.iter().find(is_it).map(|device| device.unified_devices.as_slice());
        let unified = unified.unwrap_or_default();
        let of_row =
            known.iter().filter(|known| known.device == row.device || unified.contains(&known.device));
        // A GPU that is out of service first, then one that has figures.
        let shown = of_row.max_by_key(|known| (known.quarantine.is_some(), known.figures.is_some()));
        let (health, is_faulty) = shown.map(health).unwrap_or_default();
        DeviceLine {
            name: if unified.is_empty() { row.device } else { format!("{} + GPU", row.device) },
            capacity: row.capacity_bytes,
            weights: row.weights_bytes,
            workers: row.workers_bytes,
            other: row.other_bytes,
            health,
            is_faulty,
        }
    };
    supervisor::device_rows(ledger).into_iter().map(line).collect()
}

/// What the line of a device ends with, and whether the device is out of service.
fn health(device: &Device) -> (String, bool) {
    match &device.quarantine {
        Some(quarantine) => (quarantine_text(quarantine), true),
        None => (device.figures.as_ref().map(figure_texts).unwrap_or_default().join(", "), false),
    }
}
