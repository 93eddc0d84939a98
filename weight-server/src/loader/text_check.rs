// SPDX-License-Identifier: Apache-2.0

//! Checks that a model's tokenizer and chat template can be used, before its weights are loaded.
//!
//! ```text
//! weight-server                          loader
//!   TextCheckJob + open file    ->       sets its limits, enters the sandbox
//!                               <-       TextCheckStarted, one for each key
//!                               <-       TextChecked, or LoadFailed
//! ```
//! The router later builds the same tokenizer and template from the same metadata. It serves all
//! models, so it must not be the first process to run them: a chat template is a program from the
//! file, and it can double a string until the memory of the machine is full. Here it meets the
//! limits of this process. If this process dies, its parent names the key that was under check.

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
    Loader(#[from] LoaderError),
}

pub(super) fn run(
    connection: &Connection,
    job: &wire::TextCheckJob,
    files: Vec<OwnedFd>,
) -> Result<(), LoaderError> {
    let (Some(identity), Ok([file])) = (job.file.clone(), <[OwnedFd; 1]>::try_from(files)) else {
        return Err(LoaderError::Unexpected { expected: "one open file", found: "another number of files" });
    };
    let (identity, file) = (file_identity_from_wire(identity), File::from(file));
    set_limits().map_err(LoaderError::Limits)?;
    sandbox::enter(SandboxProfile::Host).map_err(LoaderError::Sandbox)?;
    service::logging::start_thread();
    // The loader, which reads all files of the model, reports a header that is not valid.
    let Ok(header) = Header::read(PositionedReader { file, position: 0 }, identity.bytes) else {
        return send_frame(connection, loader_frame::Kind::TextChecked(wire::TextChecked::default()), &[]);
    };
    let checked = std::thread::scope(|scope| {
        let check = std::thread::Builder::new().name("text-check".to_owned()).stack_size(STACK_BYTES);
        let check = check.spawn_scoped(scope, || check_text(connection, header.metadata()));
        match check.map_err(LoaderError::Thread)?.join() {
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

fn check_text(connection: &Connection, metadata: &Metadata) -> Result<wire::TextChecked, TextRefusal> {
    let started = |key: &str| {
        let frame = wire::TextCheckStarted { key: key.to_owned() };
        send_frame(connection, loader_frame::Kind::TextCheckStarted(frame), &[])
    };
    started(TOKENIZER_KEYS)?;
    let tokenizer = match Tokenizer::from_metadata(metadata) {
        Ok(tokenizer) => tokenizer,
        Err(error @ LoadTokenizerError::NoTokenizer) => {
            return Ok(wire::TextChecked { has_tokenizer: false, chat_problem: one_line(&error) });
        }
        Err(error) => return Err(error.into()),
    };
    started(text::CHAT_TEMPLATE)?;
    let chat_problem = match ChatTemplate::from_metadata(metadata, &tokenizer) {
        Ok(_) => String::new(),
        Err(error @ LoadTemplateError::Excessive { .. }) => return Err(TextRefusal::Template(error)),
        // Such a model completes text, and refuses chats with this reason.
        Err(error) => one_line(&error),
    };
    Ok(wire::TextChecked { has_tokenizer: true, chat_problem })
}
