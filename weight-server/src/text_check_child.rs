// SPDX-License-Identifier: Apache-2.0

//! Starts a child that checks a model's tokenizer and chat template, and takes its report.
//!
//! The child runs the loader role with another first frame. It limits its memory and processor time
//! itself; the time that it waits is limited here.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use handoff::event_loop::AsyncConnection;
use handoff::manifest::file_identity_to_wire;
use handoff::seqpacket::{Connection, FrameError};
use memory::manifest::FileIdentity;
use nix::libc;
use proto::weights::v1::{self as wire, LoaderFrame, loader_command, loader_frame};
use service::{ByteSize, Exit, HasExit};
use tokio::process::Child;

use crate::loader::{CHECK_CPU_SECONDS, CHECK_MEMORY_BYTES};
use crate::loader_child::{EXIT_TIMEOUT, LoaderProgram, command};
use crate::model_files::{blocking, open_files};
use crate::refusal::{LoadFailure, LoaderErrorKind};

/// A check takes a tenth of a second; this is for a machine that is overloaded. Shorter than the
/// time that a loader waits for its next command.
const CHECK_TIMEOUT: Duration = Duration::from_secs(25);

/// A model whose text can be served.
#[derive(Debug)]
pub struct CheckedText {
    /// If false, the model takes and gives token ids only.
    pub has_tokenizer: bool,
    /// Why chats are refused; empty if they are not.
    pub chat_problem: String,
}

/// Why a model's text cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum TextCheckError {
    #[error("{0}")]
    File(String),
    #[error(
        "{} is refused: {problem}; correct this key of the file, or set tokenizer.ggml.model to \"none\" to serve token ids only",
        path.display()
    )]
    Refused { path: PathBuf, problem: String },
    #[error(
        "{} is refused: {key} needs more than {} of memory or {CHECK_CPU_SECONDS} s of processor time to be read: correct or remove this key of the file",
        path.display(),
        ByteSize(CHECK_MEMORY_BYTES).rounded()
    )]
    Excessive { path: PathBuf, key: String },
    #[error(
        "the check of tokenizer and chat template took longer than {CHECK_TIMEOUT:?}: try again when the machine is less busy"
    )]
    Timeout,
    /// Its limits end the child by other signals, so the file is not to blame.
    #[error(
        "the check of tokenizer and chat template was killed by signal {signal}, perhaps because the machine or its cgroup was out of memory: try again"
    )]
    Killed { signal: i32 },
    #[error("cannot start the check of tokenizer and chat template")]
    Spawn(#[source] io::Error),
    #[error("the check of tokenizer and chat template was lost")]
    Connection(#[source] FrameError),
}

impl HasExit for TextCheckError {
    fn exit(&self) -> Exit {
        match self {
            Self::File(_) | Self::Refused { .. } | Self::Excessive { .. } => Exit::ModelRefused,
            Self::Timeout | Self::Killed { .. } => Exit::OutOfResources,
            Self::Spawn(error) => service::exit::exit_for_io_error(error),
            Self::Connection(_) => Exit::PeerLost,
        }
    }
}

impl From<TextCheckError> for LoadFailure {
    fn from(error: TextCheckError) -> Self {
        let text = service::exit::one_line(&error);
        let kind = match &error {
            TextCheckError::File(_) => LoaderErrorKind::File,
            TextCheckError::Refused { .. } | TextCheckError::Excessive { .. } => {
                LoaderErrorKind::ModelRefused
            }
            TextCheckError::Spawn(_)
            | TextCheckError::Connection(_)
            | TextCheckError::Timeout
            | TextCheckError::Killed { .. } => return Self::LoaderLost { how: text },
        };
        Self::Loader { kind, text }
    }
}

/// Checks the text of the model whose first file is at `path`.
pub async fn check_text_of_file(path: &Path) -> Result<CheckedText, TextCheckError> {
    let paths = vec![path.to_owned()];
    let files = blocking(move || open_files(paths)).await;
    let files = files.map_err(|failure| TextCheckError::File(failure.to_string()))?;
    check_text(&files, &LoaderProgram::own()).await
}

/// Checks the text of the model with these files. Only the first one contains metadata.
pub(crate) async fn check_text(
    files: &[(FileIdentity, File)],
    program: &LoaderProgram,
) -> Result<CheckedText, TextCheckError> {
    let [(identity, file), ..] = files else {
        return Err(TextCheckError::File("the model has no file".to_owned()));
    };
    let (ours, theirs) = Connection::pair().map_err(TextCheckError::Spawn)?;
    // Killed when it is dropped, so that it does not outlive its time.
    let mut child = program.spawn_silent(theirs).map_err(TextCheckError::Spawn)?;
    let connection = AsyncConnection::new(ours).map_err(TextCheckError::Spawn)?;
    let job = wire::TextCheckJob { file: Some(file_identity_to_wire(identity.clone())) };
    let asked = command(&connection, loader_command::Kind::TextCheck(job), &[file.as_fd()]).await;
    asked.map_err(TextCheckError::Connection)?;
    let report = tokio::time::timeout(CHECK_TIMEOUT, receive_report(&connection, &identity.path));
    match report.await.unwrap_or(Err(TextCheckError::Timeout)) {
        Err(lost @ (TextCheckError::Excessive { .. } | TextCheckError::Connection(FrameError::Closed))) => {
            Err(foreign_signal(&mut child).await.map_or(lost, |signal| TextCheckError::Killed { signal }))
        }
        report => report,
    }
}

/// The signal that ended the child, if its own limits send no such signal.
async fn foreign_signal(child: &mut Child) -> Option<i32> {
    let status = tokio::time::timeout(EXIT_TIMEOUT, child.wait()).await.ok()?.ok()?;
    let is_foreign = |signal: &i32| {
        [libc::SIGKILL, libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT].contains(signal)
    };
    status.signal().filter(is_foreign)
}

/// If the child ends without a report, names the key that was under check.
async fn receive_report(connection: &AsyncConnection, path: &Path) -> Result<CheckedText, TextCheckError> {
    let mut key = None;
    loop {
        let frame = match connection.receive::<LoaderFrame>().await {
            Ok((frame, _)) => frame,
            Err(error) => {
                return Err(match (error, key) {
                    (FrameError::Closed, Some(key)) => {
                        TextCheckError::Excessive { path: path.to_owned(), key }
                    }
                    (error, _) => TextCheckError::Connection(error),
                });
            }
        };
        match frame.kind {
            Some(loader_frame::Kind::TextCheckStarted(started)) => key = Some(started.key),
            Some(loader_frame::Kind::TextChecked(wire::TextChecked { has_tokenizer, chat_problem })) => {
                return Ok(CheckedText { has_tokenizer, chat_problem });
            }
            Some(loader_frame::Kind::Failed(failed)) => {
                return Err(TextCheckError::Refused { path: path.to_owned(), problem: failed.text });
            }
            _ => return Err(TextCheckError::Connection(FrameError::Closed)),
        }
    }
}
