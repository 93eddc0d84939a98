// SPDX-License-Identifier: Apache-2.0

//! Limits of the process from outside (`ulimit`): a fleet within them serves, or ends with the exit
//! code for a lack of resources and a line that names the limit. Nothing is left of it, but perhaps
//! a directory for the next start to remove.

use crate::harness::{demo_7m, eventually, executable, proc, runs_on_host, text};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

const OUT_OF_RESOURCES: i32 = 4;
/// A user with no other process. RLIMIT_NPROC counts all processes of a user, but not root's.
const LONELY_USER: u32 = 61_234;
/// A run that is still there after this time hangs. It has no progress for 60 s then.
const RUN_SECONDS: &str = "100";

/// Pids of all processes whose runtime directories lie below this directory.
fn processes_of(directory: &Path) -> Vec<u32> {
    let setting = format!("XDG_RUNTIME_DIR={}", directory.display()).into_bytes();
    let has_setting = |pid: &u32| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|&byte| byte == 0).any(|variable| variable == setting)
    };
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(has_setting).filter(|&pid| proc::is_alive(pid)).collect()
}

/// Runs a command in a runtime directory of its own.
struct LimitedRun {
    directory: TempDir,
    user: Option<u32>,
    output: Output,
}

fn run_in(directory: &Path, limit: &[&str], user: Option<u32>, arguments: &[&str]) -> Output {
    let mut command = Command::new("timeout");
    command.arg(RUN_SECONDS).args(limit).arg(executable()).args(arguments);
    command.env("XDG_RUNTIME_DIR", directory).env_remove("RUST_BACKTRACE").stdin(Stdio::null());
    if let Some(user) = user {
        chown(directory, Some(user), Some(user)).unwrap();
        command.uid(user).gid(user);
    }
    command.output().unwrap()
}

fn generate_in(directory: &Path, limit: &[&str], user: Option<u32>) -> Output {
    let model = demo_7m();
    let model = model.to_str().unwrap();
    let options = ["--prompt", "x", "--max-tokens", "4", "--device", "host", "--threads", "2"];
    run_in(directory, limit, user, &[&["generate", model][..], &options].concat())
}

fn left_in(directory: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(directory).unwrap().flatten().map(|entry| entry.path()).collect()
}

impl LimitedRun {
    fn generate(limit: &[&str], user: Option<u32>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        Self { output: generate_in(directory.path(), limit, user), directory, user }
    }

    /// Whether the run served. Otherwise its error has one of these words. Nothing is left of it.
    fn serves_or_names(&self, words: &[&str]) -> bool {
        let (_, errors) = text(&self.output);
        let serves = self.output.status.success();
        if !serves {
            assert_eq!(self.output.status.code(), Some(OUT_OF_RESOURCES), "{errors}");
            let lines: Vec<&str> = errors.lines().filter(|line| line.starts_with("ballast: ")).collect();
            assert!(lines.iter().any(|line| words.iter().any(|word| line.contains(word))), "{errors}");
        }
        for bug in ["panicked", "memory allocation of", "is refused"] {
            assert!(!errors.contains(bug), "{errors}");
        }
        let directory = self.directory.path();
        eventually("all processes have ended", || processes_of(directory).is_empty().then_some(()));
        if !left_in(directory).is_empty() {
            // A process that ends at a failed allocation removes nothing. The next start does.
            let next = generate_in(directory, &[], self.user);
            assert!(!serves && next.status.success(), "{errors}\n{}", text(&next).1);
        }
        assert_eq!(left_in(directory), Vec::<PathBuf>::new(), "{errors}");
        serves
    }
}

#[test]
fn a_limit_of_address_space_is_named_and_leaves_nothing() {
    if !runs_on_host("a_limit_of_address_space_is_named_and_leaves_nothing") {
        return;
    }
    let limit = |kib: u64| format!("--as={}", kib << 10);
    let folder = tempfile::tempdir().unwrap();
    let can_execute =
        |kib: &u64| run_in(folder.path(), &["prlimit", &limit(*kib)], None, &["--version"]).status.success();
    // Below this, the kernel or the dynamic linker ends the process before its first line of code.
    let least = (8 << 10..1 << 20).step_by(2 << 10).find(can_execute).unwrap();
    let mut served = 0;
    for more in [0, 2, 5, 10, 15, 25, 60, 4096] {
        let run = LimitedRun::generate(&["prlimit", &limit(least + (more << 10))], None);
        served += u32::from(run.serves_or_names(&["RLIMIT_AS"]));
    }
    assert!(served >= 1, "4 GiB are enough");
}

#[test]
fn a_limit_of_processes_and_threads_is_named_and_leaves_nothing() {
    if !runs_on_host("a_limit_of_processes_and_threads_is_named_and_leaves_nothing") {
        return;
    }
    let is_root =
        std::fs::metadata("/proc/self").is_ok_and(|own| std::os::unix::fs::MetadataExt::uid(&own) == 0);
    let may_execute = |path: &Path| {
        path.ancestors()
            .skip(1)
            .all(|it| std::fs::metadata(it).is_ok_and(|it| it.permissions().mode() & 1 == 1))
    };
    if !is_root || !may_execute(&executable()) || !may_execute(&demo_7m()) {
        crate::harness::report_skipped(format_args!(
            "only root can start processes of another user, in folders that all may enter"
        ));
        return;
    }
    let mut served = 0;
    for tasks in [1, 2, 4, 6, 10, 14, 18, 22, 27, 200] {
        let run = LimitedRun::generate(&["prlimit", &format!("--nproc={tasks}")], Some(LONELY_USER));
        served += u32::from(run.serves_or_names(&["RLIMIT_NPROC"]));
    }
    assert!(served >= 1, "200 processes and threads are enough");
}
