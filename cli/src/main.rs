// SPDX-License-Identifier: Apache-2.0

//! The `ballast` executable: one subcommand for each task of a user and for each process of a
//! fleet.
//!
//! An error is one line on standard error, "ballast: what: why; what to do". `service::exit`
//! defines the exit codes.

#![forbid(unsafe_code)]

mod arguments;
mod bench;
mod bounded_read;
mod chat;
mod chat_templates;
mod cli_error;
mod completion;
mod config_source;
mod device_choice;
mod device_selection;
mod devices;
mod doctor;
mod eval;
mod file_tools;
mod fleet_arguments;
mod fleet_choice;
mod fleet_commands;
mod fleet_config;
mod fleet_models;
mod fleet_snapshot;
mod generate;
mod gguf_file;
mod gpu_support;
mod gpu_wait;
mod inspect;
mod json_output;
mod key;
mod model_config;
mod models_directory;
mod plan;
mod process;
mod progress_bar;
mod prompts;
mod ps;
mod quarantine;
mod resident_models;
mod run;
mod running_fleet;
mod sampling_arguments;
mod serve;
mod served_workers;
mod shell_files;
mod sized_model;
mod summary;
mod swap;
mod swapped_files;
mod synth;
mod terminal;
mod tokenize;
mod top;
mod worker_lifecycle;

use std::process::ExitCode;

use arguments::{Cli, CliCommand};
use clap::{CommandFactory, FromArgMatches};
use cli_error::{CliError, CliResult};
use memory::allocator::ReportingAllocator;
use service::Exit;

#[global_allocator]
static ALLOCATOR: ReportingAllocator = ReportingAllocator::new(Exit::OutOfResources.code());

fn main() -> ExitCode {
    // The exec shim replaces this process by another program, so it runs before anything else
    // starts.
    let mut raw = std::env::args_os().skip(1);
    if raw.next().is_some_and(|first| first == supervisor::shim::SUBCOMMAND) {
        let error = supervisor::shim::exec(raw);
        return end(Err(CliError::new(Exit::Internal, service::exit::one_line(&error)))).into();
    }
    let parsed = Cli::command().try_get_matches().and_then(|matches| {
        json_output::remember(&matches);
        Cli::from_arg_matches(&matches)
    });
    let outcome = match parsed {
        Ok(Cli { command, .. }) if uses_driver(&command) => {
            let exit = end(run_command(command));
            memory::process_end::end_process(exit.code())
        }
        Ok(cli) => run_command(cli.command),
        Err(message) => {
            json_output::remember_unparsed(std::env::args_os().map(|a| a.to_string_lossy().into_owned()));
            terminal::print_usage(&message)
        }
    };
    end(outcome).into()
}

/// Whether the command is a process of a fleet that may end while threads are inside a driver.
fn uses_driver(command: &CliCommand) -> bool {
    matches!(command, CliCommand::Worker(_) | CliCommand::Loader | CliCommand::DeviceMonitor(_))
}

fn run_command(command: CliCommand) -> CliResult {
    match command {
        CliCommand::Serve(arguments) => serve::run(arguments),
        CliCommand::Generate(arguments) => generate::run(arguments),
        CliCommand::Chat(arguments) => chat::run(*arguments),
        CliCommand::Run(arguments) => run::run(arguments),
        CliCommand::Tokenize(arguments) => tokenize::run(arguments),
        CliCommand::Eval(arguments) => eval::run(arguments),
        CliCommand::Inspect(arguments) => file_tools::run_inspect(arguments),
        CliCommand::Synth(arguments) => file_tools::run_synth(arguments),
        CliCommand::Devices(arguments) => devices::run(arguments),
        CliCommand::Doctor(arguments) => doctor::run(arguments),
        CliCommand::DoctorPeer(arguments) => doctor::run_peer(arguments),
        CliCommand::Plan(arguments) => plan::run(arguments),
        CliCommand::Bench(arguments) => bench::run(arguments),
        CliCommand::Ps(arguments) => ps::run(arguments),
        CliCommand::Top(arguments) => top::run(arguments),
        CliCommand::Load(arguments) => fleet_commands::load(arguments),
        CliCommand::Unload(arguments) => fleet_commands::unload(arguments),
        CliCommand::Wake(arguments) => fleet_commands::wake(arguments),
        CliCommand::Swap(arguments) => swap::swap(arguments),
        CliCommand::AddWorker(arguments) => fleet_commands::add_worker(arguments),
        CliCommand::RemoveWorker(arguments) => fleet_commands::remove_worker(arguments),
        CliCommand::Drain(arguments) => worker_lifecycle::drain(arguments),
        CliCommand::Restart(arguments) => worker_lifecycle::restart(arguments),
        CliCommand::Quarantine(arguments) => quarantine::run(arguments),
        CliCommand::Key(arguments) => key::run(arguments),
        CliCommand::Reload(arguments) => fleet_commands::reload(arguments),
        CliCommand::ResetPrefixCache(place) => fleet_commands::reset_prefix_cache(place),
        CliCommand::Completions(arguments) => shell_files::completions(arguments),
        CliCommand::Man(arguments) => shell_files::man(arguments),
        CliCommand::WeightServer(arguments) => process::weight_server(arguments),
        CliCommand::Loader => process::loader(),
        CliCommand::Worker(arguments) => process::worker(arguments),
        CliCommand::Router(arguments) => process::router(arguments),
        CliCommand::Mps(arguments) => process::mps(arguments),
        CliCommand::DeviceMonitor(arguments) => process::device_monitor(arguments),
        CliCommand::Supervisor(arguments) => serve::run_supervisor(arguments),
    }
}

/// Prints the error, if there is one, and waits until the log is written.
fn end(outcome: CliResult) -> Exit {
    let exit = match outcome {
        Ok(()) => Exit::Ok,
        Err(failure) => {
            failure.print();
            // The exit code is that of the first error.
            let _: CliResult = json_output::print_error(&failure);
            failure.exit
        }
    };
    service::logging::flush();
    exit
}
