// SPDX-License-Identifier: Apache-2.0

//! Checks that a model's tokenizer and chat template can be used, before its weights are loaded.
//!
//! ```text
//! weight-server                          loader
//!   TextCheckJob + open files   ->       sets its limits, enters the sandbox
//!                               <-       TextCheckStarted, one for each key
//!                               <-       TextChecked, or LoadFailed
//! ```
//! The router later builds the same tokenizer and template from the same metadata. It serves all
//! models, so it must not be the first process to run them: a chat template is a program from the
//! file, and it can double a string until the memory of the machine is full. Here it meets the
//! limits of this process. If this process dies, its parent names the key that was under check.
//!
//! A job may bring a chat template of its own, which replaces the model's. Without a model file,
//! only that template is checked.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use gguf::{Header, Metadata};
use handoff::manifest::file_identity_from_wire;
use handoff::seqpacket::Connection;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use proto::weights::v1::{self as wire, LoadFailure, loader_frame};
use service::exit::one_line;
use service::process_limits::StartError;
use text::{ChatTemplate, LoadTemplateError, LoadTokenizerError, Tokenizer};

use super::channel::{LoaderError, send_failure, send_frame};
use super::sandbox::{self, SandboxProfile};

/// Private memory of a check. The largest known vocabulary (262,144 tokens) takes 60 MiB.
pub(crate) const CHECK_MEMORY_BYTES: u64 = 512 << 20;
/// Processor time of a check, which normally takes a tenth of a second. A template that uses all
/// its instructions once takes two.
pub(crate) const CHECK_CPU_SECONDS: u64 = 10;
/// The stack of the router's threads. A template that needs more would end the router.
const STACK_BYTES: usize = 2 << 20;

const TOKENIZER_KEYS: &str = "tokenizer.ggml";

#[derive(Debug, thiserror::Error)]
enum TextRefusal {
    #[error(transparent)]
    Tokenizer(#[from] LoadTokenizerError),
    #[error("{}", text::CHAT_TEMPLATE)]
    Template(#[source] LoadTemplateError),
    #[error(transparent)]
    GivenTemplate(#[from] LoadTemplateError),
    #[error("the model has no tokenizer, so it has no chats")]
    NoChats,
    #[error(transparent)]
    Loader(#[from] LoaderError),
}

pub(super) fn run(
    connection: &Connection,
    job: &wire::TextCheckJob,
    files: Vec<OwnedFd>,
) -> Result<(), LoaderError> {
    let mut files = files.into_iter().map(File::from);
    let identity = job.file.clone().map(file_identity_from_wire);
    let model = identity.and_then(|identity| Some((identity, files.next()?)));
    let template = job.chat_template.then(|| files.next()).flatten();
    let is_complete = model.is_some() == job.file.is_some() && template.is_some() == job.chat_template;
    if !is_complete || files.next().is_some() {
        return Err(LoaderError::Unexpected { expected: "the files of the job", found: "other files" });
    }
    set_limits().map_err(LoaderError::Limits)?;
    sandbox::enter(SandboxProfile::Host).map_err(LoaderError::Sandbox)?;
    service::logging::start_thread();
    let header = match model {
        None => None,
        Some((identity, file)) => {
            match Header::read(PositionedReader { file, position: 0 }, identity.bytes) {
                Ok(header) => Some(header),
                // The loader, which reads all files of the model, reports an invalid header.
                Err(_) => {
                    let unknown = loader_frame::Kind::TextChecked(wire::TextChecked::default());
                    return send_frame(connection, unknown, &[]);
                }
            }
        }
    };
    let checked = std::thread::scope(|scope| {
        let check = std::thread::Builder::new().name("text-check".to_owned()).stack_size(STACK_BYTES);
        let check = check
            .spawn_scoped(scope, || check_text(connection, header.as_ref().map(Header::metadata), template));
        match check.map_err(|error| LoaderError::Thread(StartError(error)))?.join() {
            Ok(checked) => checked,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    });
    match checked {
        Ok(checked) => send_frame(connection, loader_frame::Kind::TextChecked(checked), &[]),
        Err(TextRefusal::Loader(error)) => Err(error),
        Err(error) => send_failure(connection, LoadFailure::ModelRefused, one_line(&error)),
    }
}

/// Reads a file at a position of its own. The loader of the same model shares the open file and
/// moves its position.
struct PositionedReader {
    file: File,
    position: u64,
}

impl Read for PositionedReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read_at(buffer, self.position)?;
        self.position += count as u64;
        Ok(count)
    }
}

/// An allocation beyond the limit aborts the process.
fn set_limits() -> nix::Result<()> {
    // A process that dies at its limits is no bug to look into.
    let limits = [
        (Resource::RLIMIT_DATA, CHECK_MEMORY_BYTES, CHECK_MEMORY_BYTES),
        // SIGXCPU comes before SIGKILL, which would look like a kill from outside.
        (Resource::RLIMIT_CPU, CHECK_CPU_SECONDS, CHECK_CPU_SECONDS + 1),
        (Resource::RLIMIT_CORE, 0, 0),
    ];
    for (resource, soft, hard) in limits {
        let (_, allowed) = getrlimit(resource)?;
        setrlimit(resource, soft.min(allowed), hard.min(allowed))?;
    }
    Ok(())
}

/// Checks the model's text, with `template` in place of its own chat template.
fn check_text(
    connection: &Connection,
    metadata: Option<&Metadata>,
    template: Option<File>,
) -> Result<wire::TextChecked, TextRefusal> {
    let started = |key: &str| {
        let frame = wire::TextCheckStarted { key: key.to_owned() };
        send_frame(connection, loader_frame::Kind::TextCheckStarted(frame), &[])
    };
    let Some(metadata) = metadata else {
        started(text::CHAT_TEMPLATE)?;
        ChatTemplate::new(&template_text(template)?, None, "", "")?;
        return Ok(wire::TextChecked { has_tokenizer: false, chat_problem: String::new() });
    };
    started(TOKENIZER_KEYS)?;
    let tokenizer = match Tokenizer::from_metadata(metadata) {
        Ok(tokenizer) => tokenizer,
        Err(LoadTokenizerError::NoTokenizer) if template.is_some() => {
            started(text::CHAT_TEMPLATE)?;
            return Err(TextRefusal::NoChats);
        }
        Err(error @ LoadTokenizerError::NoTokenizer) => {
            return Ok(wire::TextChecked { has_tokenizer: false, chat_problem: one_line(&error) });
        }
        Err(error) => return Err(error.into()),
    };
    started(text::CHAT_TEMPLATE)?;
    if template.is_some() {
        ChatTemplate::from_source(&template_text(template)?, &tokenizer)?;
        return Ok(wire::TextChecked { has_tokenizer: true, chat_problem: String::new() });
    }
    let chat_problem = match ChatTemplate::from_metadata(metadata, &tokenizer) {
        Ok(_) => String::new(),
        Err(error @ LoadTemplateError::Excessive { .. }) => return Err(TextRefusal::Template(error)),
        // Such a model completes text, and refuses chats with this reason.
        Err(error) => one_line(&error),
    };
    Ok(wire::TextChecked { has_tokenizer: true, chat_problem })
}

/// The text of the job's template. Empty without one.
fn template_text(file: Option<File>) -> Result<String, TextRefusal> {
    let mut bytes = Vec::new();
    if let Some(file) = file {
        let reader = PositionedReader { file, position: 0 };
        // One byte more than allowed shows that a template is too long.
        let read = reader.take(text::MAX_TEMPLATE_BYTES as u64 + 1).read_to_end(&mut bytes);
        read.map_err(LoaderError::Template)?;
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
