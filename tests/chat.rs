// SPDX-License-Identifier: Apache-2.0

//! `ballast chat` on a terminal, with a server whose answers the test scripts, with a fleet of its
//! own and with a running fleet.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};

use crate::harness::http::HttpClient;
use crate::harness::scripted_server::{Reply, ScriptedServer, chat_chunk, chat_end};
use crate::harness::terminal::{CTRL_C, CTRL_D, ENTER, Terminal, UP};
use crate::harness::{ServedFleet, ballast, device, eventually, proc, text};
use crate::tools::chat_model;

/// Bodies of the requests of a server, in their order.
type Bodies = Arc<Mutex<Vec<Value>>>;

/// A server that answers with a script of the number of the request.
pub(crate) fn server(script: impl Fn(usize) -> Reply + Send + Sync + 'static) -> (ScriptedServer, Bodies) {
    let bodies = Bodies::default();
    let seen = Arc::clone(&bodies);
    let server = ScriptedServer::start(move |number, request| {
        let body = request.split_once("\r\n\r\n").unwrap().1;
        seen.lock().unwrap().push(serde_json::from_str(body).unwrap());
        script(number)
    });
    (server, bodies)
}

pub(crate) fn answer(pieces: &[&str]) -> Reply {
    Reply::stream(pieces.iter().map(|piece| chat_chunk(piece)).chain(chat_end()))
}

fn answer_with_number(number: usize) -> Reply {
    answer(&["answer ", &number.to_string(), "."])
}

/// A chat with this server, in a state directory of its own.
pub(crate) fn chat(server: &ScriptedServer, state: &Path, more: &str) -> Terminal {
    let words = format!("chat --url {} {more}", server.url());
    let mut chat = Terminal::start(&words, &[("XDG_STATE_HOME", state.to_str().unwrap())]);
    chat.wait_for("> ");
    chat
}

/// Enters a line, and waits for the answer with a number and the next prompt.
fn ask(chat: &mut Terminal, keys: &str, number: usize) {
    chat.press(&format!("{keys}{ENTER}"));
    chat.wait_for(&format!("answer {number}."));
    chat.wait_for("> ");
}

fn quit(mut chat: Terminal) -> String {
    chat.press(CTRL_D);
    let (status, output) = chat.end();
    assert!(status.success(), "{status}: {output:?}");
    output
}

/// Roles and contents of a request.
fn messages(body: &Value) -> Vec<(&str, &str)> {
    let messages = body["messages"].as_array().unwrap().iter();
    messages.map(|m| (m["role"].as_str().unwrap(), m["content"].as_str().unwrap())).collect()
}

fn last_question(bodies: &Bodies) -> String {
    let bodies = bodies.lock().unwrap();
    messages(bodies.last().unwrap()).last().unwrap().1.to_owned()
}

#[test]
fn messages_have_several_lines_and_the_history_outlives_the_chat() {
    let (server, bodies) = server(answer_with_number);
    let state = tempfile::tempdir().unwrap();
    let mut first = chat(&server, state.path(), "");
    let several = [
        (format!("\"\"\"{ENTER}one{ENTER}{ENTER}two\"\"\""), "one\n\ntwo"),
        (format!("a\\{ENTER}b"), "a\nb"),
        (format!("c\u{1b}{ENTER}d"), "c\nd"),
        (format!("\u{1b}[200~e{ENTER}f\u{1b}[201~"), "e\nf"),
        (UP.to_owned(), "e\nf"),
        ("/usr/bin is what?".to_owned(), "/usr/bin is what?"),
    ];
    for (number, (keys, expected)) in several.iter().enumerate() {
        ask(&mut first, keys, number);
        assert_eq!(last_question(&bodies), *expected);
    }
    quit(first);

    let file = state.path().join("ballast/chat_history");
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let mut second = chat(&server, state.path(), "");
    ask(&mut second, UP, 6);
    assert_eq!(last_question(&bodies), "/usr/bin is what?");
    quit(second);
    let before = std::fs::read_to_string(&file).unwrap();
    let mut third = chat(&server, state.path(), "--no-history");
    ask(&mut third, &format!("{UP}private"), 7);
    assert_eq!(last_question(&bodies), "private");
    quit(third);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), before);
}

#[test]
fn commands_change_the_requests_and_the_conversation() {
    let (server, bodies) = server(answer_with_number);
    let state = tempfile::tempdir().unwrap();
    let saved = state.path().join("saved.json");
    let mut chat = chat(&server, state.path(), "--system short --top-p 0.9");
    let command = |chat: &mut Terminal, line: &str, says: &str| {
        chat.press(&format!("{line}{ENTER}"));
        chat.wait_for(says);
        chat.wait_for("> ");
    };
    ask(&mut chat, "one", 0);
    command(&mut chat, "/set temperature 0.7", "");
    command(&mut chat, "/set heat 1", "temperature, top_p");
    command(&mut chat, "/hepl", "there are /help, /set");
    command(&mut chat, "/se\tmax_t\t5", "");
    command(&mut chat, &format!("/save {}", saved.display()), "saved in");
    ask(&mut chat, "two", 1);
    {
        let bodies = bodies.lock().unwrap();
        let expected = [("system", "short"), ("user", "one"), ("assistant", "answer 0."), ("user", "two")];
        assert_eq!(messages(&bodies[1]), expected);
        assert_eq!((&bodies[0]["temperature"], &bodies[0]["top_p"]), (&Value::Null, &json!(0.9)));
        assert_eq!((&bodies[1]["temperature"], &bodies[1]["max_tokens"]), (&json!(0.7), &json!(5)));
        assert_eq!(bodies[1]["model"], "scripted");
    }
    ask(&mut chat, "/retry", 2);
    assert_eq!(messages(&bodies.lock().unwrap()[2]).len(), 4);
    command(&mut chat, "/undo", "");
    command(&mut chat, "/undo", "");
    command(&mut chat, "/undo", "no question");
    command(&mut chat, &format!("/load {}", saved.display()), "3 messages");
    command(&mut chat, "/system be long", "");
    ask(&mut chat, "three", 3);
    let expected = [("system", "be long"), ("user", "one"), ("assistant", "answer 0."), ("user", "three")];
    assert_eq!(messages(&bodies.lock().unwrap()[3]), expected);
    command(&mut chat, "/clear", "");
    command(&mut chat, "/show", "be long");
    chat.press(&format!("/bye{ENTER}"));
    assert!(chat.end().0.success());
}

#[test]
fn ctrl_c_keeps_the_part_of_an_answer_that_has_come_and_at_the_prompt_it_ends_the_chat_twice() {
    let (server, bodies) = server(|number| match number {
        0 => Reply::Stall {
            after: vec![chat_chunk("partial"), chat_chunk(" text")],
            pause: Duration::from_secs(600),
        },
        _ => answer_with_number(number),
    });
    let state = tempfile::tempdir().unwrap();
    let mut chat = chat(&server, state.path(), "");
    chat.press(&format!("one{ENTER}"));
    chat.wait_for("partial text");
    chat.press(CTRL_C);
    chat.wait_for("interrupted; what has come is kept");
    chat.wait_for("> ");
    // Clears the line.
    chat.press(&format!("never sent{CTRL_C}"));
    chat.wait_for("Ctrl-C again");
    chat.wait_for("> ");
    ask(&mut chat, "two", 1);
    let expected = [("user", "one"), ("assistant", "partial text"), ("user", "two")];
    assert_eq!(messages(&bodies.lock().unwrap()[1]), expected);
    chat.press(CTRL_C);
    chat.wait_for("Ctrl-C again");
    chat.press(CTRL_C);
    let (status, output) = chat.end();
    assert!(status.success(), "{output:?}");
}

#[test]
fn ctrl_c_twice_ends_the_chat_also_if_it_comes_between_two_prompts() {
    let (server, _bodies) = server(answer_with_number);
    let state = tempfile::tempdir().unwrap();
    for _ in 0..10 {
        let mut chat = chat(&server, state.path(), "--no-history");
        chat.press(CTRL_C);
        chat.wait_between_prompts();
        chat.press(CTRL_C);
        let (status, output) = chat.end();
        assert!(status.success(), "{output:?}");
    }
}

#[test]
fn an_error_is_said_and_the_chat_goes_on() {
    let (server, bodies) = server(|number| match number {
        0 => Reply::Error(503, json!({"error": {"message": "no worker is ready"}}).to_string()),
        1 => Reply::stream([chat_chunk("half")]),
        _ => answer_with_number(number),
    });
    let state = tempfile::tempdir().unwrap();
    let mut chat = chat(&server, state.path(), "");
    chat.press(&format!("one{ENTER}"));
    chat.wait_for("HTTP 503): no worker is ready");
    chat.wait_for("> ");
    chat.press(&format!("/retry{ENTER}"));
    chat.wait_for("breaks off");
    chat.wait_for("> ");
    ask(&mut chat, "/retry", 2);
    assert_eq!(messages(&bodies.lock().unwrap()[2]), [("user", "one")]);
    quit(chat);
}

/// An answer with Markdown, reasoning and control characters.
fn rich_answer(_: usize) -> Reply {
    let reasoning = json!({"choices": [{"index": 0, "delta": {"reasoning_content": "let me see"}}]});
    let texts = ["# Ti", "tle\n**bo", "ld** \u{1b}]0;owned\u{7}", "`x`\n```\ncode\n```\nend of it"];
    Reply::stream([reasoning.to_string()].into_iter().chain(texts.map(chat_chunk)).chain(chat_end()))
}

#[test]
fn markdown_is_rendered_on_a_terminal_and_control_characters_never_reach_it() {
    let (server, _bodies) = server(rich_answer);
    let state = tempfile::tempdir().unwrap();
    let run = |more: &str, variables: &[(&str, &str)]| {
        let words = format!("chat --no-history --url {} {more}", server.url());
        let mut chat = Terminal::start(&words, variables);
        chat.wait_for("> ");
        chat.press(&format!("hello{ENTER}"));
        chat.wait_for("end of it");
        chat.wait_for("> ");
        quit(chat)
    };
    let styled = run("", &[]);
    let expected =
        ["\u{1b}[0;2mlet me see", "\u{1b}[0;1;4mTi", "\u{1b}[0;1mbold\u{1b}[0m", "\u{1b}[0;36mcode"];
    assert!(expected.iter().all(|part| styled.contains(part)), "{styled:?}");
    assert!(!styled.contains("**"), "{styled:?}");
    let plain = run("", &[("NO_COLOR", "1")]);
    assert!(plain.contains("# Title") && plain.contains("**bold**"), "{plain:?}");
    assert!(plain.contains("Reasoning:\r\nlet me see"), "{plain:?}");
    for output in [&styled, &plain] {
        assert!(output.contains("\\u{1b}]0;owned\\u{7}"), "{output:?}");
        assert!(!output.contains("\u{1b}]0;"), "{output:?}");
    }
    assert!(!plain.contains("\u{1b}[0"), "{plain:?}");
    assert!(!run("--hide-reasoning", &[]).contains("let me see"));

    // Not on a terminal: the answer as it is, without reasoning.
    let lines = state.path().join("lines");
    std::fs::write(&lines, "one\n").unwrap();
    let input = std::fs::File::open(&lines).unwrap();
    let output = ballast().args(["chat", "--url", &server.url()]).stdin(input).output().unwrap();
    assert_eq!(text(&output).0, "# Title\n**bold** \u{1b}]0;owned\u{7}`x`\n```\ncode\n```\nend of it\n");
}

#[test]
fn a_server_that_cannot_be_used_is_named_with_what_to_do() {
    let (server, _bodies) = server(answer_with_number);
    let chat = |arguments: &[&str]| {
        let output = ballast().arg("chat").args(arguments).output().unwrap();
        (output.status.code().unwrap(), text(&output).1)
    };
    let unreachable = chat(&["--url", "http://127.0.0.1:1"]);
    assert!(
        unreachable.0 == 5 && unreachable.1.contains("http://127.0.0.1:1 does not answer"),
        "{unreachable:?}"
    );
    let unknown = chat(&["--url", &server.url(), "--name", "other"]);
    assert!(unknown.0 == 2 && unknown.1.contains("it has scripted"), "{unknown:?}");
    let address = chat(&["--url", "ftp://x"]);
    assert!(address.0 == 2 && address.1.contains("write http://HOST:PORT"), "{address:?}");
    let both = chat(&["--url", &server.url(), "model.gguf"]);
    assert!(both.0 == 2 && both.1.contains("cannot be used with"), "{both:?}");
    let key = chat(&["--url", &server.url(), "--api-key-file", "/dev/null"]);
    assert!(key.0 == 2 && key.1.contains("/dev/null holds no API key"), "{key:?}");
    for option in ["--workers", "--threads"] {
        let unused = chat(&["--url", &server.url(), option, "3"]);
        assert!(unused.0 == 2 && unused.1.contains(option), "{unused:?}");
        let of_a_model = chat(&[option, "3"]);
        assert!(of_a_model.0 == 2 && of_a_model.1.contains("<MODEL.gguf"), "{of_a_model:?}");
    }
}

#[test]
fn a_running_fleet_answers_and_ctrl_c_stops_its_stream_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let fleet = ServedFleet::start(&chat_model(folder.path()), &["--workers", "1", "--threads", "1"]);
    let http = HttpClient::connect(&fleet);
    let is_running = || http.metric("ballast:num_requests_running").is_some_and(|running| running > 0.0);
    let before: Vec<u32> = fleet.processes().iter().map(|process| process.pid).collect();
    let words =
        format!("chat --no-history --temperature 1.5 --runtime-dir {}", fleet.runtime_dir().display());
    let mut chat = Terminal::start(&words, &[]);
    chat.wait_for("chat: /help");
    chat.wait_for("> ");
    chat.press(&format!("hello{ENTER}"));
    eventually("the request runs", || is_running().then_some(()));
    chat.press(CTRL_C);
    chat.wait_for("interrupted");
    eventually("the request has stopped", || (!is_running()).then_some(()));
    quit(chat);
    let after: Vec<u32> = fleet.processes().iter().map(|process| process.pid).collect();
    assert_eq!(before, after);
    fleet.stop();
}

#[test]
fn a_fleet_of_its_own_survives_ctrl_c_and_ends_with_the_chat() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let words = format!(
        "chat --no-history --workers 1 --threads 1 --device {} --max-tokens 4 --runtime-dir {} {}",
        device(),
        run.display(),
        chat_model(folder.path()).display()
    );
    let mut chat = Terminal::start(&words, &[]);
    chat.wait_for("chat: /help");
    let ps = || ballast().args(["ps", "--json", "--runtime-dir"]).arg(&run).output().unwrap();
    let pids = || -> Vec<u64> {
        let lines = text(&ps()).0;
        lines
            .lines()
            .filter_map(|line| serde_json::from_str::<Value>(line).unwrap()["pid"].as_u64())
            .collect()
    };
    let before = pids();
    assert!(before.len() >= 4, "{before:?}");
    chat.press(&format!("/set max_tokens default{ENTER}hello{ENTER}"));
    chat.wait_for("hello");
    std::thread::sleep(Duration::from_millis(300));
    chat.press(CTRL_C);
    // The answer may have ended before. What is typed together with Ctrl-C is lost.
    chat.wait_for_one_of(&["interrupted", "Ctrl-C again"]);
    chat.wait_for("> ");
    chat.press(&format!("/set max_tokens 3{ENTER}/tokens{ENTER}again{ENTER}/tokens{ENTER}"));
    chat.wait_for("+ 3 answer tokens");
    assert_eq!(pids(), before);
    quit(chat);
    for pid in before {
        assert!(!proc::is_alive(u32::try_from(pid).unwrap()), "{pid} was left behind");
    }
}
