// SPDX-License-Identifier: Apache-2.0

//! The supervisor process around its real policies: child state machines, deadlines, FD store,
//! placing of orphans. It does in the simulation what the event loop does in the executable.

use std::collections::BTreeMap;
use std::sync::Arc;

use supervisor::deadlines::ChildDeadlines;
use supervisor::fd_store::{FdStore, OpenFileId};
use supervisor::orphans::{OrphanPlace, place_orphan, slot_of_worker};
use supervisor::state::{ChildAction, ChildEvent, ChildStateMachine};
use supervisor::{
    BackoffReason, ChildRole, ChildSpec, ChildState, SupervisionConfig, Termination, WorkerSlot,
};

use crate::admin_tasks::{AdminTask, SimModel};
use crate::cures::Cure;
use crate::fleet::Fleet;
use crate::messages::{
    Message, Notice, StoredItem, ToChild, ToSupervisor, ToWeightServer, ToWorld, TokenBytes,
};
use crate::network::{Link, MILLISECOND, Micros, SimPid, WORLD, mix};
use crate::router_process::SimRouter;
use crate::weight_server_process::SimWeightServer;
use crate::worker_process::SimWorker;

#[derive(Debug)]
pub(crate) struct SimChild {
    pub(crate) spec: ChildSpec,
    pub(crate) slot: Option<WorkerSlot>,
    pub(crate) machine: ChildStateMachine,
    pub(crate) process: Option<SimPid>,
    pub(crate) start_number: u64,
    pub(crate) token: Option<TokenBytes>,
    /// The process starts when the weight-server has accepted its token.
    pub(crate) awaits_token: bool,
    is_outdated: bool,
    is_removed: bool,
}

#[derive(Debug)]
pub(crate) struct SimSupervisor {
    pub(crate) pid: SimPid,
    pub(crate) children: BTreeMap<Arc<str>, SimChild>,
    pub(crate) models: BTreeMap<String, SimModel>,
    pub(crate) fd_store: FdStore<StoredItem>,
    pub(crate) deadlines: ChildDeadlines,
    pub(crate) calls: BTreeMap<u64, AdminTask>,
    /// The current task that compares the weight-server's models with the fleet's.
    pub(crate) sync: u64,
    tick_at: Micros,
}

impl Fleet {
    pub(crate) fn start_supervisor(&mut self) {
        if self.supervisor.is_some() {
            return;
        }
        let pid = self.start_process("supervisor".into(), None, None);
        let living: BTreeMap<String, (SimPid, toml::Table)> = self
            .recorded
            .iter()
            .filter(|(_, (pid, _))| self.is_alive(*pid))
            .map(|(n, p)| (n.clone(), p.clone()))
            .collect();
        let spec = self.plan.fleet_spec();
        let models = spec.models.iter().map(|model| {
            let was_served = !living.is_empty();
            (model.name.clone(), SimModel::new(was_served))
        });
        let mut supervisor = SimSupervisor {
            pid,
            children: BTreeMap::new(),
            models: models.collect(),
            fd_store: FdStore::default(),
            deadlines: ChildDeadlines::new(self.instant(), spec.supervision.watchdog),
            calls: BTreeMap::new(),
            sync: 0,
            tick_at: Micros::MAX,
        };
        let index_of = |name: &str| name.strip_prefix("worker-")?.parse::<u32>().ok();
        let workers: BTreeMap<u32, WorkerSlot> = living
            .iter()
            .filter_map(|(name, (_, config))| {
                Some((index_of(name)?, slot_of_worker(index_of(name)?, config)))
            })
            .collect();
        for (spec, slot) in spec.initial_children(&workers) {
            supervisor.add_child(spec, slot);
        }
        self.supervisor = Some(supervisor);
        for (name, (process, recorded)) in &living {
            self.place_orphan(name, *process, recorded);
        }
        let wanted = self.supervisor.iter().flat_map(|s| &s.children);
        let (gone, wanted): (Vec<_>, Vec<_>) =
            wanted.map(|(name, child)| (name.clone(), child.slot.clone())).partition(|(_, slot)| {
                let models = &self.supervisor.as_ref().expect("it was just started").models;
                slot.as_ref().is_some_and(|slot| !models.contains_key(&slot.model))
            });
        for (name, _) in gone {
            self.remove_worker(&name);
        }
        for (name, _) in wanted {
            self.apply(&name, ChildEvent::Start);
        }
    }

    fn place_orphan(&mut self, name: &str, process: SimPid, recorded: &toml::Table) {
        let Some(supervisor) = self.supervisor.as_mut() else { return };
        let configured = supervisor.children.get(name).map(|child| &child.spec.config);
        let is_worker = name.starts_with("worker-");
        let outdated = match place_orphan(name, configured, is_worker.then_some(recorded)) {
            OrphanPlace::Child { is_outdated } => is_outdated,
            OrphanPlace::RecordedWorker { index } => {
                let slot = slot_of_worker(index, recorded);
                let spec =
                    ChildSpec { name: name.to_owned(), role: ChildRole::Worker, config: recorded.clone() };
                supervisor.add_child(spec, Some(slot));
                false
            }
            OrphanPlace::Foreign => {
                return self.net.timer(process, 0, Message::Child(ToChild::Terminate));
            }
        };
        let name: Arc<str> = name.into();
        if let Some(child) = supervisor.children.get_mut(&name) {
            child.start_number += 1;
            child.is_outdated = outdated;
            child.process = Some(process);
        }
        self.apply(&name, ChildEvent::OrphanFound);
    }

    pub(crate) fn handle_supervisor(&mut self, event: ToSupervisor) {
        match event {
            ToSupervisor::Notice { child, pid, notice } => self.handle_notice(&child, pid, notice),
            ToSupervisor::ChildExited { child, pid, termination } => {
                self.recorded.retain(|_, (recorded, _)| *recorded != pid);
                let Some(known) = self.child(&child).filter(|known| known.process == Some(pid)) else {
                    return;
                };
                known.process = None;
                self.apply(&child, ChildEvent::Exited(termination));
            }
            ToSupervisor::DeadlinePassed { child } => {
                if let Some(supervisor) = self.supervisor.as_mut() {
                    supervisor.deadlines.clear_report(&child);
                }
                self.apply(&child, ChildEvent::Tick);
            }
            ToSupervisor::Tick { at } => self.tick(at),
            ToSupervisor::AdminAnswer { call, answer } => self.handle_admin_answer(call, answer),
            ToSupervisor::RetryAdmin { call } => self.repeat_admin_call(call),
        }
    }

    pub(crate) fn child(&mut self, name: &str) -> Option<&mut SimChild> {
        self.supervisor.as_mut()?.children.get_mut(name)
    }

    fn tick(&mut self, at: Micros) {
        let now = self.instant();
        let Some(supervisor) = self.supervisor.as_mut() else { return };
        let deadlines = supervisor.children.iter().map(|(name, child)| (name, child.machine.deadline()));
        if self.missing == Some(Cure::WatchdogRunningTime) {
            let due = deadlines.filter(|(_, at)| at.is_some_and(|at| at <= now));
            let due: Vec<Arc<str>> = due.map(|(name, _)| name.clone()).collect();
            supervisor.tick_at = Micros::MAX;
            due.iter().for_each(|child| self.apply(child, ChildEvent::Tick));
            return self.schedule_tick();
        }
        for child in supervisor.deadlines.report_passed(now, deadlines) {
            // The checkpoint goes through the task that forwards the child's notifications.
            let pid = supervisor.children[&child].process.unwrap_or(WORLD);
            let passed = Message::Supervisor(ToSupervisor::DeadlinePassed { child });
            self.net.send(Link::Notify(pid), supervisor.pid, passed);
        }
        if supervisor.tick_at == at {
            supervisor.tick_at = Micros::MAX;
        }
        self.schedule_tick();
    }

    fn schedule_tick(&mut self) {
        let now = self.instant();
        let Some(supervisor) = self.supervisor.as_mut() else { return };
        let deadlines = supervisor.children.iter().map(|(name, child)| (name, child.machine.deadline()));
        let next = supervisor.deadlines.next_tick(deadlines);
        let after = next.saturating_duration_since(now).as_micros() as Micros;
        let at = self.net.now + after;
        if at < supervisor.tick_at {
            supervisor.tick_at = at;
            self.net.timer(supervisor.pid, after, Message::Supervisor(ToSupervisor::Tick { at }));
        }
    }

    /// Applies an event to a child's state machine and executes the action.
    pub(crate) fn apply(&mut self, name: &Arc<str>, event: ChildEvent) {
        let now = self.instant();
        let Some(supervisor) = self.supervisor.as_mut() else { return };
        let now = match self.missing {
            Some(Cure::WatchdogRunningTime) => now,
            _ => supervisor.deadlines.advance(now),
        };
        let Some(child) = supervisor.children.get_mut(name) else { return };
        let is_loop =
            |state| matches!(state, ChildState::BackingOff { reason: BackoffReason::CrashLoop, .. });
        let gives_up = self.missing == Some(Cure::EndlessRestarts) && event == ChildEvent::Tick;
        if gives_up && is_loop(child.machine.state()) {
            return;
        }
        let action = child.machine.handle(now, event);
        let process = child.process;
        match action {
            Some(ChildAction::Spawn) => self.spawn(name),
            Some(ChildAction::Terminate | ChildAction::Drain { .. }) => match process {
                Some(pid) => {
                    self.resume(pid);
                    self.net.timer(pid, 0, Message::Child(ToChild::Terminate));
                }
                None => self.cancel_start(name),
            },
            Some(ChildAction::Kill) => match process {
                Some(pid) => self.kill_by_supervisor(name, pid),
                None => self.cancel_start(name),
            },
            None => {}
        }
        self.drop_if_removed(name);
        self.schedule_tick();
    }

    fn cancel_start(&mut self, name: &Arc<str>) {
        if let Some(child) = self.child(name).filter(|child| child.awaits_token) {
            child.awaits_token = false;
            self.apply(name, ChildEvent::Exited(Termination::SpawnFailed(String::new())));
        }
    }

    fn drop_if_removed(&mut self, name: &Arc<str>) {
        let is_gone =
            |child: &&mut SimChild| child.is_removed && child.machine.state() == ChildState::Stopped;
        if self.child(name).filter(is_gone).is_some() {
            self.call_admin(AdminTask::ForgetToken { name: name.to_string() });
            let Some(supervisor) = self.supervisor.as_mut() else { return };
            let slot = supervisor.children.remove(name).and_then(|child| child.slot);
            supervisor.deadlines.clear_report(name);
            // It may have returned weights after the leftovers were unloaded.
            if slot.is_some_and(|slot| !supervisor.models.contains_key(&slot.model)) {
                self.sync_models();
            }
        }
    }

    fn remove_worker(&mut self, name: &Arc<str>) {
        if let Some(child) = self.child(name) {
            child.is_removed = true;
        }
        self.apply(name, ChildEvent::Stop);
    }

    pub(crate) fn remove_model_workers(&mut self, model: &str) {
        let of_model = |child: &SimChild| child.slot.as_ref().is_some_and(|slot| slot.model == model);
        let workers = self.supervisor.iter().flat_map(|s| &s.children).filter(|(_, c)| of_model(c));
        let workers: Vec<Arc<str>> = workers.map(|(name, _)| name.clone()).collect();
        workers.iter().for_each(|name| self.remove_worker(name));
    }

    pub(crate) fn restart_processes(&mut self, pids: &[u32]) {
        let is_meant = |c: &SimChild| c.slot.is_some() && c.process.is_some_and(|pid| pids.contains(&pid));
        let workers = self.supervisor.iter().flat_map(|s| &s.children).filter(|(_, c)| is_meant(c));
        let workers: Vec<Arc<str>> = workers.map(|(name, _)| name.clone()).collect();
        for name in workers {
            if let Some(child) = self.child(&name) {
                child.is_outdated = false;
            }
            self.apply(&name, ChildEvent::Restart);
        }
    }

    fn spawn(&mut self, name: &Arc<str>) {
        let number = self.number();
        let Some(child) = self.child(name) else { return };
        child.start_number += 1;
        if child.spec.role != ChildRole::Worker {
            return self.spawn_process(name);
        }
        let mut token = [0; 32];
        token[..8].copy_from_slice(&mix(number).to_le_bytes());
        child.token = Some(token);
        child.awaits_token = true;
        let (start, name) = (Some(child.start_number), name.to_string());
        self.call_admin(AdminTask::AllowToken { name, token, start });
    }

    pub(crate) fn token_allowed(&mut self, name: &str, start: u64) {
        let name: Arc<str> = name.into();
        let Some(child) = self.child(&name).filter(|child| child.start_number == start) else { return };
        if std::mem::take(&mut child.awaits_token) {
            self.spawn_process(&name);
        }
    }

    fn spawn_process(&mut self, name: &Arc<str>) {
        let Some(supervisor) = self.supervisor.as_ref() else { return };
        let (parent, child) = (supervisor.pid, &supervisor.children[name]);
        let (role, config) = (child.spec.role, child.spec.config.clone());
        let (token, slot) = (child.token, child.slot.clone());
        let inherited: Vec<(String, StoredItem)> =
            supervisor.fd_store.entries().map(|(name, item)| (name.to_owned(), item.clone())).collect();
        let pid = self.start_process(name.clone(), Some(role), Some(parent));
        self.recorded.insert(name.to_string(), (pid, config));
        match (role, slot) {
            (ChildRole::WeightServer, _) => {
                self.weight_server = Some(SimWeightServer::new(pid, inherited));
            }
            (ChildRole::Router, _) => self.router = Some(SimRouter::new(pid)),
            (_, Some(slot)) => {
                let worker = SimWorker::new(&slot.model, token.unwrap_or_default());
                self.workers.insert(pid, worker);
            }
            (_, None) => {}
        }
        if let Some(child) = self.child(name) {
            child.process = Some(pid);
        }
    }

    fn handle_notice(&mut self, name: &Arc<str>, pid: SimPid, notice: Notice) {
        let Some(child) = self.child(name).filter(|child| child.process == Some(pid)) else { return };
        let is_weight_server = child.spec.role == ChildRole::WeightServer;
        match notice {
            Notice::Ready => {
                self.apply(name, ChildEvent::Ready);
                self.sync_if(is_weight_server);
            }
            Notice::Ping => self.apply(name, ChildEvent::WatchdogPing),
            Notice::Store { name, item } => {
                let file = OpenFileId { device: 0, inode: inode_of(&item) };
                let supervisor = self.supervisor.as_mut().expect("it handles a notice");
                if let Err(error) = supervisor.fd_store.store_file(&name, item, file) {
                    self.break_invariant(|| format!("I7: {error}"));
                }
            }
            Notice::Remove { name } => {
                let supervisor = self.supervisor.as_mut().expect("it handles a notice");
                supervisor.fd_store.remove(&name);
            }
            Notice::Barrier { number } => {
                let answer = ToWeightServer::BarrierAnswered { number };
                self.net.timer(pid, 20, Message::WeightServer(answer));
            }
            Notice::Offer { number, token } => {
                let is_outdated = std::mem::take(&mut child.is_outdated);
                child.token = token;
                let supervisor = self.supervisor.as_ref().expect("it handles a notice").pid;
                let adopted = ToChild::Adopted { supervisor, offer: number };
                self.net.timer(pid, MILLISECOND, Message::Child(adopted));
                self.apply(name, ChildEvent::OrphanAdopted);
                self.register_token(name);
                self.sync_if(is_weight_server);
                if is_outdated {
                    self.apply(name, ChildEvent::Restart);
                }
            }
        }
    }

    fn sync_if(&mut self, is_weight_server: bool) {
        if is_weight_server {
            let names = self.supervisor.iter().flat_map(|s| s.children.keys().cloned());
            let names: Vec<Arc<str>> = names.collect();
            names.iter().for_each(|name| self.register_token(name));
            self.sync_models();
        }
    }

    fn register_token(&mut self, name: &Arc<str>) {
        if let Some(child) = self.child(name).filter(|child| !child.awaits_token)
            && let Some(token) = child.token
        {
            self.call_admin(AdminTask::AllowToken { name: name.to_string(), token, start: None });
        }
    }

    /// A watchdog or a grace period is over.
    fn kill_by_supervisor(&mut self, name: &Arc<str>, pid: SimPid) {
        self.check_kill(name, pid);
        self.kill(pid, Termination::Signal(9));
    }

    pub(crate) fn restart_supervisor_after(&mut self, after: Micros) {
        self.net.timer(WORLD, after, Message::World(ToWorld::StartSupervisor));
    }
}

impl SimSupervisor {
    fn add_child(&mut self, spec: ChildSpec, slot: Option<WorkerSlot>) {
        let child = SimChild {
            machine: ChildStateMachine::new(spec.role.policy(&SupervisionConfig::default())),
            slot,
            process: None,
            start_number: 0,
            token: None,
            awaits_token: false,
            is_outdated: false,
            is_removed: false,
            spec,
        };
        self.children.insert(child.spec.name.as_str().into(), child);
    }
}

fn inode_of(item: &StoredItem) -> u64 {
    match item {
        StoredItem::Allocation { copy, index } => copy.inode * 8 + *index as u64,
        StoredItem::Manifest(manifest) => manifest.contents.manifest_inode * 8 + 7,
        StoredItem::Retired => 0,
        StoredItem::Pidfd(pid) => u64::from(*pid),
        StoredItem::Record(record) => record.lease,
    }
}
