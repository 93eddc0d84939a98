// SPDX-License-Identifier: Apache-2.0

//! One process of a child: fork and exec with its descriptors in place, signals, reaping.
//!
//! Descriptors of a new process, from number 3 on: the inherited ones (LISTEN_FDS), the liveness
//! socket, the pipe with the attach token, the memory of the last log lines. All other descriptors
//! of the supervisor are close-on-exec. Each process leads its own process group. Ctrl-C in a
//! terminal therefore reaches only the supervisor, and killing the group ends what the child has
//! started.

use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use command_fds::{CommandFdExt, FdMapping};
use nix::sys::signal::{Signal as GroupSignal, killpg};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use service::env;
use service::listen::LISTEN_FDS_START;
use service::logging::LogTail;
use service::supervision::ADOPTED;

use crate::attach_token::AttachToken;
use crate::mps::MPS_PIPE_DIRECTORY;
use crate::shim;
use crate::spec::ChildSpec;
use crate::state::Termination;

/// What a new process gets: configuration, sockets, descriptors and token.
pub(crate) struct SpawnOptions<'a> {
    pub(crate) config: &'a Path,
    pub(crate) notify_socket: &'a Path,
    pub(crate) inherited: Vec<(&'a str, BorrowedFd<'a>)>,
    pub(crate) token: Option<AttachToken>,
    /// Where the CUDA driver finds MPS.
    pub(crate) mps_directory: Option<&'a Path>,
    pub(crate) log: tracing::Level,
    /// The longest time between two WATCHDOG=1 messages of the process.
    pub(crate) watchdog: Duration,
    /// Where the process keeps its last log lines.
    pub(crate) log_tail: Option<LogTail>,
}

#[derive(Debug)]
pub(crate) struct ChildProcess {
    pub(crate) pid: u32,
    pub(crate) since: Instant,
    /// The last log lines, if crash reports are written.
    pub(crate) log_tail: Option<LogTail>,
    pidfd: OwnedFd,
    /// Absent for an adopted process: it is not a child of this process, so its exit status is
    /// unknown.
    own: Option<std::process::Child>,
    /// The process reads end of file on the other end when the supervisor dies. Absent until an
    /// orphan offers itself.
    liveness: Option<UnixStream>,
}

impl ChildProcess {
    pub(crate) fn spawn(spec: &ChildSpec, options: SpawnOptions<'_>) -> io::Result<Self> {
        let (liveness, liveness_of_child) = UnixStream::pair()?;
        let mut command = Command::new("/proc/self/exe");
        command
            .arg0("ballast")
            .args([shim::SUBCOMMAND, shim::SUPERVISOR, &std::process::id().to_string()])
            .args([shim::OOM_SCORE_ADJ, &spec.role.oom_score_adj().to_string()])
            .arg(spec.role.subcommand())
            .arg("--config")
            .arg(options.config)
            .process_group(0)
            .stdin(Stdio::null())
            // Standard output belongs to the command that the user started.
            .stdout(io::stderr().as_fd().try_clone_to_owned()?);
        for private in env::PRIVATE {
            command.env_remove(private);
        }
        if std::env::var_os(env::LOG).is_none() {
            command.env(env::LOG, options.log.as_str());
        }
        command.env(env::NOTIFY_SOCKET, options.notify_socket);
        command.envs(options.mps_directory.map(|directory| (MPS_PIPE_DIRECTORY, directory)));
        command.env(env::WATCHDOG_USEC, options.watchdog.as_micros().to_string());

        let mut mappings = Vec::with_capacity(options.inherited.len() + 3);
        let mut next = LISTEN_FDS_START;
        let mut map = |parent_fd: OwnedFd| {
            mappings.push(FdMapping { parent_fd, child_fd: next });
            next += 1;
            next - 1
        };
        if !options.inherited.is_empty() {
            let names: Vec<&str> = options.inherited.iter().map(|(name, _)| *name).collect();
            command.env(env::LISTEN_FDS, names.len().to_string()).env(env::LISTEN_FDNAMES, names.join(":"));
            for (_, fd) in &options.inherited {
                map(fd.try_clone_to_owned()?);
            }
        }
        command.env(env::LIVENESS_FD, map(liveness_of_child.into()).to_string());
        if let Some(token) = options.token {
            command.env(env::ATTACH_TOKEN_FD, map(token.into_pipe()?).to_string());
        }
        if let Some(tail) = &options.log_tail {
            command.env(env::LOG_TAIL_FD, map(tail.try_clone_fd()?).to_string());
        }
        command.fd_mappings(mappings).map_err(io::Error::other)?;

        let mut own = command.spawn()?;
        let pid = own.id();
        match open_pidfd(pid) {
            Ok(pidfd) => Ok(Self {
                pid,
                since: Instant::now(),
                log_tail: options.log_tail,
                pidfd,
                own: Some(own),
                liveness: Some(liveness),
            }),
            Err(error) => {
                // Without a pidfd the supervisor would not notice the exit.
                own.kill()?;
                own.wait()?;
                Err(error)
            }
        }
    }

    /// A running process of a dead supervisor. It is supervised after it has offered itself.
    pub(crate) fn orphan(pid: u32) -> io::Result<Self> {
        Ok(Self {
            pid,
            since: Instant::now(),
            log_tail: None,
            pidfd: open_pidfd(pid)?,
            own: None,
            liveness: None,
        })
    }

    /// Accepts an orphan's offer: keeps the socket that the orphan sent, and confirms on it.
    pub(crate) fn adopt(&mut self, socket: OwnedFd, log_tail: Option<LogTail>) -> io::Result<()> {
        self.log_tail = log_tail;
        let mut liveness = UnixStream::from(socket);
        liveness.write_all(&[ADOPTED])?;
        self.liveness = Some(liveness);
        Ok(())
    }

    /// Whether the process executes another file than this one: an upgrade has replaced it since.
    pub(crate) fn executes_other_file(&self) -> bool {
        let file = |process: &str| {
            let found = std::fs::metadata(format!("/proc/{process}/exe")).ok()?;
            Some((found.dev(), found.ino()))
        };
        file(&self.pid.to_string()) != file("self")
    }

    /// Whether an earlier supervisor started the process.
    pub(crate) fn is_adopted(&self) -> bool {
        self.own.is_none()
    }

    /// Readable after the process has exited.
    pub(crate) fn pidfd(&self) -> io::Result<OwnedFd> {
        self.pidfd.try_clone()
    }

    pub(crate) fn terminate(&self) {
        signal(&self.pidfd, Signal::TERM);
        // A stopped process (SIGSTOP) would not see SIGTERM.
        signal(&self.pidfd, Signal::CONT);
    }

    pub(crate) fn kill(&self) {
        signal(&self.pidfd, Signal::KILL);
    }

    /// Kills the process group of an exited process and collects its exit status.
    pub(crate) fn reap(self) -> Termination {
        let Some(mut own) = self.own else { return Termination::Unknown };
        // While the group leader is not reaped, the kernel does not reuse its process id.
        let group = nix::unistd::Pid::from_raw(self.pid.cast_signed());
        match killpg(group, GroupSignal::SIGKILL) {
            // ESRCH: the group has no other process, which is the normal case.
            Ok(()) | Err(nix::Error::ESRCH) => {}
            Err(error) => tracing::warn!(pid = self.pid, %error, "cannot kill the process group"),
        }
        match own.wait() {
            Ok(status) => match (status.code(), status.signal()) {
                (Some(code), _) => Termination::ExitCode(code),
                (_, Some(signal)) => Termination::Signal(signal),
                _ => Termination::Unknown,
            },
            Err(_) => Termination::Unknown,
        }
    }
}

fn open_pidfd(pid: u32) -> io::Result<OwnedFd> {
    let pid = Pid::from_raw(pid.cast_signed()).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}

fn signal(pidfd: &OwnedFd, signal: Signal) {
    match pidfd_send_signal(pidfd, signal) {
        // ESRCH: the process has exited, which the pidfd reports too.
        Ok(()) | Err(rustix::io::Errno::SRCH) => {}
        Err(error) => tracing::error!(?signal, %error, "cannot signal a child"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_of_another_executable_is_told_from_one_of_this() {
        assert!(!ChildProcess::orphan(std::process::id()).unwrap().executes_other_file());
        let mut other = Command::new("sleep").arg("60").spawn().unwrap();
        assert!(ChildProcess::orphan(other.id()).unwrap().executes_other_file());
        other.kill().unwrap();
        other.wait().unwrap();
    }
}
