//! What a loader gives up before it looks at a file of unknown origin.
//!
//! It has its files and its socket open already, so nothing that it loses hinders it: new privileges, every path of the
//! file system and every network port (Landlock), every system call but those of a process that reads, computes and
//! maps memory (seccomp). A fault in the parser then reaches this process's memory and its one socket. Landlock and
//! seccomp are taken as far as the kernel has them; containers may have neither.

use std::collections::BTreeMap;

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetError, Scope,
};
use nix::libc::{self, c_long};
use nix::sys::prctl::set_no_new_privs;
use nix::sys::signal::{SigSet, Signal};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

/// The newest Landlock whose rights this knows; older kernels take what they have of it.
const LANDLOCK: ABI = ABI::V6;

/// All that a loader calls: reading, its socket, memory, threads, time, signals of its own, the end.
const SYSTEM_CALLS: [c_long; 61] = [
    libc::SYS_read,
    libc::SYS_pread64,
    libc::SYS_readv,
    libc::SYS_preadv,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_pwrite64,
    libc::SYS_lseek,
    libc::SYS_close,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_fcntl,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    // Denied by Landlock, where there is one, with an error of its own.
    libc::SYS_openat,
    libc::SYS_memfd_create,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    libc::SYS_ppoll,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_mprotect,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_membarrier,
    libc::SYS_clone,
    libc::SYS_clone3,
    libc::SYS_futex,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_set_tid_address,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_prctl,
    libc::SYS_prlimit64,
    libc::SYS_getrandom,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_uname,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_sigaltstack,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_tgkill,
    libc::SYS_restart_syscall,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_getrusage,
];

#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    #[error("cannot set no_new_privs")]
    NoNewPrivs(#[source] nix::Error),
    #[error("cannot block SIGXFSZ")]
    Signal(#[source] nix::Error),
    #[error("cannot set up Landlock")]
    Landlock(#[from] RulesetError),
    #[error("cannot make the system call filter")]
    Filter(#[from] seccompiler::BackendError),
}

/// Call before the first thread is started: threads inherit all of it.
pub(super) fn enter() -> Result<(), SandboxError> {
    set_no_new_privs().map_err(SandboxError::NoNewPrivs)?;
    // A memfd beyond RLIMIT_FSIZE then fails with an error that can be reported instead of killing the process.
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGXFSZ);
    signals.thread_block().map_err(SandboxError::Signal)?;
    // No rule follows: nothing is allowed.
    Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(LANDLOCK))?
        .handle_access(AccessNet::from_all(LANDLOCK))?
        .scope(Scope::from_all(LANDLOCK))?
        .create()?
        .restrict_self()?;
    if let Err(error) = seccompiler::apply_filter(&filter()?) {
        tracing::warn!(%error, "this kernel takes no system call filter");
    }
    Ok(())
}

fn filter() -> Result<BpfProgram, seccompiler::BackendError> {
    // Not known rather than killed: the C library then takes an older way, and what has none reports an error.
    let refused = SeccompAction::Errno(libc::ENOSYS as u32);
    let rules: BTreeMap<c_long, Vec<_>> = SYSTEM_CALLS.into_iter().map(|call| (call, Vec::new())).collect();
    SeccompFilter::new(rules, refused, SeccompAction::Allow, std::env::consts::ARCH.try_into()?)?.try_into()
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Seek, Write};
    use std::net::UdpSocket;
    use std::process::Command;

    use super::*;

    /// On a thread of its own, which alone is confined.
    #[test]
    fn confined_thread_keeps_what_is_open_and_gets_nothing_else() {
        let mut open = tempfile::tempfile().unwrap();
        std::thread::spawn(move || {
            enter().unwrap();
            open.write_all(b"still").unwrap();
            open.rewind().unwrap();
            let mut text = String::new();
            open.read_to_string(&mut text).unwrap();
            assert_eq!(text, "still");
            memory::memfd::SealedMemfd::from_bytes("test", &[1; 100]).unwrap().map("test", 100).unwrap();
            assert_eq!(std::thread::spawn(|| 7).join().unwrap(), 7);

            let socket = UdpSocket::bind("127.0.0.1:0").unwrap_err();
            assert_eq!(socket.raw_os_error(), Some(libc::ENOSYS));
            assert!(Command::new("/bin/true").spawn().is_err());
            // Landlock may be missing; seccomp is not, wherever tests run.
            match File::open("/etc/passwd") {
                Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EACCES)),
                Ok(_) => println!("SKIPPED: this kernel has no Landlock"),
            }
        })
        .join()
        .unwrap();
    }
}
