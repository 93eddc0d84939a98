// SPDX-License-Identifier: Apache-2.0

//! Names in the log the process that gave a command over supervisor.sock.

use tonic::Request;
use tonic::transport::server::UdsConnectInfo;

use crate::commands::CommandError;

/// The process at the other end of a connection, as the kernel names it. The pid is that of the
/// process that connected; it may have ended since.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdminCaller {
    uid: Option<u32>,
    pid: Option<i32>,
}

impl AdminCaller {
    pub(crate) fn of<T>(request: &Request<T>) -> Self {
        let peer = request.extensions().get::<UdsConnectInfo>().and_then(|info| info.peer_cred);
        Self { uid: peer.map(|peer| peer.uid()), pid: peer.and_then(|peer| peer.pid()) }
    }

    /// Before the command is carried out: some take minutes. `subject` is a model or a process.
    pub(crate) fn log(self, command: &'static str, subject: &str) {
        let Self { uid, pid } = self;
        tracing::info!(command, subject, uid, pid, "admin command");
    }

    pub(crate) fn log_refusal(self, command: &'static str, subject: &str, error: &CommandError) {
        let Self { uid, pid } = self;
        tracing::warn!(command, subject, uid, pid, %error, "admin command refused");
    }
}
