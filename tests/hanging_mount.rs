// SPDX-License-Identifier: Apache-2.0

//! A model file on a mount whose server is gone (hanging_mount.c): commands that wait for the file
//! still stop when they are told to.

use std::process::{Command, Stdio};

use crate::harness::{ballast, demo_7m, device, eventually, preload_library, proc, serve, text};

// As documented in docs/OPERATING.md.
const INTERRUPTED: i32 = 130;

#[test]
fn a_command_whose_model_file_does_not_answer_stops_when_it_is_told_to() {
    let folder = tempfile::tempdir().unwrap();
    let library = preload_library("hanging_mount", folder.path());
    let (model, run) = (folder.path().join("model.gguf"), folder.path().join("run"));
    std::fs::copy(demo_7m(), &model).unwrap();
    let opened = folder.path().join("model.gguf.opened");
    let check = |command: Command, code: i32| {
        // Passes signals on, and ends a command that does not end itself.
        let mut bounded = Command::new("timeout");
        bounded.args(["--signal=KILL", "40"]).arg(command.get_program()).args(command.get_args());
        bounded.env("LD_PRELOAD", &library).env("BALLAST_TEST_HANGING_FILE", &model);
        let child =
            bounded.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        eventually("the file is opened", || opened.exists().then_some(()));
        proc::send_signal(child.id(), "TERM");
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{}", output.status);
        assert_eq!(text(&output), (String::new(), String::new()));
        assert!(!run.exists(), "the runtime directory is left");
        std::fs::remove_file(&opened).unwrap();
    };
    check(serve(&run, &model, &[]), 0);
    let mut generate = ballast();
    generate.arg("generate").arg(&model).args(["--prompt", "x", "--device", &device(), "--runtime-dir"]);
    generate.arg(&run);
    check(generate, INTERRUPTED);
}
