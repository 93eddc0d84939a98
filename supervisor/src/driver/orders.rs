//! Orders from outside, models, and the stop of the whole fleet.

use std::sync::Arc;

use super::{Child, Driver, Event, Model, answer};
use crate::child::Process;
use crate::fleet::{Command, FleetEvent, FleetStatus, ModelState, OrderError, Reply};
use crate::plan::{ModelPlan, Role};
use crate::state;

/// A worker's index is part of its socket's name.
const WORKERS_MAX: u32 = 10_000;

impl Driver {
    pub(super) fn command(&mut self, command: Command) {
        match command {
            Command::Status(reply) => {
                // Whoever asked may have gone away.
                let _: Result<(), _> = reply.send(self.status());
            }
            Command::Restart { name, reply } => answer(reply, self.restart(&name)),
            Command::AddWorker { model, reply } => answer(reply, self.add_worker(model)),
            Command::RemoveWorker { name, reply } => match self.children.get_key_value(name.as_str()) {
                None => answer(reply, Err(OrderError::UnknownChild { name })),
                Some((_, child)) if child.slot.is_none() => {
                    answer(reply, Err(OrderError::NotAWorker { name }))
                }
                Some((name, _)) => self.remove_worker(&name.clone(), Some(reply)),
            },
            Command::LoadModel { model, reply } => answer(reply, self.load_model(model)),
            Command::UnloadModel { name, reply } => self.unload_model(name, reply),
            Command::Stop => self.stopping = true,
            Command::Kill => self.kill_all(),
        }
    }

    fn status(&self) -> FleetStatus {
        FleetStatus {
            children: self.children.values().map(Child::status).collect(),
            models: self.models.values().map(Model::status).collect(),
            vault_fds: self.vault.len(),
            http_address: self.plan.http_address.clone(),
        }
    }

    fn restart(&mut self, name: &str) -> Result<(), OrderError> {
        self.refuse_when_stopping()?;
        let known = self.children.get_key_value(name).map(|(name, _)| name.clone());
        let name = known.ok_or_else(|| OrderError::UnknownChild { name: name.to_owned() })?;
        self.feed(&name, state::Event::Restart);
        Ok(())
    }

    fn add_worker(&mut self, model: String) -> Result<String, OrderError> {
        self.refuse_when_stopping()?;
        let found = match (model.is_empty(), self.models.len()) {
            (true, 1) => self.models.values().next(),
            (true, models) => return Err(OrderError::AmbiguousModel { models }),
            (false, _) => self.models.get(&model),
        };
        let Some(Model { plan: model, .. }) = found else {
            return Err(OrderError::UnknownModel { name: model });
        };
        let used = |index| self.children.values().any(|c| c.slot.as_ref().is_some_and(|s| s.index == index));
        let Some(index) = (0..WORKERS_MAX).find(|&index| !used(index)) else {
            let why = format!("{WORKERS_MAX} workers are there already");
            return Err(OrderError::NotStarted { name: "worker".to_owned(), why });
        };
        let (plan, slot) = self.plan.worker(index, model);
        let name = plan.name.clone();
        let added = self.add_child(plan, slot);
        let child = added.map_err(|error| OrderError::NotStarted {
            name: name.clone(),
            why: service::exit::one_line(&error),
        })?;
        self.feed(&child, state::Event::Start);
        Ok(name)
    }

    fn load_model(&mut self, plan: ModelPlan) -> Result<(), OrderError> {
        self.refuse_when_stopping()?;
        match self.models.get(&plan.name) {
            Some(Model { state: ModelState::Failed(_), .. }) | None => {}
            Some(_) => return Err(OrderError::NameTaken { name: plan.name }),
        }
        let (name, workers) = (plan.name.clone(), plan.workers);
        self.add_model(plan);
        if let Some(model) = self.models.get_mut(&name) {
            model.load(&self.admin, &self.orders);
        }
        for _ in 0..workers {
            self.add_worker(name.clone())?;
        }
        Ok(())
    }

    fn unload_model(&mut self, name: String, reply: Reply<()>) {
        let Some(model) = self.models.get_mut(&name) else {
            return answer(reply, Err(OrderError::UnknownModel { name }));
        };
        if model.unloading.is_some() {
            let why = "it is being unloaded already".to_owned();
            return answer(reply, Err(OrderError::NotUnloaded { name, why }));
        }
        model.abort();
        model.unloading = Some(reply);
        self.remove_workers_of(&name);
        self.unload_if_unused(&name);
    }

    fn refuse_when_stopping(&self) -> Result<(), OrderError> {
        match self.stopping {
            true => Err(OrderError::Stopping),
            false => Ok(()),
        }
    }

    pub(super) fn add_model(&mut self, plan: ModelPlan) {
        let state = ModelState::Loading { done_bytes: 0, total_bytes: 0 };
        let name = plan.name.clone();
        self.models.insert(name, Model { plan, state, task: None, unloading: None });
    }

    pub(super) fn model_changed(&mut self, name: &str, state: ModelState) {
        let Some(model) = self.models.get_mut(name) else { return };
        if let ModelState::Failed(failure) = &state {
            tracing::warn!(model = name, why = failure.text, "cannot be loaded");
        }
        let failed = matches!(state, ModelState::Failed(_));
        model.state = state;
        let status = model.status();
        self.publish(FleetEvent::Model(status));
        if failed {
            self.remove_workers_of(name);
        }
    }

    fn remove_workers_of(&mut self, model: &str) {
        let of_model = |c: &Child| c.slot.as_ref().is_some_and(|s| s.model == model);
        let workers: Vec<Arc<str>> =
            self.children.iter().filter(|(_, c)| of_model(c)).map(|(name, _)| name.clone()).collect();
        for worker in workers {
            self.remove_worker(&worker, None);
        }
    }

    fn remove_worker(&mut self, name: &Arc<str>, reply: Option<Reply<()>>) {
        let Some(child) = self.children.get_mut(name) else { return };
        child.removed = Some(reply);
        self.feed(name, state::Event::Stop);
    }

    pub(super) fn unload_if_unused(&mut self, name: &str) {
        let used = self.children.values().any(|c| c.slot.as_ref().is_some_and(|s| s.model == name));
        let unloading = self.models.get(name).is_some_and(|m| m.unloading.is_some());
        if used || !unloading {
            return;
        }
        let (admin, driver, name) = (self.admin.clone(), self.orders.driver.clone(), name.to_owned());
        tokio::spawn(async move {
            let refusal = admin.unload(name.clone()).await.err().map(|status| status.message().to_owned());
            let _: Result<(), _> = driver.send(Event::Unloaded { name, refusal }).await;
        });
    }

    pub(super) fn unloaded(&mut self, name: &str, refusal: Option<String>) {
        let Some(reply) = self.models.get_mut(name).and_then(|m| m.unloading.take()) else { return };
        let name = name.to_owned();
        if let Some(why) = refusal {
            return answer(reply, Err(OrderError::NotUnloaded { name, why }));
        }
        self.models.remove(&name);
        self.publish(FleetEvent::ModelGone(name));
        answer(reply, Ok(()));
    }

    /// Stops the first role that still has processes; true when none has.
    pub(super) fn advance_stop(&mut self) -> bool {
        for role in Role::STOP_ORDER {
            let of_role: Vec<Arc<str>> = self
                .children
                .iter()
                .filter(|(_, c)| c.plan.role == role)
                .map(|(name, _)| name.clone())
                .collect();
            for name in &of_role {
                let asked = self.children.get(name).map(|c| c.machine.state());
                if !matches!(asked, None | Some(state::State::Stopped)) {
                    self.feed(name, state::Event::Stop);
                }
            }
            if of_role.iter().any(|name| self.children.get(name).is_some_and(|c| c.machine.has_process())) {
                return false;
            }
        }
        true
    }

    fn kill_all(&mut self) {
        self.stopping = true;
        let names: Vec<Arc<str>> = self.children.keys().cloned().collect();
        for name in names {
            self.feed(&name, state::Event::Stop);
            self.signal(&name, Process::kill);
        }
    }
}
