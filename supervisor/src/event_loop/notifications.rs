// SPDX-License-Identifier: Apache-2.0

//! Handles notifications of children, and the FD store.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use service::Notify;
use service::notify::NotifyError;

use super::SupervisorLoop;
use crate::notification::Notification;
use crate::spec::ChildRole;
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
            return self.adopt_offered(name, fds, message.attach_token);
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
}
