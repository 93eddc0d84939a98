// SPDX-License-Identifier: Apache-2.0

//! [`Toolbox`]: the tools of a chat, with the servers that offer them. A server that fails leaves
//! the chat, with its tools; the model reads why.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Value, json};
use service::ByteSize;
use service::printable::printable;

use super::conversation::ToolCall;
use super::mcp_server::{McpError, McpServer, McpTool};
use super::tools_config::{self, ToolServerConfig};
use crate::cli_error::CliResult;

/// Tools that a request may have.
const TOOLS_MAX: usize = 128;

enum ServerState {
    Running(Box<McpServer>),
    Failed(McpError),
}

struct ToolServer {
    name: String,
    output_max: ByteSize,
    state: ServerState,
}

struct Tool {
    server: usize,
    offered: McpTool,
}

#[derive(Default)]
pub(crate) struct Toolbox {
    servers: Vec<ToolServer>,
    tools: Vec<Tool>,
    /// Names of tools that need no question.
    allowed: BTreeSet<String>,
}

impl Toolbox {
    /// Starts the servers of a file. Returns what is wrong with some of them beside the tools.
    pub(crate) async fn start(file: &Path, allowed: &[String]) -> CliResult<(Self, Vec<String>)> {
        let configs = tools_config::read(file)?;
        let mut toolbox = Self { allowed: allowed.iter().cloned().collect(), ..Self::default() };
        let mut faults = Vec::new();
        for config in configs {
            toolbox.add_server(config, &mut faults).await;
        }
        let is_there = |name: &&String| toolbox.tools.iter().any(|tool| tool.offered.name == **name);
        if let Some(unknown) = allowed.iter().find(|name| !is_there(name)) {
            let names = toolbox.names().join(", ");
            faults.push(format!("--allow-tools {unknown}: no tool has this name; there are {names}"));
        }
        Ok((toolbox, faults))
    }

    async fn add_server(&mut self, config: ToolServerConfig, faults: &mut Vec<String>) {
        let started = async {
            let mut server = McpServer::start(&config.command, &config.env, config.timeout).await?;
            let tools = server.tools().await?;
            Ok((server, tools))
        };
        let index = self.servers.len();
        let name = config.name;
        let state = match started.await {
            Ok((server, tools)) => {
                for offered in tools {
                    let is_taken = self.tools.iter().any(|tool| tool.offered.name == offered.name);
                    if is_taken || self.tools.len() >= TOOLS_MAX {
                        let why = if is_taken { "another server has it" } else { "there are 128 already" };
                        faults.push(format!("tool {} of server {name} is left out: {why}", offered.name));
                        continue;
                    }
                    self.tools.push(Tool { server: index, offered });
                }
                ServerState::Running(Box::new(server))
            }
            Err(error) => {
                faults.push(format!("tool server {name} {error}"));
                ServerState::Failed(error)
            }
        };
        self.servers.push(ToolServer { name, output_max: config.output_max, state });
    }

    fn is_running(&self, tool: &Tool) -> bool {
        matches!(self.servers[tool.server].state, ServerState::Running(_))
    }

    fn names(&self) -> Vec<&str> {
        let running = self.tools.iter().filter(|tool| self.is_running(tool));
        running.map(|tool| tool.offered.name.as_str()).collect()
    }

    /// The tools as a request has them.
    pub(crate) fn definitions(&self) -> Vec<Value> {
        let running = self.tools.iter().filter(|tool| self.is_running(tool));
        let definition = |tool: &Tool| {
            let McpTool { name, description, input_schema } = &tool.offered;
            let function = json!({"name": name, "description": description, "parameters": input_schema});
            json!({"type": "function", "function": function})
        };
        running.map(definition).collect()
    }

    /// Whether the user is to be asked before this call.
    pub(crate) fn asks_before(&self, call: &ToolCall) -> bool {
        self.names().contains(&call.function.name.as_str()) && !self.allowed.contains(&call.function.name)
    }

    pub(crate) fn allow(&mut self, name: &str) {
        self.allowed.insert(name.to_owned());
    }

    /// Executes a call. Returns the text for the model, which also says what went wrong.
    pub(crate) async fn call(&mut self, call: &ToolCall) -> String {
        let name = call.function.name.as_str();
        let found = self.tools.iter().find(|tool| tool.offered.name == name).map(|tool| tool.server);
        let Some(server) = found.and_then(|index| self.servers.get_mut(index)) else {
            return format!("error: no tool is called {name:?}; there are {}", self.names().join(", "));
        };
        let text = if call.function.arguments.trim().is_empty() { "{}" } else { &call.function.arguments };
        let arguments = match serde_json::from_str::<Value>(text) {
            Ok(arguments @ Value::Object(_)) => arguments,
            _ => return "error: the arguments are no JSON object".to_owned(),
        };
        let result = match &mut server.state {
            ServerState::Running(running) => running.call(name, arguments).await,
            ServerState::Failed(error) => return format!("error: tool server {} {error}", server.name),
        };
        match result {
            Ok(text) => shortened(text, server.output_max),
            Err(error) => {
                let text = format!("error: tool server {} {error}", server.name);
                if error.is_fatal() {
                    // Dropping the server ends it.
                    server.state = ServerState::Failed(error);
                }
                text
            }
        }
    }

    /// Asks all servers to end, and ends those that do not.
    pub(crate) async fn close(self) {
        for server in self.servers {
            if let ServerState::Running(running) = server.state {
                running.close().await;
            }
        }
    }
}

impl std::fmt::Display for Toolbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.servers.is_empty() {
            return writeln!(f, "no tools; --tools FILE.toml names commands that offer some");
        }
        for (index, server) in self.servers.iter().enumerate() {
            if let ServerState::Failed(error) = &server.state {
                writeln!(f, "{} {error}", server.name)?;
                continue;
            }
            for tool in self.tools.iter().filter(|tool| tool.server == index) {
                let McpTool { name, description, .. } = &tool.offered;
                let asks = if self.allowed.contains(name) { "" } else { " (asked before)" };
                let first_line = description.lines().next().unwrap_or_default();
                writeln!(f, "{}  {}{asks}  {}", server.name, printable(name), printable(first_line))?;
            }
        }
        Ok(())
    }
}

/// The beginning of a result that is too long.
fn shortened(mut text: String, max: ByteSize) -> String {
    let bytes = text.len();
    let max = usize::try_from(max.0).unwrap_or(usize::MAX);
    if bytes > max {
        let end = (0..=max).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
        text.truncate(end);
        text += &format!("\n(the first {max} of {bytes} bytes)");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_result_is_cut_between_characters_and_says_so() {
        assert_eq!(shortened("äöü".to_owned(), ByteSize(6)), "äöü");
        assert_eq!(shortened("äöü".to_owned(), ByteSize(5)), "äö\n(the first 5 of 6 bytes)");
    }
}
