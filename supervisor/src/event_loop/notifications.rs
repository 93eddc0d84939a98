// SPDX-License-Identifier: Apache-2.0

//! Handles notifications of children, and the FD store.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::SupervisorLoop;
use crate::notification::Notification;
use crate::spec::ChildRole;
use crate::state::ChildEvent;

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
            return self.parent_fds.remove(fd_name);
        }
        for fd in fds.into_iter().map(Arc::new) {
            self.parent_fds.store(fd_name, fd.clone());
            if let Err(error) = self.fd_store.store(fd_name, fd) {
                tracing::error!(fd_name, %error, "cannot store a descriptor");
            }
        }
    }

    /// Closing the descriptor answers the barrier. All earlier messages are processed by then. If
    /// systemd keeps copies of the FD store, the answer waits for systemd too.
    fn answer_barrier(&self, fds: Vec<OwnedFd>) {
        let Some(handled) = self.parent_fds.barrier() else { return };
        tokio::spawn(async move {
            handled.await;
            drop(fds);
        });
    }
}
