//! Starting, signalling, reaping and forgetting children.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use service::config;
use tokio::net::unix::pipe;
use tokio::sync::mpsc;

use super::{Child, Driver, Event, StartError, answer};
use crate::child::{Process, Surroundings};
use crate::fleet::{FleetEvent, LastEnd};
use crate::notify_server;
use crate::plan::{ChildPlan, Role, WorkerSlot};
use crate::state::{self, Action, End, Machine};
use crate::token::Token;

impl Driver {
    /// Makes the child known: its configuration and its notify socket are there, its process is not.
    pub(super) fn add_child(
        &mut self,
        plan: ChildPlan,
        slot: Option<WorkerSlot>,
    ) -> Result<Arc<str>, StartError> {
        let name: Arc<str> = plan.name.as_str().into();
        let names = self.directory.directory();
        config::store(&names.config(&name), &plan.config)?;
        let socket = notify_server::bind(&names.notify_socket(&name))
            .map_err(|source| StartError::NotifySocket { child: plan.name.clone(), source })?;
        // One process at a time: the next one starts when the driver has heard of the last one's end.
        let (ends, ended) = mpsc::channel(1);
        let forwarder =
            tokio::spawn(notify_server::forward(socket, ended, name.clone(), self.orders.driver.clone()));
        let child = Child {
            machine: Machine::new(plan.role.policy()),
            plan,
            slot,
            process: None,
            start: 0,
            token: None,
            preparing: None,
            forwarder,
            ends,
            status_text: String::new(),
            last_end: None,
            removed: None,
        };
        self.children.insert(name.clone(), child);
        Ok(name)
    }

    /// Lets the machine of a child see an event, and does what it says.
    pub(super) fn feed(&mut self, name: &Arc<str>, event: state::Event) {
        let Some(child) = self.children.get_mut(name) else { return };
        let before = child.machine.state();
        let action = child.machine.on(Instant::now(), event);
        let after = child.machine.state();
        if std::mem::discriminant(&before) != std::mem::discriminant(&after) {
            if let state::State::Failed(cause) = after {
                tracing::warn!(child = %name, ?cause, "given up");
            }
            self.publish_child(name);
        }
        match action {
            Some(Action::Spawn) => self.spawn(name),
            Some(Action::Terminate) => self.signal(name, Process::terminate),
            Some(Action::Kill) => self.signal(name, Process::kill),
            None => {}
        }
        self.forget_if_removed(name);
    }

    /// A worker starts when the weight-server knows its token; the others start at once.
    fn spawn(&mut self, name: &Arc<str>) {
        let Some(child) = self.children.get_mut(name) else { return };
        child.start += 1;
        child.status_text.clear();
        if child.plan.role != Role::Worker {
            return self.start_process(name, None);
        }
        let token = match Token::draw() {
            Ok(token) => token,
            Err(error) => return self.not_started(name, &error.to_string()),
        };
        child.token = Some(token.clone());
        let (admin, driver) = (self.admin.clone(), self.orders.driver.clone());
        let (child_name, start) = (name.clone(), child.start);
        let task = tokio::spawn(async move {
            let refusal = admin.tell_token(child_name.to_string(), token).await.err();
            let refusal = refusal.map(|status| status.message().to_owned());
            // A driver that is gone has no use for it.
            let _: Result<(), _> = driver.send(Event::TokenTold { child: child_name, start, refusal }).await;
        });
        child.preparing = Some(task.abort_handle());
    }

    pub(super) fn token_told(&mut self, name: &Arc<str>, start: u64, refusal: Option<String>) {
        let Some(child) = self.children.get_mut(name).filter(|c| c.start == start) else { return };
        // A stop order in between has taken the preparation back.
        if child.preparing.take().is_none() {
            return;
        }
        match refusal {
            None => {
                let token = child.token.clone();
                self.start_process(name, token);
            }
            Some(why) => self.not_started(name, &format!("the weight-server refused its token: {why}")),
        }
    }

    fn start_process(&mut self, name: &Arc<str>, token: Option<Token>) {
        let Some(child) = self.children.get_mut(name) else { return };
        let names = self.directory.directory();
        let inherited = match child.plan.role {
            Role::WeightServer => self.vault.entries().collect(),
            Role::Router => self.plan.router_socket.iter().map(|fd| ("http", fd.as_fd())).collect(),
            Role::Worker => Vec::new(),
        };
        let surroundings = Surroundings {
            config: &names.config(name),
            notify_socket: &names.notify_socket(name),
            inherited,
            token,
            log: self.plan.log,
        };
        let started = Process::spawn(&child.plan, surroundings);
        let watched = started.and_then(|process| {
            names.record_child(name, process.pid)?;
            watch_end(&process, name.clone(), child.start, child.ends.clone())?;
            Ok(process)
        });
        match watched {
            Ok(process) => {
                tracing::debug!(child = %name, pid = process.pid, "started");
                child.process = Some(process);
                self.publish_child(name);
            }
            Err(error) => self.not_started(name, &error.to_string()),
        }
    }

    fn not_started(&mut self, name: &Arc<str>, why: &str) {
        tracing::warn!(child = %name, why, "cannot start");
        self.end(name, End::NotStarted(why.to_owned()));
    }

    pub(super) fn signal(&mut self, name: &Arc<str>, send: impl Fn(&Process)) {
        let Some(child) = self.children.get_mut(name) else { return };
        if let Some(preparing) = child.preparing.take() {
            preparing.abort();
            return self.end(name, End::NotStarted("stopped before its start".to_owned()));
        }
        if let Some(process) = &child.process {
            send(process);
        }
    }

    pub(super) fn ended(&mut self, name: &Arc<str>, start: u64) {
        let Some(child) = self.children.get_mut(name).filter(|c| c.start == start) else { return };
        let Some(process) = child.process.take() else { return };
        let pid = process.pid;
        let end = process.reap();
        self.directory.directory().forget_child(name);
        match child.machine.is_stopping() {
            true => tracing::debug!(child = %name, pid, %end, "ended"),
            false => tracing::warn!(child = %name, pid, %end, words = child.status_text, "ended by itself"),
        }
        self.end(name, end);
    }

    fn end(&mut self, name: &Arc<str>, end: End) {
        if let Some(child) = self.children.get_mut(name).filter(|c| !c.machine.is_stopping()) {
            child.last_end = Some(LastEnd { end: end.clone(), words: child.status_text.clone() });
            // An immediate restart would hide it from whoever watches states.
            self.publish_child(name);
        }
        self.feed(name, state::Event::Ended(end));
    }

    fn forget_if_removed(&mut self, name: &Arc<str>) {
        let gone = |c: &Child| c.removed.is_some() && c.machine.state() == state::State::Stopped;
        if !self.children.get(name).is_some_and(gone) {
            return;
        }
        let Some(child) = self.children.remove(name) else { return };
        child.forwarder.abort();
        let names = self.directory.directory();
        for path in [names.config(name), names.notify_socket(name)] {
            if let Err(error) = std::fs::remove_file(&path) {
                tracing::debug!(path = %path.display(), %error, "cannot remove");
            }
        }
        self.publish(FleetEvent::ChildGone(name.to_string()));
        if let Some(Some(reply)) = child.removed {
            answer(reply, Ok(()));
        }
        if let Some(slot) = child.slot {
            self.unload_if_unused(&slot.model);
        }
    }
}

/// Reports the end of a process, whoever its parent is, to the forwarder of its notifications.
pub(super) fn watch_end(
    process: &Process,
    child: Arc<str>,
    start: u64,
    ends: mpsc::Sender<u64>,
) -> io::Result<()> {
    // Not a pipe, and never read from: this is tokio's safe way to wait for any descriptor.
    let pidfd = pipe::Receiver::from_owned_fd_unchecked(process.pidfd()?)?;
    tokio::spawn(async move {
        if let Err(error) = pidfd.readable().await {
            tracing::error!(%child, %error, "cannot wait for the end of a process");
        }
        // A forwarder that is gone has no driver any more.
        let _: Result<(), _> = ends.send(start).await;
    });
    Ok(())
}
