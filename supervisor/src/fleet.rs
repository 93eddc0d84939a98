// SPDX-License-Identifier: Apache-2.0

//! The handle on a running fleet. It sends commands to the event loop and reads the fleet's status.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use service::RuntimeDir;
use service::runtime_dir::RuntimeDirError;
use tokio::sync::{broadcast, mpsc, oneshot, watch};
use tokio::task::JoinHandle;

use crate::commands::{CommandError, CommandReply, FleetCommand};
use crate::events::SupervisorEvent;
use crate::spec::ReloadScope;
use crate::status::{FleetEvent, FleetStatus};

/// A subscriber that is this many events behind loses events, and is told how many.
pub(crate) const EVENT_BROADCAST_CAPACITY: usize = 256;

/// Sends commands to the event loop. Cheap to clone.
#[derive(Clone)]
pub(crate) struct CommandSender {
    pub(crate) event_loop: mpsc::Sender<SupervisorEvent>,
    pub(crate) events: broadcast::Sender<FleetEvent>,
}

impl CommandSender {
    pub(crate) async fn send(&self, command: FleetCommand) {
        // If the event loop has ended, it drops the reply channel, which the caller sees.
        let _: Result<(), _> = self.event_loop.send(SupervisorEvent::Command(command)).await;
    }

    pub(crate) async fn call<T>(
        &self,
        command: impl FnOnce(CommandReply<T>) -> FleetCommand,
    ) -> Result<T, CommandError> {
        let (reply, answer) = oneshot::channel();
        self.send(command(reply)).await;
        answer.await.unwrap_or(Err(CommandError::Stopping))
    }

    pub(crate) async fn status(&self) -> Result<FleetStatus, CommandError> {
        let (reply, answer) = oneshot::channel();
        self.send(FleetCommand::Status(reply)).await;
        answer.await.map_err(|_| CommandError::Stopping)
    }
}

/// Why the event loop stopped the fleet on its own.
pub(crate) type FleetLoss = Arc<Mutex<Option<RuntimeDirError>>>;

/// A running fleet. Dropping the handle does not stop the fleet; [`FleetHandle::stop`] does.
pub struct FleetHandle {
    pub(crate) commands: CommandSender,
    pub(crate) directory: RuntimeDir,
    pub(crate) has_adopted: bool,
    pub(crate) loss: FleetLoss,
    pub(crate) tasks: Vec<JoinHandle<()>>,
}

/// The pause before a reload is tried again. It doubles with each failure.
const RELOAD_PAUSE: Duration = Duration::from_secs(2);
const RELOAD_PAUSE_MAX: Duration = Duration::from_secs(60);

impl FleetHandle {
    pub fn directory(&self) -> &RuntimeDir {
        &self.directory
    }

    /// Whether the fleet took over running children of a dead supervisor.
    pub fn has_adopted(&self) -> bool {
        self.has_adopted
    }

    /// Why the fleet stopped itself.
    pub fn take_loss(&self) -> Option<RuntimeDirError> {
        self.loss.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Subscribes to the events from now on.
    pub fn events(&self) -> broadcast::Receiver<FleetEvent> {
        self.commands.events.subscribe()
    }

    pub async fn status(&self) -> Result<FleetStatus, CommandError> {
        self.commands.status().await
    }

    /// Begins the stop: first the router, then the workers, then the weight-server, each with its
    /// grace period.
    pub async fn stop(&self) {
        self.commands.send(FleetCommand::Stop).await;
    }

    /// Kills every child at once.
    pub async fn kill(&self) {
        self.commands.send(FleetCommand::Kill).await;
    }

    /// Reloads the configuration at every change of `requests`. The log says what changed. A change
    /// of the models directory that cannot be applied, during a swap for example, is tried again.
    pub fn reload_on(&self, mut requests: watch::Receiver<u64>, scope: ReloadScope) {
        let commands = self.commands.clone();
        tokio::spawn(async move {
            while requests.changed().await.is_ok() {
                let mut pause = RELOAD_PAUSE;
                loop {
                    let reload = |reply| FleetCommand::Reload { scope, reply };
                    match commands.call(reload).await {
                        Ok(changes) => {
                            tracing::info!(changes = changes.len(), "the configuration was reloaded");
                            break;
                        }
                        Err(CommandError::Stopping) => return,
                        Err(error) => tracing::error!(%error, "cannot reload the configuration"),
                    }
                    if scope != ReloadScope::ModelsDirectory {
                        break;
                    }
                    tokio::time::sleep(pause).await;
                    pause = RELOAD_PAUSE_MAX.min(2 * pause);
                }
            }
        });
    }

    /// Returns after every child has exited and the runtime directory is removed.
    pub async fn stopped(&mut self) {
        for task in &mut self.tasks {
            if let Err(error) = task.await {
                tracing::error!(%error, "a task of the supervisor has failed");
            }
        }
        self.tasks.clear();
    }
}
