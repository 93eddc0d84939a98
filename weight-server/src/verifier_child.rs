// SPDX-License-Identifier: Apache-2.0

//! The weight-server's side of one verification: starts the child, sends it the generation's
//! descriptors, and takes its report.
//!
//! The child runs the loader role with another first frame. Every failure ends in one
//! `VerifyFailed` event.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use handoff::event_loop::AsyncConnection;
use handoff::fd_batches::fd_batches;
use handoff::seqpacket::{Connection, FrameError};
use proto::weights::v1::{self as wire, LoaderFrame, loader_command, loader_frame};

use crate::events::{VerifyReport, WeightServerEvent};
use crate::held_fds::GenerationFds;
use crate::loader_child::{LoaderProgram, command, error_kind, wait_for_exit};
use crate::messages::{InputSender, LoopInput};
use crate::refusal::VerifyFailure;

/// Creating a context takes half a second, and so do the checksums of a terabyte. A driver that
/// hangs is not waited for.
const FRAME_TIMEOUT: Duration = Duration::from_secs(60);

/// Kept by the event loop. Dropping it kills the child.
#[derive(Debug)]
pub(crate) struct VerifierHandle(tokio::task::JoinHandle<()>);

impl Drop for VerifierHandle {
    fn drop(&mut self) {
        self.0.abort();
    }
}

pub(crate) fn start(
    generation: u64,
    device: String,
    fds: Arc<GenerationFds>,
    program: LoaderProgram,
    inputs: InputSender,
) -> VerifierHandle {
    VerifierHandle(tokio::spawn(async move {
        let event = match verify(generation, device, &fds, &program).await {
            Ok(report) => WeightServerEvent::Verified { generation, report },
            Err(failure) => WeightServerEvent::VerifyFailed { generation, failure },
        };
        inputs.send(LoopInput::Event(event)).await;
    }))
}

/// Why a session with a verifier ended early.
enum VerifierSessionError {
    Reported(wire::LoadFailed),
    Broken(FrameError),
    OutOfTurn,
}

impl From<FrameError> for VerifierSessionError {
    fn from(error: FrameError) -> Self {
        Self::Broken(error)
    }
}

async fn verify(
    generation: u64,
    device: String,
    fds: &GenerationFds,
    program: &LoaderProgram,
) -> Result<VerifyReport, VerifyFailure> {
    let started = Instant::now();
    let cannot =
        |error: std::io::Error| VerifyFailure::Lost { how: format!("it cannot be started: {error}") };
    let (ours, theirs) = Connection::pair().map_err(cannot)?;
    let mut child = program.spawn(theirs).map_err(cannot)?;
    let connection = AsyncConnection::new(ours).map_err(cannot)?;
    let conversation = run_session(&connection, generation, device, fds).await;
    drop(connection);
    // The memory of the child's context is free after its exit.
    let ended = wait_for_exit(&mut child).await;
    match conversation {
        Ok(found) => Ok(VerifyReport {
            damaged: found.damaged,
            damaged_count: found.damaged_count,
            checked_bytes: found.checked_bytes,
            took: started.elapsed(),
        }),
        Err(VerifierSessionError::Reported(failed)) => {
            Err(VerifyFailure::Verifier { kind: error_kind(failed.failure()), text: failed.text })
        }
        Err(VerifierSessionError::Broken(FrameError::Closed)) => Err(VerifyFailure::Lost { how: ended.how }),
        Err(VerifierSessionError::Broken(error)) => {
            Err(VerifyFailure::Lost { how: service::exit::one_line(&error) })
        }
        Err(VerifierSessionError::OutOfTurn) => {
            Err(VerifyFailure::Lost { how: "it broke the protocol: a frame came out of order".to_owned() })
        }
    }
}

async fn run_session(
    connection: &AsyncConnection,
    generation: u64,
    device: String,
    fds: &GenerationFds,
) -> Result<wire::Verified, VerifierSessionError> {
    let all: Vec<BorrowedFd<'_>> = fds.all().collect();
    let job = wire::VerifyJob { generation, device, fds: all.len() as u32 };
    command(connection, loader_command::Kind::Verify(job), &[]).await?;
    for batch in fd_batches(all.len() as u32) {
        let part = &all[batch.first as usize..(batch.first + batch.count) as usize];
        command(connection, loader_command::Kind::Fds(batch), part).await?;
        match answer(connection).await? {
            loader_frame::Kind::BatchReceived(receipt) if receipt.batch == batch.batch => {}
            _ => return Err(VerifierSessionError::OutOfTurn),
        }
    }
    match answer(connection).await? {
        loader_frame::Kind::Verified(found) => Ok(found),
        _ => Err(VerifierSessionError::OutOfTurn),
    }
}

/// Receives the next frame. A failure report is an error at any point. Descriptors are not expected
/// and are closed.
async fn answer(connection: &AsyncConnection) -> Result<loader_frame::Kind, VerifierSessionError> {
    let (frame, _) = connection.receive_within::<LoaderFrame>(FRAME_TIMEOUT).await?;
    match frame.kind {
        Some(loader_frame::Kind::Failed(failed)) => Err(VerifierSessionError::Reported(failed)),
        Some(kind) => Ok(kind),
        None => Err(VerifierSessionError::OutOfTurn),
    }
}
