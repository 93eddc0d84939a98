// SPDX-License-Identifier: Apache-2.0

//! `ballast serve` runs a fleet in the foreground; `ballast supervisor` does the same for a service
//! manager.

use std::collections::{HashMap, HashSet};
use std::net::{Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::time::Duration;

use service::logging::print_line;
use service::printable::printable_lines;
use service::{Exit, Notify};
use supervisor::{ChildRole, ChildStatus, FleetEvent, ModelState, ModelStatus, ReloadScope};
use tokio::sync::broadcast::{self, error::RecvError};
use tracing::Level;
use worker::PoolingSetting;

use crate::cli_error::{CliError, CliResult};
use crate::fleet_arguments::{FleetArguments, IdleUnloadArgument};
use crate::fleet_config::{FleetConfig, check_names};
use crate::running_fleet::{RunningFleet, block_on};
use crate::terminal::stream_stdout;

/// By default the fleet is reachable from this machine only.
const DEFAULT_LISTEN: &str = "127.0.0.1:8080";

#[derive(clap::Args)]
pub(crate) struct ServeArguments {
    /// Model file
    #[arg(value_name = "MODEL.gguf", required_unless_present = "config", conflicts_with = "config")]
    model: Option<PathBuf>,
    /// Name of the model in requests [default: the name of the file without extension]
    #[arg(long, conflicts_with = "config")]
    name: Option<String>,
    /// Further name of the model in requests; may be given several times
    #[arg(long, value_name = "NAME", conflicts_with = "config")]
    alias: Vec<String>,
    /// Chat template (Jinja) that replaces the one in the model file
    #[arg(long, value_name = "FILE", conflicts_with = "config")]
    chat_template: Option<PathBuf>,
    /// How hidden states become embeddings [default: as the model file says]
    #[arg(long, value_name = "none|mean|last", conflicts_with = "config")]
    pooling: Option<PoolingSetting>,
    /// Fleet of several models, configured in TOML
    #[arg(long, value_name = "FILE.toml")]
    config: Option<PathBuf>,
    /// Address and port of HTTP and gRPC; a port alone is one of this machine, port 0 selects a
    /// free one [default: 127.0.0.1:8080]
    #[arg(long, value_name = "[HOST:]PORT", value_parser = parse_listen)]
    listen: Option<SocketAddr>,
    /// File of API keys, which `ballast key` makes; clients without one of them are refused
    #[arg(long, value_name = "FILE.toml")]
    keys: Option<PathBuf>,
    /// Origin of web pages that may call the API, like https://example.org; "*" allows all. Pages of
    /// this machine always may
    #[arg(long, value_name = "ORIGIN")]
    allow_origin: Vec<String>,
    /// Refuse HTTP requests with unknown fields instead of ignoring these fields
    #[arg(long)]
    strict_requests: bool,
    /// Print one line of JSON when the fleet is ready
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    idle: IdleUnloadArgument,
    #[command(flatten)]
    fleet: FleetArguments,
}

#[derive(clap::Args)]
pub(crate) struct SupervisorArguments {
    /// Fleet configuration in TOML
    #[arg(long, value_name = "FILE.toml")]
    config: PathBuf,
}

pub(crate) fn run(arguments: ServeArguments) -> CliResult {
    let mut config = match (&arguments.config, &arguments.model) {
        (Some(path), _) => FleetConfig::load(path, arguments.fleet.runtime_dir())?,
        (None, Some(model)) => {
            let mut config = arguments.fleet.config(model, None);
            arguments.idle.set(&mut config.models);
            if let Some(served) = config.models.first_mut() {
                served.name = arguments.name.unwrap_or(served.name.clone());
                served.aliases = arguments.alias;
                served.chat_template = arguments.chat_template;
                served.pooling = arguments.pooling;
            }
            check_names(&config.models).map_err(|text| CliError::new(Exit::Usage, text))?;
            config
        }
        (None, None) => return Err(CliError::new(Exit::Usage, "name a model file or --config FILE.toml")),
    };
    let default = || DEFAULT_LISTEN.parse().ok();
    config.listen = arguments.listen.or(config.listen).or_else(default);
    config.access.keys = arguments.keys.or(config.access.keys);
    config.access.origins.extend(arguments.allow_origin);
    config.access.check()?;
    config.router.strict_requests |= arguments.strict_requests;
    // `report` prints the errors of children as text.
    service::logging::init("supervisor", Level::ERROR);
    let (json, drain) = (arguments.json, config.router.drain);
    let scheme = if config.tls.is_some() { "https" } else { "http" };
    foreground(&config, Level::ERROR, async |fleet| {
        fleet.ready().await?;
        let events = fleet.fleet.events();
        let mut failed = FailedCopies::default();
        fleet.status().await?.models.iter().for_each(|model| failed.report(model));
        tokio::spawn(report(events, failed));
        tokio::spawn(report_stop(fleet.shutdown.requested(), drain));
        tokio::spawn(announce(announcement(fleet, scheme, json).await?));
        Ok(())
    })
}

/// An address, a host name with a port, or a port of this machine.
fn parse_listen(text: &str) -> Result<SocketAddr, String> {
    if let Ok(port) = text.parse::<u16>() {
        return Ok(SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    }
    let found = text.to_socket_addrs().map_err(|error| format!("{error}; write HOST:PORT or PORT"))?;
    // A name of this machine mostly has an IPv4 and an IPv6 address.
    let found: Vec<SocketAddr> = found.collect();
    let first = found.iter().find(|address| address.is_ipv4()).or(found.first());
    first.copied().ok_or_else(|| "the name has no address".to_owned())
}

/// Says why the command does not end at once.
async fn report_stop(requested: impl Future<Output = ()>, drain: Duration) {
    requested.await;
    let seconds = drain.as_secs();
    print_line(&format!(
        "stopping: running streams have up to {seconds} s to finish; Ctrl-C again stops at once"
    ));
}

/// Prints one line for every child that crashes and every model that cannot be loaded.
async fn report(mut events: broadcast::Receiver<FleetEvent>, mut failed: FailedCopies) {
    let mut told: HashMap<String, u32> = HashMap::new();
    loop {
        match events.recv().await {
            Ok(FleetEvent::Child(child)) => {
                let before = told.insert(child.name.clone(), child.crashes).unwrap_or(0);
                if let (true, Some(end)) = (child.crashes > before, &child.last_termination) {
                    print_line(&printable_lines(&format!("{}: {end}; {}", child.name, restart_text(&child))));
                }
            }
            Ok(FleetEvent::Model(ModelStatus { name, state: ModelState::Failed(failure), .. })) => {
                print_line(&printable_lines(&format!("model {name}: {}", failure.text)));
            }
            Ok(FleetEvent::Model(model)) => failed.report(&model),
            Ok(_) | Err(RecvError::Lagged(_)) => {}
            Err(RecvError::Closed) => return,
        }
    }
}

/// The copies that are known to have failed, by model and device.
#[derive(Default)]
struct FailedCopies(HashSet<(String, String)>);

impl FailedCopies {
    /// Prints one line when a copy fails, and one when it has come nevertheless.
    fn report(&mut self, model: &ModelStatus) {
        if matches!(model.state, ModelState::Failed(_)) {
            return;
        }
        for copy in &model.copies {
            let (name, device) = (&model.name, &copy.device);
            let key = (name.clone(), device.clone());
            let line = match &copy.state {
                ModelState::Failed(failure) if self.0.insert(key) => {
                    format!("model {name}: not on {device} yet, which is tried again: {}", failure.text)
                }
                ModelState::Ready if self.0.remove(&(name.clone(), device.clone())) => {
                    format!("model {name}: now on {device} too")
                }
                _ => continue,
            };
            print_line(&printable_lines(&line));
        }
    }
}

fn restart_text(child: &ChildStatus) -> String {
    match child.next_start_in {
        None => "restarted".to_owned(),
        Some(wait) => {
            let crashes = child.consecutive_crashes;
            format!("crashed {crashes} times in a row, next start in {} s", wait.as_secs_f64().ceil())
        }
    }
}

pub(crate) fn run_supervisor(arguments: SupervisorArguments) -> CliResult {
    let config = FleetConfig::load(&arguments.config, None)?;
    service::logging::init("supervisor", Level::INFO);
    foreground(&config, Level::INFO, RunningFleet::ready)
}

/// Runs the fleet until it is stopped. An error before the fleet serves ends it; later, the
/// supervisor restarts children.
fn foreground(
    config: &FleetConfig,
    log: Level,
    started: impl AsyncFnOnce(&mut RunningFleet) -> CliResult,
) -> CliResult {
    block_on(async {
        let notify = Notify::from_env()?;
        let fleet = match RunningFleet::start(config, notify.clone(), log).await {
            // Stopped on request while the model files were read.
            Err(failure) if failure.exit == Exit::Interrupted => return Ok(()),
            started => started?,
        };
        // The sockets are bound and the children are starting. READY does not wait for models to
        // load.
        notify.ready()?;
        let shutdown = fleet.shutdown.clone();
        if config.source.is_some() {
            fleet.fleet.reload_on(shutdown.reloads(), ReloadScope::All);
        }
        let outcome = fleet.finish(async |fleet| {
            started(fleet).await?;
            fleet.ended().await;
            fleet.fleet.take_loss().map_or(Ok(()), |loss| Err(loss.into()))
        });
        match outcome.await {
            // Stopping on request is a success.
            Err(failure) if shutdown.is_requested() && failure.exit == Exit::Interrupted => Ok(()),
            outcome => outcome,
        }
    })
}

/// Prints where to send requests. The fleet serves, whether or not anybody reads this.
async fn announce(text: String) {
    if let Err(failure) = stream_stdout(text).await {
        let cause = match failure.exit {
            Exit::OutputClosed => "its reader closed it",
            _ => failure.message(),
        };
        tracing::error!(cause, "standard output does not take the announcement of this fleet");
    }
}

/// The text that says where to send requests.
async fn announcement(fleet: &RunningFleet, scheme: &str, json: bool) -> CliResult<String> {
    let status = fleet.status().await?;
    let url = format!("{scheme}://{}", status.http_address);
    let models: Vec<String> = status.models.iter().map(|m| m.name.clone()).collect();
    let workers = status.children.iter().filter(|c| c.role == ChildRole::Worker).count();
    let runtime_dir = fleet.directory().path().display().to_string();
    let text = match json {
        // JSON escapes control characters.
        true => serde_json::json!({
            "http": url, "grpc": url, "runtime_dir": runtime_dir, "models": models, "workers": workers,
            "devices": fleet.devices.iter().map(|(_, choice)| choice.device().to_string()).collect::<Vec<_>>(),
        })
        .to_string(),
        false => {
            let first = models.first().map_or("", String::as_str);
            let body = serde_json::json!({
                "model": first, "prompt": "def fibonacci(n):", "max_tokens": 64, "temperature": 0,
            });
            let devices: Vec<String> =
                fleet.devices.iter().map(|(model, choice)| format!("device     {model}: {choice}\n")).collect();
            printable_lines(&format!(
                "serving    {} with {workers} workers\n{}HTTP       {url}/v1 (OpenAI-compatible), {url}/metrics\ngRPC       {url} (ballast.v1, with reflection)\nprocesses  ballast ps --runtime-dir {runtime_dir}\ntry:\n  curl -s {url}/v1/completions -H 'content-type: application/json' -d '{body}'\nCtrl-C stops the fleet.",
                models.join(", "),
                devices.concat(),
            ))
        }
    };
    Ok(format!("{text}\n"))
}
