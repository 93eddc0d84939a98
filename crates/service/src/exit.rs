// SPDX-License-Identifier: Apache-2.0

//! Exit codes. docs/OPERATING.md documents them, and scripts may rely on them.
//!
//! The supervisor's restart policy reads them too: a restart does not help against `Usage` and
//! `ModelRefused`.

use std::process::ExitCode;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Exit {
    /// The process did its work, or drained on request.
    Ok = 0,
    /// A bug of this program, or a fault of the machine without a code of its own.
    Internal = 1,
    /// Wrong arguments or configuration.
    Usage = 2,
    /// The model file is missing, malformed, modified while it was read, or of an unsupported kind.
    ModelRefused = 3,
    /// Out of memory, file descriptors, processes, threads or disk space, or above a configured
    /// limit.
    OutOfResources = 4,
    /// Another process of the fleet died or refused a request.
    PeerLost = 5,
    /// A port or path is in use, or a socket path is too long.
    AddressInUse = 6,
    /// A step on a GPU did not end in its time.
    DeviceHangs = 7,
    /// Ctrl-C ended a command before its result was complete (128 + SIGINT, as shells count).
    Interrupted = 130,
    /// The reader of a command's output closed it, as `head` does (128 + SIGPIPE, as shells count).
    OutputClosed = 141,
}

impl Exit {
    pub const ALL: [Exit; 10] = [
        Exit::Ok,
        Exit::Internal,
        Exit::Usage,
        Exit::ModelRefused,
        Exit::OutOfResources,
        Exit::PeerLost,
        Exit::AddressInUse,
        Exit::DeviceHangs,
        Exit::Interrupted,
        Exit::OutputClosed,
    ];

    pub const fn code(self) -> u8 {
        self as u8
    }

    /// The meaning of a child's exit code, or `None` for a code that this program does not use.
    pub fn from_code(code: i32) -> Option<Exit> {
        Self::ALL.into_iter().find(|exit| i32::from(exit.code()) == code)
    }

    /// Whether the same process with the same input always fails in the same way.
    pub const fn is_permanent(self) -> bool {
        matches!(self, Exit::Usage | Exit::ModelRefused)
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        ExitCode::from(exit.code())
    }
}

/// Maps an error to an exit code. The error enum of each process implements it.
pub trait HasExit: std::error::Error {
    fn exit(&self) -> Exit;
}

/// The exit code for an I/O error. Resources, addresses and lost peers have codes of their own.
pub fn exit_for_io_error(error: &std::io::Error) -> Exit {
    use std::io::ErrorKind as Kind;
    match error.kind() {
        Kind::OutOfMemory | Kind::StorageFull | Kind::QuotaExceeded | Kind::FileTooLarge => {
            Exit::OutOfResources
        }
        Kind::AddrInUse | Kind::AddrNotAvailable => Exit::AddressInUse,
        Kind::ConnectionRefused | Kind::ConnectionReset | Kind::ConnectionAborted | Kind::BrokenPipe => {
            Exit::PeerLost
        }
        _ => match rustix::io::Errno::from_io_error(error) {
            Some(rustix::io::Errno::MFILE | rustix::io::Errno::NFILE) => Exit::OutOfResources,
            _ => Exit::Internal,
        },
    }
}

/// What to do about an I/O error, if that is the same wherever it comes from.
pub fn remedy_for_io_error(error: &std::io::Error) -> Option<&'static str> {
    use std::io::ErrorKind as Kind;
    match error.kind() {
        Kind::StorageFull | Kind::QuotaExceeded => {
            Some("free space or inodes there, or choose another directory")
        }
        Kind::ReadOnlyFilesystem => Some("choose a directory that can be written"),
        _ => match rustix::io::Errno::from_io_error(error) {
            Some(rustix::io::Errno::MFILE) => Some("raise RLIMIT_NOFILE (ulimit -n)"),
            _ => None,
        },
    }
}

/// Formats an error and all its causes on one line: "a: b: c".
pub fn one_line(error: &dyn std::error::Error) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        // A wrapper that prints its source would otherwise repeat it.
        if !line.ends_with(&text) {
            line.push_str(": ");
            line.push_str(&text);
        }
        cause = error.source();
    }
    line.replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_the_documented_ones() {
        let codes: Vec<u8> = Exit::ALL.iter().map(|e| e.code()).collect();
        assert_eq!(codes, [0, 1, 2, 3, 4, 5, 6, 7, 130, 141]);
        assert_eq!(Exit::from_code(3), Some(Exit::ModelRefused));
        assert_eq!(Exit::from_code(101), None);
    }

    #[test]
    fn one_line_contains_each_cause_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("read manifest")]
        struct Outer(#[source] std::io::Error);
        let error = Outer(std::io::Error::other("two\nlines"));
        assert_eq!(one_line(&error), "read manifest: two lines");
    }

    #[test]
    fn running_out_of_descriptors_is_a_resource_failure() {
        let emfile = std::io::Error::from_raw_os_error(rustix::io::Errno::MFILE.raw_os_error());
        assert_eq!(exit_for_io_error(&emfile), Exit::OutOfResources);
        assert_eq!(exit_for_io_error(&std::io::ErrorKind::AddrInUse.into()), Exit::AddressInUse);
    }
}
