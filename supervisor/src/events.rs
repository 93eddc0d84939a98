// SPDX-License-Identifier: Apache-2.0

//! Every event that reaches the supervisor's event loop.

use std::sync::Arc;

use bytes::Bytes;

use crate::commands::{CommandError, CommandReply, FleetCommand};
use crate::device_health::DeviceReport;
use crate::fleet_devices::GpuDevice;
use crate::memory_room::DeviceLedger;
use crate::model_swap::SwapEvent;
use crate::notification::Notification;
use crate::resident_models::WeightsOnDevice;
use crate::spec::{ModelSpec, ReloadScope, ReloadedSpec};
use crate::spec_diff::SpecChange;
use crate::status::ModelState;

/// A copy that is resident now.
#[derive(Debug)]
pub(crate) struct ResidentCopy {
    pub(crate) generation: u64,
    pub(crate) digest: Bytes,
    /// Process ids of the workers that hold other weights of this model on this device.
    pub(crate) outdated: Vec<u32>,
}

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
    /// A deadline of the child passed, and all its notifications before that were forwarded.
    DeadlinePassed {
        child: Arc<str>,
    },
    /// The weight-server accepted or refused the attach token of this start.
    TokenAllowed {
        child: Arc<str>,
        start_number: u64,
        refusal: Option<String>,
    },
    /// What the weight-server holds, to be compared with the fleet's models.
    ResidentWeights {
        resident: Vec<WeightsOnDevice>,
    },
    LeftoversUnloaded,
    /// For the models that wait for room.
    LedgerRead {
        ledger: DeviceLedger,
    },
    /// The worker of this start has drained, or did not answer.
    WorkerDrained {
        child: Arc<str>,
        start_number: u64,
    },
    CopyStateChanged {
        name: String,
        device: String,
        state: ModelState,
    },
    CopyLoaded {
        name: String,
        device: String,
        loaded: ResidentCopy,
    },
    /// Workers hold older weights of a model, whose memory the new weights need.
    WorkersOutdated {
        pids: Vec<u32>,
    },
    ModelUnloaded {
        name: String,
        refusal: Option<String>,
    },
    /// The router uses the restarted worker, or has not used it for too long.
    WorkerJoined {
        child: Arc<str>,
        is_used: bool,
    },
    /// A step of the swap with this number is done.
    SwapAdvanced {
        number: u64,
        event: SwapEvent,
    },
    /// The configuration was read again.
    ConfigurationRead {
        read: Result<ReloadedSpec, CommandError>,
        scope: ReloadScope,
        reply: CommandReply<Vec<SpecChange>>,
    },
    /// GPUs that a load names and that the fleet has not used before, or why they cannot be used.
    DevicesFound {
        found: Result<Vec<GpuDevice>, CommandError>,
        model: Box<ModelSpec>,
        reply: CommandReply<()>,
    },
    /// From the device monitor.
    DevicesReported {
        reports: Vec<DeviceReport>,
    },
    Command(FleetCommand),
}
