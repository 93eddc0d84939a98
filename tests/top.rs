// SPDX-License-Identifier: Apache-2.0

//! `ballast top` on a terminal, which `script` provides (util-linux).

use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::harness::{ServedFleet, demo_7m, executable, proc, text};

const LEAVES_SCREEN: &str = "\u{1b}[?1049l";

/// Kills a process when a test fails.
struct KillOnDrop(u32);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        proc::send_signal(self.0, "KILL");
    }
}

/// Runs `top` on a terminal of 160 columns until its screen has all of `parts`, then presses q.
/// Returns all of its output.
fn watch(fleet: &ServedFleet, parts: &[&str], meanwhile: impl FnOnce()) -> String {
    let (top, directory) = (executable(), fleet.runtime_dir().to_owned());
    let command = format!(
        "stty cols 160 rows 40; exec {} top --interval 200ms --runtime-dir {}",
        top.display(),
        directory.display()
    );
    let mut script = Command::new("script")
        .args(["--quiet", "--return", "--command", &command, "/dev/null"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let killed = KillOnDrop(script.id());
    let (sender, chunks) = mpsc::channel();
    let mut stdout = script.stdout.take().unwrap();
    std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(bytes @ 1..) = stdout.read(&mut buffer) {
            if sender.send(String::from_utf8_lossy(&buffer[..bytes]).into_owned()).is_err() {
                return;
            }
        }
    });
    let (mut output, deadline) = (String::new(), Instant::now() + Duration::from_secs(30));
    meanwhile();
    while !parts.iter().all(|part| output.contains(part)) {
        let left = deadline.saturating_duration_since(Instant::now());
        let chunk = chunks.recv_timeout(left);
        output += &chunk.unwrap_or_else(|_| panic!("{parts:?} are not all in {output:?}"));
    }
    script.stdin.take().unwrap().write_all(b"q").unwrap();
    output.extend(chunks.iter());
    assert!(script.wait().unwrap().success(), "{output:?}");
    std::mem::forget(killed);
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
