// SPDX-License-Identifier: Apache-2.0

//! A program on a terminal of its own, which `script` provides (util-linux).

use std::io::{Read, Write};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use rustix::termios::{LocalModes, tcgetattr};

use super::{TIMEOUT, eventually, executable, proc};

pub(crate) const CTRL_C: &str = "\u{3}";
pub(crate) const CTRL_D: &str = "\u{4}";
pub(crate) const ENTER: &str = "\r";
pub(crate) const UP: &str = "\u{1b}[A";

/// Columns of the terminal: longer than any line that tests look for.
const COLUMNS: u32 = 160;

pub(crate) struct Terminal {
    script: Child,
    keys: Option<ChildStdin>,
    chunks: Receiver<String>,
    /// All output.
    output: String,
    /// The part of the output that was waited for.
    seen: usize,
}

impl Terminal {
    /// Starts `ballast` with these words, which a shell reads, and these variables.
    pub(crate) fn start(words: &str, variables: &[(&str, &str)]) -> Terminal {
        Self::start_shell(&format!("exec {} {words}", executable().display()), variables)
    }

    /// Starts a command of a shell.
    pub(crate) fn start_shell(command: &str, variables: &[(&str, &str)]) -> Terminal {
        let command = format!("stty cols {COLUMNS} rows 40; {command}");
        let mut script = Command::new("script")
            .args(["--quiet", "--return", "--command", &command, "/dev/null"])
            .env_remove("NO_COLOR")
            .env("TERM", "xterm-256color")
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let (sender, chunks) = mpsc::channel();
        let (keys, mut stdout) = (script.stdin.take(), script.stdout.take().unwrap());
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(bytes @ 1..) = stdout.read(&mut buffer) {
                if sender.send(String::from_utf8_lossy(&buffer[..bytes]).into_owned()).is_err() {
                    return;
                }
            }
        });
        Terminal { script, keys, chunks, output: String::new(), seen: 0 }
    }

    /// Types keys.
    pub(crate) fn press(&mut self, keys: &str) {
        self.keys.as_mut().unwrap().write_all(keys.as_bytes()).unwrap();
    }

    /// Waits until no prompt of the program has the terminal in raw mode, for a moment at most: the
    /// next prompt comes soon.
    pub(crate) fn wait_between_prompts(&self) {
        const MOMENT: Duration = Duration::from_millis(200);
        let script = self.script.id();
        let children = std::fs::read_to_string(format!("/proc/{script}/task/{script}/children")).unwrap();
        let terminal = std::fs::File::open(format!("/proc/{}/fd/0", children.trim())).unwrap();
        let started = Instant::now();
        while started.elapsed() < MOMENT {
            if tcgetattr(&terminal).unwrap().local_modes.contains(LocalModes::ICANON) {
                return;
            }
        }
    }

    /// Waits for a text after what was waited for before.
    #[track_caller]
    pub(crate) fn wait_for(&mut self, text: &str) {
        self.wait_for_one_of(&[text]);
    }

    /// The same for one of several texts.
    #[track_caller]
    pub(crate) fn wait_for_one_of(&mut self, texts: &[&str]) {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let new = &self.output[self.seen..];
            let found = texts.iter().filter_map(|text| Some(new.find(text)? + text.len())).min();
            if let Some(end) = found {
                self.seen += end;
                return;
            }
            let chunk = self.chunks.recv_timeout(deadline.saturating_duration_since(Instant::now()));
            match chunk {
                Ok(chunk) => self.output += &chunk,
                Err(_) => panic!("{texts:?}: none is in {:?}", &self.output[self.seen..]),
            }
        }
    }

    /// The same for a text anywhere in the output.
    #[track_caller]
    pub(crate) fn wait_anywhere_for(&mut self, text: &str) {
        self.seen = 0;
        self.wait_for(text);
    }

    /// Waits for the end of the program. Returns its status and all of its output.
    #[track_caller]
    pub(crate) fn end(mut self) -> (ExitStatus, String) {
        let status = eventually("the program on the terminal ends", || self.script.try_wait().unwrap());
        self.output.extend(self.chunks.iter());
        (status, std::mem::take(&mut self.output))
    }
}

impl Drop for Terminal {
    /// Ends the program when a test fails: it hangs up.
    fn drop(&mut self) {
        if matches!(self.script.try_wait(), Ok(None)) {
            proc::send_signal(self.script.id(), "KILL");
            let _ = self.script.wait();
        }
    }
}
