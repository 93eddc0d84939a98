// SPDX-License-Identifier: Apache-2.0

//! Handles notifications of children, and the FD store.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::socket::{getsockopt, sockopt};
use service::listen::HTTP_SOCKET_NAME;

use super::SupervisorLoop;
use crate::notification::Notification;
use crate::spec::ChildRole;
use crate::state::{ChildEvent, MAX_TIMEOUT_EXTENSION};

/// The stop graces of workers, MPS and weight-server, which stop after the router.
const OTHER_CHILDREN_STOP: Duration = Duration::from_secs(20);

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
        if message.serving {
            self.worker_serves(name);
        }
        if message.used {
            self.model_used(name);
        }
        if message.watchdog_ping {
            self.apply_event(name, ChildEvent::WatchdogPing);
        }
        if message.watchdog_trigger {
            self.apply_event(name, ChildEvent::WatchdogTrigger);
        }
        if let Some(by) = message.extend_timeout {
            if self.stopping {
                // The service manager's time for a stop includes that of the child.
                self.extend_own_stop(by);
            }
            self.apply_event(name, ChildEvent::ExtendTimeout(by));
        }
    }

    fn update_fd_store(&mut self, name: &Arc<str>, store: bool, fd_name: Option<&str>, fds: Vec<OwnedFd>) {
        let role = self.children.get(name).map(|c| c.spec.role);
        if (role, store, fd_name) == (Some(ChildRole::Router), true, Some(HTTP_SOCKET_NAME)) {
            return self.keep_router_socket(fds);
        }
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

    /// A router that runs longer than its supervisor gives its socket to the successor, so that the
    /// next router inherits it.
    fn keep_router_socket(&mut self, fds: Vec<OwnedFd>) {
        let listens = |fd: &OwnedFd| getsockopt(fd, sockopt::AcceptConn).is_ok_and(|listens| listens);
        match fds.into_iter().find(listens) {
            Some(socket) if self.spec.router_socket.is_none() => {
                tracing::debug!("the public socket of the router is kept for the next one");
                self.spec.router_socket = Some(socket);
            }
            Some(_) => {}
            None => tracing::warn!("the router sent no listening socket"),
        }
    }

    fn extend_own_stop(&self, by: Duration) {
        // The children after this one need time too.
        let by = by.min(MAX_TIMEOUT_EXTENSION) + OTHER_CHILDREN_STOP;
        if let Err(error) = self.parent.extend_timeout(by) {
            tracing::debug!(%error, "cannot ask the service manager for more time to stop");
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
