// SPDX-License-Identifier: Apache-2.0

//! `ballast completions` and `ballast man`.

use std::fs::File;
use std::os::unix::fs::symlink;
use std::process::{Command, Output, Stdio};

use crate::harness::{ballast, text};

// As documented in crates/service/src/exit.rs and docs/OPERATING.md.
const OUT_OF_RESOURCES: i32 = 4;
const OUTPUT_CLOSED: i32 = 141;

/// Asks a bash that has read the script as a user's bash does for completions of the last word.
const ASK: &str = r#"
set -eu
script=$1
bash -n "$script"
. "$script"
complete -p ballast >/dev/null
shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_ballast "$1" "${@: -1}" "${@: -2:1}"
printf '%s\n' "${COMPREPLY[@]}"
"#;

fn completed(script: &std::path::Path, words: &[&str]) -> String {
    let output = Command::new("bash").args(["-c", ASK, "bash"]).arg(script).args(words).output().unwrap();
    assert!(output.status.success(), "{words:?}: {}", text(&output).1);
    text(&output).0
}

#[test]
fn bash_completes_subcommands_and_options() {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("ballast.bash");
    let status = ballast().args(["completions", "bash"]).stdout(File::create(&script).unwrap()).status();
    assert!(status.unwrap().success());
    assert_eq!(completed(&script, &["ballast", "gen"]), "generate\n");
    assert!(completed(&script, &["ballast", "serve", "--runt"]).contains("--runtime-dir\n"));
    let hidden = completed(&script, &["ballast", ""]);
    assert!(hidden.contains("\nserve\n") && !hidden.contains("loader"), "{hidden}");
    for (shell, word) in [("fish", "complete -c ballast"), ("zsh", "#compdef ballast")] {
        let output = ballast().args(["completions", shell]).output().unwrap();
        assert!(output.status.success() && text(&output).0.contains(word), "{shell}");
    }
}

/// The pages of a command and of the subcommands that its help lists.
fn expected_pages(words: &[&str]) -> Vec<String> {
    let help = text(&ballast().args(words).arg("--help").output().unwrap()).0;
    let mut pages = vec![format!("{}.1", [&["ballast"][..], words].concat().join("-"))];
    let list = help.split("Commands:\n").nth(1).unwrap_or_default().split("\n\n").next().unwrap_or_default();
    for line in list.lines().filter_map(|line| line.strip_prefix("  ")) {
        // A continued line is indented further.
        let name = line.split(' ').next().unwrap();
        if !name.is_empty() && name != "help" {
            pages.extend(expected_pages(&[words, &[name]].concat()));
        }
    }
    pages
}

#[test]
fn every_subcommand_has_a_manual_page_that_renders() {
    let folder = tempfile::tempdir().unwrap();
    let pages = folder.path().join("share/man/man1");
    assert!(ballast().arg("man").arg(&pages).status().unwrap().success());
    let mut expected = expected_pages(&[]);
    assert!(expected.len() > 20, "{expected:?}");
    expected.sort();
    let entries = std::fs::read_dir(&pages).unwrap();
    let mut written: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    written.sort();
    assert_eq!(written, expected);
    if Command::new("groff").arg("--version").output().is_err() {
        crate::harness::report_skipped(format_args!("groff is not installed"));
        return;
    }
    for page in written {
        let output =
            Command::new("groff").args(["-mandoc", "-Tutf8", "-ww"]).arg(pages.join(&page)).output().unwrap();
        let (rendered, warnings) = text(&output);
        assert!(output.status.success() && warnings.is_empty(), "{page}: {warnings}");
        assert!(rendered.lines().count() > 10, "{page}: {rendered}");
    }
}

#[track_caller]
fn check_failed(output: &Output, exit: i32, words: &[&str]) {
    let stderr = text(output).1;
    assert_eq!(output.status.code(), Some(exit), "{stderr}");
    assert!(words.iter().all(|word| stderr.contains(word)), "{stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
}

#[test]
fn what_cannot_be_written_is_an_error() {
    let full = File::options().write(true).open("/dev/full").unwrap();
    let completions = |stdout: Stdio| {
        ballast().args(["completions", "bash"]).stdout(stdout).stderr(Stdio::piped()).spawn().unwrap()
    };
    let output = completions(full.into()).wait_with_output().unwrap();
    check_failed(&output, OUT_OF_RESOURCES, &["cannot write the output"]);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    check_failed(&completions(writer.into()).wait_with_output().unwrap(), OUTPUT_CLOSED, &[]);

    let folder = tempfile::tempdir().unwrap();
    symlink("/dev/full", folder.path().join("ballast-serve.1")).unwrap();
    let man = |folder: &std::path::Path| ballast().arg("man").arg(folder).output().unwrap();
    check_failed(&man(folder.path()), OUT_OF_RESOURCES, &["cannot write", "ballast-serve.1"]);
    let file = folder.path().join("ballast.1");
    let output = man(&file);
    assert!(!output.status.success());
    assert!(text(&output).1.contains("cannot create"), "{}", text(&output).1);
}
