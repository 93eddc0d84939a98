// SPDX-License-Identifier: Apache-2.0

//! `ballast mps` with a stand-in for NVIDIA's control daemon: a script that makes the same pipe and
//! understands `quit`.

use crate::harness::{ballast, eventually, proc, text};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

const DAEMON: &str = r#"#!/bin/sh
cd "$CUDA_MPS_PIPE_DIRECTORY" || exit 3
if [ "$1" = -f ]; then
    echo $$ >daemon.pid
    mkfifo control
    while read -r order <control; do
        [ "$order" = quit ] && exit 0
    done
else
    cat >control
fi
"#;

/// `ballast mps` with the daemon in `folder`.
fn mps(folder: &Path) -> Command {
    let config = folder.join("mps.toml");
    std::fs::write(&config, format!("directory = {:?}\n", folder.join("mps"))).unwrap();
    let path = format!("{}:{}", folder.join("bin").display(), std::env::var("PATH").unwrap());
    let mut command = ballast();
    command.arg("mps").arg("--config").arg(config).env("PATH", path).stderr(Stdio::piped());
    command
}

fn install_daemon(folder: &Path) {
    let daemon = folder.join("bin/nvidia-cuda-mps-control");
    std::fs::create_dir(folder.join("bin")).unwrap();
    std::fs::write(&daemon, DAEMON).unwrap();
    std::fs::set_permissions(&daemon, std::fs::Permissions::from_mode(0o700)).unwrap();
}

fn daemon_pid(folder: &Path) -> u32 {
    eventually("the daemon accepts clients", || {
        folder.join("mps/control").exists().then_some(())?;
        std::fs::read_to_string(folder.join("mps/daemon.pid")).ok()?.trim().parse().ok()
    })
}

fn exit_code(child: &mut Child) -> Option<i32> {
    eventually("ballast mps ends", || child.try_wait().unwrap()).code()
}

#[test]
fn mps_process_ends_with_its_daemon_and_stops_it_when_asked() {
    let folder = tempfile::tempdir().unwrap();
    install_daemon(folder.path());
    // What an earlier daemon has left is not taken for this one's pipe.
    std::fs::create_dir(folder.path().join("mps")).unwrap();
    std::fs::write(folder.path().join("mps/control"), "").unwrap();
    let mut asked = mps(folder.path()).spawn().unwrap();
    let daemon = daemon_pid(folder.path());
    proc::send_signal(asked.id(), "TERM");
    assert_eq!(exit_code(&mut asked), Some(0));
    assert!(!proc::is_alive(daemon), "the daemon was left behind");
    assert!(!folder.path().join("mps").exists(), "the directory was left behind");

    let child = mps(folder.path()).spawn().unwrap();
    proc::send_signal(daemon_pid(folder.path()), "KILL");
    let ended = child.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(5), "{}", text(&ended).1);
    assert!(text(&ended).1.contains("signal: 9"), "{}", text(&ended).1);
}

#[test]
fn missing_mps_is_named_with_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("bin")).unwrap();
    let output = mps(folder.path()).env("PATH", folder.path().join("bin")).output().unwrap();
    assert!(!output.status.success());
    let said = text(&output).1;
    assert!(said.contains("nvidia-cuda-mps-control") && said.contains("mps = false"), "{said}");
}
