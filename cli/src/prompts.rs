// SPDX-License-Identifier: Apache-2.0

//! Reads prompts from a file, one JSON string per line.

use std::path::Path;

use service::Exit;

use crate::cli_error::{CliError, CliResult, IoContext};

/// Most bytes of a prompts file, because it is read whole.
const FILE_BYTES_MAX: u64 = 256 << 20;

pub(crate) fn read(path: &Path) -> CliResult<Vec<String>> {
    let usage = |text: String| CliError::new(Exit::Usage, format!("prompts file {}: {text}", path.display()));
    let bytes = std::fs::metadata(path).map_err(|error| usage(error.to_string()))?.len();
    if bytes > FILE_BYTES_MAX {
        return Err(usage(format!("{bytes} bytes are more than {FILE_BYTES_MAX}; split it")));
    }
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("cannot read prompts file {}", path.display()))?;
    parse(&text).map_err(usage)
}

fn parse(text: &str) -> Result<Vec<String>, String> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines
        .map(|(index, line)| {
            serde_json::from_str(line).map_err(|error| {
                format!(
                    "line {} is not a JSON string ({error}); write each prompt as \"...\" on its own line",
                    index + 1
                )
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_is_a_json_string() {
        assert_eq!(parse("\"a\\nb\"\n\n\"\"\n").unwrap(), ["a\nb", ""]);
        let error = parse("\"a\"\nplain\n").unwrap_err();
        assert!(error.starts_with("line 2 is not a JSON string"), "{error}");
    }
}
