//! The admin service, `ballast.weights.v1.WeightServer`: conversions between its messages and ours, nothing else.

use std::pin::Pin;

use futures::Stream;
use memory::manifest::HOST_DEVICE;
use prost::Message;
use proto::weights::v1::{self as wire, load_event, weight_server_server::WeightServer};
use tokio::sync::{broadcast, oneshot};
use tonic::{Code, Request, Response, Status};

use crate::catalog::{Integrity, Phase};
use crate::driver::{Input, Inputs, ask_load};
use crate::events::{LoadAnswer, LoadProgress, VerifyAnswer};
use crate::lease_table::LeasePhase;
use crate::ledger::Shortage;
use crate::ledger::{Row, RowKey};
use crate::refusal::{LoadFailure, LoaderComplaint, UnloadRefusal, VerifyFailure};
use crate::snapshot::{Change, GenerationView, LeaseView, Snapshot};

/// Names of models and tokens: shown in tables, kept in manifests.
const MAX_NAME_BYTES: usize = 256;

#[derive(Debug)]
pub(crate) struct Admin {
    pub(crate) inputs: Inputs,
    pub(crate) changes: broadcast::Sender<Change>,
}

type Events<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl WeightServer for Admin {
    type LoadStream = Events<wire::LoadEvent>;
    type WatchEventsStream = Events<wire::Event>;

    async fn load(&self, request: Request<wire::LoadRequest>) -> Result<Response<Self::LoadStream>, Status> {
        let wire::LoadRequest { model, path, device, no_packing } = request.into_inner();
        check_name("model", &model)?;
        let path = std::path::PathBuf::from(path);
        if !path.is_absolute() {
            return Err(Status::invalid_argument(format!("path {} is not absolute", path.display())));
        }
        let device = if device.is_empty() { HOST_DEVICE.to_owned() } else { device };
        let (mut progress, mut answer) = ask_load(&self.inputs, model, path, device, no_packing).await;
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
            let answer = answer.map_err(|_| gone())?.map_err(Status::from)?;
            yield event(load_event::Kind::Loaded(loaded(&inputs, answer).await?));
        };
        Ok(Response::new(Box::pin(events)))
    }

    async fn unload(
        &self,
        request: Request<wire::UnloadRequest>,
    ) -> Result<Response<wire::UnloadResponse>, Status> {
        let model = request.into_inner().model;
        let leases = self.ask(|answer| Input::Unload { model, answer }).await??;
        Ok(Response::new(wire::UnloadResponse { leases }))
    }

    async fn verify(
        &self,
        request: Request<wire::VerifyRequest>,
    ) -> Result<Response<wire::VerifyResponse>, Status> {
        let wire::VerifyRequest { model, device } = request.into_inner();
        let VerifyAnswer { generation, report } =
            self.ask(|answer| Input::Verify { model, device, answer }).await??;
        Ok(Response::new(wire::VerifyResponse {
            generation,
            damaged: report.damaged,
            damaged_count: report.damaged_count,
            checked_bytes: report.checked_bytes,
            seconds: report.took.as_secs_f64(),
        }))
    }

    async fn get_status(&self, _: Request<wire::GetStatusRequest>) -> Result<Response<wire::Status>, Status> {
        let snapshot = self.ask(|answer| Input::Status { answer }).await?;
        Ok(Response::new(snapshot.into()))
    }

    async fn allow_token(
        &self,
        request: Request<wire::AllowTokenRequest>,
    ) -> Result<Response<wire::AllowTokenResponse>, Status> {
        let wire::AllowTokenRequest { name, token } = request.into_inner();
        check_name("token name", &name)?;
        let allowed = self.ask(|answer| Input::AllowToken { name, token, answer }).await?;
        allowed.map_err(|error| Status::invalid_argument(error.to_string()))?;
        Ok(Response::new(wire::AllowTokenResponse {}))
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
                    Err(broadcast::error::RecvError::Lagged(missed)) => wire::event::Kind::Missed(missed),
                    Err(broadcast::error::RecvError::Closed) => break,
                };
                yield wire::Event { kind: Some(kind) };
            }
        };
        Ok(Response::new(Box::pin(events)))
    }
}

impl Admin {
    async fn ask<T>(&self, input: impl FnOnce(oneshot::Sender<T>) -> Input) -> Result<T, Status> {
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

fn event(kind: load_event::Kind) -> wire::LoadEvent {
    wire::LoadEvent { kind: Some(kind) }
}

async fn loaded(inputs: &Inputs, answer: LoadAnswer) -> Result<wire::Loaded, Status> {
    let (sender, snapshot) = oneshot::channel();
    inputs.send(Input::Status { answer: sender }).await;
    let snapshot = snapshot.await.map_err(|_| gone())?;
    let generation = snapshot.generations.into_iter().find(|generation| generation.id == answer.generation);
    // Unloaded between its answer and this look at it.
    let generation = generation.ok_or_else(|| Status::from(LoadFailure::Unloaded))?;
    Ok(wire::Loaded {
        generation: Some(generation.into()),
        read_from_file: answer.read_from_file,
        seconds: answer.elapsed.as_secs_f64(),
    })
}

impl From<LoadFailure> for Status {
    /// The details are an encoded LoadFailed, for callers that choose an exit code.
    fn from(failure: LoadFailure) -> Self {
        use wire::LoadFailure as Kind;
        let (code, kind) = match &failure {
            LoadFailure::Loader { complaint, .. } => match complaint {
                LoaderComplaint::File => (Code::NotFound, Kind::File),
                LoaderComplaint::ModelRefused => (Code::InvalidArgument, Kind::ModelRefused),
                LoaderComplaint::FileChanged => (Code::FailedPrecondition, Kind::FileChanged),
                LoaderComplaint::Truncated => (Code::DataLoss, Kind::Truncated),
                LoaderComplaint::OutOfMemory => (Code::ResourceExhausted, Kind::OutOfMemory),
                LoaderComplaint::OutOfFds => (Code::ResourceExhausted, Kind::OutOfFds),
                LoaderComplaint::Unsupported => (Code::Unimplemented, Kind::Unsupported),
                LoaderComplaint::Device => (Code::Internal, Kind::Device),
            },
            LoadFailure::LoaderLost { .. } => (Code::Aborted, Kind::LoaderLost),
            LoadFailure::NoProgress { .. } => (Code::DeadlineExceeded, Kind::NoProgress),
            LoadFailure::Ledger(crate::ledger::Shortage::Fds { .. }) => {
                (Code::ResourceExhausted, Kind::OutOfFds)
            }
            LoadFailure::Ledger(crate::ledger::Shortage::Device { .. }) => {
                (Code::Unimplemented, Kind::Unsupported)
            }
            LoadFailure::Ledger(_) | LoadFailure::Machine { .. } => {
                (Code::ResourceExhausted, Kind::OutOfMemory)
            }
            LoadFailure::Unloaded => (Code::Cancelled, Kind::Unloaded),
            LoadFailure::LoadedAs { .. } => (Code::AlreadyExists, Kind::NameTaken),
            LoadFailure::TooManyJobs { .. } => (Code::ResourceExhausted, Kind::Busy),
            LoadFailure::Settling { .. } | LoadFailure::ShuttingDown => (Code::Unavailable, Kind::Busy),
        };
        let details = wire::LoadFailed { failure: kind.into(), text: failure.to_string() }.encode_to_vec();
        Status::with_details(code, failure.to_string(), details.into())
    }
}

impl From<VerifyFailure> for Status {
    fn from(failure: VerifyFailure) -> Self {
        let code = match &failure {
            VerifyFailure::UnknownModel { .. } => Code::NotFound,
            VerifyFailure::Verifier { complaint: LoaderComplaint::Unsupported, .. } => Code::Unimplemented,
            VerifyFailure::Verifier { .. } => Code::Internal,
            VerifyFailure::Ledger(Shortage::Device { .. }) => Code::Unimplemented,
            VerifyFailure::Ledger(_) => Code::ResourceExhausted,
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
            UnloadRefusal::Settling { .. } => Status::unavailable(refusal.to_string()),
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
            Phase::Queued => wire::GenerationState::Queued,
            Phase::Starting | Phase::Loading => wire::GenerationState::Loading,
            Phase::Storing => wire::GenerationState::Storing,
            Phase::Ready => wire::GenerationState::Ready,
            Phase::Retiring => wire::GenerationState::Retiring,
        };
        let integrity = match view.integrity {
            Integrity::Loaded => wire::GenerationIntegrity::Loaded,
            Integrity::Unverified => wire::GenerationIntegrity::Unverified,
            Integrity::Verified => wire::GenerationIntegrity::Verified,
            Integrity::Quarantined => wire::GenerationIntegrity::Quarantined,
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
        }
    }
}

impl From<LeaseView> for wire::Lease {
    fn from(view: LeaseView) -> Self {
        let state = match view.phase {
            LeasePhase::Storing { .. } | LeasePhase::Granting { .. } => wire::LeaseState::Granting,
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

impl From<Snapshot> for wire::Status {
    fn from(snapshot: Snapshot) -> Self {
        let orphaned = |lease: u64| {
            snapshot.leases.iter().any(|view| view.id == lease && view.phase == LeasePhase::Orphaned)
        };
        let rows: Vec<wire::LedgerRow> =
            snapshot.rows.iter().map(|(key, row)| ledger_row(*key, row, &orphaned)).collect();
        let ledger = wire::Ledger {
            capacity_bytes: snapshot.devices.iter().map(|(_, capacity, _)| capacity).sum(),
            reserved_bytes: rows.iter().map(|row| row.bytes).sum(),
            capacity_fds: snapshot.capacity_fds,
            reserved_fds: rows.iter().map(|row| row.fds).sum(),
            rows,
            devices: snapshot
                .devices
                .into_iter()
                .map(|(device, capacity_bytes, reserved_bytes)| wire::LedgerDevice {
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
            violations: snapshot.violations,
            vault: snapshot.vault,
            adoption_notes: snapshot.adoption_notes,
        }
    }
}

fn ledger_row(key: RowKey, row: &Row, orphaned: &dyn Fn(u64) -> bool) -> wire::LedgerRow {
    let (kind, id) = match key {
        RowKey::Loading(generation) => (wire::LedgerRowKind::Loading, generation),
        RowKey::Weights(generation) => (wire::LedgerRowKind::Weights, generation),
        RowKey::Verifying(generation) => (wire::LedgerRowKind::Verifying, generation),
        RowKey::Lease(lease) if orphaned(lease) => (wire::LedgerRowKind::Orphaned, lease),
        RowKey::Lease(lease) => (wire::LedgerRowKind::Lease, lease),
    };
    wire::LedgerRow { kind: kind.into(), id, device: row.device.clone(), bytes: row.bytes, fds: row.fds }
}

impl From<Change> for wire::event::Kind {
    fn from(change: Change) -> Self {
        match change {
            Change::Generation(view) => Self::Generation(view.into()),
            Change::GenerationGone(id) => Self::GenerationGone(id),
            Change::Lease(view) => Self::Lease(view.into()),
            Change::LeaseEnded(id) => Self::LeaseEnded(id),
        }
    }
}
