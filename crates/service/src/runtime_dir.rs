// SPDX-License-Identifier: Apache-2.0

//! The runtime directory is the registry of a fleet: a process is found by the socket that it has
//! bound there.
//!
//! ```text
//! supervisor.lock        locked (flock) by the running supervisor: two cannot share a directory
//! supervisor.sock        gRPC ballast.fleet.v1
//! weights.sock           weight hand-off (SOCK_SEQPACKET)
//! weights-admin.sock     gRPC ballast.weights.v1
//! worker-<N>.sock        gRPC ballast.worker.v1
//! router.sock            gRPC ballast.v1
//! notify-<child>.sock    notify protocol, one per child
//! <child>.toml           configuration of a child
//! <child>.pid            process id and start time of a running child
//! models.toml            the models of the fleet, for a successor of the supervisor
//! devices.toml           the quarantined devices, for a successor of the supervisor
//! ```
//!
//! Only these files are ever removed. The directory is removed only if a supervisor created it and
//! it is empty. A `--runtime-dir` that existed before, or that contains other files, stays.

mod claim;
mod lock_holder;

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

use crate::exit::{Exit, HasExit, exit_for_io_error};
use crate::socket_probe::probe_listener;

pub use claim::ClaimedRuntimeDir;

/// Workers of one fleet. The router keeps a connection to each, asks each for its load four times a
/// second, and tries each of a model in turn. More than 256 processes on one machine share too few
/// cores and too little GPU memory to be of use.
pub const WORKERS_MAX: u32 = 256;
/// sun_path has 108 bytes including the final zero (unix(7)).
pub const SOCKET_PATH_BYTES_MAX: usize = 107;
/// The longest socket name of a fleet. `worker-<N>` has at most 10 digits.
const SOCKET_NAME_BYTES_MAX: usize = "notify-weight-server.sock".len() + 1;
/// Access for the owner only: the directory protects every socket in it.
const DIRECTORY_MODE: u32 = 0o700;
const LOCK_FILE: &str = "supervisor.lock";
/// Content of the lock file if a supervisor created the directory.
const CREATED_MARKER: &str = "made by ballast\n";
const FLEET_FILE_EXTENSIONS: [&str; 5] = ["sock", "toml", "pid", "partial", "turns"];

#[derive(Debug, thiserror::Error)]
pub enum RuntimeDirError {
    #[error(
        "runtime directory {} is too long: a socket path in it would have {bytes} bytes, allowed are at most {SOCKET_PATH_BYTES_MAX}; choose a shorter --runtime-dir",
        path.display()
    )]
    TooLong { path: PathBuf, bytes: usize },
    #[error("cannot create runtime directory {}", path.display())]
    Create { path: PathBuf, source: io::Error },
    #[error("runtime directory {} belongs to uid {owner}; choose another --runtime-dir", path.display())]
    ForeignOwner { path: PathBuf, owner: u32 },
    #[error("runtime directory {} is in use by a running supervisor; stop it or choose another --runtime-dir", path.display())]
    InUse { path: PathBuf },
    #[error("cannot lock {}", path.display())]
    Lock { path: PathBuf, source: io::Error },
}

impl RuntimeDirError {
    /// Whether the directory may be free a moment later: its supervisor is about to end, or it is
    /// being removed.
    fn may_pass(&self) -> bool {
        match self {
            RuntimeDirError::InUse { .. } => true,
            RuntimeDirError::Lock { source, .. } => source.kind() == io::ErrorKind::NotFound,
            _ => false,
        }
    }
}

impl HasExit for RuntimeDirError {
    fn exit(&self) -> Exit {
        match self {
            RuntimeDirError::Create { source, .. } | RuntimeDirError::Lock { source, .. } => {
                exit_for_io_error(source)
            }
            _ => Exit::AddressInUse,
        }
    }
}

/// The paths in a runtime directory, which need not exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeDir {
    path: PathBuf,
}

impl RuntimeDir {
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn supervisor_socket(&self) -> PathBuf {
        self.path.join("supervisor.sock")
    }

    pub fn weights_socket(&self) -> PathBuf {
        self.path.join("weights.sock")
    }

    pub fn weights_admin_socket(&self) -> PathBuf {
        self.path.join("weights-admin.sock")
    }

    pub fn worker_socket(&self, index: u32) -> PathBuf {
        self.path.join(format!("worker-{index}.sock"))
    }

    /// The file through which the workers of a device take turns.
    pub fn turn_file(&self, device: &str) -> PathBuf {
        self.path.join(format!("{device}.turns"))
    }

    /// The directory of MPS. Its process removes it.
    pub fn mps_directory(&self) -> PathBuf {
        self.path.join("mps")
    }

    pub fn router_socket(&self) -> PathBuf {
        self.path.join("router.sock")
    }

    pub fn notify_socket(&self, child: &str) -> PathBuf {
        self.path.join(format!("notify-{child}.sock"))
    }

    pub fn config(&self, child: &str) -> PathBuf {
        self.path.join(format!("{child}.toml"))
    }

    pub fn models_record(&self) -> PathBuf {
        self.path.join("models.toml")
    }

    pub fn devices_record(&self) -> PathBuf {
        self.path.join("devices.toml")
    }

    /// The existing worker sockets by index. A socket may belong to a dead worker.
    pub fn worker_sockets(&self) -> io::Result<Vec<(u32, PathBuf)>> {
        let mut sockets = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            let name = entry.file_name();
            let index = name.to_str().and_then(|n| n.strip_prefix("worker-")?.strip_suffix(".sock"));
            if let Some(index) = index.and_then(|i| i.parse::<u32>().ok()) {
                sockets.push((index, entry.path()));
            }
        }
        sockets.sort_unstable();
        Ok(sockets)
    }

    fn pid_record(&self, child: &str) -> PathBuf {
        self.path.join(format!("{child}.pid"))
    }

    /// Records a running child, so that a successor and a later cleanup can check whether the child
    /// is alive. The supervisor and the child both do: a reader finds a whole record or none.
    pub fn record_child(&self, child: &str, pid: u32) -> io::Result<()> {
        let started = process_start_ticks(pid).unwrap_or(0);
        let partial = self.path.join(format!("{child}.{}.partial", std::process::id()));
        let written = fs::write(&partial, format!("{pid} {started}\n"))
            .and_then(|()| fs::rename(&partial, self.pid_record(child)));
        written.inspect_err(|_| {
            // The error that is returned is the first one.
            let _: io::Result<()> = fs::remove_file(&partial);
        })
    }

    /// Removes the record of a child that has ended.
    pub fn forget_child(&self, child: &str) {
        // A missing record is fine. After any other failure, the record's start time shows that the
        // process is dead.
        let _: io::Result<()> = fs::remove_file(self.pid_record(child));
    }

    /// Removes what children have left that are neither alive nor `known`: those that a supervisor
    /// had started, and that died with it.
    pub fn remove_files_of_dead_children(&self, known: impl Fn(&str) -> bool) -> io::Result<()> {
        let living = self.living_children()?;
        for entry in fs::read_dir(&self.path)? {
            let name = entry?.file_name();
            let child = name.to_str().and_then(|name| name.strip_prefix("notify-")?.strip_suffix(".sock"));
            let Some(child) = child else { continue };
            if !known(child) && !living.iter().any(|(name, _)| name == child) {
                self.remove_child_files(child);
            }
        }
        Ok(())
    }

    fn remove_child_files(&self, child: &str) {
        let own_socket = self.path.join(format!("{child}.sock"));
        for path in [self.config(child), self.notify_socket(child), self.pid_record(child), own_socket] {
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::debug!(path = %path.display(), %error, "cannot remove a file of a dead child");
                }
                Ok(()) | Err(_) => {}
            }
        }
    }

    /// Names and process ids of the recorded children that are alive.
    pub fn living_children(&self) -> io::Result<Vec<(String, u32)>> {
        let mut living = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            let path = entry?.path();
            if path.extension().is_none_or(|e| e != "pid") {
                continue;
            }
            let Some(name) = path.file_stem().and_then(|s| s.to_str()) else { continue };
            // A record that disappears meanwhile belongs to a child that has just ended.
            let Ok(text) = fs::read_to_string(&path) else { continue };
            let Some((pid, started)) = text.trim().split_once(' ') else { continue };
            let (Ok(pid), Ok(started)) = (pid.parse::<u32>(), started.parse::<u64>()) else { continue };
            // The start time distinguishes the child from a later process with the same id.
            if process_start_ticks(pid) == Some(started) {
                living.push((name.to_owned(), pid));
            }
        }
        living.sort();
        Ok(living)
    }

    /// Called when a child ends. If the supervisor is gone, the last child removes the directory.
    ///
    /// Children may end at the same time. Each removes its record before it looks for others, so
    /// the last one to do so finds none. If another child has the lock then, that one found none
    /// either.
    fn remove_child_and_dir_if_last(&self, child: &str) {
        self.forget_this_process_as(child);
        let is_last = || self.living_children().is_ok_and(|living| living.is_empty());
        if !is_last() {
            return;
        }
        let Ok(lock) = File::open(self.path.join(LOCK_FILE)) else { return };
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            return;
        }
        // Since the file was opened, a new supervisor may have replaced it.
        if self.has_lock(&lock).unwrap_or(false) && is_last() {
            self.remove_fleet_files();
        }
    }

    /// Whether the path of the lock leads to this file.
    fn has_lock(&self, lock: &File) -> io::Result<bool> {
        let inode = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
        let found = fs::symlink_metadata(self.path.join(LOCK_FILE)).map(inode)?;
        Ok(found == lock.metadata().map(inode)?)
    }

    /// Removes the record of this process. The record of this name may be that of the child of a
    /// successor.
    fn forget_this_process_as(&self, child: &str) {
        let record = fs::read_to_string(self.pid_record(child)).unwrap_or_default();
        if record.split_once(' ').is_some_and(|(pid, _)| pid == std::process::id().to_string()) {
            self.forget_child(child);
        }
    }

    /// Removes the fleet's files, then the directory if it is empty and a supervisor created it.
    fn remove_fleet_files(&self) {
        let lock = self.path.join(LOCK_FILE);
        let was_created = fs::read_to_string(&lock).is_ok_and(|content| content == CREATED_MARKER);
        let Ok(entries) = fs::read_dir(&self.path) else { return };
        let ours = entries.filter_map(Result::ok).map(|entry| entry.path()).filter(|path| {
            path.extension().and_then(|e| e.to_str()).is_some_and(|e| FLEET_FILE_EXTENSIONS.contains(&e))
        });
        for path in ours.chain([lock]) {
            if let Err(error) = fs::remove_file(&path) {
                tracing::debug!(path = %path.display(), %error, "cannot remove a file of the runtime directory");
            }
        }
        // MPS may have been killed.
        match fs::remove_dir_all(self.mps_directory()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::debug!(%error, "cannot remove the directory of MPS");
            }
            Ok(()) | Err(_) => {}
        }
        if was_created {
            // Fails if the directory holds other files: then it stays.
            let _: io::Result<()> = fs::remove_dir(&self.path);
        }
    }
}

/// `$XDG_RUNTIME_DIR/ballast-<pid>`, else `/tmp/ballast-<uid>-<pid>`.
fn default_path() -> PathBuf {
    let pid = std::process::id();
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|d| !d.is_empty()) {
        Some(base) => Path::new(&base).join(format!("ballast-{pid}")),
        None => PathBuf::from(format!("/tmp/ballast-{}-{pid}", rustix::process::geteuid().as_raw())),
    }
}

/// The runtime directory and the name of this process, if it is a child of a supervisor. The path
/// of the notify socket contains both.
fn this_child() -> Option<(RuntimeDir, String)> {
    std::env::var_os(crate::env::LIVENESS_FD)?;
    let socket = PathBuf::from(std::env::var_os(crate::env::NOTIFY_SOCKET)?);
    let name = socket.file_stem()?.to_str()?.strip_prefix("notify-")?.to_owned();
    Some((RuntimeDir::at(socket.parent()?), name))
}

/// A child calls this first, before it takes anything that another process would need: a supervisor
/// may die between the start of a child and its own record of it.
pub fn record_this_child() -> io::Result<()> {
    this_child().map_or(Ok(()), |(directory, name)| directory.record_child(&name, std::process::id()))
}

/// A child calls this last: if its supervisor and all other children are dead, it removes the
/// runtime directory.
pub fn remove_dir_if_last_child() {
    if let Some((directory, name)) = this_child() {
        directory.remove_child_and_dir_if_last(&name);
    }
}

/// Directories with a default name, and the process id in that name.
fn default_directories() -> Vec<(RuntimeDir, u32)> {
    let own = default_path();
    let (Some(parent), Some(prefix)) = (own.parent(), own.file_name().and_then(|n| n.to_str())) else {
        return Vec::new();
    };
    let prefix = prefix.trim_end_matches(|c: char| c.is_ascii_digit());
    let Ok(entries) = fs::read_dir(parent) else { return Vec::new() };
    let pid = |name: &std::ffi::OsStr| name.to_str()?.strip_prefix(prefix)?.parse::<u32>().ok();
    let found = |entry: fs::DirEntry| Some((RuntimeDir::at(entry.path()), pid(&entry.file_name())?));
    entries.filter_map(Result::ok).filter_map(found).collect()
}

/// The fleets of this user in default directories whose supervisors listen, also while those are
/// stopped. Does not wait for them.
pub fn running_fleets() -> Vec<RuntimeDir> {
    let directories = default_directories().into_iter().map(|(directory, _)| directory);
    directories.filter(|directory| probe_listener(&directory.supervisor_socket()).is_ok()).collect()
}

/// Removes the default directories of dead fleets: their lock is free, and no recorded child is
/// alive.
pub fn remove_dead_dirs() {
    for (directory, pid) in default_directories() {
        // A running process with that id may be about to take the lock.
        if process_start_ticks(pid).is_none() {
            directory.remove_child_and_dir_if_last("");
        }
    }
}

/// Start time of a running process in clock ticks since boot (field 22 of /proc/PID/stat). `None`
/// for a zombie.
fn process_start_ticks(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the name in parentheses, and the name may contain parentheses.
    let after_name = &stat[stat.rfind(')')? + 1..];
    let mut fields = after_name.split_ascii_whitespace();
    match fields.next()? {
        "Z" | "X" => None,
        _ => fields.nth(18)?.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(path: &Path) -> Result<ClaimedRuntimeDir, RuntimeDirError> {
        ClaimedRuntimeDir::claim(Some(path))
    }

    #[test]
    fn removing_a_fleet_keeps_foreign_files() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("fleet");
        let claimed = claim(&path).unwrap();
        for name in ["worker-0.sock", "router.toml", "notes.txt"] {
            fs::write(path.join(name), "").unwrap();
        }
        drop(claimed);
        let left: Vec<_> = fs::read_dir(&path).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left, ["notes.txt"]);
    }

    #[test]
    fn a_directory_that_existed_before_stays() {
        let directory = tempfile::tempdir().unwrap();
        let claimed = claim(directory.path()).unwrap();
        fs::write(directory.path().join("worker-0.sock"), "").unwrap();
        drop(claimed);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_path_too_long_for_sockets_is_refused_before_the_directory_is_created() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("x".repeat(100));
        assert!(matches!(claim(&path), Err(RuntimeDirError::TooLong { .. })));
        assert!(!path.exists());
    }

    #[test]
    fn the_last_child_of_a_dead_supervisor_removes_the_directory() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("fleet");
        let claimed = claim(&path).unwrap();
        let directory = claimed.directory().clone();
        let mut other = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        directory.record_child("worker-0", std::process::id()).unwrap();
        directory.record_child("worker-1", other.id()).unwrap();
        let socket = directory.worker_socket(0);
        fs::write(&socket, "").unwrap();
        directory.remove_child_and_dir_if_last("worker-0");
        assert!(socket.exists(), "no socket is removed while the supervisor holds the lock");
        assert!(!directory.pid_record("worker-0").exists());
        directory.remove_child_and_dir_if_last("worker-1");
        assert!(directory.pid_record("worker-1").exists(), "the record of another process");
        drop(claimed);
        directory.remove_child_and_dir_if_last("worker-0");
        assert_eq!(directory.living_children().unwrap(), [("worker-1".to_owned(), other.id())]);
        other.kill().unwrap();
        other.wait().unwrap();
        directory.remove_child_and_dir_if_last("worker-0");
        assert!(!path.exists());
    }

    #[test]
    fn files_of_children_that_are_dead_and_unknown_are_removed() {
        let parent = tempfile::tempdir().unwrap();
        let directory = RuntimeDir::at(parent.path());
        let mut alive = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        directory.record_child("worker-2", alive.id()).unwrap();
        for name in ["worker-0", "worker-1", "worker-2"] {
            fs::write(directory.notify_socket(name), "").unwrap();
            fs::write(directory.config(name), "").unwrap();
        }
        for path in [directory.worker_socket(1), directory.models_record(), directory.router_socket()] {
            fs::write(path, "").unwrap();
        }
        directory.remove_files_of_dead_children(|name| name == "worker-0").unwrap();
        alive.kill().unwrap();
        alive.wait().unwrap();
        let mut left: Vec<_> =
            fs::read_dir(parent.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        let expected = [
            "models.toml",
            "notify-worker-0.sock",
            "notify-worker-2.sock",
            "router.sock",
            "worker-0.toml",
            "worker-2.pid",
            "worker-2.toml",
        ];
        assert_eq!(left, expected);
    }

    #[test]
    fn children_of_a_dead_supervisor_that_end_at_once_leave_no_directory() {
        const CHILDREN: usize = 4;
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("fleet");
        for round in 0..200 {
            let claimed = claim(&path).unwrap();
            let directory = claimed.directory().clone();
            let names: Vec<String> = (0..CHILDREN).map(|child| format!("worker-{child}")).collect();
            for name in &names {
                directory.record_child(name, std::process::id()).unwrap();
            }
            // It has living children, so all stays.
            drop(claimed);
            let start = std::sync::Barrier::new(CHILDREN);
            std::thread::scope(|scope| {
                for name in &names {
                    scope.spawn(|| {
                        start.wait();
                        directory.remove_child_and_dir_if_last(name);
                    });
                }
            });
            assert!(!path.exists(), "round {round}");
        }
    }

    #[test]
    fn worker_sockets_are_found_by_name() {
        let parent = tempfile::tempdir().unwrap();
        for name in ["worker-10.sock", "worker-2.sock", "worker-x.sock", "worker-1.toml", "router.sock"] {
            fs::write(parent.path().join(name), "").unwrap();
        }
        let found: Vec<u32> =
            RuntimeDir::at(parent.path()).worker_sockets().unwrap().into_iter().map(|(n, _)| n).collect();
        assert_eq!(found, [2, 10]);
    }

    #[test]
    fn the_start_time_is_constant_until_the_process_ends() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let started = process_start_ticks(child.id());
        assert!(started.is_some());
        assert_eq!(started, process_start_ticks(child.id()));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(process_start_ticks(child.id()), None);
    }
}
