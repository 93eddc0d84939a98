// SPDX-License-Identifier: Apache-2.0

//! Writes to standard output.

use std::borrow::Cow;
use std::io::{IsTerminal, Write};

use service::Exit;
use service::printable::printable_lines;

use crate::cli_error::{CliError, CliResult, IoContext};

/// Writes to standard output and flushes, so that streamed text is visible at once. On a terminal,
/// control characters are escaped: the text may come from a model or a file. Elsewhere the text
/// stays as it is.
pub(crate) fn print_stdout(text: &str) -> CliResult {
    let mut out = std::io::stdout().lock();
    let text = match out.is_terminal() {
        true => printable_lines(text).into(),
        false => Cow::Borrowed(text),
    };
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        // The reader closed the pipe, as `head` does. That is no error.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Err(CliError::new(Exit::Ok, "")),
        written => written.with_context(|| "cannot write".to_owned()),
    }
}
