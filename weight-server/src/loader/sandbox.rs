//! What a loader gives up before it looks at a file of unknown origin.
//!
//! It has its files and its socket open already, so nothing that it loses hinders it: new privileges, every path of the
//! file system and every network port (Landlock), every system call but those of a process that reads, computes and
//! maps memory (seccomp). A fault in the parser then reaches this process's memory and its one socket. Landlock and
//! seccomp are taken as far as the kernel has them; containers may have neither.
//!
//! A load onto a GPU needs more. The driver opens devices, starts threads and looks around the machine when it makes its
//! context; that comes before, when nothing but the weight-server's own frame has been read. What it does afterwards is not
//! written down anywhere: every allocation, mapping and export is ioctl, and exports open /dev/nvidiactl anew. So its
//! files stay open to it (NVIDIA's devices to be used, /proc and /sys to be read), and of system calls it
//! loses those that reach other processes and programs, or give privileges, instead of keeping a list. The driver's own
//! threads, which were there before, get the filter with all others; they read nothing of the file.

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

/// The newest Landlock whose rights this knows; older kernels take what they have of it.
const LANDLOCK_ABI: ABI = ABI::V6;

/// All that a loader calls: reading, its socket, memory, threads, time, signals of its own, the end.
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

/// What a loader with a GPU's driver in it does not call: programs, other processes, sockets, privileges, the machine's own
/// settings. Reading and writing what is open, memory, threads and ioctl stay.
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

/// What the loader has in it beside itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SandboxProfile {
    Host,
    /// A GPU's driver, with a context.
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
    #[error("cannot make the system call filter")]
    Filter(#[from] seccompiler::BackendError),
}

/// Call while no other thread of our own runs: later ones inherit all of it.
pub(super) fn enter(profile: SandboxProfile) -> Result<(), SandboxError> {
    set_no_new_privs().map_err(SandboxError::NoNewPrivs)?;
    // A memfd beyond RLIMIT_FSIZE then fails with an error that can be reported instead of killing the process.
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGXFSZ);
    signals.thread_block().map_err(SandboxError::Signal)?;
    // What no rule allows is refused.
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
        tracing::warn!(%error, "this kernel takes no system call filter");
    }
    Ok(())
}

/// Leaves the driver its devices, and what it reads about the machine.
fn driver_files(rules: RulesetCreated) -> Result<RulesetCreated, RulesetError> {
    let device = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::IoctlDev;
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    let devices = nvidia_devices(Path::new("/dev"));
    let folders = ["/proc", "/sys"].map(PathBuf::from);
    // What cannot be opened here is no use to the driver either.
    let open = |path: PathBuf, access| Some(PathBeneath::new(PathFd::new(path).ok()?, access));
    let devices = devices.into_iter().filter_map(|path| open(path, device));
    let folders = folders.into_iter().filter_map(|path| open(path, read));
    rules.add_rules(devices.chain(folders).map(Ok::<_, RulesetError>))
}

/// /dev/nvidia0, /dev/nvidiactl, /dev/nvidia-uvm and their like.
fn nvidia_devices(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let ours = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| name.starts_with("nvidia")) && !path.is_dir()
    };
    entries.filter_map(|entry| Some(entry.ok()?.path())).filter(ours).collect()
}

/// Not known rather than killed: the C library then takes an older way, and what has none reports an error.
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

    /// On a thread of its own, which alone is confined.
    #[test]
    fn confined_thread_keeps_what_is_open_and_gets_nothing_else() {
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
            // Landlock may be missing; seccomp is not, wherever tests run.
            match File::open("/etc/passwd") {
                Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EACCES)),
                Ok(_) => println!("SKIPPED: this kernel has no Landlock"),
            }
        })
        .join()
        .unwrap();
    }

    /// In a process of its own: the filter is put on all threads.
    #[test]
    fn loader_with_a_driver_starts_no_program_and_opens_no_socket() {
        const CHILD: &str = "BALLAST_TEST_GPU_SANDBOX";
        if std::env::var_os(CHILD).is_none() {
            let name = "loader::sandbox::tests::loader_with_a_driver_starts_no_program_and_opens_no_socket";
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
    fn devices_of_nvidia_are_found_and_others_are_not() {
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
