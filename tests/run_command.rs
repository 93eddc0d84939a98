// SPDX-License-Identifier: Apache-2.0

//! `ballast run`: one answer, for people and for programs.

use std::fs::File;
use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};

use crate::chat::{answer, server};
use crate::harness::scripted_server::{Reply, chat_chunk};
use crate::harness::terminal::Terminal;
use crate::harness::{ServedFleet, ballast, eventually, proc, text};
use crate::tools::chat_model;

#[test]
fn the_prompt_is_an_argument_or_the_input_and_the_answer_is_the_output() {
    let (server, bodies) = server(|_| answer(&["**an** ", "answer"]));
    let folder = tempfile::tempdir().unwrap();
    let (prompt, key) = (folder.path().join("prompt"), folder.path().join("key"));
    std::fs::write(&prompt, "from a\nfile\n").unwrap();
    std::fs::write(&key, "sk-secret\n").unwrap();
    let url = server.url();
    let run = |arguments: &[&str], input: Stdio| {
        let output = ballast().args(["run", "--url", &url]).args(arguments).stdin(input).output().unwrap();
        assert!(output.status.success(), "{}", text(&output).1);
        text(&output).0
    };
    assert_eq!(
        run(&["hello", "--system", "short", "--temperature", "0.5"], Stdio::null()),
        "**an** answer\n"
    );
    let key = key.to_str().unwrap();
    assert_eq!(run(&["--api-key-file", key], File::open(&prompt).unwrap().into()), "**an** answer\n");
    let object: Value = serde_json::from_str(&run(&["hello", "--json"], Stdio::null())).unwrap();
    assert_eq!((&object["text"], &object["finish_reason"]), (&json!("**an** answer"), &json!("stop")));
    let bodies = bodies.lock().unwrap().clone();
    let expected = json!([{"role": "system", "content": "short"}, {"role": "user", "content": "hello"}]);
    assert_eq!((&bodies[0]["messages"], &bodies[0]["temperature"]), (&expected, &json!(0.5)));
    assert_eq!(bodies[1]["messages"][0]["content"], "from a\nfile\n");

    let mut terminal = Terminal::start(&format!("run --url {url} hello"), &[]);
    terminal.wait_for("\u{1b}[0;1man\u{1b}[0m answer");
    assert!(terminal.end().0.success());
    let mut terminal = Terminal::start(&format!("run --url {url}"), &[]);
    terminal.wait_for("ballast chat for a conversation");
    assert_eq!(terminal.end().0.code(), Some(2));
}

#[test]
fn an_interrupted_answer_ends_with_130_and_a_cut_one_with_an_error() {
    let (server, _bodies) = server(|number| match number {
        0 => Reply::Stall { after: vec![chat_chunk("partial")], pause: Duration::from_secs(600) },
        _ => Reply::stream([chat_chunk("half")]),
    });
    let command = || {
        let mut command = ballast();
        command.args(["run", "--url", &server.url(), "hello"]).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    let run = command().spawn().unwrap();
    std::thread::sleep(Duration::from_secs(1));
    proc::send_signal(run.id(), "INT");
    let output = run.wait_with_output().unwrap();
    assert_eq!((output.status.code(), text(&output).0.as_str()), (Some(130), "partial"));
    let output = command().output().unwrap();
    assert_eq!(output.status.code(), Some(5));
    assert!(text(&output).1.contains("breaks off"), "{}", text(&output).1);
}

#[test]
fn a_running_fleet_with_keys_answers_its_own_user_without_one() {
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys.toml");
    let made = ballast().args(["key", "someone", "--file"]).arg(&keys).output().unwrap();
    assert!(made.status.success(), "{}", text(&made).1);
    let arguments =
        ["--workers", "1", "--threads", "1", "--alias", "other", "--keys", keys.to_str().unwrap()];
    let fleet = ServedFleet::start(&chat_model(folder.path()), &arguments);
    let refused = ballast().args(["run", "hello", "--url", &fleet.http]).output().unwrap();
    assert!(text(&refused).1.contains("refuses the API key"), "{}", text(&refused).1);
    for name in ["chat", "other"] {
        let output = fleet.run_command(&["run", "hello", "--name", name, "--max-tokens", "4", "--json"]);
        let object: Value = serde_json::from_str(&text(&output).0).unwrap();
        // The answer is sampled, so it may end early.
        let tokens = object["usage"]["completion_tokens"].as_u64().unwrap();
        assert!((1..=4).contains(&tokens), "{object}");
    }
    let unknown = fleet.refusal(&["run", "hello", "--name", "nothing"]);
    assert!(unknown.contains("it has chat"), "{unknown}");
    fleet.stop();
}

#[test]
fn progress_is_shown_on_a_terminal_and_not_with_json() {
    let folder = tempfile::tempdir().unwrap();
    let fleet = ServedFleet::start(&chat_model(folder.path()), &["--workers", "1", "--threads", "1"]);
    let run = |words: String| {
        let (status, output) = Terminal::start(&words, &[]).end();
        assert!(status.success(), "{output:?}");
        output
    };
    let file = folder.path().join("synth.gguf");
    let synth = format!("synth qwen3-wide q8_0 {}", file.display());
    let shown = run(synth.clone());
    assert!(shown.contains(" of ") && shown.contains("iB/s"), "{shown:?}");
    assert!(!run(format!("{synth} --json")).contains("iB/s"));
    let directory = fleet.runtime_dir().display();
    let load = format!("load {} --threads 1 --kv-tokens 64 --runtime-dir {directory}", file.display());
    let loaded = run(load);
    assert!(loaded.contains("iB/s"), "{loaded:?}");
    fleet.run(&["unload", "synth"]);
    let bench = "bench serve --num-prompts 8 --input-len 8 --output-len 200 --max-concurrency 1";
    let measured = run(format!("{bench} --runtime-dir {directory}"));
    assert!(measured.contains(" of 8 requests"), "{measured:?}");
    fleet.stop();
}

#[test]
fn a_signal_at_the_prompt_of_a_chat_gives_the_terminal_back_as_it_was() {
    let (server, _bodies) = server(|_| answer(&["x"]));
    let pid_file = tempfile::NamedTempFile::new().unwrap();
    let (url, pid_path) = (server.url(), pid_file.path().display());
    // The shell on the same terminal says how it is before and after the chat.
    let chat = format!("exec {} chat --no-history --url {url}", crate::harness::executable().display());
    let command = format!("stty -g; sh -c 'echo $$ >{pid_path}; {chat}'; stty -g; echo over");
    let mut terminal = Terminal::start_shell(&command, &[]);
    terminal.wait_for("/help");
    terminal.wait_for("> ");
    let pid = eventually("the chat has its process id", || {
        std::fs::read_to_string(pid_file.path()).ok()?.trim().parse::<u32>().ok()
    });
    proc::send_signal(pid, "TERM");
    terminal.wait_for("over");
    let (_, output) = terminal.end();
    let modes: Vec<&str> =
        output.lines().map(str::trim).filter(|line| line.matches(':').count() > 10).collect();
    assert_eq!(modes.len(), 2, "{output:?}");
    // In front of the second one stands what the chat wrote.
    assert!(modes[1].ends_with(modes[0]), "{modes:?}");
    assert!(output.contains("\u{1b}[?2004l"), "{output:?}");
}
