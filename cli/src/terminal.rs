//! Writes to standard output.

use std::io::Write;

use service::Exit;

use crate::cli_error::{CliError, CliResult, IoContext};

/// Writes to standard output at once: text is to be seen as it comes.
pub(crate) fn print_stdout(text: &str) -> CliResult {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        // Whoever was reading has seen enough.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Err(CliError::new(Exit::Ok, "")),
        written => written.with_context(|| "cannot write".to_owned()),
    }
}
