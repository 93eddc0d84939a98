// SPDX-License-Identifier: Apache-2.0

//! The supervisor's client of the weight-server: loads and unloads models, and registers attach
//! tokens.
//!
//! Each request runs in a task of its own and reports to the event loop. If the weight-server dies
//! during a request, the task asks its successor.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use bytes::Bytes;
use proto::weights::v1 as wire;
use proto::weights::v1::weight_server_client::WeightServerClient;
use service::Exit;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::attach_token::AttachToken;
use crate::events::{ResidentCopy, SupervisorEvent};
use crate::fleet_devices::{FleetDevices, GpuDevice};
use crate::memory_room::DeviceLedger;
use crate::resident_models::{self, WeightsOnDevice};
use crate::status::{ModelFailure, ModelState};

/// How often the client offers a token to a weight-server that is not reachable yet.
const TOKEN_RETRY_INTERVAL: Duration = Duration::from_millis(20);
/// How often the client repeats a load or an unload while the weight-server is not reachable.
const LOAD_RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// How long older weights of a model may keep the memory that the new ones need: a worker drains
/// for 10 s, then it is killed.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(60);
/// The pause after the first failed load of a model that was served before. It doubles with each
/// failure. A mount that is back is found within a minute.
const FAILED_LOAD_PAUSE: Duration = Duration::from_secs(1);
const FAILED_LOAD_PAUSE_MAX: Duration = Duration::from_secs(60);

/// What one load of a copy needs to know.
#[derive(Clone, Debug)]
pub(crate) struct CopyLoad {
    /// The model's name in requests, for reports.
    pub(crate) model: String,
    pub(crate) copy: WeightsOnDevice,
    pub(crate) path: PathBuf,
    pub(crate) pack: bool,
    /// Resident weights of this digest are the model's, whatever has become of its file.
    pub(crate) known: Option<Bytes>,
    /// A load that failed is tried again after a growing pause, for ever.
    pub(crate) repeats: bool,
    /// This generation has other content than the model's other copies: it is unloaded, and the
    /// load begins after a pause.
    pub(crate) rejected: Option<u64>,
}

/// A client of weights-admin.sock that survives restarts of the weight-server. Cheap to clone.
#[derive(Clone)]
pub(crate) struct WeightServerAdmin {
    client: WeightServerClient<Channel>,
    /// Those of the fleet.
    devices: watch::Receiver<FleetDevices>,
}

impl WeightServerAdmin {
    pub(crate) fn new(channel: Channel, devices: watch::Receiver<FleetDevices>) -> Self {
        Self { client: WeightServerClient::new(channel), devices }
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

    /// For a worker that is gone for good. A weight-server that is not reachable forgets all tokens
    /// anyway.
    pub(crate) async fn forget_token(mut self, name: String) {
        if let Err(status) = self.client.forget_token(wire::ForgetTokenRequest { name }).await {
            tracing::debug!(%status, "the weight-server did not forget a token");
        }
    }

    /// The copies of weights that the weight-server holds or loads.
    pub(crate) async fn resident_weights(mut self) -> Vec<WeightsOnDevice> {
        loop {
            if let Ok(status) = self.status().await {
                return resident_models::resident_weights(&status);
            }
            tokio::time::sleep(LOAD_RETRY_INTERVAL).await;
        }
    }

    /// Capacity and reservations of each device.
    pub(crate) async fn device_ledger(mut self) -> DeviceLedger {
        loop {
            if let Ok(status) = self.status().await {
                return resident_models::device_ledger(&status);
            }
            tokio::time::sleep(LOAD_RETRY_INTERVAL).await;
        }
    }

    /// Makes the copy resident and reports every state change to the event loop.
    pub(crate) async fn load(mut self, load: CopyLoad, event_loop: mpsc::Sender<SupervisorEvent>) {
        if let Some(generation) = load.rejected {
            self.unload_rejected(&load.copy.weights, generation).await;
            tokio::time::sleep(FAILED_LOAD_PAUSE_MAX).await;
        }
        let (mut started, mut pause) = (Instant::now(), FAILED_LOAD_PAUSE);
        let outcome = loop {
            let status = match self.load_and_replace(&load, Some(&event_loop)).await {
                Ok(loaded) => break Ok(loaded),
                Err(status) => status,
            };
            // If the weight-server died, its successor may have adopted the model, or loads it from
            // the file.
            let again = is_unreachable(&status)
                // Another model of the same file is just being unloaded.
                || (status.code() == Code::AlreadyExists && started.elapsed() < RELEASE_TIMEOUT)
                || (status.code() == Code::ResourceExhausted
                    && started.elapsed() < RELEASE_TIMEOUT
                    && self.release_older(&load.copy, &event_loop).await);
            if again {
                tokio::time::sleep(LOAD_RETRY_INTERVAL).await;
                continue;
            }
            let failure = ModelFailure::from_status(&status);
            if !load.repeats {
                break Err(failure);
            }
            report(&event_loop, &load, ModelState::Failed(failure)).await;
            tokio::time::sleep(pause).await;
            pause = FAILED_LOAD_PAUSE_MAX.min(pause * 2);
            started = Instant::now();
        };
        let (name, device) = (load.model, load.copy.device);
        let event = match outcome {
            Ok(loaded) => SupervisorEvent::CopyLoaded { name, device, loaded },
            Err(failure) => {
                SupervisorEvent::CopyStateChanged { name, device, state: ModelState::Failed(failure) }
            }
        };
        // Without an event loop the result is of no use.
        let _: Result<(), _> = event_loop.send(event).await;
    }

    /// Loads the new file of a swap onto each device, and returns its digest. The first failure is
    /// returned after all loads have ended.
    pub(crate) async fn load_all_once(self, loads: Vec<CopyLoad>) -> Result<Bytes, ModelFailure> {
        let mut running = JoinSet::new();
        for load in loads {
            running.spawn(self.clone().load_once(load));
        }
        let mut loaded = running.join_all().await.into_iter().collect::<Result<Vec<Bytes>, _>>()?;
        let digest = loaded.pop().unwrap_or_default();
        match loaded.iter().all(|other| *other == digest) {
            true => Ok(digest),
            false => Err(ModelFailure {
                exit: Exit::ModelRefused,
                text: "the file changed between the loads onto the devices: swap again".to_owned(),
            }),
        }
    }

    /// If the weight-server dies meanwhile, the next one is asked.
    async fn load_once(mut self, load: CopyLoad) -> Result<Bytes, ModelFailure> {
        loop {
            match self.load_and_replace(&load, None).await {
                Ok(loaded) => return Ok(loaded.digest),
                Err(status) if is_unreachable(&status) => tokio::time::sleep(LOAD_RETRY_INTERVAL).await,
                Err(status) => return Err(ModelFailure::from_status(&status)),
            }
        }
    }

    /// Makes the copy resident, unloads its other generations, and finds the workers that have
    /// them.
    async fn load_and_replace(
        &mut self,
        load: &CopyLoad,
        event_loop: Option<&mpsc::Sender<SupervisorEvent>>,
    ) -> Result<ResidentCopy, Status> {
        let resident = match &load.known {
            Some(digest) => {
                let status = self.status().await?;
                resident_models::find_known(&status, &load.copy, digest).cloned()
            }
            None => None,
        };
        let generation = match resident {
            Some(generation) => generation,
            None => self.load_from_file(load, event_loop).await?,
        };
        let status = self.status().await?;
        let older = resident_models::older_generations(&status, &load.copy, Some(generation.generation));
        for older in older.to_unload {
            self.unload_generation(&load.copy.weights, older).await?;
        }
        let wire::Generation { generation, digest, .. } = generation;
        Ok(ResidentCopy { generation, digest, outdated: older.readers })
    }

    /// The model does not fit beside its older weights: takes their name, and has their workers
    /// restarted. Returns false if there are none.
    async fn release_older(
        &mut self,
        copy: &WeightsOnDevice,
        event_loop: &mpsc::Sender<SupervisorEvent>,
    ) -> bool {
        // An error here shows in the next attempt to load.
        let Ok(status) = self.status().await else { return true };
        let older = resident_models::older_generations(&status, copy, None);
        for generation in older.to_unload {
            if let Err(error) = self.unload_generation(&copy.weights, generation).await {
                tracing::debug!(%error, "cannot unload the older weights of a model");
            }
        }
        let is_held = !resident_models::generations_of(&status, copy).is_empty();
        let _: Result<(), _> =
            event_loop.send(SupervisorEvent::WorkersOutdated { pids: older.readers }).await;
        is_held
    }

    /// `event_loop` hears of the progress.
    async fn load_from_file(
        &mut self,
        load: &CopyLoad,
        event_loop: Option<&mpsc::Sender<SupervisorEvent>>,
    ) -> Result<wire::Generation, Status> {
        let request = wire::LoadRequest {
            model: load.copy.weights.clone(),
            path: load.path.to_string_lossy().into_owned(),
            device: load.copy.device.clone(),
            no_packing: !load.pack,
            device_memory: self.devices.borrow().get(&load.copy.device).map(GpuDevice::memory),
        };
        let mut events = self.client.load(request).await?.into_inner();
        while let Some(event) = events.message().await? {
            match event.kind {
                Some(wire::load_event::Kind::Waiting(wire::Waiting { done_bytes, total_bytes, .. })) => {
                    let state = ModelState::Loading { done_bytes, total_bytes };
                    if let Some(event_loop) = event_loop {
                        report(event_loop, load, state).await;
                    }
                }
                Some(wire::load_event::Kind::Loaded(wire::Loaded { generation: Some(found), .. })) => {
                    return Ok(found);
                }
                Some(wire::load_event::Kind::Loaded(_)) | None => {}
            }
        }
        Err(Status::unavailable("the weight-server ended the load without a result"))
    }

    /// Unloads these copies, one after the other. Returns the first refusal.
    pub(crate) async fn unload_all(self, copies: Vec<WeightsOnDevice>) -> Result<(), Status> {
        let mut outcome = Ok(());
        for copy in copies {
            let unloaded = self.clone().unload(&copy).await;
            outcome = outcome.and(unloaded);
        }
        outcome
    }

    /// Repeats the request until the weight-server carries it out or refuses it.
    pub(crate) async fn unload(mut self, copy: &WeightsOnDevice) -> Result<(), Status> {
        loop {
            match self.try_unload(copy).await {
                Err(status) if is_unreachable(&status) => tokio::time::sleep(LOAD_RETRY_INTERVAL).await,
                outcome => return outcome,
            }
        }
    }

    /// An unload of a whole name would take the copies on other devices too.
    async fn try_unload(&mut self, copy: &WeightsOnDevice) -> Result<(), Status> {
        let status = self.status().await?;
        for generation in resident_models::generations_of(&status, copy) {
            self.unload_generation(&copy.weights, generation).await?;
        }
        Ok(())
    }

    async fn unload_rejected(&mut self, weights: &str, generation: u64) {
        if let Err(status) = self.unload_generation(weights, generation).await {
            tracing::warn!(weights, generation, %status, "cannot unload a copy with other content");
        }
    }

    async fn unload_generation(&mut self, name: &str, generation: u64) -> Result<(), Status> {
        match self.client.unload(wire::UnloadRequest { model: name.to_owned(), generation }).await {
            Ok(_) => Ok(()),
            Err(status) if status.code() == Code::NotFound => Ok(()),
            Err(status) => Err(status),
        }
    }

    /// Generations, leases and ledger.
    pub(crate) async fn status(&mut self) -> Result<wire::Status, Status> {
        Ok(self.client.get_status(wire::GetStatusRequest {}).await?.into_inner())
    }
}

async fn report(event_loop: &mpsc::Sender<SupervisorEvent>, load: &CopyLoad, state: ModelState) {
    let (name, device) = (load.model.clone(), load.copy.device.clone());
    let event = SupervisorEvent::CopyStateChanged { name, device, state };
    // Without an event loop the result is of no use.
    let _: Result<(), _> = event_loop.send(event).await;
}

/// The weight-server did not answer: it is starting, or it just died. A status with a source was
/// created on this side of the connection.
fn is_unreachable(status: &Status) -> bool {
    status.code() == Code::Unavailable || std::error::Error::source(status).is_some()
}
