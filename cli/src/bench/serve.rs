// SPDX-License-Identifier: Apache-2.0

//! `ballast bench serve`: load on a running fleet, or on another OpenAI-compatible server.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use loadgen::serving::{
    CONVERSATIONS_MAX, Objective, RequestRate, RequestTemplate, ServerError, ServingBackend, ServingClient,
    ServingLoad, ServingMetrics, ServingMix, ServingRun, ServingSettings, drive, measure_token_scale,
    result_json,
};
use proto::fleet::v1::GetStatusRequest;
use serde_json::Value;
use service::Exit;
use service::exit::one_line;
use service::logging::print_line;

use super::mix::MixArguments;
use super::progress::with_progress;
use super::serving_table::table;
use crate::cli_error::{CliError, CliResult, IoContext};
use crate::fleet_choice::find_fleet;
use crate::progress_bar::ProgressUnit;
use crate::ps;
use crate::terminal::print_stdout;

/// Requests of a run without `--num-prompts` and `--duration`, as in vLLM.
const DEFAULT_PROMPTS: u64 = 1000;
/// Warm-up requests at one time, if no limit of concurrency says more or less.
const WARM_UP_CONCURRENCY: usize = 8;

#[derive(clap::Args)]
pub(super) struct ServeArguments {
    /// Address of any OpenAI-compatible server [default: the running fleet]
    #[arg(long, value_name = "URL", conflicts_with = "runtime_dir")]
    base_url: Option<String>,
    /// Runtime directory of the fleet [default: that of the only running fleet]
    #[arg(long, value_name = "DIR")]
    runtime_dir: Option<PathBuf>,
    /// API key [default: the environment variable OPENAI_API_KEY, which other users do not see]
    #[arg(long, value_name = "KEY")]
    api_key: Option<String>,
    /// Model name [default: the first model of the server]
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// API that takes the prompts: completions, or chat
    #[arg(long, value_name = "openai|openai-chat", default_value = "openai")]
    backend: ServingBackend,
    #[command(flatten)]
    load: LoadArguments,
    #[command(flatten)]
    mix: MixArguments,
    /// Seed of prompts and arrivals
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    temperature: f64,
    /// Whether answers go on to their full length, so that all runs do the same work
    #[arg(long, value_name = "true|false", default_value_t = true, action = clap::ArgAction::Set)]
    ignore_eos: bool,
    /// Objectives in milliseconds: ttft:MS, tpot:MS, e2el:MS
    #[arg(long, value_name = "METRIC:MS", num_args = 1..)]
    goodput: Vec<Objective>,
    /// A stream without an event for this long has failed
    #[arg(long, value_name = "DURATION", default_value = "5min", value_parser = service::duration::parse)]
    stall_timeout: Duration,
    /// Name of the result in comparisons and reports
    #[arg(long, value_name = "TEXT", default_value = "ballast bench serve")]
    label: String,
    /// Write the result as JSON, with the field names of vLLM's benchmark
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Add the figures of each request to the JSON, for `bench compare` and `bench report`
    #[arg(long, requires = "json")]
    save_detailed: bool,
}

#[derive(clap::Args)]
struct LoadArguments {
    /// Requests per second, on average; "inf" sends all at once, or as --max-concurrency allows
    #[arg(long, value_name = "R", default_value = "inf")]
    request_rate: RequestRate,
    /// Shape of the arrivals: 1 is a Poisson process, less is burstier, more is more even
    #[arg(long, value_name = "SHAPE", default_value_t = 1.0)]
    burstiness: f64,
    /// Requests that run at one time; with the rate "inf", a closed loop
    #[arg(long, value_name = "N")]
    max_concurrency: Option<usize>,
    /// Requests to send, or conversations with several turns [default: 1000, or as many as come in
    /// --duration]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=CONVERSATIONS_MAX))]
    num_prompts: Option<u64>,
    /// Send no further request after this time
    #[arg(long, value_name = "DURATION", value_parser = service::duration::parse)]
    duration: Option<Duration>,
    /// Requests before the run, which do not count
    #[arg(long, value_name = "N", default_value_t = 0)]
    num_warmups: u64,
}

impl LoadArguments {
    fn load(&self) -> CliResult<ServingLoad> {
        let usage = |text: &str| Err(CliError::new(Exit::Usage, text));
        let is_burst = self.request_rate == RequestRate::Unlimited && self.max_concurrency.is_none();
        if is_burst && self.duration.is_some() && self.num_prompts.is_none() {
            return usage(
                "an unlimited rate sends all requests at once: pass --num-prompts or --max-concurrency",
            );
        }
        if self.max_concurrency == Some(0) {
            return usage("--max-concurrency 0 sends nothing");
        }
        let unbounded = if self.duration.is_some() { CONVERSATIONS_MAX } else { DEFAULT_PROMPTS };
        Ok(ServingLoad {
            rate: self.request_rate,
            burstiness: self.burstiness,
            max_concurrency: self.max_concurrency,
            first: 0,
            conversations: self.num_prompts.unwrap_or(unbounded),
            duration: self.duration,
        })
    }
}

pub(super) async fn serve(arguments: ServeArguments) -> CliResult {
    let load = arguments.load.load()?;
    arguments.mix.check()?;
    let base_url = match &arguments.base_url {
        Some(url) => url.clone(),
        None => fleet_url(arguments.runtime_dir.as_deref()).await?,
    };
    let api_key = arguments.api_key.clone().or_else(|| std::env::var("OPENAI_API_KEY").ok());
    let client = ServingClient::new(&base_url, api_key, arguments.stall_timeout).map_err(server_error)?;
    let model = client.model(arguments.model.as_deref()).await.map_err(server_error)?;
    let template = RequestTemplate {
        backend: arguments.backend,
        model: model.id,
        temperature: arguments.temperature,
        ignore_eos: arguments.ignore_eos,
    };
    let scale = measure_token_scale(&client, &template, model.max_model_len).await.map_err(server_error)?;
    let kind = arguments.mix.kind(&scale, model.max_model_len, arguments.seed)?;
    let mix = ServingMix { kind, seed: arguments.seed, scale, context_tokens: model.max_model_len };
    let mix = Arc::new(mix);
    let run = warm_up_and_drive(&client, &template, &mix, &load, &arguments).await?;
    let metrics = ServingMetrics::of(&run, &arguments.goodput);
    let settings = ServingSettings {
        label: arguments.label.clone(),
        date: loadgen::serving::date_of_now(),
        base_url: client.base_url().to_owned(),
        template,
        mix: arguments.mix.description(),
        seed: arguments.seed,
        load,
        objectives: arguments.goodput.clone(),
    };
    report(&arguments, &settings, &run, &metrics)
}

/// Writes the file first: the table may have no reader.
fn report(
    arguments: &ServeArguments,
    settings: &ServingSettings,
    run: &ServingRun,
    metrics: &ServingMetrics,
) -> CliResult {
    if let Some(file) = &arguments.json {
        let result = result_json(settings, run, metrics, arguments.save_detailed);
        std::fs::write(file, format!("{}\n", Value::Object(result)))
            .with_context(|| format!("cannot write {}", file.display()))?;
    }
    print_stdout(&table(settings, metrics))?;
    match metrics.failures.first().filter(|_| metrics.completed == 0) {
        Some(failure) => {
            let text = format!("no request was completed: {}", failure.example);
            Err(CliError::new(Exit::PeerLost, text))
        }
        None => Ok(()),
    }
}

async fn warm_up_and_drive(
    client: &ServingClient,
    template: &RequestTemplate,
    mix: &Arc<ServingMix>,
    load: &ServingLoad,
    arguments: &ServeArguments,
) -> CliResult<ServingRun> {
    let warm_ups = arguments.load.num_warmups;
    let requests = load.conversations.saturating_mul(arguments.mix.turns());
    let usage = |error| CliError::new(Exit::Usage, one_line(&error));
    if warm_ups > 0 {
        let warm_up = ServingLoad {
            rate: RequestRate::Unlimited,
            max_concurrency: load.max_concurrency.or(Some(WARM_UP_CONCURRENCY)),
            first: load.conversations,
            conversations: warm_ups,
            duration: None,
            ..load.clone()
        };
        let run = drive(client, template, mix, &warm_up).await.map_err(usage)?;
        if let Some(failure) = run.requests.iter().find_map(|request| request.outcome.as_ref().err()) {
            print_line(&format!("a warm-up request failed: {failure}"));
        }
    }
    let total = load.duration.is_none().then_some(requests);
    let driven = drive(client, template, mix, load);
    let driven = with_progress(ProgressUnit::Requests, total, || client.ended_requests(), driven);
    driven.await.map_err(usage)
}

/// The address of a running fleet, from its supervisor.
async fn fleet_url(runtime_dir: Option<&Path>) -> CliResult<String> {
    let directory = find_fleet(runtime_dir).await?;
    let status = ps::connect(&directory)
        .await?
        .get_status(GetStatusRequest { memory: false, ledger: false })
        .await
        .map_err(|status| CliError::from_status("the fleet", &status))?
        .into_inner();
    match status.http_address.as_str() {
        "" => Err(CliError::new(
            Exit::Usage,
            format!("the fleet in {} does not know its address: pass --base-url", directory.path().display()),
        )),
        address => Ok(format!("http://{address}")),
    }
}

fn server_error(error: ServerError) -> CliError {
    let exit = match &error {
        ServerError::Address(_) | ServerError::UnknownModel { .. } => Exit::Usage,
        ServerError::Client(_) => Exit::Internal,
        _ => Exit::PeerLost,
    };
    CliError::new(exit, one_line(&error))
}
