// SPDX-License-Identifier: Apache-2.0

//! pidfds: descriptors of processes, which cannot be confused with later processes of the same
//! number.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{getsockopt, sockopt};

use crate::seqpacket::Connection;

/// The process at the other end of a connection.
pub fn of_peer(connection: &Connection) -> io::Result<OwnedFd> {
    match getsockopt(connection, sockopt::PeerPidfd) {
        Ok(fd) => Ok(fd),
        // Before Linux 6.5: open by number, then check that the process has not ended and its
        // number been reused.
        Err(nix::errno::Errno::ENOPROTOOPT | nix::errno::Errno::EINVAL) => {
            let pid = connection.peer()?.pid;
            let fd = open(pid)?;
            if has_ended(&fd)? { Err(io::Error::from_raw_os_error(libc::ESRCH)) } else { Ok(fd) }
        }
        Err(errno) => Err(errno.into()),
    }
}

/// The process that has this number now.
pub fn open(pid: i32) -> io::Result<OwnedFd> {
    let pid = rustix::process::Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())?)
}

/// Whether the process has ended. A pidfd becomes readable then, so an event loop can wait for it.
pub fn has_ended(pidfd: &impl AsFd) -> io::Result<bool> {
    let mut fds = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
    Ok(poll(&mut fds, PollTimeout::ZERO)? > 0)
}

/// The number of the process; `None` once it has been reaped, or if the descriptor is no pidfd.
pub fn number(pidfd: &impl AsFd) -> Option<i32> {
    let path = format!("/proc/self/fdinfo/{}", pidfd.as_fd().as_raw_fd());
    let info = std::fs::read_to_string(path).ok()?;
    let pid = info.lines().find_map(|line| line.strip_prefix("Pid:"))?.trim().parse().ok()?;
    (pid > 0).then_some(pid)
}

/// Clock ticks since boot at which a living process started (field 22 of /proc/PID/stat).
pub fn start_ticks(pid: i32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the command in parentheses and may itself hold spaces and parentheses.
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_ascii_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pidfd_follows_its_process_to_the_end() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id() as i32;
        let pidfd = open(pid).unwrap();
        assert_eq!(number(&pidfd), Some(pid));
        assert!(start_ticks(pid).unwrap() >= start_ticks(std::process::id() as i32).unwrap());
        assert!(!has_ended(&pidfd).unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(has_ended(&pidfd).unwrap());
        assert_eq!(number(&pidfd), None);
        assert_eq!(start_ticks(pid), None);
    }

    #[test]
    fn peer_of_a_pair_is_this_process() {
        let (left, _right) = Connection::pair().unwrap();
        let pidfd = of_peer(&left).unwrap();
        assert_eq!(number(&pidfd), Some(std::process::id() as i32));
    }

    #[test]
    fn other_descriptors_have_no_process_number() {
        assert_eq!(number(&std::fs::File::open("/dev/null").unwrap()), None);
    }
}
