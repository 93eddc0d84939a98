// SPDX-License-Identifier: Apache-2.0

//! The admin service `ballast.weights.v1.WeightServer`: converts between its messages and the event
//! loop's types.

use std::pin::Pin;

use futures::Stream;
use memory::manifest::HOST_DEVICE;
use memory::numa::{is_host_device, node_of_device};
use prost::Message;
use proto::weights::v1::{self as wire, load_event, weight_server_server::WeightServer};
use service::ByteSize;
use service::admin_audit::{AdminCall, AdminCallKind, AdminCaller};
use tokio::sync::{broadcast, oneshot};
use tonic::{Code, Request, Response, Status};

use crate::catalog::{GenerationIntegrity, GenerationPhase};
use crate::config::{DeviceBudget, DeviceConfig};
use crate::events::{LoadOutcome, VerifyOutcome};
use crate::lease_table::LeasePhase;
use crate::ledger::ReservationError;
use crate::ledger::{LedgerReservation, ReservationKey};
use crate::messages::{InputSender, LoopInput};
use crate::model_files::{LoadReceivers, request_load};
use crate::refusal::{LoadFailure, LoaderErrorKind, UnloadRefusal, VerifyFailure};
use crate::status::{CatalogChange, GenerationView, LeaseView, StatusSnapshot};
use crate::tokens::{self, TokenError};
use crate::waiters::LoadProgress;

/// For names of models and tokens, which appear in tables and manifests.
const MAX_NAME_BYTES: usize = 256;

#[derive(Debug)]
pub(crate) struct AdminService {
    pub(crate) inputs: InputSender,
    pub(crate) changes: broadcast::Sender<CatalogChange>,
}

type AdminStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl WeightServer for AdminService {
    type LoadStream = AdminStream<wire::LoadEvent>;
    type WatchEventsStream = AdminStream<wire::Event>;

    async fn load(&self, request: Request<wire::LoadRequest>) -> Result<Response<Self::LoadStream>, Status> {
        let call = self.begin(&request, "load", &request.get_ref().model);
        let (mut progress, mut answer) = match self.request_load(request.into_inner()).await {
            Ok(load) => load,
            Err(error) => return call.end(Err(error)),
        };
        let inputs = self.inputs.clone();
        let events = async_stream::try_stream! {
            let answer = loop {
                tokio::select! {
                    answer = &mut answer => break answer,
                    Ok(()) = progress.changed() => {
                        let latest = *progress.borrow_and_update();
                        if let Some(latest) = latest {
                            yield event(load_event::Kind::Waiting(latest.into()));
                        }
                    }
                }
            };
            let outcome = match answer {
                Ok(Ok(answer)) => loaded(&inputs, answer).await,
                Ok(Err(failure)) => Err(Status::from(failure)),
                Err(_) => Err(gone()),
            };
            yield event(load_event::Kind::Loaded(call.end(outcome)?));
        };
        Ok(Response::new(Box::pin(events)))
    }

    async fn unload(
        &self,
        request: Request<wire::UnloadRequest>,
    ) -> Result<Response<wire::UnloadResponse>, Status> {
        let call = self.begin(&request, "unload", &request.get_ref().model);
        let wire::UnloadRequest { model, generation } = request.into_inner();
        let generation = (generation != 0).then_some(generation);
        let unloaded = self.ask(|answer| LoopInput::Unload { model, generation, answer }).await;
        let leases = call.end(unloaded.and_then(|leases| Ok(leases?)))?;
        Ok(Response::new(wire::UnloadResponse { leases }))
    }

    async fn verify(
        &self,
        request: Request<wire::VerifyRequest>,
    ) -> Result<Response<wire::VerifyResponse>, Status> {
        let call = self.begin(&request, "verify", &request.get_ref().model);
        let wire::VerifyRequest { model, device } = request.into_inner();
        let verified = self.ask(|answer| LoopInput::Verify { model, device, answer }).await;
        let VerifyOutcome { generation, report } = call.end(verified.and_then(|outcome| Ok(outcome?)))?;
        Ok(Response::new(wire::VerifyResponse {
            generation,
            damaged: report.damaged,
            damaged_count: report.damaged_count,
            checked_bytes: report.checked_bytes,
            seconds: report.took.as_secs_f64(),
        }))
    }

    async fn get_status(&self, _: Request<wire::GetStatusRequest>) -> Result<Response<wire::Status>, Status> {
        let snapshot = self.ask(|answer| LoopInput::Status { answer }).await?;
        Ok(Response::new(snapshot.into()))
    }

    async fn allow_token(
        &self,
        request: Request<wire::AllowTokenRequest>,
    ) -> Result<Response<wire::AllowTokenResponse>, Status> {
        let call = self.begin(&request, "allow-token", &request.get_ref().name);
        call.end(self.allow(request.into_inner()).await)?;
        Ok(Response::new(wire::AllowTokenResponse {}))
    }

    async fn forget_token(
        &self,
        request: Request<wire::ForgetTokenRequest>,
    ) -> Result<Response<wire::ForgetTokenResponse>, Status> {
        let call = self.begin(&request, "forget-token", &request.get_ref().name);
        let name = request.into_inner().name;
        self.inputs.send(LoopInput::ForgetToken { name }).await;
        call.end(Ok::<_, Status>(()))?;
        Ok(Response::new(wire::ForgetTokenResponse {}))
    }

    async fn watch_events(
        &self,
        _: Request<wire::WatchEventsRequest>,
    ) -> Result<Response<Self::WatchEventsStream>, Status> {
        let mut changes = self.changes.subscribe();
        let events = async_stream::try_stream! {
            loop {
                let kind = match changes.recv().await {
                    Ok(change) => change.into(),
                    Err(broadcast::error::RecvError::Lagged(missed)) => wire::event::Kind::MissedEvents(missed),
                    Err(broadcast::error::RecvError::Closed) => break,
                };
                yield wire::Event { kind: Some(kind) };
            }
        };
        Ok(Response::new(Box::pin(events)))
    }
}

impl AdminService {
    /// Records a call that changes something. What the parent process calls, a supervisor, is a
    /// step of a command on supervisor.sock, which the supervisor has recorded, or of its own work
    /// (a start, a restart): at `info` each command would be there twice. A call that another
    /// process sends here, past the supervisor, always has level `info`. So have the calls of a
    /// supervisor that took over, whose child this process is not.
    fn begin<T>(&self, request: &Request<T>, command: &'static str, subject: &str) -> AdminCall {
        let caller = AdminCaller::of(request);
        let parent = i32::try_from(std::os::unix::process::parent_id()).ok();
        let kind = match caller.pid.is_some() && caller.pid == parent {
            true => AdminCallKind::Step,
            false => AdminCallKind::Command,
        };
        AdminCall::begin(caller, kind, command, subject)
    }

    async fn request_load(&self, request: wire::LoadRequest) -> Result<LoadReceivers, Status> {
        let wire::LoadRequest { model, path, device, no_packing, device_memory } = request;
        check_name("model", &model)?;
        let path = std::path::PathBuf::from(path);
        if !path.is_absolute() {
            return Err(Status::invalid_argument(format!("path {} is not absolute", path.display())));
        }
        let device = if device.is_empty() { HOST_DEVICE.to_owned() } else { device };
        if let Some(memory) = device_memory {
            let device = device_config(&device, &memory)?;
            self.inputs.send(LoopInput::AddDevice { device }).await;
        }
        Ok(request_load(&self.inputs, model, path, device, no_packing).await)
    }

    async fn allow(&self, request: wire::AllowTokenRequest) -> Result<(), Status> {
        let wire::AllowTokenRequest { name, token } = request;
        check_name("token name", &name)?;
        let invalid = |error: TokenError| Status::invalid_argument(error.to_string());
        let digest = tokens::digest_of(&token).map_err(invalid)?;
        self.ask(|answer| LoopInput::AllowToken { name, digest, answer }).await?.map_err(invalid)
    }

    async fn ask<T>(&self, input: impl FnOnce(oneshot::Sender<T>) -> LoopInput) -> Result<T, Status> {
        let (answer, answered) = oneshot::channel();
        self.inputs.send(input(answer)).await;
        answered.await.map_err(|_| gone())
    }
}

fn gone() -> Status {
    Status::unavailable("the weight-server is shutting down")
}

fn check_name(what: &str, name: &str) -> Result<(), Status> {
    let fits = !name.is_empty() && name.len() <= MAX_NAME_BYTES && !name.chars().any(char::is_control);
    let wrong = || {
        Status::invalid_argument(format!("{what} {name:?} must have 1 to {MAX_NAME_BYTES} printable bytes"))
    };
    fits.then_some(()).ok_or_else(wrong)
}

fn device_config(id: &str, memory: &wire::DeviceMemory) -> Result<DeviceConfig, Status> {
    check_name("device", id)?;
    if is_host_device(id) {
        return Err(Status::invalid_argument(format!("device_memory: {id} is no GPU")));
    }
    let budget = match &memory.budget {
        Some(wire::device_memory::Budget::Bytes(bytes)) => DeviceBudget::Own(ByteSize(*bytes)),
        Some(wire::device_memory::Budget::Unified(_)) => DeviceBudget::Host,
        None => return Err(Status::invalid_argument(format!("device_memory of {id} has no budget"))),
    };
    Ok(DeviceConfig { id: id.to_owned(), budget, numa_node: memory.numa_node })
}

fn event(kind: load_event::Kind) -> wire::LoadEvent {
    wire::LoadEvent { kind: Some(kind) }
}

async fn loaded(inputs: &InputSender, answer: LoadOutcome) -> Result<wire::Loaded, Status> {
    let (sender, snapshot) = oneshot::channel();
    inputs.send(LoopInput::Status { answer: sender }).await;
    let snapshot = snapshot.await.map_err(|_| gone())?;
    let generation = snapshot.generations.into_iter().find(|generation| generation.id == answer.generation);
    // The model was unloaded after the reply and before this query.
    let generation = generation.ok_or_else(|| Status::from(LoadFailure::Unloaded))?;
    Ok(wire::Loaded {
        generation: Some(generation.into()),
        read_from_file: answer.read_from_file,
        seconds: answer.elapsed.as_secs_f64(),
    })
}

impl From<LoadFailure> for Status {
    /// The status details hold an encoded LoadFailed, from which callers choose an exit code.
    fn from(failure: LoadFailure) -> Self {
        use wire::LoadFailure as Kind;
        let (code, kind) = match &failure {
            LoadFailure::Loader { kind, .. } => match kind {
                LoaderErrorKind::File => (Code::NotFound, Kind::File),
                LoaderErrorKind::ModelRefused => (Code::InvalidArgument, Kind::ModelRefused),
                LoaderErrorKind::FileChanged => (Code::FailedPrecondition, Kind::FileChanged),
                LoaderErrorKind::Truncated => (Code::DataLoss, Kind::Truncated),
                LoaderErrorKind::OutOfMemory => (Code::ResourceExhausted, Kind::OutOfMemory),
                LoaderErrorKind::OutOfFds => (Code::ResourceExhausted, Kind::OutOfFds),
                LoaderErrorKind::Unsupported => (Code::Unimplemented, Kind::Unsupported),
                LoaderErrorKind::Device => (Code::Internal, Kind::Device),
                LoaderErrorKind::SourceDamaged => (Code::DataLoss, Kind::SourceDamaged),
            },
            LoadFailure::LoaderLost { .. } => (Code::Aborted, Kind::LoaderLost),
            LoadFailure::NoProgress { .. } => (Code::DeadlineExceeded, Kind::NoProgress),
            LoadFailure::Reservation(crate::ledger::ReservationError::InsufficientFds { .. }) => {
                (Code::ResourceExhausted, Kind::OutOfFds)
            }
            LoadFailure::Reservation(crate::ledger::ReservationError::UnknownDevice { .. }) => {
                (Code::Unimplemented, Kind::Unsupported)
            }
            LoadFailure::Reservation(_) | LoadFailure::InsufficientMemory { .. } => {
                (Code::ResourceExhausted, Kind::OutOfMemory)
            }
            LoadFailure::Unloaded => (Code::Cancelled, Kind::Unloaded),
            LoadFailure::LoadedAs { .. } => (Code::AlreadyExists, Kind::NameTaken),
            LoadFailure::TooManyJobs { .. } => (Code::ResourceExhausted, Kind::Busy),
            LoadFailure::AwaitingReclaim { .. } | LoadFailure::ShuttingDown => {
                (Code::Unavailable, Kind::Busy)
            }
        };
        let details = wire::LoadFailed { failure: kind.into(), text: failure.to_string() }.encode_to_vec();
        Status::with_details(code, failure.to_string(), details.into())
    }
}

impl From<VerifyFailure> for Status {
    fn from(failure: VerifyFailure) -> Self {
        let code = match &failure {
            VerifyFailure::UnknownModel { .. } => Code::NotFound,
            VerifyFailure::Verifier { kind: LoaderErrorKind::Unsupported, .. } => Code::Unimplemented,
            VerifyFailure::Verifier { .. } => Code::Internal,
            VerifyFailure::Reservation(ReservationError::UnknownDevice { .. }) => Code::Unimplemented,
            VerifyFailure::Reservation(_) => Code::ResourceExhausted,
            VerifyFailure::Lost { .. } | VerifyFailure::Unloaded => Code::Aborted,
            VerifyFailure::ShuttingDown => Code::Unavailable,
        };
        Self::new(code, failure.to_string())
    }
}

impl From<UnloadRefusal> for Status {
    fn from(refusal: UnloadRefusal) -> Self {
        match refusal {
            UnloadRefusal::UnknownModel { .. } => Status::not_found(refusal.to_string()),
            UnloadRefusal::AwaitingReclaim { .. } => Status::unavailable(refusal.to_string()),
        }
    }
}

impl From<LoadProgress> for wire::Waiting {
    fn from(progress: LoadProgress) -> Self {
        Self {
            done_bytes: progress.done_bytes,
            total_bytes: progress.total_bytes,
            jobs_ahead: progress.jobs_ahead,
        }
    }
}

impl From<GenerationView> for wire::Generation {
    fn from(view: GenerationView) -> Self {
        let state = match view.phase {
            GenerationPhase::Queued => wire::GenerationState::Queued,
            GenerationPhase::Starting | GenerationPhase::AwaitingSource | GenerationPhase::Loading => {
                wire::GenerationState::Loading
            }
            GenerationPhase::Storing => wire::GenerationState::Storing,
            GenerationPhase::Ready => wire::GenerationState::Ready,
            GenerationPhase::Retiring => wire::GenerationState::Retiring,
        };
        let integrity = match view.integrity {
            GenerationIntegrity::Loaded => wire::GenerationIntegrity::Loaded,
            GenerationIntegrity::Unverified => wire::GenerationIntegrity::Unverified,
            GenerationIntegrity::Verified => wire::GenerationIntegrity::Verified,
            GenerationIntegrity::Quarantined => wire::GenerationIntegrity::Quarantined,
        };
        Self {
            generation: view.id,
            model: view.model,
            state: state.into(),
            device: view.device,
            layout: view.layout,
            digest: view
                .contents
                .digest
                .map_or_else(bytes::Bytes::new, |d| bytes::Bytes::copy_from_slice(&d)),
            path: view.path.to_string_lossy().into_owned(),
            tensor_bytes: view.contents.tensor_bytes,
            allocation_bytes: view.contents.allocation_bytes,
            allocations: view.contents.allocations,
            tensors: view.contents.tensors,
            done_bytes: view.done_bytes,
            adopted: view.adopted,
            integrity: integrity.into(),
            copied_from: view.copied_from.unwrap_or_default(),
            copy_seconds: view.contents.copy_time.as_secs_f64(),
        }
    }
}

impl From<LeaseView> for wire::Lease {
    fn from(view: LeaseView) -> Self {
        let state = match view.phase {
            LeasePhase::Restoring { .. } | LeasePhase::Storing { .. } | LeasePhase::Granting { .. } => {
                wire::LeaseState::Granting
            }
            LeasePhase::Held { .. } => wire::LeaseState::Held,
            LeasePhase::Disconnected { .. } => wire::LeaseState::Disconnected,
            LeasePhase::Orphaned => wire::LeaseState::Orphaned,
        };
        Self {
            lease: view.id,
            generation: view.generation,
            state: state.into(),
            uid: view.uid,
            pid: view.pid,
            token_name: view.token_name,
            kv_bytes: view.kv_bytes,
            workspace_bytes: view.workspace_bytes,
        }
    }
}

impl From<StatusSnapshot> for wire::Status {
    fn from(snapshot: StatusSnapshot) -> Self {
        let orphaned = |lease: u64| {
            snapshot.leases.iter().any(|view| view.id == lease && view.phase == LeasePhase::Orphaned)
        };
        let reservations: Vec<wire::Reservation> = snapshot
            .reservations
            .iter()
            .map(|(key, reservation)| reservation_message(*key, reservation, &orphaned))
            .collect();
        let ledger = wire::Ledger {
            // The memory of a node is counted with the host's.
            capacity_bytes: snapshot
                .devices
                .iter()
                .filter(|(device, _, _)| node_of_device(device).is_none())
                .map(|(_, capacity, _)| capacity)
                .sum(),
            reserved_bytes: reservations.iter().fold(0, |sum, row| row.bytes.saturating_add(sum)),
            capacity_fds: snapshot.capacity_fds,
            reserved_fds: reservations.iter().map(|reservation| reservation.fds).sum(),
            reservations,
            devices: snapshot
                .devices
                .into_iter()
                .map(|(device, capacity_bytes, reserved_bytes)| wire::DeviceCapacity {
                    unified_devices: match device.as_str() {
                        HOST_DEVICE => snapshot.unified_devices.clone(),
                        _ => Vec::new(),
                    },
                    device,
                    capacity_bytes,
                    reserved_bytes,
                })
                .collect(),
        };
        Self {
            generations: snapshot.generations.into_iter().map(Into::into).collect(),
            leases: snapshot.leases.into_iter().map(Into::into).collect(),
            ledger: Some(ledger),
            tokens_required: snapshot.tokens_required,
            registered_tokens: snapshot.registered_tokens as u32,
            violations: snapshot.violations,
            fd_store: snapshot.fd_store,
            adoption_notes: snapshot.adoption_notes,
            log_lines_lost: service::logging::lost_lines(),
        }
    }
}

fn reservation_message(
    key: ReservationKey,
    reservation: &LedgerReservation,
    orphaned: &dyn Fn(u64) -> bool,
) -> wire::Reservation {
    let (kind, id) = match key {
        ReservationKey::Loading(generation) => (wire::ReservationKind::Loading, generation),
        ReservationKey::Weights(generation) => (wire::ReservationKind::Weights, generation),
        ReservationKey::Verifying(generation) => (wire::ReservationKind::Verifying, generation),
        ReservationKey::Copying(generation) => (wire::ReservationKind::Copying, generation),
        ReservationKey::Lease(lease) if orphaned(lease) => (wire::ReservationKind::Orphaned, lease),
        ReservationKey::Lease(lease) => (wire::ReservationKind::Lease, lease),
    };
    wire::Reservation {
        kind: kind.into(),
        id,
        device: reservation.device.clone(),
        bytes: reservation.bytes,
        fds: reservation.fds,
    }
}

impl From<CatalogChange> for wire::event::Kind {
    fn from(change: CatalogChange) -> Self {
        match change {
            CatalogChange::Generation(view) => Self::Generation(view.into()),
            CatalogChange::GenerationRemoved(id) => Self::GenerationRemoved(id),
            CatalogChange::Lease(view) => Self::Lease(view.into()),
            CatalogChange::LeaseEnded(id) => Self::LeaseEnded(id),
        }
    }
}
