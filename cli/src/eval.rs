// SPDX-License-Identifier: Apache-2.0

//! `ballast eval`: a worker computes the logits of given tokens (teacher forcing), or the
//! perplexity of a text.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use ops::{KvLayer, KvTypes};
use proto::worker::v1::metadata_frame::Frame as MetadataFrame;
use proto::worker::v1::score_frame::Frame as ScoreFrame;
use proto::worker::v1::worker_client::WorkerClient;
use proto::worker::v1::{GetMetadataRequest, ScoreRequest, WorkerDescription};
use service::exit::one_line;
use service::{Exit, Notify};
use text::EncodeOptions;
use tonic::transport::Channel;
use tracing::Level;

use crate::cli_error::{CliError, CliResult, IoContext};
use crate::fleet_arguments::FleetArguments;
use crate::gguf_file;
use crate::running_fleet::{RunningFleet, block_on};
use crate::terminal::print_stdout;

/// Most bytes of an input file, because files are read whole.
const FILE_BYTES_MAX: u64 = 256 << 20;

#[derive(clap::Args)]
pub(crate) struct EvalArguments {
    /// The model file
    #[arg(value_name = "MODEL.gguf")]
    model: PathBuf,
    /// File with a JSON array of token ids
    #[arg(
        long,
        value_name = "FILE.json",
        requires = "logits_out",
        conflicts_with = "text",
        required_unless_present = "text"
    )]
    tokens: Option<PathBuf>,
    /// Output file for the logits of all positions: little-endian f32, one row of vocabulary size
    /// per token
    #[arg(long, value_name = "FILE.f32", requires = "tokens")]
    logits_out: Option<PathBuf>,
    /// Text file to compute the perplexity of
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    fleet: FleetArguments,
}

enum EvalTask {
    Logits { tokens: Vec<u32>, out: PathBuf },
    Perplexity { tokens: Vec<u32>, begin: Option<u32>, kv: KvCacheCost },
}

/// Types of the KV cache, and its bytes per token.
#[derive(Clone)]
struct KvCacheCost {
    types: KvTypes,
    token_bytes: usize,
}

pub(crate) fn run(arguments: EvalArguments) -> CliResult {
    let config = arguments.fleet.clone().with_one_worker().config(&arguments.model, None);
    let types = config.models.first().map_or_else(KvTypes::default, |model| model.kv_type.clone());
    let task = task(&arguments, types)?;
    service::logging::init("supervisor", Level::ERROR);
    block_on(async {
        let fleet = RunningFleet::start(&config, Notify::disabled(), Level::ERROR).await?;
        let result = fleet.finish(async |fleet| {
            fleet.ready().await?;
            let worker = ScoringClient::connect(fleet).await?;
            match &task {
                EvalTask::Logits { tokens, out } => worker.write_logits(tokens, out).await.map(|()| None),
                EvalTask::Perplexity { tokens, begin, kv } => {
                    let perplexity = worker.perplexity(tokens, *begin).await?;
                    Ok(Some((perplexity, kv)))
                }
            }
        });
        match result.await? {
            Some((perplexity, kv)) => perplexity.print(kv, arguments.json),
            None if arguments.json => {
                let written = serde_json::json!({"logits_out": arguments.logits_out});
                print_stdout(&format!("{written}\n"))
            }
            None => Ok(()),
        }
    })
}

fn task(arguments: &EvalArguments, types: KvTypes) -> CliResult<EvalTask> {
    let usage = |path: &Path, text: String| CliError::new(Exit::Usage, format!("{}: {text}", path.display()));
    let read = |path: &Path| -> CliResult<String> {
        let bytes = std::fs::metadata(path).map_err(|error| usage(path, error.to_string()))?.len();
        if bytes > FILE_BYTES_MAX {
            return Err(usage(path, format!("{bytes} bytes are more than {FILE_BYTES_MAX}; split it")));
        }
        std::fs::read_to_string(path).map_err(|error| usage(path, error.to_string()))
    };
    match (&arguments.tokens, &arguments.logits_out, &arguments.text) {
        (Some(path), Some(out), _) => {
            let tokens: Vec<u32> = serde_json::from_str(&read(path)?)
                .map_err(|error| usage(path, format!("not a JSON array of token ids ({error})")))?;
            if tokens.is_empty() {
                return Err(usage(path, "the list of tokens is empty".to_owned()));
            }
            Ok(EvalTask::Logits { tokens, out: out.clone() })
        }
        (_, _, Some(path)) => {
            let text = read(path)?;
            let model = gguf_file::open(&arguments.model)?;
            let tokenizer = gguf_file::tokenizer(&arguments.model, &model)?;
            let options = EncodeOptions { add_special: true, parse_special: false };
            let tokens = tokenizer.encode(&text, options).map_err(|error| usage(path, one_line(&error)))?;
            if tokens.len() < 2 {
                return Err(usage(
                    path,
                    "the text has fewer than two tokens, so there is nothing to predict".to_owned(),
                ));
            }
            let begin = tokenizer.bos().filter(|bos| tokens.first() == Some(bos));
            let layers = gguf_file::describe(&arguments.model, &model)?.kv_layers(&types);
            let token_bytes = layers.iter().map(KvLayer::token_bytes).sum();
            Ok(EvalTask::Perplexity { tokens, begin, kv: KvCacheCost { types, token_bytes } })
        }
        _ => Err(CliError::new(Exit::Usage, "give --tokens FILE --logits-out FILE, or --text FILE")),
    }
}

/// A client of the fleet's only worker.
struct ScoringClient {
    client: WorkerClient<Channel>,
    description: WorkerDescription,
}

/// Perplexity: exp(mean of -log p) over all predicted tokens.
struct Perplexity {
    value: f64,
    predicted: usize,
    windows: usize,
    window_tokens: usize,
}

impl ScoringClient {
    async fn connect(fleet: &RunningFleet) -> CliResult<Self> {
        let refused = |status: tonic::Status| CliError::from_status("the worker", &status);
        let channel = service::grpc::connect(&fleet.directory().worker_socket(0)).await?;
        let mut client = WorkerClient::new(channel);
        let mut frames = client.get_metadata(GetMetadataRequest {}).await.map_err(refused)?.into_inner();
        match frames.message().await.map_err(refused)?.and_then(|f| f.frame) {
            Some(MetadataFrame::Description(description)) => Ok(Self { client, description }),
            _ => Err(CliError::new(Exit::PeerLost, "the worker did not describe its model")),
        }
    }

    /// Runs one Score call and passes its frames to `take` in order.
    async fn score(
        &self,
        tokens: &[u32],
        top_logprobs: Option<u32>,
        mut take: impl FnMut(ScoreFrame) -> CliResult,
    ) -> CliResult {
        let refused = |status: tonic::Status| CliError::from_status("the worker", &status);
        let request = ScoreRequest {
            fingerprint: self.description.fingerprint.clone(),
            tokens: tokens.to_vec(),
            top_logprobs,
            deadline_ms: 0,
            request_id: "eval".to_owned(),
        };
        let mut frames = self.client.clone().score(request).await.map_err(refused)?.into_inner();
        while let Some(frame) = frames.message().await.map_err(refused)? {
            frame.frame.map_or(Ok(()), &mut take)?;
        }
        Ok(())
    }

    async fn write_logits(&self, tokens: &[u32], path: &Path) -> CliResult {
        let failed = || format!("cannot write {}", path.display());
        let mut file = BufWriter::new(File::create(path).with_context(failed)?);
        let mut bytes = 0u64;
        self.score(tokens, None, |frame| {
            let ScoreFrame::Logits(part) = frame else { return Ok(()) };
            bytes += part.len() as u64;
            file.write_all(&part).with_context(failed)
        })
        .await?;
        file.flush().with_context(failed)?;
        let expected = tokens.len() as u64 * u64::from(self.description.vocabulary) * size_of::<f32>() as u64;
        match bytes == expected {
            true => Ok(()),
            false => Err(CliError::new(
                Exit::PeerLost,
                format!("the worker sent {bytes} bytes of logits instead of {expected}"),
            )),
        }
    }

    /// Scores the text in windows of the model's context length. Each window starts anew, with BOS
    /// if the model uses one.
    async fn perplexity(&self, tokens: &[u32], begin: Option<u32>) -> CliResult<Perplexity> {
        let window_tokens = self.description.context_tokens as usize;
        let text = &tokens[usize::from(begin.is_some())..];
        let per_window = window_tokens.saturating_sub(usize::from(begin.is_some())).max(2);
        let (mut loss, mut predicted, mut windows) = (0.0f64, 0usize, 0usize);
        for part in text.chunks(per_window) {
            let window: Vec<u32> = begin.into_iter().chain(part.iter().copied()).collect();
            if window.len() < 2 {
                continue;
            }
            self.score(&window, Some(0), |frame| {
                let ScoreFrame::Scored(scored) = frame else { return Ok(()) };
                predicted += scored.logprobs.len();
                loss -= scored.logprobs.iter().map(|l| f64::from(l.logprob)).sum::<f64>();
                Ok(())
            })
            .await?;
            windows += 1;
        }
        Ok(Perplexity { value: (loss / predicted as f64).exp(), predicted, windows, window_tokens })
    }
}

impl Perplexity {
    fn print(&self, kv: &KvCacheCost, json: bool) -> CliResult {
        let Self { value, predicted, windows, window_tokens } = self;
        let KvCacheCost { types, token_bytes } = kv;
        let line = match json {
            true => serde_json::json!({
                "perplexity": value, "tokens": predicted, "windows": windows, "window_tokens": window_tokens,
                "kv_type": types.to_string(), "kv_token_bytes": token_bytes,
            })
            .to_string(),
            false => format!(
                "perplexity {value:.4} over {predicted} tokens in {windows} windows of {window_tokens} tokens; \
                 KV cache of type {types}, {token_bytes} bytes per token"
            ),
        };
        print_stdout(&format!("{line}\n"))
    }
}
