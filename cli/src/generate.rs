// SPDX-License-Identifier: Apache-2.0

//! `ballast generate`: starts a fleet, generates text for prompts, prints a summary, and stops the
//! fleet.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use proto::v1::generate_frame::Frame;
use proto::v1::inference_client::InferenceClient;
use proto::v1::{FinishReason, GenerateRequest, Sampling, generate_request::Prompt};
use service::{Exit, Notify};
use tokio::sync::{Semaphore, mpsc};
use tonic::transport::Channel;
use tracing::Level;

use crate::cli_error::{CliError, CliResult};
use crate::completion::PromptCompletion;
use crate::fleet_arguments::FleetArguments;
use crate::prompts;
use crate::running_fleet::{RunningFleet, block_on};
use crate::sampling_arguments::SharedSamplingArguments;
use crate::summary::{GenerationRun, RunSummary};
use crate::terminal::{print_stderr, stream_stdout};

/// Most prompts in flight. One worker runs 64 and queues 256.
const IN_FLIGHT_MAX: usize = 256;

#[derive(clap::Args)]
pub(crate) struct GenerateArguments {
    /// Model file
    #[arg(value_name = "MODEL.gguf")]
    model: PathBuf,
    /// Prompt
    #[arg(long, value_name = "TEXT", conflicts_with = "prompts", required_unless_present = "prompts")]
    prompt: Option<String>,
    /// File of prompts, one JSON string per line. All run concurrently; the output has their order
    #[arg(long, value_name = "FILE.jsonl")]
    prompts: Option<PathBuf>,
    /// Print one JSON object per prompt
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    sampling: SamplingArguments,
    #[command(flatten)]
    fleet: FleetArguments,
}

#[derive(clap::Args, Clone)]
pub(crate) struct SamplingArguments {
    /// Most tokens to generate for each prompt
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    #[arg(long, value_name = "T", default_value_t = 0.0, help = sampling_params::TEMPERATURE.help())]
    temperature: f32,
    #[command(flatten)]
    shared: SharedSamplingArguments,
    /// Continue after the model's end-of-text token
    #[arg(long)]
    ignore_eos: bool,
}

impl SamplingArguments {
    pub(crate) fn request(&self, prompt: Prompt) -> GenerateRequest {
        GenerateRequest {
            prompt: Some(prompt),
            max_tokens: self.max_tokens,
            sampling: Some(Sampling {
                temperature: Some(self.temperature),
                top_k: self.shared.top_k,
                top_p: self.shared.top_p,
                min_p: self.shared.min_p,
                repetition_penalty: self.shared.repetition_penalty,
                seed: self.shared.seed,
                ..Sampling::default()
            }),
            stop: self.shared.stop.clone(),
            ignore_eos: self.ignore_eos,
            ..GenerateRequest::default()
        }
    }
}

/// An event of one prompt's stream.
enum GenerationEvent {
    Text(String),
    Done(Box<PromptCompletion>),
}

pub(crate) fn run(arguments: GenerateArguments) -> CliResult {
    let texts = match (&arguments.prompts, &arguments.prompt) {
        (Some(file), _) => prompts::read(file)?,
        (None, prompt) => prompt.iter().cloned().collect(),
    };
    service::logging::init("supervisor", Level::ERROR);
    let config = arguments.fleet.clone().config(&arguments.model, None);
    block_on(async {
        let fleet = RunningFleet::start(&config, Notify::disabled(), Level::ERROR).await?;
        let summary = fleet
            .finish(async |fleet| {
                fleet.ready().await?;
                let ready = Instant::now();
                let finished = generate_all(fleet, &texts, &arguments).await?;
                let measured = GenerationRun { elapsed: ready.elapsed(), finished };
                RunSummary::collect(fleet, measured).await
            })
            .await?;
        print_stderr(&summary.to_string())
    })
}

/// Runs all prompts concurrently. Prints the outputs in the order of the prompts, and streams the
/// text of the first unfinished one.
async fn generate_all(
    fleet: &RunningFleet,
    texts: &[String],
    arguments: &GenerateArguments,
) -> CliResult<Vec<PromptCompletion>> {
    let client = fleet.client()?;
    let places = Arc::new(Semaphore::new(IN_FLIGHT_MAX));
    let mut streams = Vec::with_capacity(texts.len());
    for text in texts {
        // This channel is bounded by max_tokens. A channel that blocks the stream would make the
        // router cancel it as a slow client.
        let (sender, receiver) = mpsc::unbounded_channel();
        let request = arguments.sampling.request(Prompt::Text(text.clone()));
        let (client, places) = (client.clone(), places.clone());
        let task = tokio::spawn(async move {
            let _place = places.acquire_owned().await;
            continue_one(client, request, &sender).await
        });
        streams.push((receiver, task));
    }
    let mut finished = Vec::with_capacity(texts.len());
    for (index, (receiver, task)) in streams.into_iter().enumerate() {
        finished.push(match print(index, &texts[index], receiver, arguments).await? {
            Some(done) => done,
            None => return Err(why_it_ended(index, task.await)),
        });
    }
    Ok(finished)
}

/// Prints the output of one prompt. Returns `None` if the stream ended early.
async fn print(
    index: usize,
    prompt: &str,
    mut progress: mpsc::UnboundedReceiver<GenerationEvent>,
    arguments: &GenerateArguments,
) -> CliResult<Option<PromptCompletion>> {
    let several = arguments.prompts.is_some();
    // On a terminal the prompt is shown before its continuation. Programs get the continuation
    // alone.
    if !arguments.json && (several || std::io::stdout().is_terminal()) {
        stream_stdout(prompt).await?;
    }
    while let Some(progress) = progress.recv().await {
        match progress {
            GenerationEvent::Text(text) if !arguments.json => stream_stdout(text).await?,
            GenerationEvent::Text(_) => {}
            GenerationEvent::Done(done) => {
                match arguments.json {
                    true => stream_stdout(format!("{}\n", done.to_json(index))).await?,
                    false => stream_stdout(if several { "\n\n" } else { "\n" }).await?,
                }
                return Ok(Some(*done));
            }
        }
    }
    Ok(None)
}

fn why_it_ended(index: usize, task: Result<CliResult, tokio::task::JoinError>) -> CliError {
    match task {
        Ok(Err(failure)) => {
            CliError::new(failure.exit, format!("prompt {}: {}", index + 1, failure.message()))
        }
        Ok(Ok(())) => CliError::new(
            Exit::PeerLost,
            format!("prompt {}: the stream ended without a final frame", index + 1),
        ),
        Err(error) => CliError::new(Exit::Internal, format!("prompt {}: {error}", index + 1)),
    }
}

/// Runs one prompt to its end and sends its events.
async fn continue_one(
    mut client: InferenceClient<Channel>,
    request: GenerateRequest,
    progress: &mpsc::UnboundedSender<GenerationEvent>,
) -> CliResult {
    let refused = |status: tonic::Status| CliError::from_status("the fleet", &status);
    let mut frames = client.generate(request).await.map_err(refused)?.into_inner();
    let mut done = PromptCompletion::default();
    while let Some(frame) = frames.message().await.map_err(refused)? {
        match frame.frame {
            Some(Frame::Started(started)) => {
                done.prompt_tokens = started.prompt_tokens;
                done.seed = started.seed;
            }
            Some(Frame::Delta(piece)) => {
                done.tokens.extend(piece.tokens);
                done.text.push_str(&piece.text);
                // The receiver is gone if the command was interrupted.
                let _: Result<(), _> = progress.send(GenerationEvent::Text(piece.text));
            }
            Some(Frame::Finished(finished)) => {
                done.reason = match finished.reason() {
                    FinishReason::Stop => "stop",
                    FinishReason::Length => "length",
                    FinishReason::Unspecified => "unknown",
                };
                done.first_token_ms = finished.usage.map_or(0.0, |usage| usage.first_token_ms);
                let _: Result<(), _> = progress.send(GenerationEvent::Done(Box::new(done)));
                return Ok(());
            }
            None => {}
        }
    }
    Err(CliError::new(Exit::PeerLost, "the stream ended without a final frame"))
}
