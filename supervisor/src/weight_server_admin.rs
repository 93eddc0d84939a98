// SPDX-License-Identifier: Apache-2.0

//! The supervisor's client of the weight-server: loads and unloads models, and registers attach
//! tokens.
//!
//! Each request runs in a task of its own and reports to the event loop. If the weight-server dies
//! during a request, the task asks its successor.

use std::time::Duration;

use proto::weights::v1 as wire;
use proto::weights::v1::weight_server_client::WeightServerClient;
use tokio::sync::mpsc;
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::attach_token::AttachToken;
use crate::events::SupervisorEvent;
use crate::spec::ModelSpec;
use crate::status::{ModelFailure, ModelState};

/// How often the client offers a token to a weight-server that is not reachable yet.
const TOKEN_RETRY_INTERVAL: Duration = Duration::from_millis(20);
/// How often the client repeats a load while the weight-server is not reachable.
const LOAD_RETRY_INTERVAL: Duration = Duration::from_millis(200);

/// A client of weights-admin.sock that survives restarts of the weight-server. Cheap to clone.
#[derive(Clone)]
pub(crate) struct WeightServerAdmin {
    client: WeightServerClient<Channel>,
}

impl WeightServerAdmin {
    pub(crate) fn new(channel: Channel) -> Self {
        Self { client: WeightServerClient::new(channel) }
    }

    /// Repeats the request until the weight-server accepts or refuses the token. Dropping the
    /// future cancels it.
    pub(crate) async fn allow_token(mut self, name: String, token: AttachToken) -> Result<(), Status> {
        loop {
            let request =
                wire::AllowTokenRequest { name: name.clone(), token: token.bytes().to_vec().into() };
            match self.client.allow_token(request).await {
                Ok(_) => return Ok(()),
                Err(status) if is_unreachable(&status) => tokio::time::sleep(TOKEN_RETRY_INTERVAL).await,
                Err(status) => return Err(status),
            }
        }
    }

    /// Makes the model resident and reports every state change to the event loop.
    pub(crate) async fn load(mut self, model: ModelSpec, event_loop: mpsc::Sender<SupervisorEvent>) {
        let state = loop {
            let outcome = match self.is_resident(&model.name).await {
                Ok(true) => Ok(()),
                Ok(false) => self.load_from_file(&model, &event_loop).await,
                Err(status) => Err(status),
            };
            match outcome {
                Ok(()) => break ModelState::Ready,
                // The weight-server died. Its successor may have adopted the model, or loads it
                // from the file.
                Err(status) if is_unreachable(&status) => tokio::time::sleep(LOAD_RETRY_INTERVAL).await,
                Err(status) => break ModelState::Failed(ModelFailure::from_status(&status)),
            }
        };
        // Without an event loop the result is of no use.
        let _: Result<(), _> =
            event_loop.send(SupervisorEvent::ModelStateChanged { name: model.name, state }).await;
    }

    /// An adopted model counts as resident, even if its file no longer exists.
    async fn is_resident(&mut self, name: &str) -> Result<bool, Status> {
        let status = self.client.get_status(wire::GetStatusRequest {}).await?.into_inner();
        let ready = |g: &wire::Generation| g.model == name && g.state() == wire::GenerationState::Ready;
        Ok(status.generations.iter().any(ready))
    }

    async fn load_from_file(
        &mut self,
        model: &ModelSpec,
        event_loop: &mpsc::Sender<SupervisorEvent>,
    ) -> Result<(), Status> {
        let request = wire::LoadRequest {
            model: model.name.clone(),
            path: model.path.to_string_lossy().into_owned(),
            device: model.device.clone(),
            no_packing: !model.pack,
        };
        let mut events = self.client.load(request).await?.into_inner();
        while let Some(event) = events.message().await? {
            match event.kind {
                Some(wire::load_event::Kind::Waiting(wire::Waiting { done_bytes, total_bytes, .. })) => {
                    let state = ModelState::Loading { done_bytes, total_bytes };
                    let _: Result<(), _> = event_loop
                        .send(SupervisorEvent::ModelStateChanged { name: model.name.clone(), state })
                        .await;
                }
                Some(wire::load_event::Kind::Loaded(_)) => return Ok(()),
                None => {}
            }
        }
        Err(Status::unavailable("the weight-server ended the load without a result"))
    }

    pub(crate) async fn unload(mut self, name: String) -> Result<(), Status> {
        match self.client.unload(wire::UnloadRequest { model: name }).await {
            Ok(_) => Ok(()),
            Err(status) if status.code() == Code::NotFound => Ok(()),
            Err(status) => Err(status),
        }
    }
}

/// The weight-server did not answer: it is starting, or it just died. A status with a source was
/// created on this side of the connection.
fn is_unreachable(status: &Status) -> bool {
    status.code() == Code::Unavailable || std::error::Error::source(status).is_some()
}
