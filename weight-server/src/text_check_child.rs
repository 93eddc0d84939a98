// SPDX-License-Identifier: Apache-2.0

//! Starts a child that checks a model's tokenizer and chat template, and takes its report.
//!
//! The child runs the loader role with another first frame. It limits its memory and processor time
//! itself; the time that it waits is limited here.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use handoff::event_loop::AsyncConnection;
use handoff::manifest::file_identity_to_wire;
use handoff::seqpacket::{Connection, FrameError};
use memory::manifest::FileIdentity;
use memory::memfd::{MemfdError, SealedMemfd};
use nix::libc;
use proto::weights::v1::{self as wire, LoaderFrame, loader_command, loader_frame};
use service::process_limits::{StartError, address_space_limit};
use service::{ByteSize, Exit, HasExit};
use tokio::process::Child;

use crate::loader::{CHECK_CPU_SECONDS, CHECK_MEMORY_BYTES};
use crate::loader_child::{EXIT_TIMEOUT, LoaderProgram, command};
use crate::model_files::{blocking, open_files};
use crate::refusal::{LoadFailure, LoaderErrorKind};

/// Address space of a check beside its private memory: executable, libraries, stacks, arenas.
const CODE_BYTES: u64 = 512 << 20;
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
    #[error("the chat template {} is refused: {problem}", template.display())]
    TemplateRefused { template: PathBuf, problem: String },
    #[error(
        "the chat template {} is refused: it needs more than {} of memory or {CHECK_CPU_SECONDS} s of processor time for a short conversation",
        template.display(),
        ByteSize(CHECK_MEMORY_BYTES).rounded()
    )]
    TemplateExcessive { template: PathBuf },
    #[error(
        "the check of tokenizer and chat template took longer than {CHECK_TIMEOUT:?}: try again when the machine is less busy"
    )]
    Timeout,
    /// Its limits end the child by other signals, so the file is not to blame.
    #[error(
        "the check of tokenizer and chat template was killed by signal {signal}, perhaps because the machine or its cgroup was out of memory: try again"
    )]
    Killed { signal: i32 },
    /// Also if the check met a limit that its parent had before.
    #[error("the check of tokenizer and chat template lacked resources: {problem}")]
    Resources { problem: String },
    #[error("cannot start the check of tokenizer and chat template")]
    Spawn(#[source] StartError),
    #[error("cannot connect to the check of tokenizer and chat template")]
    Socket(#[source] io::Error),
    #[error("cannot pass the chat template to its check")]
    Pass(#[from] MemfdError),
    #[error("the check of tokenizer and chat template was lost")]
    Connection(#[source] FrameError),
}

impl HasExit for TextCheckError {
    fn exit(&self) -> Exit {
        match self {
            Self::File(_)
            | Self::Refused { .. }
            | Self::Excessive { .. }
            | Self::TemplateRefused { .. }
            | Self::TemplateExcessive { .. } => Exit::ModelRefused,
            Self::Timeout | Self::Killed { .. } | Self::Resources { .. } | Self::Pass(_) => {
                Exit::OutOfResources
            }
            Self::Spawn(error) => error.exit(),
            Self::Socket(error) => service::exit::exit_for_io_error(error),
            Self::Connection(_) => Exit::PeerLost,
        }
    }
}

impl From<TextCheckError> for LoadFailure {
    fn from(error: TextCheckError) -> Self {
        let text = service::exit::one_line(&error);
        let kind = match &error {
            TextCheckError::File(_) => LoaderErrorKind::File,
            TextCheckError::Refused { .. }
            | TextCheckError::Excessive { .. }
            | TextCheckError::TemplateRefused { .. }
            | TextCheckError::TemplateExcessive { .. } => LoaderErrorKind::ModelRefused,
            TextCheckError::Resources { .. } | TextCheckError::Spawn(_) => LoaderErrorKind::OutOfMemory,
            TextCheckError::Socket(_)
            | TextCheckError::Pass(_)
            | TextCheckError::Connection(_)
            | TextCheckError::Timeout
            | TextCheckError::Killed { .. } => return Self::LoaderLost { how: text },
        };
        Self::Loader { kind, text }
    }
}

/// A chat template that replaces the model's own.
#[derive(Clone, Copy, Debug)]
pub struct GivenTemplate<'a> {
    /// Names the template in errors.
    pub file: &'a Path,
    pub text: &'a str,
}

/// What a check looks at.
struct TextCheck<'a> {
    /// The model's first file: only this one contains metadata.
    model: Option<&'a (FileIdentity, File)>,
    template: Option<GivenTemplate<'a>>,
}

/// Checks the text of the model whose first file is at `path`.
pub async fn check_text_of_file(path: &Path) -> Result<CheckedText, TextCheckError> {
    let model = open_model(path).await?;
    TextCheck { model: Some(&model), template: None }.run(&LoaderProgram::own()).await
}

/// Checks a chat template, for the model whose first file is at `model` if there is one.
pub async fn check_chat_template(
    model: Option<&Path>,
    template: GivenTemplate<'_>,
) -> Result<(), TextCheckError> {
    let model = match model {
        Some(path) => Some(open_model(path).await?),
        None => None,
    };
    let check = TextCheck { model: model.as_ref(), template: Some(template) };
    check.run(&LoaderProgram::own()).await.map(drop)
}

async fn open_model(path: &Path) -> Result<(FileIdentity, File), TextCheckError> {
    let paths = vec![path.to_owned()];
    let files = blocking(move || open_files(paths)).await;
    let mut files = files.map_err(|failure| TextCheckError::File(failure.to_string()))?;
    if files.is_empty() { Err(TextCheckError::no_file()) } else { Ok(files.swap_remove(0)) }
}

/// Checks the text of the model with these files.
pub(crate) async fn check_text(
    files: &[(FileIdentity, File)],
    program: &LoaderProgram,
) -> Result<CheckedText, TextCheckError> {
    let model = files.first().ok_or_else(TextCheckError::no_file)?;
    TextCheck { model: Some(model), template: None }.run(program).await
}

impl TextCheckError {
    fn no_file() -> Self {
        Self::File("the model has no file".to_owned())
    }
}

impl TextCheck<'_> {
    async fn run(&self, program: &LoaderProgram) -> Result<CheckedText, TextCheckError> {
        let template = self.template.map(|template| template.text.as_bytes());
        let template = template.map(|text| SealedMemfd::from_bytes("chat-template", text)).transpose()?;
        let (ours, theirs) = Connection::pair().map_err(TextCheckError::Socket)?;
        // Killed when it is dropped, so that it does not outlive its time.
        let child = program.spawn_silent(theirs);
        let mut child = child.map_err(|error| TextCheckError::Spawn(StartError(error)))?;
        let connection = AsyncConnection::new(ours).map_err(TextCheckError::Socket)?;
        let job = wire::TextCheckJob {
            file: self.model.map(|(identity, _)| file_identity_to_wire(identity.clone())),
            chat_template: template.is_some(),
        };
        let model = self.model.iter().map(|(_, file)| file.as_fd());
        let fds: Vec<BorrowedFd<'_>> = model.chain(template.iter().map(AsFd::as_fd)).collect();
        let asked = command(&connection, loader_command::Kind::TextCheck(job), &fds).await;
        asked.map_err(TextCheckError::Connection)?;
        let report = tokio::time::timeout(CHECK_TIMEOUT, self.receive_report(&connection));
        match report.await.unwrap_or(Err(TextCheckError::Timeout)) {
            Err(
                lost @ (TextCheckError::Excessive { .. }
                | TextCheckError::TemplateExcessive { .. }
                | TextCheckError::Connection(FrameError::Closed)),
            ) => Err(match foreign_signal(&mut child).await {
                Some(signal) => TextCheckError::Killed { signal },
                None => inherited_limit().unwrap_or(lost),
            }),
            report => report,
        }
    }

    /// If the child ends without a report, names what was under check.
    async fn receive_report(&self, connection: &AsyncConnection) -> Result<CheckedText, TextCheckError> {
        let mut key = None;
        loop {
            let frame = match connection.receive::<LoaderFrame>().await {
                Ok((frame, _)) => frame,
                Err(FrameError::Closed) if key.is_some() => {
                    return Err(self.excessive(key.unwrap_or_default()));
                }
                Err(error) => return Err(TextCheckError::Connection(error)),
            };
            match frame.kind {
                Some(loader_frame::Kind::TextCheckStarted(started)) => key = Some(started.key),
                Some(loader_frame::Kind::TextChecked(wire::TextChecked { has_tokenizer, chat_problem })) => {
                    return Ok(CheckedText { has_tokenizer, chat_problem });
                }
                Some(loader_frame::Kind::Failed(failed))
                    if failed.failure() == wire::LoadFailure::OutOfMemory =>
                {
                    return Err(TextCheckError::Resources { problem: failed.text });
                }
                Some(loader_frame::Kind::Failed(failed)) => return Err(self.refused(key, failed.text)),
                _ => return Err(TextCheckError::Connection(FrameError::Closed)),
            }
        }
    }

    /// The template that was under check, if it is not the model's own.
    fn template_of(&self, key: Option<&str>) -> Option<PathBuf> {
        let template = self.template.filter(|_| self.model.is_none() || key == Some(text::CHAT_TEMPLATE));
        template.map(|template| template.file.to_owned())
    }

    fn model_path(&self) -> PathBuf {
        self.model.map_or_else(PathBuf::new, |(identity, _)| identity.path.clone())
    }

    fn excessive(&self, key: String) -> TextCheckError {
        match self.template_of(Some(&key)) {
            Some(template) => TextCheckError::TemplateExcessive { template },
            None => TextCheckError::Excessive { path: self.model_path(), key },
        }
    }

    fn refused(&self, key: Option<String>, problem: String) -> TextCheckError {
        match self.template_of(key.as_deref()) {
            Some(template) => TextCheckError::TemplateRefused { template, problem },
            None => TextCheckError::Refused { path: self.model_path(), problem },
        }
    }
}

/// The address space of each process is limited from outside, to less than the check's own limits
/// need. Then the file is not to blame.
fn inherited_limit() -> Option<TextCheckError> {
    let limit = address_space_limit().filter(|&bytes| bytes < CHECK_MEMORY_BYTES + CODE_BYTES)?;
    let problem = format!(
        "the address space of each process is limited to {} (RLIMIT_AS): raise it with ulimit -v",
        ByteSize(limit).rounded()
    );
    Some(TextCheckError::Resources { problem })
}

/// The signal that ended the child, if its own limits send no such signal.
async fn foreign_signal(child: &mut Child) -> Option<i32> {
    let status = tokio::time::timeout(EXIT_TIMEOUT, child.wait()).await.ok()?.ok()?;
    let is_foreign = |signal: &i32| {
        [libc::SIGKILL, libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT].contains(signal)
    };
    status.signal().filter(is_foreign)
}
