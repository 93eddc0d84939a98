// SPDX-License-Identifier: Apache-2.0

//! Reads files that may not answer: a mount whose server is gone, or a pipe without a writer.

use std::fs::File;
use std::io::{self, Read};
use std::path::PathBuf;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// A file on a mount whose server is gone neither opens nor fails. The children of a dead
/// supervisor wait 10 s for a successor, which reads model files and then chat templates.
const READ_TIMEOUT: Duration = Duration::from_secs(3);

/// Reads at most `bytes_max` bytes of each file, all at the same time. The result of a file that
/// does not answer is [`io::ErrorKind::TimedOut`]; its thread stays behind.
pub(crate) fn read_files(paths: Vec<PathBuf>, bytes_max: u64) -> Vec<io::Result<Vec<u8>>> {
    let deadline = Instant::now() + READ_TIMEOUT;
    let started: Vec<io::Result<mpsc::Receiver<_>>> =
        paths.into_iter().map(|path| start_read(path, bytes_max)).collect();
    let finish = |outcome: mpsc::Receiver<io::Result<Vec<u8>>>| {
        let left = deadline.saturating_duration_since(Instant::now());
        outcome.recv_timeout(left).unwrap_or_else(|_| Err(no_answer()))
    };
    started.into_iter().map(|outcome| outcome.and_then(finish)).collect()
}

fn no_answer() -> io::Error {
    let text = format!("no answer within {READ_TIMEOUT:?}: a pipe, or a mount whose server is gone");
    io::Error::new(io::ErrorKind::TimedOut, text)
}

fn start_read(path: PathBuf, bytes_max: u64) -> io::Result<mpsc::Receiver<io::Result<Vec<u8>>>> {
    let (sender, outcome) = mpsc::channel();
    let read = move || {
        let mut bytes = Vec::new();
        File::open(path)?.take(bytes_max).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    std::thread::Builder::new().name("read".to_owned()).spawn(move || {
        // After the timeout the outcome has no receiver.
        let _ = sender.send(read());
    })?;
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_do_not_answer_cost_one_timeout_together_and_the_others_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = |name: &str| {
            let path = folder.path().join(name);
            let made = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
            assert!(made.success());
            path
        };
        let (file, missing) = (folder.path().join("file"), folder.path().join("missing"));
        std::fs::write(&file, "text").unwrap();
        let began = Instant::now();
        let paths = vec![pipe("a"), file, pipe("b"), missing, pipe("c"), pipe("d")];
        let found: Vec<_> = read_files(paths, 3).into_iter().map(|read| read.map_err(|e| e.kind())).collect();
        let silent = || Err(io::ErrorKind::TimedOut);
        let expected =
            [silent(), Ok(b"tex".to_vec()), silent(), Err(io::ErrorKind::NotFound), silent(), silent()];
        assert_eq!(found, expected);
        assert!(began.elapsed() < 3 * READ_TIMEOUT, "{:?}", began.elapsed());
    }
}
