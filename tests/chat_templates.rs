// SPDX-License-Identifier: Apache-2.0

//! Chat templates that the configuration or the command line names, in place of the model file's.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use proto::v1::generate_frame::Frame;
use proto::v1::generate_request::Prompt;
use proto::v1::inference_client::InferenceClient;
use proto::v1::{Chat, ChatMessage, GenerateRequest, Sampling};
use serde_json::json;
use tonic::transport::Channel;

use crate::harness::api::{connect, runtime};
use crate::harness::http::HttpClient;
use crate::harness::separate::{SeparateProcesses, worker_config};
use crate::harness::{
    ServedFleet, ballast, demo_7m, device, eventually, model_table, proc, serve, serve_config, text,
};
use crate::model_text::{DOUBLING_TEMPLATE, ENDLESS_TEMPLATE, check_refused};
use crate::reload::while_streaming;
use crate::tools::chat_model;

const MODEL_REFUSED: i32 = 3;

/// A template that writes `mark` before each message.
fn template(mark: &str) -> String {
    format!("{{% for m in messages %}}{mark} {{{{ m.content }}}}\n{{% endfor %}}")
}

fn write(folder: &Path, name: &str, text: &str) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, text).unwrap();
    path
}

/// The prompt that a chat of one message becomes over HTTP, without the first token. The error is
/// the status of the answer.
fn prompt(http: &HttpClient, model: &str) -> Result<String, u16> {
    let chat = json!({"model": model, "messages": [{"role": "user", "content": "def f():"}]});
    let (status, tokens) = http.post("/tokenize", &chat);
    if status != 200 {
        return Err(status);
    }
    let tokens: serde_json::Value = serde_json::from_str(&tokens).unwrap();
    let body = json!({"model": model, "tokens": tokens["tokens"]});
    let text = http.post_json("/detokenize", &body)["prompt"].as_str().unwrap().to_owned();
    Ok(text.trim_start_matches("<|endoftext|>").to_owned())
}

/// The greedy continuation of a prompt.
async fn continuation(client: &mut InferenceClient<Channel>, model: &str, prompt: Prompt) -> Vec<u32> {
    let request = GenerateRequest {
        model: model.to_owned(),
        prompt: Some(prompt),
        max_tokens: 12,
        sampling: Some(Sampling { temperature: Some(0.0), ..Sampling::default() }),
        ignore_eos: true,
        ..GenerateRequest::default()
    };
    let mut stream = client.generate(request).await.unwrap().into_inner();
    let mut tokens = Vec::new();
    while let Some(frame) = stream.message().await.unwrap() {
        if let Some(Frame::Delta(delta)) = frame.frame {
            tokens.extend(delta.tokens);
        }
    }
    tokens
}

/// A chat over gRPC has the prompt that the template makes.
async fn check_grpc_chat(client: &mut InferenceClient<Channel>, model: &str, mark: &str) {
    let message = ChatMessage { role: "user".to_owned(), content: "def f():".to_owned() };
    let chat = Prompt::Chat(Chat { messages: vec![message] });
    let rendered = Prompt::Text(format!("{mark} def f():\n"));
    let (chat, rendered) =
        (continuation(client, model, chat).await, continuation(client, model, rendered).await);
    assert_eq!(chat, rendered, "{model} {mark}");
}

#[test]
fn two_names_on_one_copy_have_two_templates_and_aliases_have_their_model_s() {
    let folder = tempfile::tempdir().unwrap();
    let (one, two) = (write(folder.path(), "one.jinja", &template("# one")), template("# two"));
    write(folder.path(), "two.jinja", &two);
    let file = chat_model(folder.path());
    let own = model_table("own", &file, "");
    let first = model_table("first", &file, &format!("chat-template = {one:?}\naliases = [\"alias\"]"));
    // A relative path is relative to the configuration.
    let second = model_table("second", &file, "chat-template = \"two.jinja\"");
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let config = write(folder.path(), "ballast.toml", &format!("{first}{own}{second}"));
    let mut command = ballast();
    command.args(["serve", "--json", "--listen", "127.0.0.1:0", "--config"]).arg(&config);
    command.arg("--runtime-dir").arg(directory.path()).stdout(Stdio::piped());
    let fleet = ServedFleet::start_command(directory, command);
    let copies = fleet.try_ps_lines().unwrap();
    assert_eq!(copies.iter().filter(|line| line["role"] == "generation").count(), 1, "{copies:?}");

    let http = HttpClient::connect(&fleet);
    let expected = [
        ("first", "# one def f():\n"),
        ("alias", "# one def f():\n"),
        ("second", "# two def f():\n"),
        ("own", "[user]def f():[assistant] "),
    ];
    for (name, expected) in expected {
        assert_eq!(prompt(&http, name).as_deref(), Ok(expected), "{name}");
    }
    runtime().block_on(async {
        let mut client = connect(&fleet.grpc).await;
        for (name, mark) in [("first", "# one"), ("alias", "# one"), ("second", "# two")] {
            check_grpc_chat(&mut client, name, mark).await;
        }
    });

    // A worker that restarts has the template that was checked, whatever the file says now.
    std::fs::write(&one, ENDLESS_TEMPLATE).unwrap();
    let workers = fleet.processes_by_role("worker");
    for worker in &workers {
        proc::send_signal(worker.pid, "KILL");
    }
    eventually("new workers serve", || {
        let now = fleet.try_processes()?;
        let mut restarted = now.iter().filter(|now| now.role == "worker");
        restarted
            .all(|now| now.state == "ready" && workers.iter().all(|old| old.pid != now.pid))
            .then_some(())
    });
    for (name, expected) in expected {
        eventually("the prompts are as before", || (prompt(&http, name).ok()? == expected).then_some(()));
    }
    fleet.stop();
}

#[test]
fn a_reload_reads_templates_again_without_a_lost_request_and_a_wrong_one_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let file = write(folder.path(), "chat.jinja", &template("# old"));
    let config = |more: &str| {
        model_table("m", &demo_7m(), more).replace("workers = 1", "workers = 2").replace("1024", "2048")
    };
    let with_template = config(&format!("chat-template = {file:?}"));
    let fleet = ServedFleet::start_config(&with_template);
    let http = HttpClient::connect(&fleet);
    assert_eq!(prompt(&http, "m").as_deref(), Ok("# old def f():\n"));
    assert_eq!(fleet.reload(&[]), "the configuration has not changed\n");

    for (wrong, word) in [("{% if %}", "not a valid template"), (DOUBLING_TEMPLATE, "MiB")] {
        std::fs::write(&file, wrong).unwrap();
        let output = fleet.run_command(&["reload"]);
        let error = text(&output).1;
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains("chat.jinja") && error.contains(word), "{error}");
        assert_eq!(prompt(&http, "m").as_deref(), Ok("# old def f():\n"));
    }
    // A pipe without a writer, like a mount whose server is gone, neither opens nor fails.
    std::fs::remove_file(&file).unwrap();
    assert!(Command::new("mkfifo").arg(&file).status().unwrap().success());
    let output = fleet.run_command(&["reload"]);
    let error = text(&output).1;
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("chat.jinja") && error.contains("no answer within 3s"), "{error}");
    std::fs::remove_file(&file).unwrap();
    let long = format!("{}{{# {} #}}", template("# new"), "x".repeat(300));
    std::fs::write(&file, &long).unwrap();
    while_streaming(&fleet, "m", || {
        let printed = fleet.reload(&[]);
        let (old, new) = (template("# old").len(), long.len());
        assert_eq!(
            printed,
            format!(
                "workers of model m restart one after the other: chat-template.text ({old} bytes) -> ({new} bytes)\n"
            )
        );
        eventually("the new template is used", || {
            (prompt(&http, "m").ok()? == "# new def f():\n").then_some(())
        });
    });
    fleet.configure(&config(""));
    fleet.reload(&[]);
    // The demo model has no template of its own.
    eventually("the file's own template is used", || (prompt(&http, "m") == Err(400)).then_some(()));
    fleet.stop();
}

#[test]
fn a_successor_applies_a_changed_template_and_goes_on_with_the_present_one_if_it_cannot() {
    let folder = tempfile::tempdir().unwrap();
    let file = write(folder.path(), "chat.jinja", &template("# old"));
    let name = file.to_str().unwrap();
    let arguments = ["--workers", "1", "--threads", "1", "--name", "m", "--chat-template", name];
    let mut fleet = ServedFleet::start(&demo_7m(), &arguments);
    let http = HttpClient::connect(&fleet);
    let before = fleet.only_process("worker").pid;
    let successor = serve(fleet.runtime_dir(), &demo_7m(), &arguments);
    fleet.take_over(|| std::fs::write(&file, DOUBLING_TEMPLATE).unwrap(), successor);
    assert_eq!(prompt(&http, "m").as_deref(), Ok("# old def f():\n"));
    assert_eq!(fleet.only_process("worker").pid, before, "the worker goes on");

    let successor = serve(fleet.runtime_dir(), &demo_7m(), &arguments);
    fleet.take_over(|| std::fs::write(&file, template("# new")).unwrap(), successor);
    eventually("the new template is used", || (prompt(&http, "m").ok()? == "# new def f():\n").then_some(()));
    fleet.stop();
}

/// Every template that cannot be used, with words of the sentence that says so.
fn unusable_templates(folder: &Path) -> Vec<(PathBuf, &'static str)> {
    std::fs::write(folder.join("binary.jinja"), [0xff, 0xfe]).unwrap();
    vec![
        (write(folder, "doubling.jinja", DOUBLING_TEMPLATE), "512 MiB"),
        (write(folder, "endless.jinja", ENDLESS_TEMPLATE), "instructions"),
        (write(folder, "syntax.jinja", "{% for m in messages %}\n{{ m. }}"), "chat_template:2"),
        (write(folder, "long.jinja", &"x".repeat((1 << 20) + 1)), "more than 1048576 bytes"),
        (folder.join("binary.jinja"), "not UTF-8"),
        (folder.join("missing.jinja"), "No such file"),
    ]
}

#[test]
fn a_template_that_cannot_be_used_is_refused_by_name_before_anything_is_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "1", "--threads", "1"]);
    for (index, (file, word)) in unusable_templates(folder.path()).iter().enumerate() {
        let named = |mut command: Command| -> Command {
            command.arg("--chat-template").arg(file);
            command
        };
        let mut chat = ballast();
        chat.arg("chat").arg(demo_7m()).args(["--device", &device()]);
        let mut load = ballast();
        load.arg("load").arg(demo_7m()).args(["--name", "other", "--device", &device(), "--runtime-dir"]);
        load.arg(fleet.runtime_dir());
        let runtime_dir = folder.path().join("run");
        let configured = model_table("m", &demo_7m(), &format!("chat-template = {file:?}"));
        let commands = match index {
            0 => vec![named(chat), named(load), serve_config(&runtime_dir, &configured)],
            _ => vec![named(serve(&runtime_dir, &demo_7m(), &[]))],
        };
        for mut command in commands {
            let output = check_refused(&mut command, file, &[word]);
            assert!(!text(&output).1.contains("weights"), "{output:?}");
        }
    }
    assert_eq!(fleet.processes_by_role("worker").len(), 1);

    // A template that the new file of a swap cannot use.
    let file = write(folder.path(), "good.jinja", &template("#"));
    let loaded = fleet.run_command(&[
        "load",
        demo_7m().to_str().unwrap(),
        "--name",
        "good",
        "--device",
        &device(),
        "--threads",
        "1",
        "--chat-template",
        file.to_str().unwrap(),
    ]);
    assert!(loaded.status.success(), "{}", text(&loaded).1);
    let http = HttpClient::connect(&fleet);
    eventually("the loaded model has its template", || {
        (prompt(&http, "good").ok()? == "# def f():\n").then_some(())
    });
    std::fs::write(&file, "{% if %}").unwrap();
    let swapped = fleet.run_command(&["swap", "good", chat_model(folder.path()).to_str().unwrap()]);
    assert_eq!(swapped.status.code(), Some(MODEL_REFUSED), "{}", text(&swapped).1);
    assert!(text(&swapped).1.contains("good.jinja"), "{}", text(&swapped).1);
    assert_eq!(prompt(&http, "good").as_deref(), Ok("# def f():\n"));
    std::fs::write(&file, template("##")).unwrap();
    let swapped = fleet.run_command(&["swap", "good", chat_model(folder.path()).to_str().unwrap()]);
    assert!(swapped.status.success(), "{}", text(&swapped).1);
    assert_eq!(prompt(&http, "good").as_deref(), Ok("## def f():\n"));
    fleet.stop();
}

#[test]
fn chat_says_before_the_prompt_that_a_model_has_no_template_and_takes_another_one() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = ballast();
    command.arg("chat").arg(demo_7m()).args(["--device", &device()]);
    let output = check_refused(&mut command, &demo_7m(), &["no chat template", "--chat-template FILE"]);
    assert_eq!(text(&output).0, "", "there is no prompt");

    let file = write(folder.path(), "chat.jinja", &template("#"));
    let lines = std::fs::File::open(write(folder.path(), "lines", "def add(a, b):\n")).unwrap();
    let mut command = ballast();
    command.arg("chat").arg(demo_7m()).args(["--device", &device(), "--workers", "1", "--threads", "1"]);
    let command = command.args(["--max-tokens", "4", "--chat-template"]).arg(&file).stdin(lines);
    let output = command.output().unwrap();
    assert!(output.status.success() && !text(&output).0.trim().is_empty(), "{:?}", text(&output));
}

#[test]
fn a_worker_without_supervisor_reads_its_template_and_tries_it_before_it_serves() {
    let folder = tempfile::tempdir().unwrap();
    let file = write(folder.path(), "chat.jinja", &template("# split"));
    let processes = SeparateProcesses::start(&demo_7m(), &format!("chat-template = {file:?}\n"));
    let mut client = processes.client().unwrap();
    processes.runtime.block_on(check_grpc_chat(&mut client, "m", "# split"));
    let bad = write(folder.path(), "bad.jinja", DOUBLING_TEMPLATE);
    let config = worker_config(folder.path(), &format!("chat-template = {bad:?}\n"));
    let config = write(folder.path(), "worker.toml", &config);
    let output = check_refused(ballast().args(["worker", "--config"]).arg(config), &bad, &["512 MiB"]);
    assert_eq!(text(&output).0, "");
}
