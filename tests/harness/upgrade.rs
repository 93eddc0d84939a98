// SPDX-License-Identifier: Apache-2.0

//! Successors of a supervisor, another executable among them, and streams that run while a fleet
//! changes.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::api::{TestRequest, connect, generate, runtime};
use super::{ServedFleet, TIMEOUT, eventually, executable, first_json_line, proc, text};

impl ServedFleet {
    /// Kills the supervisor. The command has to start a successor on the same runtime directory.
    pub(crate) fn succeed(&mut self, mut successor: Command) {
        proc::send_signal(self.supervisor.id(), "KILL");
        let _ = self.supervisor.wait();
        let mut successor = successor.spawn().unwrap();
        first_json_line(&mut successor);
        self.supervisor = successor;
    }

    /// Replaces each process that a new supervisor has adopted, as an upgrade does.
    pub(crate) fn replace_processes(&self, program: &Path) {
        for arguments in
            [&["restart", "weight-server"][..], &["restart", "--rolling"], &["restart", "router"]]
        {
            let restarted = self.run_command(arguments);
            assert!(restarted.status.success(), "{arguments:?}: {}", text(&restarted).1);
        }
        eventually("every process executes the new file", || {
            let processes = self.try_processes()?;
            let is_new = |pid| self::program(pid) == program;
            processes.iter().all(|process| process.state == "ready" && is_new(process.pid)).then_some(())
        });
    }
}

/// The file that a process executes.
pub(crate) fn program(pid: u32) -> PathBuf {
    std::fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default()
}

pub(crate) fn copy_of_executable(folder: &Path, name: &str) -> PathBuf {
    let copy = folder.join(name);
    std::fs::copy(executable(), &copy).unwrap();
    copy
}

pub(crate) fn serve_with(program: &Path, command: &Command) -> Command {
    let mut other = Command::new(program);
    other.args(command.get_args()).stdin(Stdio::null()).stdout(Stdio::piped()).env_remove("NOTIFY_SOCKET");
    other
}

/// Completes the requests again and again until the change is done. Each of them has to give what
/// is expected. Returns how often.
pub(crate) fn complete_during(
    url: &str,
    requests: &[TestRequest],
    expected: &[Vec<u32>],
    change: impl FnOnce(),
) -> usize {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            let mut rounds = 0;
            while !done.load(Ordering::Relaxed) {
                assert_eq!(runtime().block_on(complete_all(url, requests)), expected, "round {rounds}");
                rounds += 1;
            }
            rounds
        });
        // The load ends, also if the change fails.
        let changed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(change));
        done.store(true, Ordering::Relaxed);
        let rounds = load.join().unwrap();
        changed.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        rounds
    })
}

/// The tokens of all requests. A request that meets a router on its way out is sent again, as
/// clients do; a stream that has begun has to end well.
pub(crate) async fn complete_all(url: &str, requests: &[TestRequest]) -> Vec<Vec<u32>> {
    let tasks: Vec<_> = requests
        .iter()
        .map(|request| {
            let (url, request) = (url.to_owned(), request.clone());
            tokio::spawn(async move { complete(&url, &request).await })
        })
        .collect();
    let mut all = Vec::new();
    for task in tasks {
        all.push(task.await.unwrap());
    }
    all
}

async fn complete(url: &str, request: &TestRequest) -> Vec<u32> {
    let end = Instant::now() + TIMEOUT;
    loop {
        let (mut client, mut has_begun) = (connect(url).await, false);
        match generate(&mut client, request, |_| has_begun = true).await {
            Ok(done) => return done.tokens,
            Err(status) => assert!(!has_begun && Instant::now() < end, "{status:?}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
