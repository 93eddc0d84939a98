//! How a command fails: one line for people, one code for scripts.

use service::Exit;
use service::exit::{HasExit, one_line};

#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) exit: Exit,
    /// "what: why; what to do". Empty: nothing more is to be said.
    message: String,
}

pub(crate) type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    pub(crate) fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self { exit, message: message.into() }
    }

    /// Ctrl-C: who has typed it knows why.
    pub(crate) fn interrupted() -> Self {
        Self::new(Exit::Interrupted, "")
    }

    /// An answer of another process to something that was asked of it.
    pub(crate) fn answer(what: &str, status: &tonic::Status) -> Self {
        let exit = match status.code() {
            tonic::Code::InvalidArgument | tonic::Code::NotFound | tonic::Code::AlreadyExists => Exit::Usage,
            tonic::Code::FailedPrecondition => Exit::ModelRefused,
            tonic::Code::ResourceExhausted => Exit::OutOfResources,
            tonic::Code::Unavailable | tonic::Code::Aborted | tonic::Code::DeadlineExceeded => Exit::PeerLost,
            _ => Exit::Internal,
        };
        Self::new(exit, format!("{what}: {}", status.message()))
    }

    pub(crate) fn print(&self) {
        if !self.message.is_empty() {
            eprintln!("ballast: {}", self.message.replace('\n', " "));
        }
    }

    /// Somebody else tells it.
    pub(crate) fn already_said(self) -> Self {
        Self::new(self.exit, "")
    }

    pub(crate) fn message(&self) -> &str {
        &self.message
    }
}

/// Errors of our own crates say what, why and what to do themselves.
impl<E: HasExit> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::new(error.exit(), one_line(&error))
    }
}

/// For errors of the operating system: what was tried stands before it.
pub(crate) trait Trying<T> {
    fn trying(self, what: impl FnOnce() -> String) -> Outcome<T>;
}

impl<T> Trying<T> for std::io::Result<T> {
    fn trying(self, what: impl FnOnce() -> String) -> Outcome<T> {
        self.map_err(|error| {
            Failure::new(service::exit::exit_for_io_error(&error), format!("{}: {error}", what()))
        })
    }
}
