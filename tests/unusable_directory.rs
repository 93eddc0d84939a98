// SPDX-License-Identifier: Apache-2.0

//! A runtime directory that cannot be used, and descriptors that run out: the error says where, why
//! and what to do, and nothing is left.

use crate::harness::{demo_7m, executable, runs_on_host, text};
use std::process::{Command, Output, Stdio};

const INTERNAL: i32 = 1;
const OUT_OF_RESOURCES: i32 = 4;
const ADDRESS_IN_USE: i32 = 6;
/// What the script ends with if something is left in the directory.
const LEFT: i32 = 99;

const GENERATE: [&str; 7] = ["--prompt", "x", "--max-tokens", "1", "--device", "host", "--threads=1"];

/// Checks the exit code and that one line has these words.
#[track_caller]
fn check(output: &Output, code: i32, words: &[&str]) {
    let errors = text(output).1;
    assert_eq!(output.status.code(), Some(code), "{errors}");
    let lines: Vec<&str> = errors.lines().filter(|line| line.starts_with("ballast: ")).collect();
    assert_eq!(lines.len(), 1, "{errors}");
    for word in words {
        assert!(lines[0].contains(word), "{:?} does not say {word:?}", lines[0]);
    }
}

/// Runs `ballast generate` with a tmpfs as the parent of its runtime directory, after a command of
/// the shell. `None` if this user cannot mount.
fn generate_in_tmpfs(options: &str, prepare: &str) -> Option<Output> {
    let own_mounts = ["unshare", "--map-root-user", "--mount"];
    let may_mount = Command::new(own_mounts[0]).args(&own_mounts[1..]).arg("true").status();
    if !may_mount.is_ok_and(|status| status.success()) {
        crate::harness::report_skipped(format_args!("this user cannot make a mount namespace"));
        return None;
    }
    let directory = tempfile::tempdir().unwrap();
    let script = format!(
        "mount -t tmpfs -o {options} tmpfs \"$XDG_RUNTIME_DIR\" && {{ {prepare}; }}; \"$@\"; code=$?; \
         for left in \"$XDG_RUNTIME_DIR\"/ballast-*; do test ! -e \"$left\" || exit {LEFT}; done; \
         exit $code"
    );
    let mut command = Command::new(own_mounts[0]);
    command.args(&own_mounts[1..]).args(["sh", "-c", &script, "sh"]);
    command.arg(executable()).arg("generate").arg(demo_7m()).args(GENERATE);
    Some(command.env("XDG_RUNTIME_DIR", directory.path()).stdin(Stdio::null()).output().unwrap())
}

#[test]
fn a_read_only_runtime_directory_is_named() {
    let test = "a_read_only_runtime_directory_is_named";
    if !runs_on_host(test) {
        return;
    }
    let remount = "mount -o remount,ro \"$XDG_RUNTIME_DIR\"";
    let Some(output) = generate_in_tmpfs("size=64k", remount) else { return };
    check(&output, INTERNAL, &["runtime directory", "Read-only", "choose a directory"]);
}

#[test]
fn a_full_runtime_directory_is_named_and_nothing_is_left() {
    if !runs_on_host("a_full_runtime_directory_is_named_and_nothing_is_left") {
        return;
    }
    let words = ["/ballast-", "No space left", "free space"];
    let fill = "cat /dev/zero >\"$XDG_RUNTIME_DIR\"/fill 2>/dev/null";
    let Some(output) = generate_in_tmpfs("size=16k", fill) else { return };
    check(&output, OUT_OF_RESOURCES, &words);
    // The first without an inode is the directory, the lock, a socket or a configuration.
    for inodes in [2, 3, 4, 6, 8, 11] {
        let output = generate_in_tmpfs(&format!("size=4k,nr_inodes={inodes}"), "true").unwrap();
        check(&output, OUT_OF_RESOURCES, &words);
    }
}

#[test]
fn descriptors_that_were_inherited_are_not_blamed_on_the_model() {
    if !runs_on_host("descriptors_that_were_inherited_are_not_blamed_on_the_model") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    for inherited in [236, 242, 244, 246, 248, 250, 252, 254] {
        let script = format!(
            "ulimit -n 272 && for ((i = 0; i < {inherited}; i++)); do exec {{fd}}</dev/null; done; exec \"$@\""
        );
        let mut command = Command::new("bash");
        command.args(["-c", &script, "bash"]).arg(executable()).arg("generate").arg(demo_7m()).args(GENERATE);
        let output = command.env("XDG_RUNTIME_DIR", directory.path()).stdin(Stdio::null()).output().unwrap();
        check(&output, OUT_OF_RESOURCES, &["RLIMIT_NOFILE"]);
    }
}

#[test]
fn a_lock_that_never_is_in_place_is_refused_after_a_bounded_time() {
    if !runs_on_host("a_lock_that_never_is_in_place_is_refused_after_a_bounded_time") {
        return;
    }
    let (directory, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::NamedTempFile::new().unwrap());
    // The path leads to the symbolic link, and the descriptor to its target.
    std::os::unix::fs::symlink(elsewhere.path(), directory.path().join("supervisor.lock")).unwrap();
    let mut command = Command::new("timeout");
    command.args(["--signal=KILL", "20"]).arg(executable()).arg("serve").arg(demo_7m());
    command.args(["--device", "host", "--listen", "127.0.0.1:0", "--runtime-dir"]).arg(directory.path());
    let output = command.stdin(Stdio::null()).output().unwrap();
    check(&output, ADDRESS_IN_USE, &["runtime directory", "in use"]);
}
