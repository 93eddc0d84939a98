// SPDX-License-Identifier: Apache-2.0

//! [`McpServer`]: a command that offers tools by the Model Context Protocol over its standard input
//! and output: JSON-RPC, one message a line.
//!
//! The command is not trusted to behave: lines, messages before an answer, and waits are bounded.
//! Any violation ends it.

use std::collections::BTreeMap;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command};
use tokio::time::{Instant, timeout, timeout_at};

/// The version that is asked for. A server may answer with another one; tools are the same in all.
const PROTOCOL_VERSION: &str = "2025-06-18";
/// The result of a tool with an image, say, which is skipped.
const LINE_BYTES_MAX: usize = 4 << 20;
/// Notifications and requests of the server before its answer.
const MESSAGES_MAX: usize = 10_000;
/// Pages of the list of tools.
const PAGES_MAX: usize = 16;
/// What is kept of standard error, for the message about a death.
const STDERR_BYTES_MAX: usize = 1 << 10;
/// How long a server may take to end by itself.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);
/// JSON-RPC's "method not found".
const METHOD_NOT_FOUND: i64 = -32601;

/// Why a server gave no result.
#[derive(Debug, thiserror::Error)]
pub(super) enum McpError {
    #[error("cannot be started: {0}")]
    Start(#[source] std::io::Error),
    #[error("ended ({status}){said}")]
    Died { status: String, said: String },
    #[error("has not answered {method} within {} s", after.as_secs_f64())]
    Silent { method: String, after: Duration },
    #[error("sends a line of more than {LINE_BYTES_MAX} bytes")]
    LineTooLong,
    #[error("sends more than {MESSAGES_MAX} messages instead of an answer")]
    Flood,
    #[error("sends a line that is no JSON-RPC message: {0}")]
    Malformed(String),
    /// The server goes on after this one.
    #[error("answers {method} with an error: {text}")]
    Refused { method: String, text: String },
}

impl McpError {
    pub(super) fn is_fatal(&self) -> bool {
        !matches!(self, Self::Refused { .. })
    }
}

/// A tool as `tools/list` describes it.
#[derive(Clone, Debug)]
pub(super) struct McpTool {
    pub(super) name: String,
    pub(super) description: String,
    pub(super) input_schema: Value,
}

pub(super) struct McpServer {
    child: Child,
    /// Absent once it is closed.
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
    stderr: Arc<Mutex<Vec<u8>>>,
    /// What is not written yet. A cancelled call leaves whole messages here.
    outgoing: Vec<u8>,
    /// The beginning of a line.
    line: Vec<u8>,
    last_id: u64,
    /// A request whose caller has gone.
    unanswered: Option<u64>,
    timeout: Duration,
}

impl McpServer {
    /// Starts the command and agrees on the protocol.
    pub(super) async fn start(
        command: &[String],
        environment: &BTreeMap<String, String>,
        timeout: Duration,
    ) -> Result<Self, McpError> {
        let empty = || McpError::Start(std::io::Error::other("the command is empty"));
        let (program, arguments) = command.split_first().ok_or_else(empty)?;
        let mut child = Command::new(program)
            .args(arguments)
            .env_remove(super::KEY_VARIABLE)
            .envs(environment)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Ctrl-C on the terminal is for the chat.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(McpError::Start)?;
        let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(stdin), Some(stdout), Some(stderr)) = (stdin, stdout, stderr) else {
            return Err(McpError::Start(std::io::Error::other("no pipes")));
        };
        let mut server = Self {
            child,
            stdin: Some(stdin),
            stdout: BufReader::new(stdout),
            stderr: keep_end(stderr),
            outgoing: Vec::new(),
            line: Vec::new(),
            last_id: 0,
            unanswered: None,
            timeout,
        };
        let client = json!({"name": "ballast", "version": env!("CARGO_PKG_VERSION")});
        let parameters =
            json!({"protocolVersion": PROTOCOL_VERSION, "capabilities": {}, "clientInfo": client});
        server.request("initialize", parameters).await?;
        server.enqueue(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"}));
        Ok(server)
    }

    pub(super) async fn tools(&mut self) -> Result<Vec<McpTool>, McpError> {
        let (mut tools, mut cursor) = (Vec::new(), Value::Null);
        for _ in 0..PAGES_MAX {
            let parameters = if cursor.is_null() { json!({}) } else { json!({"cursor": cursor}) };
            let page = self.request("tools/list", parameters).await?;
            let listed = page["tools"].as_array().into_iter().flatten();
            tools.extend(listed.filter_map(|tool| {
                let description = tool["description"].as_str().unwrap_or_default().to_owned();
                let name = tool["name"].as_str()?.to_owned();
                Some(McpTool { name, description, input_schema: tool["inputSchema"].clone() })
            }));
            cursor = page["nextCursor"].clone();
            if cursor.is_null() {
                break;
            }
        }
        Ok(tools)
    }

    /// Calls a tool, and returns the text of its result.
    pub(super) async fn call(&mut self, name: &str, arguments: Value) -> Result<String, McpError> {
        let result = self.request("tools/call", json!({"name": name, "arguments": arguments})).await?;
        let contents = result["content"].as_array().into_iter().flatten();
        let parts: Vec<String> = contents
            .map(|content| match content["text"].as_str() {
                Some(text) => text.to_owned(),
                None => format!("({}, which this chat cannot show)", content["type"].as_str().unwrap_or("?")),
            })
            .collect();
        let text = parts.join("\n");
        match result["isError"].as_bool() {
            Some(true) => Ok(format!("error: {text}")),
            _ if text.is_empty() && !result["structuredContent"].is_null() => {
                Ok(result["structuredContent"].to_string())
            }
            _ => Ok(text),
        }
    }

    /// Closes the server's input, which asks it to end, and ends it if it does not.
    pub(super) async fn close(mut self) {
        self.stdin = None;
        if timeout(CLOSE_TIMEOUT, self.child.wait()).await.is_err() {
            self.kill();
            // A process that is stuck in the kernel is left behind.
            let _ = timeout(CLOSE_TIMEOUT, self.child.wait()).await;
        }
    }

    /// Kills it with its children. After the end of the child, its process id may be that of
    /// another process.
    fn kill(&self) {
        let running = self.child.id().and_then(|pid| Pid::from_raw(pid.cast_signed()));
        if let Some(group) = running {
            // It may have ended by itself.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }

    fn enqueue(&mut self, message: &Value) {
        self.outgoing.extend_from_slice(message.to_string().as_bytes());
        self.outgoing.push(b'\n');
    }

    async fn request(&mut self, method: &str, parameters: Value) -> Result<Value, McpError> {
        if let Some(id) = self.unanswered.take() {
            let cancelled = json!({"requestId": id, "reason": "the user interrupted it"});
            let method = "notifications/cancelled";
            self.enqueue(&json!({"jsonrpc": "2.0", "method": method, "params": cancelled}));
        }
        self.last_id += 1;
        let id = self.last_id;
        self.unanswered = Some(id);
        self.enqueue(&json!({"jsonrpc": "2.0", "id": id, "method": method, "params": parameters}));
        let after = self.timeout;
        let answer = timeout_at(Instant::now() + after, self.answer(id)).await;
        let answer = answer.map_err(|_| McpError::Silent { method: method.to_owned(), after })??;
        self.unanswered = None;
        match answer.get("error") {
            None => Ok(answer["result"].clone()),
            Some(error) => {
                let text = error["message"].as_str().unwrap_or("without a message").to_owned();
                Err(McpError::Refused { method: method.to_owned(), text })
            }
        }
    }

    /// Writes what waits, and reads messages until the answer to this request.
    async fn answer(&mut self, id: u64) -> Result<Value, McpError> {
        for _ in 0..MESSAGES_MAX {
            self.flush().await?;
            let line = self.read_line().await?;
            if line.trim_ascii().is_empty() {
                continue;
            }
            let excerpt = || service::printable::excerpt(&String::from_utf8_lossy(&line), 80);
            let message: Value = serde_json::from_slice(&line).map_err(|_| McpError::Malformed(excerpt()))?;
            let is_request = message.get("method").is_some() && message.get("id").is_some();
            if is_request {
                self.enqueue(&reply(&message));
            } else if message["id"] == id {
                return Ok(message);
            }
        }
        Err(McpError::Flood)
    }

    async fn flush(&mut self) -> Result<(), McpError> {
        while !self.outgoing.is_empty() {
            let written = match &mut self.stdin {
                Some(stdin) => stdin.write(&self.outgoing).await,
                None => Ok(0),
            };
            match written {
                Ok(bytes @ 1..) => drop(self.outgoing.drain(..bytes)),
                Ok(0) | Err(_) => return Err(self.death().await),
            }
        }
        Ok(())
    }

    /// May be cancelled: the beginning of a line is kept.
    async fn read_line(&mut self) -> Result<Vec<u8>, McpError> {
        loop {
            let read = match self.stdout.fill_buf().await {
                Ok(read) if !read.is_empty() => read,
                _ => return Err(self.death().await),
            };
            let end = read.iter().position(|byte| *byte == b'\n');
            let bytes = end.map_or(read.len(), |end| end + 1);
            self.line.extend_from_slice(&read[..bytes]);
            self.stdout.consume(bytes);
            if self.line.len() > LINE_BYTES_MAX {
                return Err(McpError::LineTooLong);
            }
            if end.is_some() {
                return Ok(std::mem::take(&mut self.line));
            }
        }
    }

    /// The server has closed a pipe. One that has not ended is ended.
    async fn death(&mut self) -> McpError {
        self.stdin = None;
        let status = match timeout(CLOSE_TIMEOUT, self.child.wait()).await {
            Ok(Ok(status)) => status.to_string(),
            _ => "it closed its output".to_owned(),
        };
        let end = self.stderr.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let end = String::from_utf8_lossy(&end);
        let last_line = end.trim_end().lines().next_back().unwrap_or_default();
        let said = match last_line {
            "" => String::new(),
            line => format!(": {}", service::printable::excerpt(line, 200)),
        };
        McpError::Died { status, said }
    }
}

impl Drop for McpServer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The answer to a request of the server. This client offers nothing but to be there.
fn reply(request: &Value) -> Value {
    let id = &request["id"];
    match request["method"].as_str() {
        Some("ping") => json!({"jsonrpc": "2.0", "id": id, "result": {}}),
        _ => {
            let error = json!({"code": METHOD_NOT_FOUND, "message": "this client has no such method"});
            json!({"jsonrpc": "2.0", "id": id, "error": error})
        }
    }
}

/// Reads standard error, so that the server is never stopped by a full pipe, and keeps its end.
fn keep_end(mut stderr: ChildStderr) -> Arc<Mutex<Vec<u8>>> {
    let end = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&end);
    tokio::spawn(async move {
        let mut buffer = vec![0; STDERR_BYTES_MAX];
        while let Ok(bytes @ 1..) = stderr.read(&mut buffer).await {
            let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
            kept.extend_from_slice(&buffer[..bytes]);
            let excess = kept.len().saturating_sub(STDERR_BYTES_MAX);
            kept.drain(..excess);
        }
    });
    end
}
