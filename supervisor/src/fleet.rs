//! The handle on a running fleet: sends commands to the event loop and reads its status.

use service::RuntimeDir;
use tokio::sync::{broadcast, mpsc, oneshot};
use tokio::task::JoinHandle;

use crate::commands::{CommandError, CommandReply, FleetCommand};
use crate::events::SupervisorEvent;
use crate::status::{FleetEvent, FleetStatus};

/// A subscriber that is this many events behind is told that it missed some.
pub(crate) const EVENT_BROADCAST_CAPACITY: usize = 256;

/// Gives commands to the driver. Cheap to clone.
#[derive(Clone)]
pub(crate) struct CommandSender {
    pub(crate) driver: mpsc::Sender<SupervisorEvent>,
    pub(crate) events: broadcast::Sender<FleetEvent>,
}

impl CommandSender {
    pub(crate) async fn send(&self, command: FleetCommand) {
        // A driver that is gone drops the reply channel, which the caller sees.
        let _: Result<(), _> = self.driver.send(SupervisorEvent::Command(command)).await;
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

/// A running fleet. Dropping it leaves the fleet to itself, as the death of this process would: end it with
/// [`FleetHandle::stop`].
pub struct FleetHandle {
    pub(crate) commands: CommandSender,
    pub(crate) directory: RuntimeDir,
    pub(crate) tasks: Vec<JoinHandle<()>>,
}

impl FleetHandle {
    pub fn directory(&self) -> &RuntimeDir {
        &self.directory
    }

    /// What changes from now on.
    pub fn events(&self) -> broadcast::Receiver<FleetEvent> {
        self.commands.events.subscribe()
    }

    pub async fn status(&self) -> Result<FleetStatus, CommandError> {
        self.commands.status().await
    }

    /// Begins the stop: router, then workers, then weight-server, each with its grace.
    pub async fn stop(&self) {
        self.commands.send(FleetCommand::Stop).await;
    }

    /// Ends every child at once.
    pub async fn kill(&self) {
        self.commands.send(FleetCommand::Kill).await;
    }

    /// Returns when every child has ended and the runtime directory is gone.
    pub async fn stopped(&mut self) {
        for task in &mut self.tasks {
            if let Err(error) = task.await {
                tracing::error!(%error, "a task of the supervisor has failed");
            }
        }
        self.tasks.clear();
    }
}
