// SPDX-License-Identifier: Apache-2.0

use std::collections::HashMap;

use proto::fleet::v1::{Child, ChildState, Model, ModelCopy, ModelState, Role, Status};
use proto::weights::v1::{self as weights, DeviceCapacity, Generation, Ledger, Reservation, ReservationKind};
use proto::worker::v1::StatsReply;
use ratatui::Terminal;
use ratatui::backend::TestBackend;

use super::*;
use crate::top::rates::WorkerTokenRates;

const GIB: u64 = 1 << 30;

fn worker(name: &str, state: ChildState, pid: u32) -> Child {
    let (model, device) = ("m".to_owned(), "host".to_owned());
    let (role, state) = (Role::Worker.into(), state.into());
    Child { name: name.to_owned(), role, state, pid, model, device, crashes: 3, ..Child::default() }
}

fn row(kind: ReservationKind, bytes: u64) -> Reservation {
    Reservation { kind: kind.into(), device: "host".to_owned(), bytes, ..Reservation::default() }
}

fn snapshot() -> FleetSnapshot {
    let copy = ModelCopy { device: "host".to_owned(), weights: "w".to_owned(), ..ModelCopy::default() };
    let model = |name: &str, state: ModelState| Model {
        name: name.to_owned(),
        state: state.into(),
        ..Model::default()
    };
    let models = vec![
        Model { copies: vec![copy], ..model("m", ModelState::Ready) },
        model("sleeps", ModelState::Idle),
        Model { failure: "no such\u{1b}[31m file".to_owned(), ..model("broken", ModelState::Failed) },
    ];
    let children =
        vec![worker("worker-0", ChildState::Running, 70), worker("worker-1", ChildState::Failed, 0)];
    let stats = StatsReply {
        running: 4,
        waiting: 2,
        kv_total_tokens: 1000,
        kv_used_tokens: 250,
        ..StatsReply::default()
    };
    let generation = Generation {
        model: "w".to_owned(),
        device: "host".to_owned(),
        allocation_bytes: 3 * GIB,
        ..Generation::default()
    };
    let capacity = DeviceCapacity {
        device: "host".to_owned(),
        capacity_bytes: 16 * GIB,
        reserved_bytes: 8 * GIB,
        unified_devices: Vec::new(),
    };
    let reservations = vec![row(ReservationKind::Weights, 3 * GIB), row(ReservationKind::Lease, 5 * GIB)];
    let ledger = Ledger { devices: vec![capacity], reservations, ..Ledger::default() };
    FleetSnapshot {
        status: Status { http_address: "127.0.0.1:8080".to_owned(), children, models, ..Status::default() },
        workers: HashMap::from([("worker-0".to_owned(), stats)]),
        weight_server: weights::Status {
            generations: vec![generation],
            ledger: Some(ledger),
            ..weights::Status::default()
        },
    }
}

fn drawn(view: &TopView, (width, height): (u16, u16), skipped: usize, trouble: Option<&str>) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| screen::draw(frame, view, skipped, trouble)).unwrap();
    let cells = terminal.backend().buffer().content();
    let lines = cells.chunks(usize::from(width));
    lines.map(|line| line.iter().map(|cell| cell.symbol()).collect::<String>()).collect()
}

#[track_caller]
fn has(lines: &[String], parts: &[&str]) {
    let found = lines.iter().any(|line| parts.iter().all(|part| line.contains(part)));
    assert!(found, "{parts:?} in\n{}", lines.join("\n"));
}

fn view() -> TopView {
    let rates = WorkerTokenRates { output: 123.4, prompt: 56.0 };
    TopView::new(&snapshot(), &HashMap::from([("worker-0".to_owned(), rates)]))
}

#[test]
fn a_screen_shows_devices_models_and_processes_with_their_rates() {
    let lines = drawn(&view(), (140, 24), 0, None);
    has(&lines, &["127.0.0.1:8080", "123 tokens/s", "56 prompt tokens/s", "4 running, 2 waiting"]);
    has(&lines, &["host", "8.00 GiB of 16.0 GiB", "weights 3.00 GiB", "workers 5.00 GiB"]);
    // 3 and 5 of 16 GiB are 8 and 13 of 40 cells.
    let bar = lines.iter().find(|line| line.contains("of 16.0 GiB")).unwrap();
    assert_eq!((bar.matches('█').count(), bar.matches('·').count()), (21, 19), "{bar}");
    has(&lines, &["m ", "1/2", "4", "2", "123", "host 3.00 GiB", "ready"]);
    has(&lines, &["sleeps", "0/0", "idle"]);
    has(&lines, &["broken", "failed: no such"]);
    assert!(!lines.concat().contains('\u{1b}'));
    has(&lines, &["worker-0", "ready", "70", "25% of 1000"]);
    has(&lines, &["worker-1", "failed", "-", "3"]);
}

#[test]
fn a_gpu_with_unified_memory_and_the_host_are_one_line() {
    let mut snapshot = snapshot();
    let ledger = snapshot.weight_server.ledger.as_mut().unwrap();
    ledger.devices[0].unified_devices = vec!["GPU-1".to_owned()];
    ledger.reservations[0].device = "GPU-1".to_owned();
    let view = TopView::new(&snapshot, &HashMap::new());
    let line = view::DeviceLine {
        name: "host + GPU".to_owned(),
        capacity: 16 * GIB,
        weights: 3 * GIB,
        workers: 5 * GIB,
        other: 0,
        health: String::new(),
        is_faulty: false,
    };
    assert_eq!(view.devices, [line]);
}

#[test]
fn a_small_screen_and_an_empty_fleet_are_drawn_too() {
    for size in [(20, 3), (1, 1), (400, 200)] {
        drawn(&view(), size, 0, None);
        drawn(&TopView::default(), size, 0, Some("no answer"));
    }
    has(&drawn(&view(), (100, 20), 0, Some("no answer: gone")), &["no answer: gone"]);
}

#[test]
fn processes_scroll_and_many_models_leave_room_for_them() {
    let mut view = view();
    assert_eq!(screen::skipped_max(&view), 1);
    let lines = drawn(&view, (140, 24), 1, None);
    has(&lines, &["worker-1"]);
    assert!(!lines.concat().contains("worker-0"));
    let model = view.models[0].clone();
    view.models = vec![model; 50];
    let lines = drawn(&view, (140, 24), 0, None);
    has(&lines, &["and 38 more"]);
    has(&lines, &["worker-1"]);
}

#[test]
fn keys_quit_and_scroll() {
    let press = |code| key_action(KeyEvent::new(code, KeyModifiers::NONE));
    assert_eq!(press(KeyCode::Char('q')), Some(KeyAction::Quit));
    assert_eq!(press(KeyCode::Down), Some(KeyAction::Scroll(1)));
    assert_eq!(press(KeyCode::Char('c')), None);
    let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
    assert_eq!(key_action(interrupt), Some(KeyAction::Quit));
}
