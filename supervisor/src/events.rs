//! Everything that reaches the supervisor's event loop.

use std::sync::Arc;

use crate::commands::FleetCommand;
use crate::notification::Notification;
use crate::status::ModelState;

#[derive(Debug)]
pub(crate) enum SupervisorEvent {
    NotificationReceived {
        child: Arc<str>,
        notification: Notification,
    },
    /// The process of this start has ended.
    ProcessExited {
        child: Arc<str>,
        start: u64,
    },
    /// The weight-server knows the token for this start, or refused it.
    TokenAllowed {
        child: Arc<str>,
        start: u64,
        refusal: Option<String>,
    },
    ModelStateChanged {
        name: String,
        state: ModelState,
    },
    ModelUnloaded {
        name: String,
        refusal: Option<String>,
    },
    Command(FleetCommand),
}
