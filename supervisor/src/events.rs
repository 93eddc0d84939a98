// SPDX-License-Identifier: Apache-2.0

//! Every event that reaches the supervisor's event loop.

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
    /// The process with this start number exited.
    ProcessExited {
        child: Arc<str>,
        start_number: u64,
    },
    /// The weight-server accepted or refused the attach token of this start.
    TokenAllowed {
        child: Arc<str>,
        start_number: u64,
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
