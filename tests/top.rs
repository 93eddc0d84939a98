// SPDX-License-Identifier: Apache-2.0

//! `ballast top` on a terminal.

use std::time::Duration;

use crate::harness::terminal::Terminal;
use crate::harness::{ServedFleet, demo_7m, text};

const LEAVES_SCREEN: &str = "\u{1b}[?1049l";

/// Runs `top` until its screen has all of `parts`, then presses q. Returns all of its output.
fn watch(fleet: &ServedFleet, parts: &[&str], meanwhile: impl FnOnce()) -> String {
    let words = format!("top --interval 200ms --runtime-dir {}", fleet.runtime_dir().display());
    let mut top = Terminal::start(&words, &[]);
    meanwhile();
    parts.iter().for_each(|part| top.wait_anywhere_for(part));
    top.press("q");
    let (status, output) = top.end();
    assert!(status.success(), "{output:?}");
    output
}

#[test]
fn top_shows_the_fleet_on_a_terminal_follows_it_and_leaves_the_terminal_as_it_was() {
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "2"]);
    let shown = ["pycoder-7m", "worker-0", "worker-1", "weight-server", "2/2", "KV CACHE", "tokens/s"];
    let output = watch(&fleet, &shown, || {});
    assert!(output.contains("\u{1b}[?1049h") && output.contains(LEAVES_SCREEN), "{output:?}");
    // Only what changes is drawn: "stopp" replaces "ready" or "drain".
    let output = watch(&fleet, &["stopp"], || {
        std::thread::sleep(Duration::from_secs(1));
        assert!(fleet.run_command(&["drain", "worker-1"]).status.success());
    });
    assert!(output.contains(LEAVES_SCREEN), "{output:?}");
    fleet.stop();
}

#[test]
fn top_without_a_terminal_names_what_prints_the_figures() {
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "1"]);
    let output = fleet.run_command(&["top"]);
    let (stdout, stderr) = text(&output);
    assert_eq!((output.status.code(), stdout.as_str()), (Some(2), ""), "{stderr}");
    assert!(stderr.contains("ballast ps --json"), "{stderr}");
    fleet.stop();
}
