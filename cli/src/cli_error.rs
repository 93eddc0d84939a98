// SPDX-License-Identifier: Apache-2.0

//! [`CliError`]: a failed command, as one line of text and an exit code.

use std::error::Error;
use std::io;

use service::Exit;
use service::exit::{HasExit, exit_for_io_error, one_line, remedy_for_io_error};
use service::printable::printable;
use service::process_limits::{StartError, with_limits};

#[derive(Debug)]
pub(crate) struct CliError {
    pub(crate) exit: Exit,
    /// "what: why; what to do". If empty, nothing is printed.
    message: String,
    /// Standard error says it already.
    is_printed: bool,
}

pub(crate) type CliResult<T = ()> = Result<T, CliError>;

impl CliError {
    pub(crate) fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self { exit, message: with_limits(exit, message.into()), is_printed: false }
    }

    /// The user pressed Ctrl-C, which needs no message.
    pub(crate) fn interrupted() -> Self {
        Self::new(Exit::Interrupted, "")
    }

    /// An error that another process returned. `what` names the process or the failed command.
    pub(crate) fn from_status(what: &str, status: &tonic::Status) -> Self {
        let exit = match status.code() {
            tonic::Code::InvalidArgument | tonic::Code::NotFound | tonic::Code::AlreadyExists => Exit::Usage,
            tonic::Code::FailedPrecondition => Exit::ModelRefused,
            tonic::Code::ResourceExhausted => Exit::OutOfResources,
            tonic::Code::Unavailable | tonic::Code::Aborted | tonic::Code::DeadlineExceeded => Exit::PeerLost,
            _ => Exit::Internal,
        };
        match is_silent(status) {
            true => {
                Self::new(exit, format!("{what}: the process does not answer, it is stopped or overloaded"))
            }
            false => Self::new(exit, format!("{what}: {}", status.message())),
        }
    }

    pub(crate) fn print(&self) {
        if !self.message.is_empty() && !self.is_printed {
            let text = self.message.replace('\n', " ");
            service::logging::print_line(&format!("ballast: {}", printable(&text)));
        }
    }

    /// The same error, of which standard error says enough.
    pub(crate) fn printed(self) -> Self {
        Self { is_printed: true, ..self }
    }

    /// Removes the message, because another process reports the error.
    pub(crate) fn without_message(self) -> Self {
        Self::new(self.exit, "")
    }

    pub(crate) fn message(&self) -> &str {
        &self.message
    }
}

/// Whether the call ended because the other process has not answered a ping of HTTP/2. hyper has no
/// type for that in its public API.
fn is_silent(status: &tonic::Status) -> bool {
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        if error.to_string().contains("keep-alive timed out") {
            return true;
        }
        cause = error.source();
    }
    false
}

/// Errors of this workspace's crates say what failed, why, and what to do.
impl<E: HasExit> From<E> for CliError {
    fn from(error: E) -> Self {
        match start_error(&error) {
            Some(cause) => Self::new(cause.exit(), format!("{}: {cause}", one_line(&error))),
            None => Self::new(error.exit(), with_remedy(&error)),
        }
    }
}

/// The errors of the system that an error comes from.
fn system_errors<'a>(error: &'a (dyn Error + 'a)) -> impl Iterator<Item = &'a io::Error> {
    let causes = std::iter::successors(error.source(), |&cause| cause.source());
    causes.filter_map(|cause| cause.downcast_ref::<io::Error>())
}

/// The cause of an error if it is a thread that the system did not start. Threads start in many
/// places, which only pass the error of the system on.
fn start_error(error: &dyn Error) -> Option<StartError> {
    let mut refusals = system_errors(error).filter(|cause| cause.kind() == io::ErrorKind::WouldBlock);
    let code = refusals.find_map(io::Error::raw_os_error)?;
    Some(StartError(io::Error::from_raw_os_error(code)))
}

/// One line with what to do about the system's error. Files are opened and written in many places,
/// which only say which file and why not.
pub(crate) fn with_remedy(error: &dyn Error) -> String {
    let text = one_line(error);
    match system_errors(error).find_map(remedy_for_io_error) {
        Some(remedy) => format!("{text}: {remedy}"),
        None => text,
    }
}

/// Adds what was being done to an error of the operating system.
pub(crate) trait IoContext<T> {
    fn with_context(self, what: impl FnOnce() -> String) -> CliResult<T>;
}

impl<T> IoContext<T> for std::io::Result<T> {
    fn with_context(self, what: impl FnOnce() -> String) -> CliResult<T> {
        self.map_err(|error| {
            let exit = exit_for_io_error(&error);
            let remedy = remedy_for_io_error(&error).map(|remedy| format!(": {remedy}")).unwrap_or_default();
            CliError::new(exit, format!("{}: {error}{remedy}", what()))
        })
    }
}
