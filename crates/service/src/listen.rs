// SPDX-License-Identifier: Apache-2.0

//! File descriptors that a parent passes at start (sd_listen_fds(3)): those that the FD store kept
//! from an earlier process, or sockets of systemd's socket activation.

use std::io;
use std::os::fd::{OwnedFd, RawFd};

use crate::env;
use crate::exit::{Exit, HasExit, exit_for_io_error};
use crate::inherited_fd::take_fd;

/// Number of the first inherited descriptor, as sd_listen_fds(3) defines.
pub const LISTEN_FDS_START: RawFd = 3;

/// More inherited descriptors mean a corrupted environment. The limit is above that of the FD
/// store.
pub const LISTEN_FDS_MAX: usize = 65_536;

/// Name of the router's public socket: in a .socket unit (FileDescriptorName=), and where its
/// supervisor keeps it.
pub const HTTP_SOCKET_NAME: &str = "http";

#[derive(Debug)]
pub struct InheritedFd {
    pub name: String,
    pub fd: OwnedFd,
}

#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error("environment variable LISTEN_FDS={value:?} is not a number of at most {LISTEN_FDS_MAX}")]
    Count { value: String },
    #[error("LISTEN_FDS announces {fds} descriptors, LISTEN_FDNAMES names {names}")]
    Names { fds: usize, names: usize },
    #[error("cannot take over inherited descriptor {number} ({name})")]
    Take { number: RawFd, name: String, source: io::Error },
    #[error("environment variable {variable}={value:?} names no inherited descriptor")]
    Variable { variable: &'static str, value: String, source: io::Error },
}

impl HasExit for ListenError {
    fn exit(&self) -> Exit {
        match self {
            ListenError::Take { source, .. } | ListenError::Variable { source, .. } => {
                exit_for_io_error(source)
            }
            _ => Exit::Usage,
        }
    }
}

/// Checks what the environment announces, without taking descriptors. Tests therefore need no real
/// ones.
fn parse_announced_fds(
    pid: Option<&str>,
    count: Option<&str>,
    names: Option<&str>,
    own_pid: u32,
) -> Result<Vec<(RawFd, String)>, ListenError> {
    let (Some(pid), Some(count)) = (pid, count) else { return Ok(Vec::new()) };
    // Variables for another process may have been inherited through a process in between.
    if pid.parse() != Ok(own_pid) {
        return Ok(Vec::new());
    }
    let fds = match count.parse::<usize>() {
        Ok(fds) if fds <= LISTEN_FDS_MAX => fds,
        _ => return Err(ListenError::Count { value: count.to_owned() }),
    };
    let names: Vec<String> = match names {
        _ if fds == 0 => Vec::new(),
        Some(names) => names.split(':').map(str::to_owned).collect(),
        None => vec!["unknown".to_owned(); fds],
    };
    if names.len() != fds {
        return Err(ListenError::Names { fds, names: names.len() });
    }
    Ok((LISTEN_FDS_START..).zip(names).collect())
}

/// Takes all descriptors that are announced to this process. Call once and early, before threads
/// start.
pub fn inherited_fds() -> Result<Vec<InheritedFd>, ListenError> {
    let variable = |name| std::env::var(name).ok();
    let announced = parse_announced_fds(
        variable(env::LISTEN_PID).as_deref(),
        variable(env::LISTEN_FDS).as_deref(),
        variable(env::LISTEN_FDNAMES).as_deref(),
        std::process::id(),
    )?;
    announced
        .into_iter()
        .map(|(number, name)| match take_fd(number) {
            Ok(fd) => Ok(InheritedFd { name, fd }),
            Err(source) => Err(ListenError::Take { number, name, source }),
        })
        .collect()
}

/// Takes the descriptor whose number the environment variable contains. `None` if the variable is
/// not set.
pub fn fd_from_env(variable: &'static str) -> Result<Option<OwnedFd>, ListenError> {
    let Ok(value) = std::env::var(variable) else { return Ok(None) };
    let number = value.parse::<RawFd>().map_err(|_| io::ErrorKind::InvalidInput.into());
    match number.and_then(take_fd) {
        Ok(fd) => Ok(Some(fd)),
        Err(source) => Err(ListenError::Variable { variable, value, source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_for_another_process_are_ignored() {
        assert!(parse_announced_fds(Some("7"), Some("2"), Some("a:b"), 8).unwrap().is_empty());
        assert!(parse_announced_fds(None, Some("2"), Some("a:b"), 8).unwrap().is_empty());
    }

    #[test]
    fn names_belong_to_numbers_from_3_on() {
        let fds = parse_announced_fds(Some("8"), Some("2"), Some("manifest:lease"), 8).unwrap();
        assert_eq!(fds, [(3, "manifest".to_owned()), (4, "lease".to_owned())]);
    }

    #[test]
    fn inconsistent_announcements_are_errors() {
        assert!(matches!(parse_announced_fds(Some("8"), Some("x"), None, 8), Err(ListenError::Count { .. })));
        assert!(matches!(
            parse_announced_fds(Some("8"), Some("9999999"), None, 8),
            Err(ListenError::Count { .. })
        ));
        assert!(matches!(
            parse_announced_fds(Some("8"), Some("3"), Some("a:b"), 8),
            Err(ListenError::Names { fds: 3, names: 2 })
        ));
    }
}
