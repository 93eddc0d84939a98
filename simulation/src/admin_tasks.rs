// SPDX-License-Identifier: Apache-2.0

//! The supervisor's calls of the weight-server, as the tasks of its admin client make them. What
//! they decide is in `supervisor::resident_models`.

use bytes::Bytes;
use memory::manifest::HOST_DEVICE;
use supervisor::resident_models::{
    OlderGenerations, WeightsOnDevice, find_known, leftovers, older_generations, resident_weights,
};
use weight_server::tokens::token_digest;

use crate::fleet::Fleet;
use crate::messages::{AdminAnswer, AdminRequest, Message, ToSupervisor, ToWeightServer, TokenBytes};
use crate::network::{Link, MILLISECOND, Micros, SECOND};
use proto::weights::v1::Status;

const TOKEN_RETRY: Micros = 20 * MILLISECOND;
const LOAD_RETRY: Micros = 200 * MILLISECOND;
const FAILED_LOAD_PAUSE: Micros = SECOND;
const FAILED_LOAD_PAUSE_MAX: Micros = 60 * SECOND;

/// The copy of a model: simulated fleets have no other device.
fn on_host(model: &str) -> WeightsOnDevice {
    WeightsOnDevice { weights: model.to_owned(), device: HOST_DEVICE.to_owned() }
}

/// A model of the fleet.
#[derive(Debug)]
pub(crate) struct SimModel {
    pub(crate) digest: Option<Bytes>,
    pub(crate) was_served: bool,
    pub(crate) is_ready: bool,
    /// The current task that loads the model.
    task: u64,
    pause: Micros,
}

impl SimModel {
    pub(crate) fn new(was_served: bool) -> Self {
        Self { digest: None, was_served, is_ready: false, task: 0, pause: FAILED_LOAD_PAUSE }
    }
}

/// A task of the admin client, and where it is.
#[derive(Clone, Debug)]
pub(crate) enum AdminTask {
    /// `start`: the process of this start waits for the answer.
    AllowToken {
        name: String,
        token: TokenBytes,
        start: Option<u64>,
    },
    ForgetToken {
        name: String,
    },
    FindResident {
        sync: u64,
    },
    UnloadLeftover {
        sync: u64,
        first: String,
        rest: Vec<String>,
    },
    Model {
        name: String,
        task: u64,
        step: ModelStep,
    },
}

#[derive(Clone, Debug)]
pub(crate) enum ModelStep {
    FindKnown,
    Load,
    /// This generation is the model's.
    FindOlder {
        generation: u64,
        digest: [u8; 32],
    },
    UnloadOlder {
        generation: u64,
        digest: [u8; 32],
        older: Vec<u64>,
        readers: Vec<u32>,
    },
    /// The memory does not suffice for old and new weights.
    FindReplaceable,
    UnloadReplaceable {
        older: Vec<u64>,
        readers: Vec<u32>,
    },
}

impl Fleet {
    /// Compares what a new weight-server holds with the models of this fleet.
    pub(crate) fn sync_models(&mut self) {
        let sync = self.number();
        if let Some(supervisor) = self.supervisor.as_mut() {
            supervisor.sync = sync;
        }
        self.call_admin(AdminTask::FindResident { sync });
    }

    fn request_models(&mut self) {
        let names = self.supervisor.iter().flat_map(|s| s.models.keys().cloned());
        let names: Vec<String> = names.collect();
        for name in names {
            let task = self.number();
            let supervisor = self.supervisor.as_mut().expect("it has models");
            let model = supervisor.models.get_mut(&name).expect("it was just listed");
            (model.task, model.pause) = (task, FAILED_LOAD_PAUSE);
            self.start_model_task(name, task);
        }
    }

    fn start_model_task(&mut self, name: String, task: u64) {
        let model = self.supervisor.as_ref().and_then(|s| s.models.get(&name));
        let step = match model.and_then(|model| model.digest.as_ref()) {
            Some(_) => ModelStep::FindKnown,
            None => ModelStep::Load,
        };
        self.call_admin(AdminTask::Model { name, task, step });
    }

    fn is_current(&self, task: &AdminTask) -> bool {
        let Some(supervisor) = &self.supervisor else { return false };
        match task {
            AdminTask::AllowToken { name, token, .. } => {
                supervisor.children.get(name.as_str()).is_some_and(|child| child.token == Some(*token))
            }
            AdminTask::ForgetToken { .. } => true,
            AdminTask::FindResident { sync } | AdminTask::UnloadLeftover { sync, .. } => {
                supervisor.sync == *sync
            }
            AdminTask::Model { name, task, .. } => {
                supervisor.models.get(name).is_some_and(|model| model.task == *task)
            }
        }
    }

    pub(crate) fn call_admin(&mut self, task: AdminTask) {
        let call = self.number();
        let Some(supervisor) = self.supervisor.as_mut() else { return };
        supervisor.calls.insert(call, task);
        self.repeat_admin_call(call);
    }

    pub(crate) fn repeat_admin_call(&mut self, call: u64) {
        let Some(task) = self.supervisor.as_mut().and_then(|s| s.calls.remove(&call)) else { return };
        if !self.is_current(&task) {
            return;
        }
        let request = match &task {
            AdminTask::AllowToken { name, token, .. } => {
                AdminRequest::AllowToken { name: name.clone(), digest: token_digest(token) }
            }
            AdminTask::ForgetToken { name } => AdminRequest::ForgetToken { name: name.clone() },
            AdminTask::FindResident { .. } => AdminRequest::Status,
            AdminTask::UnloadLeftover { first, .. } => {
                AdminRequest::Unload { model: first.clone(), generation: None }
            }
            AdminTask::Model { name, step, .. } => match step {
                ModelStep::FindKnown | ModelStep::FindOlder { .. } | ModelStep::FindReplaceable => {
                    AdminRequest::Status
                }
                ModelStep::Load => AdminRequest::Load { model: name.clone() },
                ModelStep::UnloadOlder { older, .. } | ModelStep::UnloadReplaceable { older, .. } => {
                    AdminRequest::Unload { model: name.clone(), generation: older.last().copied() }
                }
            },
        };
        let supervisor = self.supervisor.as_mut().expect("it has the call");
        supervisor.calls.insert(call, task);
        match self.weight_server.as_ref().filter(|server| server.is_ready()) {
            Some(server) => {
                let message = Message::WeightServer(ToWeightServer::Admin { call, request });
                self.net.send(Link::Admin(supervisor.pid), server.pid, message);
            }
            None => self.answer_admin(call, AdminAnswer::Unavailable),
        }
    }

    /// The answer of a weight-server, or of the transport.
    pub(crate) fn answer_admin(&mut self, call: u64, answer: AdminAnswer) {
        if let Some(supervisor) = &self.supervisor {
            let message = Message::Supervisor(ToSupervisor::AdminAnswer { call, answer });
            self.net.send(Link::AdminReply(supervisor.pid), supervisor.pid, message);
        }
    }

    /// The weight-server is gone.
    pub(crate) fn fail_admin_calls(&mut self) {
        let calls: Vec<u64> = self.supervisor.iter().flat_map(|s| s.calls.keys().copied()).collect();
        for call in calls {
            self.answer_admin(call, AdminAnswer::Unavailable);
        }
    }

    fn retry_admin(&mut self, task: AdminTask, after: Micros) {
        let call = self.number();
        if let Some(supervisor) = self.supervisor.as_mut() {
            supervisor.calls.insert(call, task);
            let retry = Message::Supervisor(ToSupervisor::RetryAdmin { call });
            self.net.timer(supervisor.pid, after, retry);
        }
    }

    pub(crate) fn handle_admin_answer(&mut self, call: u64, answer: AdminAnswer) {
        let Some(task) = self.supervisor.as_mut().and_then(|s| s.calls.remove(&call)) else { return };
        if !self.is_current(&task) {
            return;
        }
        match task {
            AdminTask::AllowToken { name, token, start } => match answer {
                AdminAnswer::Unavailable => {
                    self.retry_admin(AdminTask::AllowToken { name, token, start }, TOKEN_RETRY);
                }
                _ => {
                    if let Some(start) = start {
                        self.token_allowed(&name, start);
                    }
                }
            },
            AdminTask::ForgetToken { .. } => {}
            AdminTask::FindResident { sync } => match answer {
                AdminAnswer::Status(status) => self.unload_leftovers(sync, &status),
                _ => self.retry_admin(AdminTask::FindResident { sync }, LOAD_RETRY),
            },
            AdminTask::UnloadLeftover { sync, first, mut rest } => match (answer, rest.pop()) {
                (AdminAnswer::Unavailable, last) => {
                    rest.extend(last);
                    self.retry_admin(AdminTask::UnloadLeftover { sync, first, rest }, LOAD_RETRY);
                }
                (_, Some(first)) => self.call_admin(AdminTask::UnloadLeftover { sync, first, rest }),
                (_, None) => self.request_models(),
            },
            AdminTask::Model { name, task, step } => self.continue_model_task(name, task, step, answer),
        }
    }

    fn unload_leftovers(&mut self, sync: u64, status: &Status) {
        let supervisor = self.supervisor.as_ref().expect("it handles an answer");
        let is_of_fleet = |copy: &WeightsOnDevice| supervisor.models.contains_key(&copy.weights);
        let left = leftovers(resident_weights(status), is_of_fleet);
        let mut rest: Vec<String> = left.into_iter().map(|copy| copy.weights).collect();
        match rest.pop() {
            Some(first) => self.call_admin(AdminTask::UnloadLeftover { sync, first, rest }),
            None => self.request_models(),
        }
    }

    fn continue_model_task(&mut self, name: String, task: u64, step: ModelStep, answer: AdminAnswer) {
        let next = match (step, answer) {
            (_, AdminAnswer::Unavailable) => {
                // Starts again with what is known by then.
                let known = self.supervisor.as_ref().and_then(|s| s.models.get(&name)?.digest.as_ref());
                let step = if known.is_some() { ModelStep::FindKnown } else { ModelStep::Load };
                return self.retry_admin(AdminTask::Model { name, task, step }, LOAD_RETRY);
            }
            (ModelStep::FindKnown, AdminAnswer::Status(status)) => {
                let digest = self.supervisor.as_ref().and_then(|s| s.models.get(&name)?.digest.clone());
                let known = digest.and_then(|digest| find_known(&status, &on_host(&name), &digest));
                match known {
                    Some(found) => {
                        let digest = found.digest[..].try_into().unwrap_or_default();
                        ModelStep::FindOlder { generation: found.generation, digest }
                    }
                    None => ModelStep::Load,
                }
            }
            (ModelStep::Load, AdminAnswer::Loaded { generation, digest }) => {
                ModelStep::FindOlder { generation, digest }
            }
            (ModelStep::Load, AdminAnswer::Failed { is_memory_short: true }) => ModelStep::FindReplaceable,
            (ModelStep::FindOlder { generation, digest }, AdminAnswer::Status(status)) => {
                let OlderGenerations { to_unload: older, readers } =
                    older_generations(&status, &on_host(&name), Some(generation));
                if older.is_empty() {
                    return self.model_loaded(&name, digest, &readers);
                }
                ModelStep::UnloadOlder { generation, digest, older, readers }
            }
            (ModelStep::UnloadOlder { generation, digest, mut older, readers }, _) => {
                older.pop();
                if older.is_empty() {
                    return self.model_loaded(&name, digest, &readers);
                }
                ModelStep::UnloadOlder { generation, digest, older, readers }
            }
            (ModelStep::FindReplaceable, AdminAnswer::Status(status)) => {
                let OlderGenerations { to_unload: older, readers } =
                    older_generations(&status, &on_host(&name), None);
                if older.is_empty() {
                    return self.replace_readers(name, task, &readers);
                }
                ModelStep::UnloadReplaceable { older, readers }
            }
            (ModelStep::UnloadReplaceable { mut older, readers }, _) => {
                older.pop();
                if older.is_empty() {
                    return self.replace_readers(name, task, &readers);
                }
                ModelStep::UnloadReplaceable { older, readers }
            }
            (_, _) => return self.load_failed(name, task),
        };
        self.call_admin(AdminTask::Model { name, task, step: next });
    }

    fn replace_readers(&mut self, name: String, task: u64, readers: &[u32]) {
        self.restart_processes(readers);
        self.retry_admin(AdminTask::Model { name, task, step: ModelStep::Load }, LOAD_RETRY);
    }

    fn model_loaded(&mut self, name: &str, digest: [u8; 32], outdated: &[u32]) {
        self.counts.models_loaded += 1;
        if let Some(model) = self.supervisor.as_mut().and_then(|s| s.models.get_mut(name)) {
            model.digest = Some(Bytes::copy_from_slice(&digest));
            (model.was_served, model.is_ready) = (true, true);
        }
        self.restart_processes(outdated);
    }

    fn load_failed(&mut self, name: String, task: u64) {
        self.counts.failed_loads += 1;
        let Some(model) = self.supervisor.as_mut().and_then(|s| s.models.get_mut(&name)) else { return };
        if !model.was_served {
            return self.remove_model_workers(&name);
        }
        let pause = model.pause;
        model.pause = FAILED_LOAD_PAUSE_MAX.min(pause * 2);
        let step = if model.digest.is_some() { ModelStep::FindKnown } else { ModelStep::Load };
        self.retry_admin(AdminTask::Model { name, task, step }, pause);
    }
}
