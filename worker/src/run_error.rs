// SPDX-License-Identifier: Apache-2.0

//! Why a worker process ends, and the exit code for it.

use std::io;
use std::time::Duration;

use service::Exit;
use service::exit::{HasExit, exit_for_io_error};
use service::process_limits::StartError;

use crate::attach_error::WorkerAttachError;
use crate::config::ComputeDevice;

#[derive(Debug, thiserror::Error)]
pub enum WorkerRunError {
    #[error("cannot start the async runtime of the worker")]
    Runtime(#[source] io::Error),
    #[error("cannot start the engine's thread")]
    Thread(#[source] StartError),
    #[error("cannot listen for signals")]
    Signals(#[source] io::Error),
    #[error(transparent)]
    Notify(#[from] service::notify::NotifyError),
    #[error(transparent)]
    Inherit(#[from] service::listen::ListenError),
    #[error("cannot read the attach token")]
    Token(#[source] io::Error),
    #[error(transparent)]
    Socket(#[from] service::grpc::BindError),
    #[error("cannot describe the gRPC services")]
    Reflection(#[from] tonic_reflection::server::Error),
    #[error("the gRPC server failed")]
    Serve(#[source] tonic::transport::Error),
    #[error(transparent)]
    Attach(#[from] WorkerAttachError),
    #[error(transparent)]
    Tracer(#[from] traces::TracerError),
    #[error(
        "{device} failed and this worker ends; other workers keep the weights, which are mapped read-only"
    )]
    Engine { device: String, source: engine::StepError },
    /// The worker ends because sequences could otherwise share blocks wrongly and produce wrong
    /// text.
    #[error("the integrity check of the idle KV cache failed, this worker ends")]
    Integrity(#[source] engine::IntegrityError),
    #[error("the weights are damaged, this worker ends and attaches them again: {text}")]
    Quarantined { text: String },
    #[error(
        "a step on {device} has not ended within {timeout:?}, this worker ends and starts again; `step-timeout` sets the limit"
    )]
    StepHangs { timeout: Duration, device: ComputeDevice },
    #[error("the engine's thread ended without an error")]
    EngineLost,
}

impl HasExit for WorkerRunError {
    fn exit(&self) -> Exit {
        match self {
            WorkerRunError::Runtime(source) | WorkerRunError::Signals(source) => exit_for_io_error(source),
            WorkerRunError::Thread(error) => error.exit(),
            WorkerRunError::Token(_) => Exit::Usage,
            WorkerRunError::Notify(error) => error.exit(),
            WorkerRunError::Inherit(error) => error.exit(),
            WorkerRunError::Socket(error) => error.exit(),
            WorkerRunError::Attach(error) => error.exit(),
            WorkerRunError::Tracer(error) => error.exit(),
            WorkerRunError::Quarantined { .. } => Exit::PeerLost,
            // The supervisor quarantines a GPU on which this happens again and again.
            WorkerRunError::StepHangs { device: ComputeDevice::Gpu(_), .. } => Exit::DeviceHangs,
            WorkerRunError::Reflection(_)
            | WorkerRunError::Serve(_)
            | WorkerRunError::Engine { .. }
            | WorkerRunError::Integrity(_)
            | WorkerRunError::StepHangs { .. }
            | WorkerRunError::EngineLost => Exit::Internal,
        }
    }
}
