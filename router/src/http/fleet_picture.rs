// SPDX-License-Identifier: Apache-2.0

//! `/ui/fleet`: what the page at `/ui` draws. Devices and processes are as the supervisor last
//! said, workers as they last reported, counters those of this router.

use std::collections::{BTreeMap, BTreeSet};

use axum::Json;
use axum::extract::State;
use proto::fleet::v1::{Child, ChildState, Device, Model, ModelState, Role, Status};
use serde_json::{Value, json};

use super::AppState;
use crate::registry::{ModelSnapshot, WorkerSnapshot};
use crate::totals;

pub(super) async fn fleet(State(app): State<AppState>) -> Json<Value> {
    let status = app.fleet.look();
    let has_supervisor = status.is_some();
    let status = status.unwrap_or_default();
    let models = app.generator.registry.snapshot();
    Json(json!({
        "has_supervisor": has_supervisor,
        "devices": devices(&status, &models),
        "copies": copies(&models),
        "workers": workers(&models),
        "models": status.models.iter().map(model).collect::<Vec<_>>(),
        "processes": status.children.iter().map(process).collect::<Vec<_>>(),
        "totals": totals::to_json(&app.metrics.render()),
    }))
}

/// Those that the supervisor knows, that the ledger has, or that a worker uses.
fn devices(status: &Status, models: &[ModelSnapshot]) -> Vec<Value> {
    let used = models.iter().flat_map(|model| model.workers.iter().map(|worker| &*worker.device));
    let told = status.devices.iter().map(|device| device.device.as_str());
    let names: BTreeSet<&str> =
        used.chain(told).chain(status.ledger.iter().map(|row| row.device.as_str())).collect();
    let device = |name: &str| {
        let told = status.devices.iter().find(|device| device.device == name);
        let ledger = status.ledger.iter().find(|row| row.device == name);
        json!({
            "device": name,
            "figures": told.and_then(figures),
            "xid_errors": told.map_or(0, |device| device.xids.iter().map(|xid| xid.count).sum::<u64>()),
            "quarantine": told.and_then(|device| device.quarantine.as_ref()).map(|quarantine| json!({
                "reason": quarantine.reason,
                "since_ms": quarantine.since_ms,
                "ends_in_ms": quarantine.ends_in_ms,
            })),
            "ledger": ledger.map(|row| json!({
                "capacity_bytes": row.capacity_bytes,
                "weights_bytes": row.weights_bytes,
                "workers_bytes": row.workers_bytes,
                "other_bytes": row.other_bytes,
            })),
        })
    };
    names.into_iter().map(device).collect()
}

fn figures(device: &Device) -> Option<Value> {
    let figures = device.figures.as_ref()?;
    Some(json!({
        "temperature_celsius": figures.temperature_celsius,
        "power_milliwatts": figures.power_milliwatts,
        "utilization_percent": figures.utilization_percent,
        "memory_used_bytes": figures.memory_used_bytes,
        "memory_total_bytes": figures.memory_total_bytes,
    }))
}

/// Each copy of weights that workers use once, with the models that share it.
fn copies(models: &[ModelSnapshot]) -> Vec<Value> {
    let mut copies: BTreeMap<(&str, u64, String), (u64, BTreeSet<&str>)> = BTreeMap::new();
    for snapshot in models {
        let description = &snapshot.model.description;
        for worker in &snapshot.workers {
            let copy = (&*worker.device, worker.generation, snapshot.model.digest_hex());
            let (_, users) = copies.entry(copy).or_insert((description.weight_bytes, BTreeSet::new()));
            users.insert(snapshot.model.name());
        }
    }
    let copy = |((device, generation, digest), (bytes, users))| {
        json!({
            "device": device,
            "generation": generation,
            "digest": digest,
            "bytes": bytes,
            "models": users,
        })
    };
    copies.into_iter().map(copy).collect()
}

fn workers(models: &[ModelSnapshot]) -> Vec<Value> {
    let of_model = |snapshot: &ModelSnapshot| {
        let worker = |worker: &WorkerSnapshot| {
            json!({
                "name": worker.name,
                "model": snapshot.model.name(),
                "device": &*worker.device,
                "generation": worker.generation,
                "digest": snapshot.model.digest_hex(),
                "streams": worker.own_streams,
                "running": worker.report.running,
                "waiting": worker.report.waiting,
                "kv_used_tokens": worker.report.kv_used_tokens,
                "kv_cached_tokens": worker.report.kv_cached_tokens,
                "kv_total_tokens": worker.report.kv_total_tokens,
            })
        };
        snapshot.workers.iter().map(worker).collect::<Vec<_>>()
    };
    models.iter().flat_map(of_model).collect()
}

fn model(model: &Model) -> Value {
    let state = match model.state() {
        ModelState::Loading => "loading",
        ModelState::Ready => "ready",
        ModelState::Failed => "failed",
        ModelState::Idle => "idle",
        ModelState::Unspecified => "unknown",
    };
    json!({
        "name": model.name,
        "state": state,
        "failure": model.failure,
        "fallback": model.fallback,
        "done_bytes": model.done_bytes,
        "total_bytes": model.total_bytes,
    })
}

fn process(child: &Child) -> Value {
    let role = match child.role() {
        Role::WeightServer => "weight-server",
        Role::Worker => "worker",
        Role::Router => "router",
        Role::Mps => "mps",
        Role::DeviceMonitor => "device-monitor",
        Role::Unspecified => "unknown",
    };
    json!({
        "name": child.name,
        "role": role,
        "state": state(child.state()),
        "restarts": child.crashes,
        "uptime_ms": child.uptime_ms,
        "next_start_ms": child.next_start_ms,
        "last_termination": child.last_termination,
        "model": child.model,
        "device": child.device,
    })
}

fn state(state: ChildState) -> &'static str {
    match state {
        ChildState::Starting => "starting",
        ChildState::Running => "ready",
        ChildState::Stopping => "stopping",
        ChildState::BackingOff => "backing-off",
        ChildState::Failed => "failed",
        ChildState::Stopped => "stopped",
        ChildState::Orphaned => "orphaned",
        ChildState::Draining => "draining",
        ChildState::Unspecified => "unknown",
    }
}
