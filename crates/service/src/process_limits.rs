// SPDX-License-Identifier: Apache-2.0

//! What an error says about the limits of the process: address space, and processes with their
//! threads. Children inherit the limits of their parent.

use std::io;

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use crate::exit::{Exit, HasExit, exit_for_io_error, remedy_for_io_error};
use crate::size::ByteSize;

/// The beginnings of the panics of std and tokio if the system starts no thread.
const THREAD_PANICS: [&str; 2] = ["failed to spawn thread", "OS can't spawn worker thread"];

/// The system did not start a process or a thread.
#[derive(Debug, thiserror::Error)]
#[error("{}", describe(.0))]
pub struct StartError(pub io::Error);

impl HasExit for StartError {
    fn exit(&self) -> Exit {
        match Errno::from_io_error(&self.0) {
            Some(Errno::AGAIN | Errno::NOMEM) => Exit::OutOfResources,
            _ => exit_for_io_error(&self.0),
        }
    }
}

fn describe(error: &io::Error) -> String {
    match Errno::from_io_error(error) {
        Some(Errno::AGAIN) => {
            "the system starts no further process or thread: raise RLIMIT_NPROC (ulimit -u) or pids.max of the cgroup"
                .to_owned()
        }
        _ => match remedy_for_io_error(error) {
            Some(remedy) => format!("{error}: {remedy}"),
            None => error.to_string(),
        },
    }
}

/// The error behind a panic whose message says that no thread was started.
pub(crate) fn thread_panic(message: &str) -> Option<StartError> {
    let is_of_thread = THREAD_PANICS.iter().any(|start| message.starts_with(start));
    is_of_thread.then(|| StartError(Errno::AGAIN.into()))
}

/// The limit of this process's address space (RLIMIT_AS), if it has one.
pub fn address_space_limit() -> Option<u64> {
    getrlimit(Resource::As).current
}

/// Adds the limit of the address space to the text of an error that it may have caused.
pub fn with_limits(exit: Exit, text: String) -> String {
    const NAME: &str = "RLIMIT_AS";
    match address_space_limit() {
        Some(bytes) if exit == Exit::OutOfResources && !text.contains(NAME) => format!(
            "{text}; the address space of each process is limited to {} ({NAME}), perhaps raise it with ulimit -v",
            ByteSize(bytes).rounded()
        ),
        _ => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_panic_of_a_thread_that_does_not_start_is_recognised() {
        let refused = "failed to spawn thread: Os { code: 11, kind: WouldBlock, message: \"x\" }";
        for message in
            [refused, "OS can't spawn worker thread: Resource temporarily unavailable (os error 11)"]
        {
            let error = thread_panic(message).unwrap();
            assert_eq!(error.exit(), Exit::OutOfResources);
            assert!(error.to_string().contains("RLIMIT_NPROC"), "{error}");
        }
        assert!(thread_panic("index out of bounds").is_none());
    }

    #[test]
    fn a_file_that_cannot_be_executed_is_not_called_a_limit() {
        let error = StartError(io::ErrorKind::NotFound.into());
        assert_eq!(error.exit(), Exit::Internal);
        assert!(!error.to_string().contains("RLIMIT"), "{error}");
    }
}
