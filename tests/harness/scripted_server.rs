// SPDX-License-Identifier: Apache-2.0

//! A server with OpenAI's completions whose answers a test scripts, faults included.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::json;

/// What the server does with one request.
pub(crate) enum Reply {
    /// Events, then the end of the stream.
    Stream(Vec<String>),
    /// Events, then silence, then the end of the stream.
    Stall { after: Vec<String>, pause: Duration },
    /// A status with a body.
    Error(u16, String),
}

impl Reply {
    pub(crate) fn stream(events: impl IntoIterator<Item = String>) -> Reply {
        Reply::Stream(events.into_iter().collect())
    }
}

/// The data of an event with one text.
pub(crate) fn chunk(text: &str) -> String {
    json!({"choices": [{"index": 0, "text": text, "finish_reason": null}], "usage": null}).to_string()
}

/// The data of an event with one text of a chat.
pub(crate) fn chat_chunk(text: &str) -> String {
    let choice = json!({"index": 0, "delta": {"content": text}, "finish_reason": null});
    json!({"choices": [choice]}).to_string()
}

/// The data of the events that end a chat.
pub(crate) fn chat_end() -> [String; 2] {
    let choice = json!({"index": 0, "delta": {}, "finish_reason": "stop"});
    [json!({"choices": [choice]}).to_string(), "[DONE]".to_owned()]
}

/// The data of the event with the counts of tokens.
pub(crate) fn usage(completion_tokens: u64) -> String {
    json!({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": completion_tokens}}).to_string()
}

type AnswerScript = dyn Fn(usize, &str) -> Reply + Send + Sync;

pub(crate) struct ScriptedServer {
    address: SocketAddr,
    is_over: Arc<AtomicBool>,
}

impl ScriptedServer {
    /// Requests before those of the run: `bench serve` counts the tokens of two prompts first.
    pub(crate) const FIRST_MEASURED: usize = 2;

    /// The script gets the number of a completion, from 0, and the whole request.
    pub(crate) fn start(script: impl Fn(usize, &str) -> Reply + Send + Sync + 'static) -> ScriptedServer {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (script, is_over): (Arc<AnswerScript>, _) = (Arc::new(script), Arc::new(AtomicBool::new(false)));
        let (number, over) = (Arc::new(AtomicUsize::new(0)), Arc::clone(&is_over));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if over.load(Ordering::Relaxed) {
                    return;
                }
                let (script, number) = (Arc::clone(&script), Arc::clone(&number));
                // A client may leave at any byte.
                std::thread::spawn(move || stream.and_then(|stream| serve(stream, &*script, &number)));
            }
        });
        ScriptedServer { address, is_over }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }
}

impl Drop for ScriptedServer {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        // Wakes the thread that accepts.
        let _woken = TcpStream::connect(self.address);
    }
}

/// Answers the requests of one connection.
fn serve(stream: TcpStream, script: &AnswerScript, number: &AtomicUsize) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut writer = stream;
    while let Some(request) = read_request(&mut reader)? {
        if request.starts_with("GET /v1/models") {
            let body = json!({"object": "list", "data": [{"id": "scripted", "object": "model"}]}).to_string();
            write_document(&mut writer, 200, &body)?;
            continue;
        }
        match script(number.fetch_add(1, Ordering::SeqCst), &request) {
            Reply::Error(status, body) => write_document(&mut writer, status, &body)?,
            Reply::Stream(events) => write_events(&mut writer, &events, Duration::ZERO)?,
            Reply::Stall { after, pause } => write_events(&mut writer, &after, pause)?,
        }
    }
    Ok(())
}

/// Head and body as one text, with names of headers in lower case as hyper sends them. `None` at
/// the end of the connection.
fn read_request(reader: &mut impl BufRead) -> std::io::Result<Option<String>> {
    let mut request = String::new();
    let mut body_bytes = 0;
    loop {
        let begin = request.len();
        if reader.read_line(&mut request)? == 0 {
            return Ok(None);
        }
        let line = request[begin..].trim_end();
        if let Some(length) = line.strip_prefix("content-length: ") {
            body_bytes = length.parse().unwrap();
        }
        if line.is_empty() {
            break;
        }
    }
    let mut body = vec![0; body_bytes];
    reader.read_exact(&mut body)?;
    Ok(Some(request + &String::from_utf8(body).unwrap()))
}

fn write_document(writer: &mut impl Write, status: u16, body: &str) -> std::io::Result<()> {
    write!(writer, "HTTP/1.1 {status} X\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

fn write_events(writer: &mut impl Write, events: &[String], pause: Duration) -> std::io::Result<()> {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    writer.write_all(head.as_bytes())?;
    for event in events {
        let event = format!("data: {event}\n\n");
        write!(writer, "{:x}\r\n{event}\r\n", event.len())?;
        writer.flush()?;
    }
    std::thread::sleep(pause);
    writer.write_all(b"0\r\n\r\n")
}
