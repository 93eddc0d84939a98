// SPDX-License-Identifier: Apache-2.0

//! Starts, signals, reaps and removes children.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use service::config;
use service::listen::HTTP_SOCKET_NAME;
use service::process_limits::StartError;
use tokio::net::unix::pipe;
use tokio::sync::mpsc;

use super::crashes::DeadProcess;
use super::{FleetStartError, SupervisedChild, SupervisorLoop, answer};
use crate::attach_token::AttachToken;
use crate::events::SupervisorEvent;
use crate::notify_server::{self, Checkpoint};
use crate::process::{ChildProcess, SpawnOptions};
use crate::rolling_restart::RollingEvent;
use crate::spec::{ChildRole, ChildSpec, WorkerSlot};
use crate::state::{BackoffReason, ChildAction, ChildEvent, ChildState, ChildStateMachine, Termination};
use crate::status::{FleetEvent, LastTermination};
use crate::worker_drain;

impl SupervisorLoop {
    /// Adds a child: writes its configuration and binds its notify socket. Its process is started
    /// later.
    pub(super) fn add_child(
        &mut self,
        spec: ChildSpec,
        slot: Option<WorkerSlot>,
    ) -> Result<Arc<str>, FleetStartError> {
        let name: Arc<str> = spec.name.as_str().into();
        let names = self.directory.directory();
        config::store(&names.config(&name), &spec.config)?;
        let socket = notify_server::bind(&names.notify_socket(&name))
            .map_err(|source| FleetStartError::NotifySocket { child: spec.name.clone(), source })?;
        // A child has one process at a time: the next one starts after the event loop has seen the
        // last one's exit. It also has at most one deadline that is not reported yet.
        let (checkpoint_sender, checkpoints) = mpsc::channel(2);
        let forwarder = tokio::spawn(notify_server::forward(
            socket,
            checkpoints,
            name.clone(),
            self.commands.event_loop.clone(),
        ));
        let child = SupervisedChild {
            machine: ChildStateMachine::new(spec.role.policy(&self.spec.supervision)),
            spec,
            slot,
            process: None,
            start_number: 0,
            token: None,
            token_registration: None,
            forwarder,
            checkpoints: checkpoint_sender,
            status_text: String::new(),
            last_termination: None,
            is_outdated: false,
            waits_for_stop: Vec::new(),
            removed: None,
        };
        self.children.insert(name.clone(), child);
        Ok(name)
    }

    /// Applies an event to a child's state machine and executes the resulting action.
    pub(super) fn apply_event(&mut self, name: &Arc<str>, event: ChildEvent) {
        let now = self.deadlines.advance(Instant::now());
        let child = supervised_child(&mut self.children, name);
        let before = child.machine.state();
        let action = child.machine.handle(now, event);
        let after = child.machine.state();
        if std::mem::discriminant(&before) != std::mem::discriminant(&after) {
            if let ChildState::BackingOff { deadline, reason } = after
                && reason != BackoffReason::Crash
            {
                let (crashes, pause) = (child.machine.consecutive_crashes(), deadline - now);
                tracing::warn!(child = %name, ?reason, crashes, ?pause, "child failed, starting it again after a pause");
            }
            self.publish_child(name);
        }
        match action {
            Some(ChildAction::Spawn) => self.spawn(name),
            Some(ChildAction::Drain { grace }) => self.drain_worker(name, grace),
            Some(ChildAction::Terminate) => self.signal(name, ChildProcess::terminate),
            Some(ChildAction::Kill) => self.signal(name, ChildProcess::kill),
            None => {}
        }
        if std::mem::discriminant(&before) != std::mem::discriminant(&after) {
            match after {
                ChildState::Running { .. } => self.roll(RollingEvent::Running(name)),
                ChildState::BackingOff { .. } => {
                    self.roll(RollingEvent::Failed(name));
                    self.swapped_worker_failed(name);
                }
                ChildState::Stopped => self.roll(RollingEvent::Lost(name)),
                _ => {}
            }
        }
        self.answer_if_stopped(name);
        self.drop_if_removed(name);
    }

    /// Asks the worker to finish its streams. The process is stopped after its answer.
    fn drain_worker(&self, name: &Arc<str>, grace: Duration) {
        let Some((child, slot)) = self.children.get(name).and_then(|c| Some((c, c.slot.as_ref()?))) else {
            return;
        };
        let socket = self.directory.directory().worker_socket(slot.index);
        let (event_loop, child, start_number) =
            (self.commands.event_loop.clone(), name.clone(), child.start_number);
        tokio::spawn(async move {
            if let Err(error) = worker_drain::drain(&socket, grace).await {
                tracing::warn!(%child, error = service::exit::one_line(&error), "cannot drain the worker");
            }
            // Without an event loop the result is of no use.
            let _: Result<(), _> =
                event_loop.send(SupervisorEvent::WorkerDrained { child, start_number }).await;
        });
    }

    pub(super) fn worker_drained(&mut self, name: &Arc<str>, start_number: u64) {
        if self.children.get(name).is_some_and(|child| child.start_number == start_number) {
            self.apply_event(name, ChildEvent::Drained);
        }
    }

    fn answer_if_stopped(&mut self, name: &Arc<str>) {
        let Some(child) = self.children.get_mut(name) else { return };
        if !child.machine.has_process() {
            for reply in child.waits_for_stop.drain(..) {
                answer(reply, Ok(()));
            }
        }
    }

    /// A worker starts after the weight-server has accepted its token; other roles start at once.
    fn spawn(&mut self, name: &Arc<str>) {
        let child = supervised_child(&mut self.children, name);
        child.start_number += 1;
        child.status_text.clear();
        if child.spec.role != ChildRole::Worker {
            return self.spawn_process(name, None);
        }
        let token = match AttachToken::generate() {
            Ok(token) => token,
            Err(error) => return self.start_failed(name, &error.to_string()),
        };
        child.token = Some(token.clone());
        let (admin, event_loop) = (self.admin.clone(), self.commands.event_loop.clone());
        let (child_name, start_number) = (name.clone(), child.start_number);
        let task = tokio::spawn(async move {
            let refusal = admin.allow_token(child_name.to_string(), token).await.err();
            let refusal = refusal.map(|status| status.message().to_owned());
            // Without an event loop the result is of no use.
            let _: Result<(), _> = event_loop
                .send(SupervisorEvent::TokenAllowed { child: child_name, start_number, refusal })
                .await;
        });
        child.token_registration = Some(task.abort_handle());
    }

    pub(super) fn token_allowed(&mut self, name: &Arc<str>, start_number: u64, refusal: Option<String>) {
        let Some(child) = self.children.get_mut(name).filter(|c| c.start_number == start_number) else {
            return;
        };
        // A Stop command may have cancelled the registration in the meantime.
        if child.token_registration.take().is_none() {
            return;
        }
        match refusal {
            None => {
                let token = child.token.clone();
                self.spawn_process(name, token);
            }
            Some(why) => self.start_failed(name, &format!("the weight-server refused its token: {why}")),
        }
    }

    fn spawn_process(&mut self, name: &Arc<str>, token: Option<AttachToken>) {
        let child = supervised_child(&mut self.children, name);
        let names = self.directory.directory();
        let inherited = match child.spec.role {
            ChildRole::WeightServer => self.fd_store.borrowed().collect(),
            ChildRole::Router => {
                self.spec.router_socket.iter().map(|fd| (HTTP_SOCKET_NAME, fd.as_fd())).collect()
            }
            ChildRole::Worker | ChildRole::Mps | ChildRole::DeviceMonitor => Vec::new(),
        };
        let mps = self.spec.mps.as_ref().filter(|_| child.spec.role == ChildRole::Worker);
        let options = SpawnOptions {
            config: &names.config(name),
            notify_socket: &names.notify_socket(name),
            inherited,
            token,
            mps_directory: mps.map(|mps| mps.directory.as_path()),
            log: self.spec.log,
            watchdog: self.spec.supervision.watchdog,
            log_tail: self.crash_reports.new_log_tail(),
        };
        // The file may have been deleted since the last start.
        if let Err(error) = config::store(options.config, &child.spec.config) {
            return self.start_failed(name, &service::exit::one_line(&error));
        }
        let started = ChildProcess::spawn(&child.spec, options);
        let watched = started.and_then(|process| {
            if let Err(error) = names.record_child(name, process.pid) {
                // The disk may be full. The child works without its record.
                tracing::warn!(child = %name, %error, "cannot record the child: a successor of this supervisor would not take it over");
            }
            watch_exit(&process, name.clone(), child.start_number, child.checkpoints.clone())?;
            Ok(process)
        });
        match watched {
            Ok(process) => {
                tracing::debug!(child = %name, pid = process.pid, "child started");
                child.process = Some(process);
                self.publish_child(name);
            }
            Err(error) => self.start_failed(name, &StartError(error).to_string()),
        }
    }

    fn start_failed(&mut self, name: &Arc<str>, why: &str) {
        tracing::warn!(child = %name, why, "cannot start the child");
        self.record_exit(name, Termination::SpawnFailed(why.to_owned()));
    }

    pub(super) fn signal(&mut self, name: &Arc<str>, send: impl Fn(&ChildProcess)) {
        let child = supervised_child(&mut self.children, name);
        if let Some(token_registration) = child.token_registration.take() {
            token_registration.abort();
            return self.record_exit(name, Termination::SpawnFailed("stopped before it started".to_owned()));
        }
        if let Some(process) = &child.process {
            send(process);
        }
    }

    pub(super) fn process_exited(&mut self, name: &Arc<str>, start_number: u64) {
        let Some(child) = self.children.get_mut(name).filter(|c| c.start_number == start_number) else {
            return;
        };
        let process = child.process.take();
        let mut process = process.expect("invariant: a start number has one process, which exits once");
        let pid = process.pid;
        let dead = DeadProcess::of(&mut process);
        let end = process.reap();
        self.directory.directory().forget_child(name);
        let is_expected = child.machine.is_stopping();
        match is_expected {
            true if end.is_crash() => {
                tracing::error!(child = %name, pid, %end, "child crashed while it stopped");
            }
            true => tracing::debug!(child = %name, pid, %end, "child exited"),
            false => {
                tracing::warn!(child = %name, pid, %end, status_text = child.status_text, "child exited unexpectedly")
            }
        }
        self.report_crash(name, dead, &end);
        self.record_exit(name, end.clone());
        if !is_expected {
            self.note_hung_step(name, &end);
        }
    }

    fn record_exit(&mut self, name: &Arc<str>, end: Termination) {
        if let Some(child) = self.children.get_mut(name).filter(|c| !c.machine.is_stopping()) {
            child.last_termination =
                Some(LastTermination { termination: end.clone(), status_text: child.status_text.clone() });
            // Publishes before the next state: an immediate restart would hide the crash from
            // subscribers.
            self.publish_child(name);
        }
        self.apply_event(name, ChildEvent::Exited(end));
    }

    fn drop_if_removed(&mut self, name: &Arc<str>) {
        let gone = |c: &SupervisedChild| c.removed.is_some() && c.machine.state() == ChildState::Stopped;
        if !self.children.get(name).is_some_and(gone) {
            return;
        }
        let Some(child) = self.children.remove(name) else { return };
        // A later child may get the name.
        self.deadlines.clear_report(name);
        child.forwarder.abort();
        if child.spec.role == ChildRole::Worker {
            tokio::spawn(self.admin.clone().forget_token(name.to_string()));
        }
        let names = self.directory.directory();
        for path in [names.config(name), names.notify_socket(name)] {
            if let Err(error) = std::fs::remove_file(&path) {
                tracing::debug!(path = %path.display(), %error, "cannot remove the file");
            }
        }
        self.publish(FleetEvent::ChildRemoved(name.to_string()));
        if let Some(Some(reply)) = child.removed {
            answer(reply, Ok(()));
        }
        if let Some(slot) = child.slot {
            self.unload_if_unused(&slot.model);
            self.unload_returned(&slot);
            self.notice_gone_workers();
        }
    }
}

/// The child of this name. Callers inside the event loop have checked the name before.
pub(super) fn supervised_child<'a>(
    children: &'a mut BTreeMap<Arc<str>, SupervisedChild>,
    name: &Arc<str>,
) -> &'a mut SupervisedChild {
    children.get_mut(name).expect("invariant: the event loop changes only children that it supervises")
}

/// Reports the exit of a process to the task that forwards its notifications. Works for adopted
/// processes too.
pub(super) fn watch_exit(
    process: &ChildProcess,
    child: Arc<str>,
    start_number: u64,
    checkpoints: mpsc::Sender<Checkpoint>,
) -> io::Result<()> {
    // The descriptor is not a pipe, and nothing reads from it. This is tokio's safe way to wait
    // until a descriptor is readable.
    let pidfd = pipe::Receiver::from_owned_fd_unchecked(process.pidfd()?)?;
    tokio::spawn(async move {
        if let Err(error) = pidfd.readable().await {
            tracing::error!(%child, %error, "cannot wait for the exit of a process");
        }
        // If the forwarding task is gone, the event loop is gone too.
        let _: Result<(), _> = checkpoints.send(Checkpoint::Exited { start_number }).await;
    });
    Ok(())
}
