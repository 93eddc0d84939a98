// SPDX-License-Identifier: Apache-2.0

//! `ballast bench`: measures a fleet from outside, as clients and operators see it.

mod mix;
mod progress;
mod router_overhead;
mod serve;
mod serving_table;
mod stored_results;

use std::path::{Path, PathBuf};

use loadgen::{
    DraftError, DraftLoad, FleetError, LatencySummary, MeasuredFleet, PrefixBurst, StartOptions, StreamLoad,
    StreamLoadError, StreamLoadReport, WorkerStartupError, run_load,
};
use progress::with_token_progress;
use serde_json::json;
use service::Exit;
use service::exit::{exit_for_io_error, one_line};

use crate::cli_error::{CliError, CliResult, IoContext};
use crate::device_selection::DeviceSelection;
use crate::running_fleet::block_on;
use crate::terminal::print_stdout;

#[derive(clap::Args)]
pub(crate) struct BenchArguments {
    #[command(subcommand)]
    what: BenchCommand,
}

#[derive(clap::Subcommand)]
enum BenchCommand {
    /// Load on a running fleet or another OpenAI-compatible server, as vLLM's benchmark measures it
    Serve(Box<serve::ServeArguments>),
    /// Compare two results of `serve`, or two sets of them, with confidence intervals
    Compare(stored_results::ResultComparisonArguments),
    /// Show results of `serve` as one HTML page with plots
    Report(stored_results::ResultPageArguments),
    /// Prefill and decode speed of concurrent streams
    Throughput(ThroughputArguments),
    /// Times of worker starts: attach, an added worker, and the restart of a killed worker
    WorkerStarts(WorkerStartsArguments),
    /// Speculative decoding against plain decoding, in turns: speed and accepted draft tokens
    Drafts(DraftsArguments),
    /// Output with a JSON schema against free output, in turns: time between tokens
    Structured(StructuredArguments),
    /// Requests with a shared prompt prefix against requests without, in turns
    SharedPrefix(SharedPrefixArguments),
    /// The router's HTTP and gRPC against the worker's own socket, in turns
    RouterOverhead(router_overhead::RouterOverheadArguments),
}

#[derive(clap::Args)]
struct ThroughputArguments {
    #[command(flatten)]
    fleet: BenchFleetArguments,
    #[arg(long, value_name = "N", default_value_t = 16)]
    streams: u32,
    #[arg(long, value_name = "N", default_value_t = 128)]
    prompt_tokens: u32,
    #[arg(long, value_name = "N", default_value_t = 64)]
    tokens: u32,
}

#[derive(clap::Args)]
struct WorkerStartsArguments {
    #[command(flatten)]
    fleet: BenchFleetArguments,
    /// Number of workers to add, and number of workers to kill
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: u32,
}

#[derive(clap::Args)]
struct DraftsArguments {
    #[command(flatten)]
    fleet: BenchFleetArguments,
    /// Source of draft tokens: prompt lookup, or a smaller model
    #[arg(long, value_name = "lookup|MODEL.gguf")]
    draft: String,
    /// File of prompts, one JSON string per line
    #[arg(long, value_name = "FILE.jsonl")]
    prompts: PathBuf,
    #[arg(long, value_name = "N", default_value_t = 128)]
    tokens: u32,
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    temperature: f32,
    /// Concurrent streams
    #[arg(long, value_name = "N", default_value_t = 1)]
    streams: usize,
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: u32,
}

#[derive(clap::Args)]
struct StructuredArguments {
    #[command(flatten)]
    fleet: BenchFleetArguments,
    #[arg(long, value_name = "N", default_value_t = 8)]
    streams: u32,
    #[arg(long, value_name = "N", default_value_t = 128)]
    prompt_tokens: u32,
    #[arg(long, value_name = "N", default_value_t = 256)]
    tokens: u32,
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: u32,
}

#[derive(clap::Args)]
struct SharedPrefixArguments {
    #[command(flatten)]
    fleet: BenchFleetArguments,
    #[arg(long, value_name = "N", default_value_t = 16)]
    requests: u32,
    /// Tokens of the shared prefix
    #[arg(long, value_name = "N", default_value_t = 2048)]
    prefix_tokens: u32,
    /// Tokens of each prompt after the prefix
    #[arg(long, value_name = "N", default_value_t = 32)]
    own_tokens: u32,
    #[arg(long, value_name = "N", default_value_t = 16)]
    tokens: u32,
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: u32,
}

#[derive(clap::Args)]
struct BenchFleetArguments {
    /// The model file
    #[arg(value_name = "MODEL.gguf")]
    model: PathBuf,
    #[arg(long, value_name = "N", default_value_t = 1)]
    workers: u32,
    /// Threads of each worker [default: cores / workers]
    #[arg(long, value_name = "N")]
    threads: Option<u32>,
    /// Size of each worker's KV cache in tokens
    #[arg(long, value_name = "TOKENS")]
    kv_tokens: Option<u32>,
    /// Token budget of one step of a worker
    #[arg(long, value_name = "TOKENS")]
    step_tokens: Option<u32>,
    /// Device of the weights and the workers, as in `ballast serve`
    #[arg(long, default_value_t = DeviceSelection::default())]
    device: DeviceSelection,
    /// How the router chooses workers, as in `ballast serve` [default: auto]
    #[arg(long, value_name = "MODE")]
    routing: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: BenchArguments) -> CliResult {
    block_on(async {
        match arguments.what {
            BenchCommand::Serve(arguments) => serve::serve(*arguments).await,
            BenchCommand::Compare(arguments) => stored_results::compare_results(&arguments),
            BenchCommand::Report(arguments) => stored_results::report(&arguments),
            BenchCommand::Throughput(arguments) => throughput(arguments).await,
            BenchCommand::WorkerStarts(arguments) => worker_starts(arguments).await,
            BenchCommand::Drafts(arguments) => drafts(arguments).await,
            BenchCommand::Structured(arguments) => structured(arguments).await,
            BenchCommand::SharedPrefix(arguments) => shared_prefix(arguments).await,
            BenchCommand::RouterOverhead(arguments) => router_overhead::router_overhead(arguments).await,
        }
    })
}

async fn throughput(arguments: ThroughputArguments) -> CliResult {
    let ThroughputArguments { fleet: options, streams, prompt_tokens, tokens } = arguments;
    let load = StreamLoad { streams, prompt_tokens, tokens, schema: None };
    let fleet = options.start()?;
    let measured = async {
        let client = fleet.client().await.map_err(fleet_error)?;
        let vocabulary = loadgen::vocabulary_size(&fleet).await.map_err(lifecycle_error)?;
        // The first steps fault in pages of the weights and the KV cache, and do not count.
        run_load(&client, StreamLoad { tokens: tokens.min(8), ..load }, vocabulary, 0)
            .await
            .map_err(load_error)?;
        run_load(&client, load, vocabulary, 1).await.map_err(load_error)
    };
    let total = u64::from(streams) * u64::from(tokens.min(8) + tokens);
    let report = with_token_progress(total, measured).await;
    fleet.stop().await.map_err(fleet_error)?;
    let report = report?;
    let Throughput { prompt, decode } = Throughput::of(&report);
    match options.json {
        true => {
            let mut line = serde_json::to_value(&report)
                .map_err(|error| CliError::new(Exit::Internal, format!("cannot write as JSON: {error}")))?;
            line["prompt_tokens_per_second"] = json!(prompt);
            line["decode_tokens_per_second"] = json!(decode);
            print_stdout(&format!("{line}\n"))
        }
        false => print_stdout(&format!(
            "{streams} streams of {prompt_tokens} + {tokens} tokens: prefill {prompt:.1} tokens/s, decode {decode:.1} tokens/s\n\
             first token {:.1} ms (p99 {:.1}), between tokens {:.2} ms (p99 {:.2})\n",
            report.first_token.p50_ms,
            report.first_token.p99_ms,
            report.inter_token.p50_ms,
            report.inter_token.p99_ms,
        )),
    }
}

/// Tokens per second over all streams.
struct Throughput {
    prompt: f64,
    decode: f64,
}

impl Throughput {
    /// Prefill ends when the last stream has its first token; what follows is decode.
    fn of(report: &StreamLoadReport) -> Self {
        let StreamLoad { streams, prompt_tokens, tokens, .. } = report.load;
        let prompts_s = report.first_token.max_ms / 1e3;
        let decode_s = report.total_s - prompts_s;
        Self {
            prompt: f64::from(streams) * f64::from(prompt_tokens) / prompts_s,
            decode: f64::from(streams) * f64::from(tokens.saturating_sub(1)) / decode_s,
        }
    }
}

async fn worker_starts(arguments: WorkerStartsArguments) -> CliResult {
    let WorkerStartsArguments { fleet: options, rounds } = arguments;
    let fleet = options.start()?;
    let measured = async {
        let attach_ms = loadgen::attach_times(&fleet).await?;
        let (mut added, mut restarted) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            added.push(loadgen::add_worker(&fleet).await?);
        }
        for _ in 0..rounds {
            restarted.push(loadgen::replace_killed_worker(&fleet).await?);
        }
        Ok((attach_ms, added, restarted))
    };
    let measured: Result<_, WorkerStartupError> = measured.await;
    fleet.stop().await.map_err(fleet_error)?;
    let (attach_ms, added, restarted) = measured.map_err(lifecycle_error)?;
    if options.json {
        let line = json!({"attach_ms": attach_ms, "added_worker": added, "restarted_worker": restarted});
        return print_stdout(&format!("{line}\n"));
    }
    let mut text = format!("attach: {attach_ms:.2?} ms\n");
    for (what, starts) in [("added worker", &added), ("restarted worker", &restarted)] {
        for start in starts {
            text += &format!(
                "{what}: socket after {:.0} ms, serving after {:.0} ms, first token after {:.0} ms, known to the router after {:.0} ms\n",
                start.socket_ms, start.serving_ms, start.first_token_ms, start.router_ms
            );
        }
    }
    print_stdout(&text)
}

async fn drafts(arguments: DraftsArguments) -> CliResult {
    let DraftsArguments { fleet: options, draft, prompts, tokens, temperature, streams, rounds } = arguments;
    let prompts = crate::prompts::read(&prompts)?;
    let load = DraftLoad { prompts, tokens, temperature, at_once: streams, rounds };
    let plain = options.start()?;
    let drafting = options.start_with("drafting", &["--draft".to_owned(), draft])?;
    let total = 2 * u64::from(rounds) * load.prompts.len() as u64 * u64::from(tokens);
    let measured = with_token_progress(total, loadgen::compare_drafting(&plain, &drafting, &load)).await;
    plain.stop().await.map_err(fleet_error)?;
    drafting.stop().await.map_err(fleet_error)?;
    let report = measured.map_err(draft_error)?;
    if options.json {
        return print_stdout(&format!("{}\n", json!(report)));
    }
    let (drafted, accepted): (u64, u64) = (report.drafted.iter().sum(), report.accepted.iter().sum());
    print_stdout(&format!(
        "plain {:.1?} tokens/s, speculative {:.1?} tokens/s: {:.2} times as fast, same output\n\
         {drafted} draft tokens, {accepted} accepted; by position {:?} of {:?}\n",
        report.plain_tokens_per_s,
        report.drafting_tokens_per_s,
        report.speed_up,
        report.accepted,
        report.drafted,
    ))
}

async fn structured(arguments: StructuredArguments) -> CliResult {
    let StructuredArguments { fleet: options, streams, prompt_tokens, tokens, rounds } = arguments;
    let load = StreamLoad { streams, prompt_tokens, tokens, schema: None };
    let fleet = options.start()?;
    let measured = async {
        let client = fleet.client().await.map_err(fleet_error)?;
        let vocabulary = loadgen::vocabulary_size(&fleet).await.map_err(lifecycle_error)?;
        loadgen::compare_structured_output(&client, load, vocabulary, rounds).await.map_err(load_error)
    };
    let total = 2 * u64::from(rounds) * u64::from(streams) * u64::from(tokens);
    let report = with_token_progress(total, measured).await;
    fleet.stop().await.map_err(fleet_error)?;
    let report = report?;
    if options.json {
        return print_stdout(&format!("{}\n", json!(report)));
    }
    let mut text = String::new();
    for (name, decode) in [("free", &report.free), ("with a schema", &report.constrained)] {
        let of =
            |figure: fn(&LatencySummary) -> f64| decode.inter_token.iter().map(figure).collect::<Vec<_>>();
        text += &format!(
            "{name}: between tokens {:.3?} ms (p99 {:.3?}), {:.1?} tokens/s of a stream\n",
            of(|times| times.p50_ms),
            of(|times| times.p99_ms),
            decode.tokens_per_s,
        );
    }
    print_stdout(&format!(
        "{text}with a schema, the time between tokens is {:.3} times as long\n",
        report.slow_down
    ))
}

async fn shared_prefix(arguments: SharedPrefixArguments) -> CliResult {
    let SharedPrefixArguments { fleet: options, requests, prefix_tokens, own_tokens, tokens, rounds } =
        arguments;
    let burst = PrefixBurst { requests, prefix_tokens, own_tokens, tokens };
    let fleet = options.start()?;
    let measured = async {
        let client = fleet.client().await.map_err(fleet_error)?;
        let vocabulary = loadgen::vocabulary_size(&fleet).await.map_err(lifecycle_error)?;
        loadgen::compare_prefix_sharing(&client, burst, vocabulary, rounds).await.map_err(load_error)
    };
    let total = 2 * u64::from(rounds) * u64::from(requests) * u64::from(tokens);
    let report = with_token_progress(total, measured).await;
    fleet.stop().await.map_err(fleet_error)?;
    let report = report?;
    if options.json {
        return print_stdout(&format!("{}\n", json!(report)));
    }
    print_stdout(&format!(
        "{requests} requests of {prefix_tokens} shared + {own_tokens} tokens, {tokens} output tokens: shared {:.3?} s, not shared {:.3?} s: \
         {:.1} times as fast, {:.1} by rows\n\
         first tokens: shared {:.3?} s, not shared {:.3?}: {:.1} times as fast, {:.1} by rows\n",
        report.shared_s,
        report.apart_s,
        report.speed_up,
        report.rows_ratio,
        report.shared_first_tokens_s,
        report.apart_first_tokens_s,
        report.speed_up_of_first_tokens,
        report.rows_ratio_of_first_tokens,
    ))
}

fn load_error(error: StreamLoadError) -> CliError {
    CliError::new(Exit::PeerLost, one_line(&error))
}

fn draft_error(error: DraftError) -> CliError {
    match error {
        DraftError::Fleet(error) => fleet_error(error),
        DraftError::Life(error) => lifecycle_error(error),
        error @ DraftError::Stream { .. } => CliError::new(Exit::PeerLost, one_line(&error)),
        error @ DraftError::Different { .. } => CliError::new(Exit::Internal, one_line(&error)),
    }
}

impl BenchFleetArguments {
    fn start(&self) -> CliResult<MeasuredFleet> {
        self.start_with("fleet", &[])
    }

    /// Starts a fleet. `name` distinguishes the fleets of one benchmark; `more` are further
    /// arguments of `ballast serve`.
    fn start_with(&self, name: &str, more: &[String]) -> CliResult<MeasuredFleet> {
        let executable = std::env::current_exe().with_context(|| "cannot find this executable".to_owned())?;
        let mut arguments = vec!["--device".to_owned(), self.device.to_string()];
        for (name, value) in [
            ("--threads", self.threads),
            ("--kv-tokens", self.kv_tokens),
            ("--step-tokens", self.step_tokens),
        ] {
            arguments.extend(value.map(|value| [name.to_owned(), value.to_string()]).into_iter().flatten());
        }
        arguments.extend(self.routing.iter().flat_map(|mode| ["--routing".to_owned(), mode.clone()]));
        arguments.extend_from_slice(more);
        let options = StartOptions {
            executable,
            model: self.model.clone(),
            runtime_dir: Path::new("/tmp").join(format!("ballast-bench-{}-{name}", std::process::id())),
            workers: self.workers,
            arguments,
        };
        MeasuredFleet::start(&options).map_err(fleet_error)
    }
}

fn fleet_error(error: FleetError) -> CliError {
    let exit = match &error {
        FleetError::Start { source, .. } | FleetError::Read(source) => exit_for_io_error(source),
        _ => Exit::PeerLost,
    };
    CliError::new(exit, one_line(&error))
}

fn lifecycle_error(error: WorkerStartupError) -> CliError {
    match error {
        WorkerStartupError::Fleet(error) => fleet_error(error),
        error => CliError::new(Exit::PeerLost, one_line(&error)),
    }
}
