// SPDX-License-Identifier: Apache-2.0

//! What a loader with a reserved plan may do: read its files, or copy a resident generation of the
//! same files, whose descriptors it gets.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use handoff::event_loop::AsyncConnection;
use handoff::fd_batches::fd_batches;
use handoff::seqpacket::FrameError;
use proto::weights::v1::{self as wire, LoaderFrame, loader_command, loader_frame};

use crate::held_fds::GenerationFds;
use crate::loader_child::command;

/// The loader acknowledges a batch at once: it waits for its permit.
const RECEIPT_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(crate) enum LoadPermit {
    ReadFiles,
    /// Copies this generation.
    Copy(Arc<GenerationFds>),
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum PermitError {
    #[error("its connection broke")]
    Connection(#[from] FrameError),
    #[error("it did not acknowledge batch {batch}")]
    NotAcknowledged { batch: u32 },
    /// The loader reports a failure of its own.
    #[error("{}", .0.text)]
    Reported(wire::LoadFailed),
}

impl LoadPermit {
    pub(crate) async fn send(self, connection: &AsyncConnection) -> Result<(), PermitError> {
        let Self::Copy(source) = self else {
            return Ok(command(connection, loader_command::Kind::Proceed(wire::Proceed {}), &[]).await?);
        };
        let all: Vec<BorrowedFd<'_>> = source.all().collect();
        let job = wire::CopyJob { fds: all.len() as u32 };
        command(connection, loader_command::Kind::Copy(job), &[]).await?;
        for batch in fd_batches(all.len() as u32) {
            let part = &all[batch.first as usize..(batch.first + batch.count) as usize];
            command(connection, loader_command::Kind::Fds(batch), part).await?;
            let (frame, _) = connection.receive_within::<LoaderFrame>(RECEIPT_TIMEOUT).await?;
            match frame.kind {
                Some(loader_frame::Kind::BatchReceived(receipt)) if receipt.batch == batch.batch => {}
                Some(loader_frame::Kind::Failed(failed)) => return Err(PermitError::Reported(failed)),
                _ => return Err(PermitError::NotAcknowledged { batch: batch.batch }),
            }
        }
        Ok(())
    }
}
