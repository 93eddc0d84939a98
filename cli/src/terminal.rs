// SPDX-License-Identifier: Apache-2.0

//! The output of commands: the only place that writes to standard output, and what a command has to
//! say on standard error. Errors are checked. Logs and error lines go through `service::logging`.

use std::borrow::Cow;
use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use service::Exit;
use service::printable::printable_lines;

use crate::cli_error::{CliError, CliResult, IoContext};

/// Whether anything was written to standard output.
static IS_STDOUT_USED: AtomicBool = AtomicBool::new(false);

pub(crate) fn is_stdout_used() -> bool {
    IS_STDOUT_USED.load(Ordering::Relaxed)
}

/// Writes to standard output and flushes, so that another program sees the text at once. On a
/// terminal, control characters are escaped: the text may come from a model or a file. Elsewhere
/// the text stays as it is.
pub(crate) fn print_stdout(text: &str) -> CliResult {
    IS_STDOUT_USED.store(true, Ordering::Relaxed);
    print_to(io::stdout().lock(), text)
}

/// The same, for output to be read beside a result on standard output.
pub(crate) fn print_stderr(text: &str) -> CliResult {
    print_to(io::stderr().lock(), text)
}

/// The same as [`print_stdout`], for a command that must react while its output is not read. If
/// the future is dropped, the text may still be written.
pub(crate) async fn stream_stdout(text: impl Into<String>) -> CliResult {
    let text = text.into();
    match tokio::task::spawn_blocking(move || print_stdout(&text)).await {
        Ok(printed) => printed,
        Err(error) => Err(CliError::new(Exit::Internal, error.to_string())),
    }
}

/// The same for text with the escape sequences of its styles: what it quotes was escaped before.
pub(crate) async fn stream_styled(text: String) -> CliResult {
    match tokio::task::spawn_blocking(move || print_styled(&text)).await {
        Ok(printed) => printed,
        Err(error) => Err(CliError::new(Exit::Internal, error.to_string())),
    }
}

pub(crate) fn print_styled(text: &str) -> CliResult {
    IS_STDOUT_USED.store(true, Ordering::Relaxed);
    let mut out = io::stdout().lock();
    checked(out.write_all(text.as_bytes()).and_then(|()| out.flush()))
}

/// Prints a message of the argument parser: help and version as output, errors as errors.
pub(crate) fn print_usage(message: &clap::Error) -> CliResult {
    let is_error = message.use_stderr();
    match message.print() {
        // clap has printed the whole of it.
        _ if is_error => Err(CliError::new(Exit::Usage, sentence(message)).printed()),
        printed => checked(printed),
    }
}

/// The sentence of an error of the argument parser, without usage and advice.
fn sentence(message: &clap::Error) -> String {
    let text = message.to_string();
    let lines: Vec<&str> = text.lines().map(str::trim).take_while(|line| !line.is_empty()).collect();
    let sentence = lines.join(" ");
    sentence.strip_prefix("error: ").unwrap_or(&sentence).to_owned()
}

fn print_to(mut out: impl Write + IsTerminal, text: &str) -> CliResult {
    let text = match out.is_terminal() {
        true => printable_lines(text).into(),
        false => Cow::Borrowed(text),
    };
    checked(out.write_all(text.as_bytes()).and_then(|()| out.flush()))
}

fn checked(written: io::Result<()>) -> CliResult {
    match written {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(CliError::new(Exit::OutputClosed, "")),
        written => written.with_context(|| "cannot write the output".to_owned()),
    }
}
