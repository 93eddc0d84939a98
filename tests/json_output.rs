// SPDX-License-Identifier: Apache-2.0

//! `--json` of every command: standard output is one JSON document, or JSON Lines where that is
//! documented, also when the command fails.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::Value;

use crate::chat::{answer, server};
use crate::harness::{ServedFleet, ballast, demo_7m, device, text};
use crate::model_text::rewrite;

/// Commands that print a line for each item.
const LINES: [&str; 4] = ["generate", "ps", "serve", "tokenize"];

/// The commands whose help has the flag, with the words of their subcommands.
fn commands_with_json(words: &[&str]) -> BTreeSet<String> {
    let help = text(&ballast().args(words).arg("--help").output().unwrap()).0;
    let mut commands = BTreeSet::new();
    // `--json <FILE>` is no flag.
    let is_flag = |rest: &str| rest.is_empty() || rest.starts_with("  ");
    if help.lines().any(|line| line.trim().strip_prefix("--json").is_some_and(is_flag)) {
        commands.insert(words.join(" "));
    }
    let list = help.split("Commands:\n").nth(1).unwrap_or_default().split("\n\n").next().unwrap_or_default();
    for line in list.lines().filter_map(|line| line.strip_prefix("  ")) {
        // A continued line is indented further.
        let name = line.split(' ').next().unwrap();
        if !name.is_empty() && name != "help" {
            commands.extend(commands_with_json(&[words, &[name]].concat()));
        }
    }
    commands
}

/// Arguments with which a command fails after its command line was understood, and those with which
/// it succeeds. `None` for a success that other tests cover or that takes long.
struct JsonCase {
    command: &'static str,
    failing: Vec<String>,
    succeeding: Option<Vec<String>>,
}

fn case(command: &'static str, failing: &[&str], succeeding: Option<&[&str]>) -> JsonCase {
    let owned = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
    JsonCase { command, failing: owned(failing), succeeding: succeeding.map(owned) }
}

fn cases(folder: &Path, fleet: &ServedFleet, url: &str) -> Vec<JsonCase> {
    let path = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    let (demo, missing, device) = (demo_7m(), path("missing.gguf"), device());
    let (demo, missing, device) = (demo.to_str().unwrap(), missing.as_str(), device.as_str());
    let (ids, logits, written) = (path("ids.json"), path("logits.f32"), path("synth.gguf"));
    std::fs::write(&ids, "[1, 2, 3]").unwrap();
    std::fs::write(path("prompts"), "\"a\"\n").unwrap();
    let (absent, runtime_dir) = (path("no/such/file"), fleet.runtime_dir().to_str().unwrap());
    let generated = [demo, "--prompt", "def", "--max-tokens", "2", "--device", device, "--threads", "1"];
    let evaluated = [demo, "--tokens", &ids, "--logits-out", &logits, "--device", device, "--threads", "1"];
    let drafts = [missing, "--draft", "lookup", "--prompts", &path("prompts")];
    vec![
        case("bench compare", &[&absent, &absent], None),
        case("bench drafts", &drafts, None),
        case("bench router-overhead", &[missing], None),
        case("bench shared-prefix", &[missing], None),
        case("bench structured", &[missing], None),
        case(
            "bench throughput",
            &[missing],
            Some(&[demo, "--streams", "2", "--prompt-tokens", "4", "--tokens", "4", "--device", device]),
        ),
        case("bench worker-starts", &[missing], None),
        case("devices", &[], Some(&[])),
        case("doctor", &[], None),
        case("eval", &[missing, "--tokens", &ids, "--logits-out", &logits], Some(&evaluated)),
        case("generate", &[missing, "--prompt", "x"], Some(&generated)),
        case("inspect", &[missing], Some(&[demo])),
        case("plan", &[missing], Some(&[demo, "--device", device])),
        case("ps", &["--runtime-dir", &absent], Some(&["--runtime-dir", runtime_dir])),
        case("run", &["x", "--url", "http://127.0.0.1:1"], Some(&["x", "--url", url])),
        case("serve", &[missing], None),
        case("synth", &["qwen3-tiny", "q8_0", &absent], Some(&["qwen3-tiny", "q8_0", &written])),
        case("tokenize", &[missing, "--prompt", "x"], Some(&[demo, "--prompt", "x"])),
    ]
}

fn run(command: &str, arguments: &[String]) -> Output {
    ballast().args(command.split(' ')).args(arguments).arg("--json").output().unwrap()
}

/// The documents on standard output, which is nothing else.
#[track_caller]
fn documents(command: &str, output: &Output) -> Vec<Value> {
    let (stdout, stderr) = text(output);
    let parsed: Result<Vec<Value>, _> = serde_json::Deserializer::from_str(&stdout).into_iter().collect();
    let documents = parsed.unwrap_or_else(|error| panic!("{command}: {error}: {stdout:?} {stderr}"));
    let is_lines = LINES.contains(&command);
    if is_lines {
        assert!(
            stdout.lines().all(|line| serde_json::from_str::<Value>(line).is_ok()),
            "{command}: {stdout}"
        );
    }
    assert!(documents.len() == 1 || is_lines && !documents.is_empty(), "{command}: {stdout:?} {stderr}");
    documents
}

#[track_caller]
fn check_error(command: &str, output: &Output) {
    let error = &documents(command, output).pop().unwrap()["error"];
    assert_eq!(error["exit_code"], output.status.code().unwrap(), "{command}: {error}");
    let stderr = text(output).1;
    let message = error["message"].as_str().unwrap();
    assert!(message.len() > 10, "{command}: {message:?}");
    assert!(!stderr.is_empty(), "{command}: people read standard error");
}

#[test]
fn every_command_with_json_prints_one_document_also_when_it_fails() {
    let folder = tempfile::tempdir().unwrap();
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "1", "--threads", "1"]);
    let (server, _bodies) = server(|_| answer(&["an ", "answer"]));
    let cases = cases(folder.path(), &fleet, &server.url());
    let tested: BTreeSet<String> = cases.iter().map(|case| case.command.to_owned()).collect();
    assert_eq!(tested, commands_with_json(&[]), "every command with --json has a case here");
    for JsonCase { command, failing, succeeding } in cases {
        check_error(command, &run(command, &["--no-such-option".to_owned()]));
        if !failing.is_empty() {
            let output = run(command, &failing);
            assert!(!output.status.success(), "{command} {failing:?}: {}", text(&output).0);
            check_error(command, &output);
        }
        if let Some(arguments) = succeeding {
            let output = run(command, &arguments);
            assert!(output.status.success(), "{command} {arguments:?}: {}", text(&output).1);
            let documents = documents(command, &output);
            assert!(documents.iter().all(|document| document.get("error").is_none()), "{documents:?}");
        }
    }
    fleet.stop();
}

#[test]
fn a_document_that_says_what_failed_is_the_only_one() {
    let folder = tempfile::tempdir().unwrap();
    // A model that no engine can use, whose header can be read.
    let file: PathBuf = folder.path().join("unusable.gguf");
    rewrite(&file, &["tokenizer.ggml.pre"], |metadata| {
        metadata.put("tokenizer.ggml.pre", "gpt-9").unwrap();
    });
    let output = run("inspect", &[file.to_str().unwrap().to_owned()]);
    assert_eq!(output.status.code(), Some(3), "{}", text(&output).1);
    let document = documents("inspect", &output).remove(0);
    assert!(document["refused"].as_str().unwrap().contains("gpt-9"), "{document}");
    documents("doctor", &run("doctor", &[]));
}

#[test]
fn without_json_standard_output_has_no_error() {
    let output = ballast().args(["inspect", "missing.gguf"]).output().unwrap();
    assert_eq!(text(&output).0, "");
    let output = ballast().args(["eval", "--", "--json"]).output().unwrap();
    assert_eq!((output.status.code(), text(&output).0.as_str()), (Some(2), ""));
}
