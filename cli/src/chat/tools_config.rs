// SPDX-License-Identifier: Apache-2.0

//! The file of `--tools`: commands that offer tools.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Deserializer};
use service::{ByteSize, Exit};

use crate::bounded_read::read_files;
use crate::cli_error::{CliError, CliResult, IoContext};

const FILE_BYTES_MAX: u64 = 1 << 20;
/// How long a server may take for an answer.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);
/// Bytes of a tool's result that the model gets: some 16,000 tokens.
const DEFAULT_OUTPUT_MAX: ByteSize = ByteSize(64 << 10);

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ToolsFile {
    servers: Vec<ToolServerConfig>,
}

/// A command that speaks the Model Context Protocol.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct ToolServerConfig {
    pub(super) name: String,
    /// The program and its arguments.
    pub(super) command: Vec<String>,
    #[serde(default)]
    pub(super) env: BTreeMap<String, String>,
    #[serde(default = "default_timeout", deserialize_with = "duration")]
    pub(super) timeout: Duration,
    #[serde(default = "default_output_max")]
    pub(super) output_max: ByteSize,
}

fn default_timeout() -> Duration {
    DEFAULT_TIMEOUT
}

fn default_output_max() -> ByteSize {
    DEFAULT_OUTPUT_MAX
}

fn duration<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    service::duration::parse(&String::deserialize(deserializer)?).map_err(serde::de::Error::custom)
}

pub(super) fn read(file: &Path) -> CliResult<Vec<ToolServerConfig>> {
    let what = || format!("cannot read the tools of {}", file.display());
    let read = read_files(vec![file.to_owned()], FILE_BYTES_MAX).pop();
    let bytes = read.unwrap_or_else(|| Err(std::io::ErrorKind::NotFound.into())).with_context(what)?;
    let usage = |text: String| CliError::new(Exit::Usage, format!("{}: {text}", file.display()));
    let text = String::from_utf8(bytes).map_err(|_| usage("not UTF-8".to_owned()))?;
    parse(&text).map_err(usage)
}

fn parse(text: &str) -> Result<Vec<ToolServerConfig>, String> {
    let ToolsFile { servers } = toml::from_str(text).map_err(|error| error.to_string())?;
    let mut names = BTreeSet::new();
    for server in &servers {
        if !names.insert(server.name.as_str()) {
            return Err(format!("two servers are called {:?}", server.name));
        }
        if server.command.is_empty() {
            return Err(format!("the command of server {:?} is empty", server.name));
        }
    }
    Ok(servers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_have_bounds_and_errors_name_the_field() {
        let servers = parse(
            "[[servers]]\nname = \"a\"\ncommand = [\"x\", \"y\"]\ntimeout = \"2s\"\noutput-max = \"1KiB\"\n\
             env = { K = \"v\" }\n[[servers]]\nname = \"b\"\ncommand = [\"z\"]\n",
        )
        .unwrap();
        assert_eq!((servers[0].timeout, servers[0].output_max), (Duration::from_secs(2), ByteSize(1024)));
        assert_eq!((servers[1].timeout, servers[1].output_max), (DEFAULT_TIMEOUT, DEFAULT_OUTPUT_MAX));
        for (text, says) in [
            ("[[servers]]\nname = \"a\"\ncommand = []\n", "\"a\" is empty"),
            ("[[servers]]\nname = \"a\"\ncommand = [\"x\"]\ntime = 1\n", "time"),
            ("[[servers]]\nname = \"a\"\ncommand = [\"x\"]\ntimeout = \"2\"\n", "timeout"),
            ("servers = []\nserver = 1", "server"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
        let twice = "[[servers]]\nname = \"a\"\ncommand = [\"x\"]\n".repeat(2);
        assert!(parse(&twice).unwrap_err().contains("two servers"));
    }
}
