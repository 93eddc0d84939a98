// SPDX-License-Identifier: Apache-2.0

//! Writes to standard output.

use std::io::Write;

use service::Exit;

use crate::cli_error::{CliError, CliResult, IoContext};

/// Writes to standard output and flushes, so that streamed text is visible at once.
pub(crate) fn print_stdout(text: &str) -> CliResult {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        // The reader closed the pipe, as `head` does. That is no error.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Err(CliError::new(Exit::Ok, "")),
        written => written.with_context(|| "cannot write".to_owned()),
    }
}
