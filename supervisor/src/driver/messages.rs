//! What children say, and the vault; how the children of a dead supervisor are taken over.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use service::notify::NotifyError;
use service::{Notify, config};

use super::children::watch_end;
use super::{Driver, StartError};
use crate::child::Process;
use crate::notify_server::Notification;
use crate::plan::{ChildPlan, Role, WorkerSlot};
use crate::state;

/// How long systemd may take to work off what was forwarded to it.
const PARENT_BARRIER: Duration = Duration::from_secs(5);

impl Driver {
    pub(super) fn notified(&mut self, name: &Arc<str>, notification: Notification) {
        let Some(child) = self.children.get_mut(name) else { return };
        let Notification { pid, message, fds } = notification;
        if child.process.as_ref().is_none_or(|process| process.pid != pid) {
            tracing::warn!(child = %name, pid, "dropped a notification that is not from this child");
            return;
        }
        if message.adopt {
            return self.offered(name, fds);
        }
        if let Some(text) = message.status {
            child.status_text = text;
            self.publish_child(name);
        }
        if message.store || message.remove {
            self.keep(name, message.store, message.fd_name.as_deref(), fds);
        } else if message.barrier {
            self.barrier(fds);
        }
        if message.ready {
            self.feed(name, state::Event::Ready);
            self.after_ready(name);
        }
        if message.alive {
            self.feed(name, state::Event::Alive);
        }
        if message.stuck {
            self.feed(name, state::Event::Stuck);
        }
        if let Some(by) = message.extend {
            self.feed(name, state::Event::Extend(by));
        }
    }

    /// A weight-server that has just become ready knows neither tokens nor, perhaps, models.
    fn after_ready(&mut self, name: &Arc<str>) {
        if self.children.get(name).is_none_or(|c| c.plan.role != Role::WeightServer) {
            return;
        }
        for (worker, child) in &self.children {
            if let (Some(token), None) = (&child.token, &child.preparing) {
                let (admin, worker, token) = (self.admin.clone(), worker.to_string(), token.clone());
                tokio::spawn(async move {
                    if let Err(status) = admin.tell_token(worker.clone(), token).await {
                        tracing::warn!(worker, %status, "the weight-server refused the token of a worker");
                    }
                });
            }
        }
        for model in self.models.values_mut().filter(|m| m.unloading.is_none()) {
            model.load(&self.admin, &self.orders);
        }
    }

    fn keep(&mut self, name: &Arc<str>, store: bool, fd_name: Option<&str>, fds: Vec<OwnedFd>) {
        let role = self.children.get(name).map(|c| c.plan.role);
        let (Some(Role::WeightServer), Some(fd_name)) = (role, fd_name) else {
            tracing::warn!(child = %name, "only the weight-server may store descriptors, each with a name");
            return;
        };
        if !store {
            self.vault.remove(fd_name);
            self.forward(|parent| parent.fdstore_remove(fd_name));
            return;
        }
        for fd in fds {
            self.forward(|parent| parent.fdstore(fd_name, &[fd.as_fd()]));
            if let Err(error) = self.vault.store(fd_name, fd) {
                tracing::error!(fd_name, %error, "cannot keep a descriptor");
            }
        }
    }

    fn forward(&self, send: impl FnOnce(&Notify) -> Result<(), NotifyError>) {
        if let Err(error) = send(&self.parent) {
            tracing::error!(%error, "systemd does not keep a descriptor");
        }
    }

    /// Closing the descriptor answers the barrier. Everything before it is in the vault; systemd, where it keeps copies, is
    /// waited for as well.
    fn barrier(&self, fds: Vec<OwnedFd>) {
        if !self.parent.has_parent() {
            return;
        }
        let parent = self.parent.clone();
        tokio::task::spawn_blocking(move || {
            if let Err(error) = parent.barrier(PARENT_BARRIER) {
                tracing::error!(%error, "systemd does not answer");
            }
            drop(fds);
        });
    }

    /// Living processes that the directory records become orphans of the children of the same name.
    pub(super) fn take_over(&mut self, living: &BTreeMap<String, u32>) -> Result<(), StartError> {
        for (name, &pid) in living {
            let known = match self.children.get_key_value(name.as_str()) {
                Some((known, _)) => Some(known.clone()),
                None => self.know_added_worker(name)?,
            };
            let Ok(process) = Process::orphan(pid) else { continue };
            let Some(name) = known else {
                tracing::warn!(child = name, pid, "ending a process that this fleet has no place for");
                process.terminate();
                continue;
            };
            let Some(child) = self.children.get_mut(&name) else { continue };
            child.start += 1;
            let watched = watch_end(&process, name.clone(), child.start, child.ends.clone());
            watched.map_err(StartError::RuntimeDir)?;
            child.process = Some(process);
            self.feed(&name, state::Event::Orphan);
        }
        Ok(())
    }

    /// A worker that was added while the dead supervisor ran is in no plan; its configuration tells its model.
    fn know_added_worker(&mut self, name: &str) -> Result<Option<Arc<str>>, StartError> {
        let Some(index) = name.strip_prefix("worker-").and_then(|i| i.parse().ok()) else { return Ok(None) };
        let path = self.directory.directory().config(name);
        let config: toml::Table = config::load(&path)?;
        let model = config.get("model").and_then(toml::Value::as_str).unwrap_or_default().to_owned();
        let plan = ChildPlan { name: name.to_owned(), role: Role::Worker, config };
        self.add_child(plan, Some(WorkerSlot { index, model })).map(Some)
    }

    /// An orphan offers itself: from now on it hears when we die.
    fn offered(&mut self, name: &Arc<str>, fds: Vec<OwnedFd>) {
        let Some(child) = self.children.get_mut(name) else { return };
        let (Some(process), Some(socket)) = (&mut child.process, fds.into_iter().next()) else { return };
        match process.adopt(socket) {
            Ok(()) => {
                tracing::info!(child = %name, pid = process.pid, "taken over");
                self.feed(name, state::Event::Adopted);
                self.after_ready(name);
            }
            Err(error) => {
                tracing::warn!(child = %name, %error, "an orphan went away while it was taken over")
            }
        }
    }
}
