// SPDX-License-Identifier: Apache-2.0

//! The supervisor's call of a worker: finish your streams and take no new ones.

use std::path::Path;
use std::time::Duration;

use proto::worker::v1::DrainRequest;
use proto::worker::v1::worker_client::WorkerClient;
use service::grpc::ConnectError;
use tonic::Status;

#[derive(Debug, thiserror::Error)]
pub(crate) enum DrainError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("the worker refused to drain")]
    Refused(#[source] Box<Status>),
}

/// Returns when every stream has ended, or when `grace` is over and the worker has cut the others.
pub(crate) async fn drain(socket: &Path, grace: Duration) -> Result<(), DrainError> {
    let mut client = WorkerClient::new(service::grpc::connect(socket).await?);
    let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
    let drained = client.drain(DrainRequest { grace_ms }).await;
    let cut = drained.map_err(|status| DrainError::Refused(Box::new(status)))?.into_inner().streams_cut;
    tracing::info!(socket = %socket.display(), cut, "worker drained");
    Ok(())
}
