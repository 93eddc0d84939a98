// SPDX-License-Identifier: Apache-2.0

//! Tools of `ballast chat`: servers of the Model Context Protocol that work, die, flood and hang.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::chat::{answer, chat, server};
use crate::harness::scripted_server::Reply;
use crate::harness::terminal::{CTRL_C, CTRL_D, ENTER, Terminal};
use crate::harness::{ballast, eventually, in_tree, proc, text};

/// Names the tool of `tool_server.py` that behaves like this.
fn tool(behaviour: &str) -> String {
    format!("add_{behaviour}")
}

/// An answer that calls a tool, in pieces as servers stream it.
fn tool_call(name: &str) -> Reply {
    let delta = |call: Value| {
        let choice = json!({"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": null});
        json!({"choices": [choice]}).to_string()
    };
    let end = json!({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}).to_string();
    let begin = json!({"index": 0, "id": "call_1", "type": "function", "function": {"name": name}});
    Reply::stream([
        delta(begin),
        delta(json!({"index": 0, "function": {"arguments": "{\"a\": 1,"}})),
        delta(json!({"index": 0, "function": {"arguments": " \"b\": 2}"}})),
        end,
        "[DONE]".to_owned(),
    ])
}

/// A file for `--tools` with a server for each behaviour. The process ids are written beside it.
fn tools_file(folder: &Path, behaviours: &[&str]) -> PathBuf {
    let (script, pids) = (in_tree("tests/tool_server.py"), folder.join("pids"));
    let server = |behaviour: &&str| {
        format!(
            "[[servers]]\nname = \"server-{behaviour}\"\ntimeout = \"4s\"\noutput-max = \"2KiB\"\n\
             command = [\"python3\", {script:?}, {behaviour:?}, {pids:?}]\n"
        )
    };
    let file = folder.join("tools.toml");
    std::fs::write(&file, behaviours.iter().map(server).collect::<String>()).unwrap();
    file
}

fn pids(folder: &Path) -> Vec<u32> {
    let text = std::fs::read_to_string(folder.join("pids")).unwrap();
    text.lines().map(|line| line.parse().unwrap()).collect()
}

fn tool_result(body: &Value) -> &str {
    let message = body["messages"].as_array().unwrap().last().unwrap();
    assert_eq!((&message["role"], &message["tool_call_id"]), (&json!("tool"), &json!("call_1")), "{body}");
    message["content"].as_str().unwrap()
}

fn end(mut chat: Terminal) {
    chat.press(CTRL_D);
    let (status, output) = chat.end();
    assert!(status.success(), "{output:?}");
}

#[test]
fn a_tool_is_called_when_the_user_allows_it_and_its_server_ends_with_the_chat() {
    let (server, bodies) = server(|number| match number {
        0 | 2 | 4 | 6 => tool_call(&tool("well")),
        _ => answer(&["answer ", &number.to_string(), "."]),
    });
    let folder = tempfile::tempdir().unwrap();
    let file = tools_file(folder.path(), &["well"]);
    let mut chat = chat(&server, folder.path(), &format!("--tools {}", file.display()));
    for (number, (permission, expected)) in
        [("y", "3"), ("n", "does not allow"), ("a", "3"), ("", "3")].into_iter().enumerate()
    {
        chat.press(&format!("add{ENTER}"));
        chat.wait_for("tool add_well {\"a\": 1, \"b\": 2}");
        if !permission.is_empty() {
            chat.wait_for("[a]lways");
            chat.press(&format!("{permission}{ENTER}"));
        }
        chat.wait_for(&format!("answer {}.", 2 * number + 1));
        chat.wait_for("> ");
        let bodies = bodies.lock().unwrap();
        let result = tool_result(&bodies[2 * number + 1]);
        assert!(result.contains(expected), "{permission}: {result}");
    }
    let first = bodies.lock().unwrap()[0].clone();
    let offered = &first["tools"][0]["function"];
    assert_eq!((&offered["name"], &offered["description"]), (&json!("add_well"), &json!("Adds.")));
    assert_eq!(offered["parameters"]["type"], "object");
    let [pid] = pids(folder.path())[..] else { panic!("one server") };
    assert!(proc::is_alive(pid));
    end(chat);
    eventually("the server has ended", || (!proc::is_alive(pid)).then_some(()));
}

#[test]
fn a_tool_server_that_dies_floods_or_never_answers_is_named_and_the_chat_goes_on() {
    let behaviours = ["dies", "hangs", "floods", "chatters", "mute", "long"];
    let folder = tempfile::tempdir().unwrap();
    let file = tools_file(folder.path(), &behaviours);
    let called = ["dies", "hangs", "floods", "chatters", "long", "mute"];
    let (server, bodies) = server(move |number| match number % 2 {
        0 => tool_call(&tool(called[number / 2])),
        _ => answer(&["answer ", &number.to_string(), "."]),
    });
    let allowed: String =
        called[..5].iter().map(|behaviour| format!(" --allow-tools {}", tool(behaviour))).collect();
    let words = format!("chat --no-history --url {} --tools {}{allowed}", server.url(), file.display());
    let mut chat = Terminal::start(&words, &[]);
    chat.wait_for("tool server server-mute has not answered initialize within 4 s");
    chat.wait_for("> ");
    let says = [
        "server-dies ended (exit status: 3): out of coffee",
        "server-hangs has not answered tools/call within 4 s",
        "server-floods sends a line of more than",
        "server-chatters sends more than",
        "(the first 2048 of 100000 bytes)",
        "no tool is called \"add_mute\"; there are add_long",
    ];
    for (index, said) in says.iter().enumerate() {
        chat.press(&format!("add{ENTER}"));
        chat.wait_for(&format!("answer {}.", 2 * index + 1));
        chat.wait_for("> ");
        let bodies = bodies.lock().unwrap();
        let result = tool_result(&bodies[2 * index + 1]);
        assert!(result.contains(said), "{said}: {}", &result[..result.len().min(300)]);
    }
    let last = bodies.lock().unwrap().last().unwrap().clone();
    assert_eq!(last["tools"].as_array().unwrap().len(), 1, "{}", last["tools"]);
    let started = pids(folder.path());
    assert_eq!(started.len(), behaviours.len());
    let is_alive = |pid: &&u32| proc::is_alive(**pid);
    eventually("the failed servers have ended", || {
        (started.iter().filter(is_alive).count() == 1).then_some(())
    });
    chat.press(&format!("/tools{ENTER}"));
    chat.wait_for("server-dies ended");
    chat.wait_for("> ");
    end(chat);
    eventually("all servers have ended", || (started.iter().filter(is_alive).count() == 0).then_some(()));
}

#[test]
fn ctrl_c_interrupts_a_tool_and_without_a_terminal_only_allowed_tools_are_called() {
    let (server, bodies) = server(|number| match number {
        0 | 2 => tool_call(&tool("hangs")),
        3 => tool_call(&tool("well")),
        _ => answer(&["answer ", &number.to_string(), "."]),
    });
    let folder = tempfile::tempdir().unwrap();
    let file = tools_file(folder.path(), &["hangs", "well"]);
    let text_of_file = std::fs::read_to_string(&file).unwrap().replace("\"4s\"", "\"10min\"");
    std::fs::write(&file, text_of_file).unwrap();
    let tools = format!("--tools {} --allow-tools add_hangs", file.display());
    let mut chat = chat(&server, folder.path(), &tools);
    chat.press(&format!("one{ENTER}"));
    chat.wait_for("tool add_hangs");
    chat.press(CTRL_C);
    chat.wait_for("interrupted");
    chat.wait_for("> ");
    chat.press(&format!("two{ENTER}"));
    chat.wait_for("answer 1.");
    // Before the prompt, the terminal would take the end of input for a byte.
    chat.wait_for("> ");
    let messages = bodies.lock().unwrap()[1]["messages"].clone();
    assert_eq!(messages[2]["content"], "error: interrupted by the user");
    end(chat);

    let lines = folder.path().join("lines");
    std::fs::write(&lines, "three\n").unwrap();
    let mut command = ballast();
    command.args(["chat", "--url", &server.url(), "--tools"]).arg(&file).args(["--allow-tools", "add_other"]);
    let output = command.stdin(std::fs::File::open(&lines).unwrap()).output().unwrap();
    let (stdout, stderr) = text(&output);
    assert!(output.status.success() && stdout.contains("answer 4."), "{stdout}{stderr}");
    assert!(stderr.contains("there are add_hangs, add_well"), "{stderr}");
    let bodies = bodies.lock().unwrap();
    assert!(bodies[3..].iter().all(|body| tool_result(body).contains("does not allow")), "{bodies:?}");
}

#[test]
fn a_tools_file_with_an_error_is_refused_by_name() {
    let (server, _bodies) = server(|_| answer(&["x"]));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tools.toml");
    for (text_of_file, says) in [("[[servers]]\nname = \"a\"\n", "command"), ("servers = 3", "servers")] {
        std::fs::write(&file, text_of_file).unwrap();
        let output = ballast().args(["chat", "--url", &server.url(), "--tools"]).arg(&file).output().unwrap();
        let stderr = text(&output).1;
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(stderr.contains("tools.toml") && stderr.contains(says), "{stderr}");
    }
}
