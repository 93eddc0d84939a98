// SPDX-License-Identifier: Apache-2.0

//! Runs one process of a fleet. The supervisor or a systemd unit starts it.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde::de::DeserializeOwned;
use service::Notify;
use tracing::Level;
use worker::WorkerConfig;

use crate::chat_templates::read_workers_chat_template;
use crate::cli_error::{CliError, CliResult};

#[derive(Args)]
pub(crate) struct ProcessArguments {
    /// Configuration file of this process
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
}

pub(crate) fn weight_server(arguments: ProcessArguments) -> CliResult {
    service::logging::init("weight-server", Level::INFO);
    run(arguments, weight_server::run)
}

pub(crate) fn worker(arguments: ProcessArguments) -> CliResult {
    run(arguments, |mut config: WorkerConfig| {
        read_workers_chat_template(&mut config)?;
        worker::run(config).map_err(CliError::from)
    })
}

pub(crate) fn router(arguments: ProcessArguments) -> CliResult {
    run(arguments, router::run)
}

pub(crate) fn mps(arguments: ProcessArguments) -> CliResult {
    run(arguments, supervisor::mps::run)
}

pub(crate) fn device_monitor(arguments: ProcessArguments) -> CliResult {
    run(arguments, device_monitor::run)
}

/// Runs the loader. It gets its job on standard input, a socket to the weight-server, and reports
/// errors there.
pub(crate) fn loader() -> CliResult {
    // The loader starts the log's thread within its sandbox.
    service::logging::init_without_thread("loader", Level::INFO);
    Ok(weight_server::loader::run()?)
}

/// How long a failing process waits until the supervisor has received its last status.
const LAST_WORDS_WAIT: Duration = Duration::from_secs(1);

/// Runs a process until it ends. A failing process reports its error to the supervisor; without a
/// supervisor it prints the error itself.
fn run<C: DeserializeOwned, E: Into<CliError>>(
    arguments: ProcessArguments,
    process: fn(C) -> Result<(), E>,
) -> CliResult {
    let outcome = service::config::load(&arguments.config)
        .map_err(CliError::from)
        .and_then(|config| process(config).map_err(E::into));
    service::runtime_dir::remove_dir_if_last_child();
    match outcome {
        Err(failure) if was_heard(&failure) => Err(failure.without_message()),
        outcome => outcome,
    }
}

/// Sends the error to the supervisor as the last status. Returns true if the supervisor has
/// received it.
fn was_heard(failure: &CliError) -> bool {
    let Ok(notify) = Notify::from_env() else { return false };
    notify.has_parent()
        && notify.status(failure.message()).and_then(|()| notify.barrier(LAST_WORDS_WAIT)).is_ok()
}
