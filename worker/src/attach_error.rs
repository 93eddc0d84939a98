// SPDX-License-Identifier: Apache-2.0

//! Why a worker could not attach its model, and the exit code for it.

use std::path::PathBuf;

use cuda::{DeviceError, OpenDriverError};
use engine::EngineStartError;
use memory::numa::NumaError;
use models::{BuildModelError, WeightError};
use ops::OpError;
use prefix::FingerprintError;
use proto::weights::v1::RefusalReason;
use service::Exit;
use service::exit::{HasExit, exit_for_io_error};
use turns::TurnError;

use crate::backend::TensorImportError;
use crate::draft_vocabulary::DraftVocabularyError;

#[derive(Debug, thiserror::Error)]
pub enum WorkerAttachError {
    #[error(transparent)]
    Driver(#[from] OpenDriverError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Node(#[from] NumaError),
    #[error(
        "the GPU {device} has no memory left for a context, which takes half a GiB: end other processes on it"
    )]
    NoRoom { device: String, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("cannot create a context on the GPU {device}: see nvidia-smi, or run with --device host")]
    Context { device: String, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("cannot attach model {model:?} from {socket}")]
    Attach { model: String, socket: String, source: handoff::AttachModelError },
    #[error("the model's metadata is invalid")]
    Metadata(#[from] gguf::MetadataError),
    #[error(transparent)]
    Tensor(#[from] TensorImportError),
    #[error("the model's tensors are invalid")]
    Weights(#[from] WeightError),
    #[error("cannot build the model")]
    Build(#[from] BuildModelError),
    #[error("cannot start the compute backend")]
    Backend(#[source] OpError),
    #[error(transparent)]
    Start(#[from] EngineStartError),
    #[error(transparent)]
    Vocabulary(#[from] DraftVocabularyError),
    #[error("MPS does not run in {}: the supervisor starts it again", directory.display())]
    Mps { directory: PathBuf },
    #[error(transparent)]
    Turns(#[from] turns::TurnError),
    #[error("cannot compute the worker's fingerprint")]
    Fingerprint(#[from] FingerprintError),
}

impl HasExit for WorkerAttachError {
    fn exit(&self) -> Exit {
        match self {
            WorkerAttachError::Driver(OpenDriverError::Init(_))
            | WorkerAttachError::Device(DeviceError::Driver(_)) => Exit::Internal,
            WorkerAttachError::Driver(_) | WorkerAttachError::Device(_) => Exit::Usage,
            WorkerAttachError::Node(NumaError::Unknown { .. }) => Exit::Usage,
            WorkerAttachError::Node(_) => Exit::Internal,
            WorkerAttachError::NoRoom { .. } => Exit::OutOfResources,
            WorkerAttachError::Context { .. } => Exit::Internal,
            WorkerAttachError::Attach {
                source: handoff::AttachModelError::Refused { reason, .. }, ..
            } => match reason {
                RefusalReason::UnknownModel => Exit::Usage,
                RefusalReason::LoadFailed => Exit::ModelRefused,
                RefusalReason::Ledger => Exit::OutOfResources,
                _ => Exit::PeerLost,
            },
            WorkerAttachError::Attach { .. } => Exit::PeerLost,
            WorkerAttachError::Metadata(_) | WorkerAttachError::Tensor(_) | WorkerAttachError::Weights(_) => {
                Exit::ModelRefused
            }
            WorkerAttachError::Build(BuildModelError::Backend(error)) | WorkerAttachError::Backend(error) => {
                exit_for_op_error(error)
            }
            WorkerAttachError::Build(_) | WorkerAttachError::Vocabulary(_) => Exit::ModelRefused,
            WorkerAttachError::Start(EngineStartError::Config(_)) => Exit::Usage,
            WorkerAttachError::Start(EngineStartError::Kv { source, .. }) => exit_for_op_error(source),
            WorkerAttachError::Mps { .. } => Exit::PeerLost,
            WorkerAttachError::Turns(TurnError::Full { .. }) => Exit::OutOfResources,
            WorkerAttachError::Turns(TurnError::Open { source, .. } | TurnError::Lock { source, .. }) => {
                exit_for_io_error(source)
            }
            WorkerAttachError::Fingerprint(_) => Exit::Internal,
        }
    }
}

fn exit_for_op_error(error: &OpError) -> Exit {
    match error {
        OpError::Memory { .. } => Exit::OutOfResources,
        _ => Exit::Internal,
    }
}
