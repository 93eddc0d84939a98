// SPDX-License-Identifier: Apache-2.0

//! Why a load fails, and the failure that is reported to the weight-server.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::PathBuf;

use memory::memfd::MemfdError;
use memory::numa::NumaError;
use memory::pack::PackError;
use proto::weights::v1::LoadFailure;

use super::copy::CopyError;
use super::host_reader::TensorReadError;

/// A device failed. The error types of GPU drivers exist only in builds with CUDA, so this type
/// keeps the error itself opaque.
#[derive(Debug)]
pub(super) struct DeviceFailure {
    failure: LoadFailure,
    error: Box<dyn Error + Send + Sync>,
}

impl DeviceFailure {
    pub(super) fn new(failure: LoadFailure, error: impl Error + Send + Sync + 'static) -> Self {
        Self { failure, error: Box::new(error) }
    }

    pub(super) fn failure(&self) -> LoadFailure {
        self.failure
    }
}

impl fmt::Display for DeviceFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl Error for DeviceFailure {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.error.source()
    }
}

/// Why the device of a job cannot be opened.
#[derive(Debug, thiserror::Error)]
pub(super) enum OpenTargetError {
    #[error("layout {layout} is not supported on {device}: use layout {expected}")]
    Layout { layout: u32, device: String, expected: u32 },
    #[error(
        "{name:?} is not a device: use \"host\", a NUMA node as \"host:0\", or the UUID of a GPU, as nvidia-smi -L shows it"
    )]
    Name { name: String },
    #[error(transparent)]
    Node(#[from] NumaError),
    #[error(transparent)]
    Device(#[from] DeviceFailure),
}

#[derive(Debug, thiserror::Error)]
pub(super) enum ModelLoadError {
    #[error(transparent)]
    Target(#[from] OpenTargetError),
    #[error(transparent)]
    Device(#[from] DeviceFailure),
    #[error(transparent)]
    Open(#[from] gguf::OpenError),
    #[error("{} is refused", path.display())]
    Model { path: PathBuf, source: gguf::ModelCheckError },
    #[error("{} cannot be placed in memory", path.display())]
    Pack { path: PathBuf, source: PackError },
    #[error("cannot inspect {}", path.display())]
    Inspect { path: PathBuf, source: io::Error },
    #[error("{} changed while it was being loaded: load it again when it is complete", path.display())]
    Changed { path: PathBuf },
    #[error("cannot allocate {bytes} bytes, allocation {number} of {of}")]
    Allocate { bytes: u64, number: usize, of: usize, source: MemfdError },
    #[error(transparent)]
    Read(#[from] TensorReadError),
    #[error("cannot seal the loaded model")]
    Seal(#[source] MemfdError),
    #[error(transparent)]
    Copy(#[from] CopyError),
}

impl ModelLoadError {
    pub(super) fn failure(&self) -> LoadFailure {
        match self {
            Self::Target(
                OpenTargetError::Layout { .. } | OpenTargetError::Name { .. } | OpenTargetError::Node(_),
            ) => LoadFailure::Unsupported,
            Self::Target(OpenTargetError::Device(error)) | Self::Device(error) => error.failure(),
            Self::Open(gguf::OpenError::Io { .. }) | Self::Inspect { .. } => LoadFailure::File,
            Self::Open(_) | Self::Model { .. } | Self::Pack { .. } => LoadFailure::ModelRefused,
            Self::Changed { .. } => LoadFailure::FileChanged,
            Self::Allocate { source, .. } | Self::Seal(source) => memory_failure(source),
            Self::Read(error) => read_failure(error),
            Self::Copy(CopyError::Checksums { .. }) => LoadFailure::SourceDamaged,
            Self::Copy(_) => LoadFailure::Device,
        }
    }
}

pub(super) fn read_failure(error: &TensorReadError) -> LoadFailure {
    match error {
        TensorReadError::Memory { source, .. } => memory_failure(source),
        TensorReadError::Io { .. } | TensorReadError::Cancelled => LoadFailure::File,
        TensorReadError::Truncated { .. } => LoadFailure::Truncated,
    }
}

fn memory_failure(error: &MemfdError) -> LoadFailure {
    match error {
        MemfdError::OutOfFds { .. } => LoadFailure::OutOfFds,
        _ => LoadFailure::OutOfMemory,
    }
}
