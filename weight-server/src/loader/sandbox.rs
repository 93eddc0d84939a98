// SPDX-License-Identifier: Apache-2.0

//! The sandbox of a loader, which it enters before it reads a file of unknown origin.
//!
//! The loader has its files and its socket open already. With Landlock it gives up every path of
//! the file system and every network port. With seccomp it gives up every system call that reading,
//! computing and mapping memory do not need. It also gives up new privileges. A bug in the parser
//! then reaches only this process's memory and its one socket. Landlock and seccomp are applied as
//! far as the kernel supports them; containers may support neither.
//!
//! A load onto a GPU needs more. The driver opens devices, starts threads and inspects the machine
//! when it creates its context. That happens before the sandbox, when only the weight-server's
//! frame has been read. What the driver does later is not documented: every allocation, mapping and
//! export is an ioctl, and exports open /dev/nvidiactl again. Its files therefore stay accessible:
//! NVIDIA's devices for use, /proc and /sys for reading. Instead of an allowlist, a denylist blocks
//! the system calls that reach other processes and programs or give privileges. The filter also
//! applies to the driver's existing threads, which read nothing of the file.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreated, RulesetCreatedAttr, RulesetError, Scope,
};
use nix::libc::{self, c_long};
use nix::sys::prctl::set_no_new_privs;
use nix::sys::signal::{SigSet, Signal};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

/// The newest Landlock version that this code knows. Older kernels apply what they support of it.
const LANDLOCK_ABI: ABI = ABI::V6;

/// Every system call of a loader: reading, its socket, memory, threads, time, its own signals,
/// exit.
const ALLOWED_SYSCALLS: [c_long; 61] = [
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
    // Landlock, if the kernel has it, denies this with its own error.
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

/// System calls that a loader with a GPU driver does not need: programs, other processes, sockets,
/// privileges, settings of the machine. Access to open files, memory, threads and ioctl stay.
const DENIED_GPU_SYSCALLS: [c_long; 54] = [
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_getfd,
    libc::SYS_pidfd_send_signal,
    libc::SYS_kill,
    libc::SYS_tkill,
    libc::SYS_socket,
    libc::SYS_socketpair,
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_connect,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_setns,
    libc::SYS_unshare,
    libc::SYS_setuid,
    libc::SYS_setgid,
    libc::SYS_setreuid,
    libc::SYS_setregid,
    libc::SYS_setresuid,
    libc::SYS_setresgid,
    libc::SYS_setfsuid,
    libc::SYS_setfsgid,
    libc::SYS_setgroups,
    libc::SYS_capset,
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_open_by_handle_at,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_sethostname,
    libc::SYS_acct,
];

/// What the loader must keep access to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SandboxProfile {
    Host,
    /// A GPU driver with a context.
    Gpu,
}

#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    #[error("cannot set no_new_privs")]
    NoNewPrivs(#[source] nix::Error),
    #[error("cannot block SIGXFSZ")]
    Signal(#[source] nix::Error),
    #[error("cannot set up Landlock")]
    Landlock(#[from] RulesetError),
    #[error("cannot build the system call filter")]
    Filter(#[from] seccompiler::BackendError),
}

/// Must be called while this process runs no other thread of its own: later threads inherit the
/// sandbox.
pub(super) fn enter(profile: SandboxProfile) -> Result<(), SandboxError> {
    set_no_new_privs().map_err(SandboxError::NoNewPrivs)?;
    // A memfd larger than RLIMIT_FSIZE then fails with an error that can be reported, instead of
    // killing the process.
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGXFSZ);
    signals.thread_block().map_err(SandboxError::Signal)?;
    // Access that no rule allows is denied.
    let rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(LANDLOCK_ABI))?
        .handle_access(AccessNet::from_all(LANDLOCK_ABI))?
        .scope(Scope::from_all(LANDLOCK_ABI))?
        .create()?;
    let (rules, filter) = match profile {
        SandboxProfile::Host => (rules, allow_only(&ALLOWED_SYSCALLS)?),
        SandboxProfile::Gpu => (driver_files(rules)?, deny(&DENIED_GPU_SYSCALLS)?),
    };
    rules.restrict_self()?;
    let applied = match profile {
        SandboxProfile::Host => seccompiler::apply_filter(&filter),
        SandboxProfile::Gpu => seccompiler::apply_filter_all_threads(&filter),
    };
    if let Err(error) = applied {
        tracing::warn!(%error, "the kernel does not support the system call filter");
    }
    Ok(())
}

/// Allows the driver its devices, and what it reads about the machine.
fn driver_files(rules: RulesetCreated) -> Result<RulesetCreated, RulesetError> {
    let device = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::IoctlDev;
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    let devices = nvidia_devices(Path::new("/dev"));
    let folders = ["/proc", "/sys"].map(PathBuf::from);
    // A path that cannot be opened here is of no use to the driver either.
    let open = |path: PathBuf, access| Some(PathBeneath::new(PathFd::new(path).ok()?, access));
    let devices = devices.into_iter().filter_map(|path| open(path, device));
    let folders = folders.into_iter().filter_map(|path| open(path, read));
    rules.add_rules(devices.chain(folders).map(Ok::<_, RulesetError>))
}

/// /dev/nvidia0, /dev/nvidiactl, /dev/nvidia-uvm and similar devices.
fn nvidia_devices(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let ours = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| name.starts_with("nvidia")) && !path.is_dir()
    };
    entries.filter_map(|entry| Some(entry.ok()?.path())).filter(ours).collect()
}

/// ENOSYS instead of a kill: the C library then falls back to an older system call, or reports an
/// error.
const DENY: SeccompAction = SeccompAction::Errno(libc::ENOSYS as u32);

fn allow_only(calls: &[c_long]) -> Result<BpfProgram, seccompiler::BackendError> {
    filter(calls, DENY, SeccompAction::Allow)
}

fn deny(calls: &[c_long]) -> Result<BpfProgram, seccompiler::BackendError> {
    filter(calls, SeccompAction::Allow, DENY)
}

fn filter(
    calls: &[c_long],
    others: SeccompAction,
    these: SeccompAction,
) -> Result<BpfProgram, seccompiler::BackendError> {
    let rules: BTreeMap<c_long, Vec<_>> = calls.iter().map(|call| (*call, Vec::new())).collect();
    SeccompFilter::new(rules, others, these, std::env::consts::ARCH.try_into()?)?.try_into()
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Seek, Write};
    use std::net::UdpSocket;
    use std::process::Command;

    use super::*;

    /// Runs in a thread of its own, which alone is confined.
    #[test]
    fn confined_thread_keeps_open_files_and_gets_no_new_access() {
        let mut open = tempfile::tempfile().unwrap();
        std::thread::spawn(move || {
            enter(SandboxProfile::Host).unwrap();
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
            // Landlock may be missing on a test machine; seccomp is not.
            match File::open("/etc/passwd") {
                Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EACCES)),
                Ok(_) => println!("SKIPPED: this kernel has no Landlock"),
            }
        })
        .join()
        .unwrap();
    }

    /// Runs in a process of its own, because the filter applies to all threads.
    #[test]
    fn gpu_sandbox_denies_programs_and_sockets() {
        const CHILD: &str = "BALLAST_TEST_GPU_SANDBOX";
        if std::env::var_os(CHILD).is_none() {
            let name = "loader::sandbox::tests::gpu_sandbox_denies_programs_and_sockets";
            let status = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", name])
                .env(CHILD, "1")
                .status()
                .unwrap();
            assert!(status.success());
            return;
        }
        let (asked, when_asked) = std::sync::mpsc::channel();
        let earlier = std::thread::spawn(move || {
            when_asked.recv().unwrap();
            UdpSocket::bind("127.0.0.1:0").unwrap_err().raw_os_error()
        });
        enter(SandboxProfile::Gpu).unwrap();
        asked.send(()).unwrap();
        assert_eq!(earlier.join().unwrap(), Some(libc::ENOSYS));
        assert!(Command::new("/bin/true").spawn().is_err());
        let (left, mut right) = std::io::pipe().map(|(read, write)| (write, read)).unwrap();
        (&left).write_all(b"open").unwrap();
        let mut read = [0; 4];
        right.read_exact(&mut read).unwrap();
        File::open("/proc/self/maps").unwrap();
        match File::open("/etc/passwd") {
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EACCES)),
            Ok(_) => println!("SKIPPED: this kernel has no Landlock"),
        }
    }

    #[test]
    fn only_nvidia_devices_are_found() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["nvidia0", "nvidiactl", "nvidia-uvm", "null", "sda"] {
            File::create(folder.path().join(name)).unwrap();
        }
        std::fs::create_dir(folder.path().join("nvidia-caps")).unwrap();
        let mut found = nvidia_devices(folder.path());
        found.sort();
        let names: Vec<&str> = found.iter().filter_map(|path| path.file_name()?.to_str()).collect();
        assert_eq!(names, ["nvidia-uvm", "nvidia0", "nvidiactl"]);
    }
}
