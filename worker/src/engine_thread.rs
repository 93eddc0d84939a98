// SPDX-License-Identifier: Apache-2.0

//! The engine's thread: attaches the model, then runs the engine loop until the process stops.

use std::sync::{Arc, Weak};

use bytes::Bytes;
use handoff::attach::GrantedModel;
use handoff::lease::LeaseGuard;
use service::Notify;
use tokio::sync::oneshot;

use crate::attach::{self, AttachContext, AttachedEngine, AttachedModelInfo};
use crate::attach_error::WorkerAttachError;
use crate::backend::DeviceRuntime;
use crate::config::WorkerConfig;
use crate::engine_loop::{EngineHandle, EngineLoopError, engine_loop};
use crate::run_error::WorkerRunError;
use crate::startup_timeline::StartupTimeline;

/// The engine of an attached model, as gRPC calls use it.
pub(crate) struct ServingEngine {
    pub(crate) handle: EngineHandle,
    pub(crate) info: AttachedModelInfo,
}

/// Sent once the engine can step.
pub(crate) struct EngineReady {
    pub(crate) engine: ServingEngine,
    pub(crate) leases: Vec<Weak<LeaseGuard>>,
}

/// The inputs of the engine's thread.
pub(crate) struct EngineThread<'a> {
    pub(crate) timeline: StartupTimeline,
    pub(crate) config: &'a WorkerConfig,
    pub(crate) token: Option<Bytes>,
    pub(crate) notify: &'a Notify,
    pub(crate) ready: oneshot::Sender<EngineReady>,
}

impl EngineThread<'_> {
    /// Waits until the weight-server grants the configured model on `device`.
    pub(crate) fn request_grant<R: DeviceRuntime>(
        &self,
        device: String,
    ) -> Result<GrantedModel, WorkerAttachError> {
        attach::request_grant::<R>(device, &self.attach_context())
    }

    fn attach_context(&self) -> AttachContext<'_> {
        AttachContext { config: self.config, token: self.token.as_ref(), notify: self.notify }
    }

    /// Maps the granted model, builds its engine, and runs the engine loop.
    pub(crate) fn run_on<R: DeviceRuntime>(
        self,
        runtime: &R,
        granted: GrantedModel,
    ) -> Result<(), WorkerRunError> {
        let AttachedEngine { engine, leases, info } =
            attach::build_engine(runtime, granted, self.timeline.clone(), &self.attach_context())?;
        let score_rows_max = self.config.engine_config().score_rows_max(info.vocab_size);
        let (handle, engine_loop) = engine_loop(engine, score_rows_max, R::measure, info.timeline.clone());
        let ready = EngineReady {
            engine: ServingEngine { handle, info },
            leases: leases.iter().map(Arc::downgrade).collect(),
        };
        if self.ready.send(ready).is_err() {
            // The process is stopping. Weights must be unmapped before the leases end.
            drop(engine_loop);
            return Ok(());
        }
        // `run` consumes the engine, so the weights are unmapped before the leases end.
        let ended = engine_loop.run();
        drop(leases);
        ended.map_err(|error| match error {
            EngineLoopError::Step(source) => WorkerRunError::Engine { device: runtime.describe(), source },
            EngineLoopError::Integrity(source) => WorkerRunError::Integrity(source),
        })
    }
}
