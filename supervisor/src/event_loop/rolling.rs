// SPDX-License-Identifier: Apache-2.0

//! Carries out the actions of [`RollingRestart`]: one worker after the other gets its current
//! settings.
//!
//! [`RollingRestart`]: crate::rolling_restart::RollingRestart

use std::sync::Arc;

use super::SupervisorLoop;
use super::children::supervised_child;
use crate::commands::DRAIN_GRACE;
use crate::events::SupervisorEvent;
use crate::rolling_restart::{RollingAction, RollingEvent};
use crate::router_join;
use crate::state::{AfterExit, ChildEvent, ChildState};

impl SupervisorLoop {
    /// Restarts these workers with the settings of their models, one after the other. A worker that
    /// is stopped gets them at its next start.
    pub(super) fn restart_rolling(&mut self, workers: Vec<Arc<str>>) {
        let is_stopped = |name: &Arc<str>| {
            self.children.get(name).is_none_or(|child| child.machine.state() == ChildState::Stopped)
        };
        let (stopped, others): (Vec<_>, Vec<_>) = workers.into_iter().partition(is_stopped);
        stopped.iter().for_each(|name| self.renew_settings(name));
        self.roll(RollingEvent::Begin(others));
    }

    pub(super) fn roll(&mut self, event: RollingEvent<'_>) {
        match self.rolling.handle(event) {
            None => {}
            Some(RollingAction::Restart(name)) => {
                tracing::info!(child = %name, "restarting with new settings");
                self.renew_settings(&name);
                self.apply_event(&name, ChildEvent::Drain { grace: DRAIN_GRACE, then: AfterExit::Start });
            }
            Some(RollingAction::AwaitRouter(name)) => self.await_router(name),
            Some(RollingAction::GiveUp { failed, left }) => {
                let left = left.join(", ");
                tracing::error!(child = %failed, left, "does not come up: the workers that are left keep their settings");
            }
        }
    }

    fn renew_settings(&mut self, name: &Arc<str>) {
        let Some(slot) = self.children.get(name).and_then(|child| child.slot.clone()) else { return };
        let Some(model) = self.models.get(&slot.model) else { return };
        let Some(copy) = model.spec.copy_on(&slot.device) else { return };
        let (spec, slot) = self.worker_spec(slot.index, &model.spec, copy);
        let child = supervised_child(&mut self.children, name);
        (child.spec, child.slot) = (spec, slot);
    }

    /// Asks the router until it uses all running workers of the worker's model.
    fn await_router(&self, name: Arc<str>) {
        let slot = self.children.get(&name).and_then(|child| child.slot.clone());
        let Some(model) = slot.map(|slot| slot.model) else { return };
        let is_running = |child: &&super::SupervisedChild| {
            child.slot.as_ref().is_some_and(|slot| slot.model == model)
                && matches!(child.machine.state(), ChildState::Running { .. })
        };
        let running = self.children.values().filter(is_running).count();
        let (router, event_loop) =
            (self.directory.directory().router_socket(), self.commands.event_loop.clone());
        tokio::spawn(async move {
            let is_used = router_join::wait_until_used(&router, &model, running).await;
            // Without an event loop the result is of no use.
            let _: Result<(), _> =
                event_loop.send(SupervisorEvent::WorkerJoined { child: name, is_used }).await;
        });
    }
}
