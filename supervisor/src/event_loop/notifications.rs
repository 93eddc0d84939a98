// SPDX-License-Identifier: Apache-2.0

//! Handles notifications of children, the FD store, and the adoption of a dead supervisor's
//! children.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use service::notify::NotifyError;
use service::{Notify, config};

use super::children::{supervised_child, watch_exit};
use super::{FleetStartError, SupervisorLoop};
use crate::notification::Notification;
use crate::process::ChildProcess;
use crate::spec::{ChildRole, ChildSpec, WorkerSlot};
use crate::state::ChildEvent;

/// How long systemd may take to process the messages that were forwarded to it.
const PARENT_BARRIER: Duration = Duration::from_secs(5);

impl SupervisorLoop {
    pub(super) fn handle_notification(&mut self, name: &Arc<str>, notification: Notification) {
        let Some(child) = self.children.get_mut(name) else { return };
        let Notification { pid, message, fds } = notification;
        if child.process.as_ref().is_none_or(|process| process.pid != pid) {
            tracing::warn!(child = %name, pid, "dropped a notification from another process");
            return;
        }
        if message.offers_adoption {
            return self.adopt_offered(name, fds);
        }
        if let Some(text) = message.status {
            child.status_text = text;
            self.publish_child(name);
        }
        if message.store_fds || message.remove_fds {
            self.update_fd_store(name, message.store_fds, message.fd_name.as_deref(), fds);
        } else if message.barrier {
            self.answer_barrier(fds);
        }
        if message.ready {
            self.apply_event(name, ChildEvent::Ready);
            self.sync_weight_server(name);
        }
        if message.watchdog_ping {
            self.apply_event(name, ChildEvent::WatchdogPing);
        }
        if message.watchdog_trigger {
            self.apply_event(name, ChildEvent::WatchdogTrigger);
        }
        if let Some(by) = message.extend_timeout {
            self.apply_event(name, ChildEvent::ExtendTimeout(by));
        }
    }

    /// A weight-server that has just become ready knows no tokens, and perhaps no models. Sends it
    /// both.
    fn sync_weight_server(&mut self, name: &Arc<str>) {
        if self.children.get(name).is_none_or(|c| c.spec.role != ChildRole::WeightServer) {
            return;
        }
        for (worker, child) in &self.children {
            if let (Some(token), None) = (&child.token, &child.token_registration) {
                let (admin, worker, token) = (self.admin.clone(), worker.to_string(), token.clone());
                tokio::spawn(async move {
                    if let Err(status) = admin.allow_token(worker.clone(), token).await {
                        tracing::warn!(worker, %status, "the weight-server refused the token of a worker");
                    }
                });
            }
        }
        for model in self.models.values_mut().filter(|m| m.unloading.is_none()) {
            model.load(&self.admin, &self.commands);
        }
    }

    fn update_fd_store(&mut self, name: &Arc<str>, store: bool, fd_name: Option<&str>, fds: Vec<OwnedFd>) {
        let role = self.children.get(name).map(|c| c.spec.role);
        let (Some(ChildRole::WeightServer), Some(fd_name)) = (role, fd_name) else {
            tracing::warn!(child = %name, "only the weight-server may store descriptors, each with a name");
            return;
        };
        if !store {
            self.fd_store.remove(fd_name);
            self.forward_to_parent(|parent| parent.fdstore_remove(fd_name));
            return;
        }
        for fd in fds {
            self.forward_to_parent(|parent| parent.fdstore(fd_name, &[fd.as_fd()]));
            if let Err(error) = self.fd_store.store(fd_name, fd) {
                tracing::error!(fd_name, %error, "cannot store a descriptor");
            }
        }
    }

    fn forward_to_parent(&self, send: impl FnOnce(&Notify) -> Result<(), NotifyError>) {
        if let Err(error) = send(&self.parent) {
            tracing::error!(%error, "cannot forward to systemd's FD store");
        }
    }

    /// Closing the descriptor answers the barrier. All earlier messages are processed by then. If
    /// systemd keeps copies of the FD store, the answer waits for systemd too.
    fn answer_barrier(&self, fds: Vec<OwnedFd>) {
        if !self.parent.has_parent() {
            return;
        }
        let parent = self.parent.clone();
        tokio::task::spawn_blocking(move || {
            if let Err(error) = parent.barrier(PARENT_BARRIER) {
                tracing::error!(%error, "systemd does not answer the barrier");
            }
            drop(fds);
        });
    }

    /// Running processes that the runtime directory records become orphans of the children with the
    /// same name.
    pub(super) fn adopt_orphans(&mut self, living: &BTreeMap<String, u32>) -> Result<(), FleetStartError> {
        for (name, &pid) in living {
            let known = match self.children.get_key_value(name.as_str()) {
                Some((known, _)) => Some(known.clone()),
                None => self.add_recorded_worker(name)?,
            };
            let Ok(process) = ChildProcess::orphan(pid) else { continue };
            let Some(name) = known else {
                tracing::warn!(child = name, pid, "terminating a process that is not part of this fleet");
                process.terminate();
                continue;
            };
            let child = supervised_child(&mut self.children, &name);
            child.start_number += 1;
            let watched = watch_exit(&process, name.clone(), child.start_number, child.exits.clone());
            watched.map_err(FleetStartError::RuntimeDir)?;
            child.process = Some(process);
            self.apply_event(&name, ChildEvent::OrphanFound);
        }
        Ok(())
    }

    /// The spec does not list a worker that was added while the dead supervisor ran. Its
    /// configuration file names its model.
    fn add_recorded_worker(&mut self, name: &str) -> Result<Option<Arc<str>>, FleetStartError> {
        let Some(index) = name.strip_prefix("worker-").and_then(|i| i.parse().ok()) else { return Ok(None) };
        let path = self.directory.directory().config(name);
        let config: toml::Table = config::load(&path)?;
        let model = config.get("model").and_then(toml::Value::as_str).unwrap_or_default().to_owned();
        let spec = ChildSpec { name: name.to_owned(), role: ChildRole::Worker, config };
        self.add_child(spec, Some(WorkerSlot { index, model })).map(Some)
    }

    /// An orphan offers itself for adoption. From now on it notices when this supervisor dies.
    fn adopt_offered(&mut self, name: &Arc<str>, fds: Vec<OwnedFd>) {
        // The sender decides what it sends: an offer may come without its socket.
        let Some(socket) = fds.into_iter().next() else { return };
        let process = &mut supervised_child(&mut self.children, name).process;
        let process =
            process.as_mut().expect("invariant: the sender of a handled message is the child's process");
        match process.adopt(socket) {
            Ok(()) => {
                tracing::info!(child = %name, pid = process.pid, "adopted");
                self.apply_event(name, ChildEvent::OrphanAdopted);
                self.sync_weight_server(name);
            }
            Err(error) => {
                tracing::warn!(child = %name, %error, "an orphan went away during its adoption")
            }
        }
    }
}
