// SPDX-License-Identifier: Apache-2.0

//! Log lines as JSON. The process is this test executable once more, with the ignored test.

#![forbid(unsafe_code)]

use std::process::{Command, Stdio};

use serde_json::{Value, json};

#[test]
#[ignore = "the process of the other test"]
fn child_that_logs_and_panics() {
    service::logging::init("child", tracing::Level::INFO);
    let text = "quotes \" and\na line end";
    tracing::warn!(count = 3_u64, ratio = 0.5, is_new = true, text, process = "other", "an event");
    tracing::info!(nothing = f64::NAN, path = %"a/b", list = ?[1, 2]);
    service::logging::print_line("two\nlines");
    panic!("the end");
}

#[test]
fn each_line_is_an_object_with_the_fields_of_the_event() {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "--nocapture", "child_that_logs_and_panics"])
        .envs([("BALLAST_LOG", "info"), ("BALLAST_LOG_FORMAT", "json")])
        .env_remove("JOURNAL_STREAM")
        .env_remove("RUST_BACKTRACE")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .output()
        .unwrap();
    let log = String::from_utf8(output.stderr).unwrap();
    let mut lines: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for line in &mut lines {
        let line = line.as_object_mut().unwrap();
        let timestamp = line.remove("timestamp").unwrap();
        assert!(
            timestamp.as_str().is_some_and(|time| time.len() == 27 && time.ends_with('Z')),
            "{timestamp}"
        );
        assert_eq!(line.remove("process"), Some(json!("child")));
    }
    let panic = lines.pop().unwrap();
    assert!(
        panic["level"] == "ERROR" && panic["message"].as_str().unwrap().ends_with(": the end"),
        "{panic}"
    );
    let event = json!({
        "level": "WARN", "message": "an event", "count": 3, "ratio": 0.5, "is_new": true,
        "text": "quotes \" and\na line end", "process_": "other",
    });
    let without_text = json!({"level": "INFO", "nothing": null, "path": "a/b", "list": "[1, 2]"});
    let printed = json!({"level": "INFO", "message": "two\nlines"});
    assert_eq!(lines, [event, without_text, printed]);
}
