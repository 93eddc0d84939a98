// SPDX-License-Identifier: Apache-2.0

//! A gRPC client in Rust: streams the continuation of a prompt.
//!
//! Start a fleet, then run the client with the prompt of your choice:
//!
//! ```text
//! cargo run --release -- serve demo/pycoder-7m-q8_0.gguf
//! cargo run --release -p ballast --example grpc_client -- "def fibonacci(n):"
//! ```
//!
//! A second argument selects another server; the default is http://127.0.0.1:8080.

#![expect(clippy::print_stdout, reason = "an example prints its result")]

use std::error::Error;
use std::io::Write;

use proto::v1::generate_frame::Frame;
use proto::v1::generate_request::Prompt;
use proto::v1::inference_client::InferenceClient;
use proto::v1::{GenerateRequest, Sampling};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let prompt = arguments.next().unwrap_or_else(|| "def fibonacci(n):\n".to_owned());
    let server = arguments.next().unwrap_or_else(|| "http://127.0.0.1:8080".to_owned());

    let mut client = InferenceClient::connect(server).await?;
    let request = GenerateRequest {
        prompt: Some(Prompt::Text(prompt)),
        max_tokens: 64,
        sampling: Some(Sampling { temperature: Some(0.0), ..Sampling::default() }),
        ..GenerateRequest::default()
    };
    let mut frames = client.generate(request).await?.into_inner();
    while let Some(frame) = frames.message().await? {
        match frame.frame {
            Some(Frame::Started(started)) => {
                println!("[{}, {} prompt tokens]", started.model, started.prompt_tokens.len());
            }
            Some(Frame::Delta(delta)) => {
                print!("{}", delta.text);
                std::io::stdout().flush()?;
            }
            Some(Frame::Finished(finished)) => {
                let tokens = finished.usage.as_ref().map_or(0, |usage| usage.completion_tokens);
                println!("\n[{tokens} tokens, {:?}]", finished.reason());
            }
            None => {}
        }
    }
    Ok(())
}
