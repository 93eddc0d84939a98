// SPDX-License-Identifier: Apache-2.0

//! The loader's end of the hand-off socket: receives commands, sends frames.

use std::os::fd::{BorrowedFd, OwnedFd};

use handoff::fd_batches::{FdBatchError, FdCollector};
use handoff::seqpacket::{Connection, FrameError};
use proto::weights::v1::{
    self as wire, LoadFailure, LoaderCommand, LoaderFrame, loader_command, loader_frame,
};
use service::process_limits::StartError;
use service::{Exit, HasExit};

use super::sandbox::SandboxError;

#[derive(Debug, thiserror::Error)]
pub enum LoaderError {
    #[error("a loader is started by the weight-server only: its standard input is not a hand-off socket")]
    NotStartedByWeightServer(#[source] std::io::Error),
    #[error("cannot enter the sandbox")]
    Sandbox(#[source] SandboxError),
    #[error("the connection to the weight-server failed")]
    Connection(#[from] FrameError),
    #[error("the weight-server sent {found} instead of {expected}")]
    Unexpected { expected: &'static str, found: &'static str },
    #[error("cannot limit memory and processor time")]
    Limits(#[source] nix::Error),
    #[error("cannot read the chat template")]
    Template(#[source] std::io::Error),
    #[error("cannot start a thread")]
    Thread(#[source] StartError),
}

#[derive(Debug, thiserror::Error)]
pub(super) enum ReceiveFdsError {
    #[error("the weight-server sent inconsistent descriptors")]
    Batch(#[from] FdBatchError),
    #[error(transparent)]
    Loader(#[from] LoaderError),
}

impl HasExit for LoaderError {
    fn exit(&self) -> Exit {
        match self {
            Self::NotStartedByWeightServer(_) => Exit::Usage,
            Self::Connection(_) => Exit::PeerLost,
            Self::Sandbox(_) | Self::Limits(_) | Self::Template(_) | Self::Unexpected { .. } => {
                Exit::Internal
            }
            Self::Thread(error) => error.exit(),
        }
    }
}

pub(super) fn send_frame(
    connection: &Connection,
    kind: loader_frame::Kind,
    fds: &[BorrowedFd<'_>],
) -> Result<(), LoaderError> {
    Ok(connection.send(&LoaderFrame { kind: Some(kind) }, fds)?)
}

/// Reports a failed load or verification. The process then exits cleanly.
pub(super) fn send_failure(
    connection: &Connection,
    failure: LoadFailure,
    text: String,
) -> Result<(), LoaderError> {
    let failed = wire::LoadFailed { failure: failure.into(), text };
    send_frame(connection, loader_frame::Kind::Failed(failed), &[])
}

pub(super) fn receive_command(
    connection: &Connection,
) -> Result<(loader_command::Kind, Vec<OwnedFd>), LoaderError> {
    let (frame, fds) = connection.receive::<LoaderCommand>()?;
    match frame.kind {
        Some(kind) => Ok((kind, fds)),
        None => Err(LoaderError::Unexpected { expected: "a command", found: "an unknown command" }),
    }
}

/// Receives the descriptors of a resident generation in batches, and acknowledges each.
pub(super) fn receive_fds(connection: &Connection, count: u32) -> Result<Vec<OwnedFd>, ReceiveFdsError> {
    let mut collector = FdCollector::new(count)?;
    while !collector.is_complete() {
        match receive_command(connection)? {
            (loader_command::Kind::Fds(batch), fds) => {
                let receipt = collector.accept(&batch, fds)?;
                send_frame(connection, loader_frame::Kind::BatchReceived(receipt), &[])?;
            }
            (other, _) => return Err(unexpected_command("FdBatch", &other).into()),
        }
    }
    Ok(collector.into_fds())
}

pub(super) fn unexpected_command(expected: &'static str, found: &loader_command::Kind) -> LoaderError {
    let found = match found {
        loader_command::Kind::Job(_) => "LoadJob",
        loader_command::Kind::Proceed(_) => "Proceed",
        loader_command::Kind::BatchReceived(_) => "BatchReceived",
        loader_command::Kind::Verify(_) => "VerifyJob",
        loader_command::Kind::Fds(_) => "FdBatch",
        loader_command::Kind::TextCheck(_) => "TextCheckJob",
        loader_command::Kind::Copy(_) => "CopyJob",
        loader_command::Kind::AwaitSource(_) => "AwaitSource",
    };
    LoaderError::Unexpected { expected, found }
}
