// SPDX-License-Identifier: Apache-2.0

//! Streams the continuation of a prompt.
//!
//! Start a fleet, then run the client with the prompt of your choice:
//!
//! ```text
//! cargo run --release -- serve demo/pycoder-7m-q8_0.gguf
//! cargo run --release -p ballast-client --example stream -- "def fibonacci(n):"
//! ```
//!
//! A second argument selects another server; the default is http://127.0.0.1:8080. The environment
//! variable BALLAST_API_KEY may hold an API key, BALLAST_ROOTS the file of the roots for an https
//! URL.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "an example prints its result")]

use std::error::Error;
use std::io::Write;
use std::time::Duration;

use ballast_client::{BallastClient, ClientTls, GenerateEvent, GenerateRequest};
use futures::TryStreamExt;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let prompt = arguments.next().unwrap_or_else(|| "def fibonacci(n):\n".to_owned());
    let server = arguments.next().unwrap_or_else(|| "http://127.0.0.1:8080".to_owned());

    let mut builder = BallastClient::builder(server);
    if let Ok(key) = std::env::var("BALLAST_API_KEY") {
        builder = builder.api_key(key);
    }
    if let Some(roots) = std::env::var_os("BALLAST_ROOTS") {
        builder = builder.tls(ClientTls::with_roots(std::fs::read(roots)?));
    }
    let client = builder.connect().await?;
    let request = GenerateRequest::text(prompt)
        .max_tokens(64)
        .temperature(0.8)
        .seed(7)
        .deadline(Duration::from_secs(60));
    let mut events = client.generate(request).await?;
    while let Some(event) = events.try_next().await? {
        match event {
            GenerateEvent::Started(started) => {
                eprintln!("[{}, {} prompt tokens]", started.model, started.prompt_tokens.len());
            }
            GenerateEvent::Delta(delta) => {
                print!("{}", delta.text);
                std::io::stdout().flush()?;
            }
            GenerateEvent::Finished(finished) => {
                let tokens = finished.usage.as_ref().map_or(0, |usage| usage.completion_tokens);
                eprintln!("\n[{tokens} tokens, {:?}]", finished.reason());
            }
        }
    }
    Ok(())
}
