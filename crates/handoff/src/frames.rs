// SPDX-License-Identifier: Apache-2.0

//! Frames between a worker and the weight-server, as the worker sends and receives them.

use std::os::fd::OwnedFd;
use std::time::Duration;

use proto::weights::v1::{self as wire, server_frame, worker_frame};

use crate::attach_error::AttachModelError;
use crate::seqpacket::{Connection, FrameError};

/// Frames of a worker are small, so a server that does not accept one in this time is stuck.
pub(crate) const SEND_TIMEOUT: Duration = Duration::from_secs(5);

pub(crate) fn send(connection: &Connection, kind: worker_frame::Kind) -> Result<(), FrameError> {
    connection.send(&wire::WorkerFrame { kind: Some(kind) }, &[])
}

pub(crate) type ReceivedFrame = (server_frame::Kind, Vec<OwnedFd>);

/// Receives the next frame. A refusal is an error at any time.
pub(crate) fn receive(connection: &Connection) -> Result<ReceivedFrame, AttachModelError> {
    let (frame, fds) = connection.receive::<wire::ServerFrame>()?;
    match frame.kind {
        Some(server_frame::Kind::Refused(refused)) => {
            Err(AttachModelError::Refused { reason: refused.reason(), text: refused.text })
        }
        Some(kind) => Ok((kind, fds)),
        None => Err(AttachModelError::Unexpected { expected: "a frame", found: "an unknown kind" }),
    }
}

pub(crate) fn unexpected(expected: &'static str, kind: server_frame::Kind) -> AttachModelError {
    let found = match kind {
        server_frame::Kind::Refused(_) => "a refusal",
        server_frame::Kind::Waiting(_) => "a progress report",
        server_frame::Kind::Grant(_) => "a grant",
        server_frame::Kind::Fds(_) => "descriptors",
        server_frame::Kind::Reclaimed(_) => "the answer to a re-claim",
        server_frame::Kind::ReturnRequested(_) => "a request for descriptors",
        server_frame::Kind::BatchReceived(_) => "an acknowledgement",
    };
    AttachModelError::Unexpected { expected, found }
}
