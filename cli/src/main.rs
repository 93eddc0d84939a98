//! The `ballast` executable: one subcommand per thing a user does and per process of a fleet.
//!
//! Errors are one line, "ballast: what: why; what to do", with the exit codes of `service::exit`.

#![forbid(unsafe_code)]

mod arguments;
mod bench;
mod chat;
mod device_choice;
mod devices;
mod doctor;
mod eval;
mod failure;
mod file_tools;
mod fleet_arguments;
mod fleet_config;
mod fleet_orders;
mod generate;
mod gguf_file;
mod inspect;
mod plan;
mod process;
mod prompts;
mod ps;
mod running_fleet;
mod serve;
mod sized_model;
mod summary;
mod synth;
mod tokenize;

use std::process::ExitCode;

use arguments::{Arguments, Command};
use clap::Parser;
use service::Exit;

fn main() -> ExitCode {
    // The exec shim becomes another process before anything of this one has started.
    let mut raw = std::env::args_os().skip(1);
    if raw.next().is_some_and(|first| first == supervisor::shim::SUBCOMMAND) {
        eprintln!("ballast: {}", service::exit::one_line(&supervisor::shim::exec(raw)));
        return Exit::Internal.into();
    }
    let outcome = match Arguments::parse().command {
        Command::Serve(arguments) => serve::run(arguments),
        Command::Generate(arguments) => generate::run(arguments),
        Command::Chat(arguments) => chat::run(arguments),
        Command::Tokenize(arguments) => tokenize::run(arguments),
        Command::Eval(arguments) => eval::run(arguments),
        Command::Inspect(arguments) => file_tools::run_inspect(arguments),
        Command::Synth(arguments) => file_tools::run_synth(arguments),
        Command::Devices(arguments) => devices::run(arguments),
        Command::Doctor(arguments) => doctor::run(arguments),
        Command::DoctorPeer(arguments) => doctor::run_peer(arguments),
        Command::Plan(arguments) => plan::run(arguments),
        Command::Bench(arguments) => bench::run(arguments),
        Command::Ps(arguments) => ps::run(arguments),
        Command::Load(arguments) => fleet_orders::load(arguments),
        Command::Unload(arguments) => fleet_orders::unload(arguments),
        Command::AddWorker(arguments) => fleet_orders::add_worker(arguments),
        Command::RemoveWorker(arguments) => fleet_orders::remove_worker(arguments),
        Command::Restart(arguments) => fleet_orders::restart(arguments),
        Command::ResetPrefixes(place) => fleet_orders::reset_prefixes(place),
        Command::WeightServer(arguments) => process::weight_server(arguments),
        Command::Loader => process::loader(),
        Command::Worker(arguments) => process::worker(arguments),
        Command::Router(arguments) => process::router(arguments),
        Command::Supervisor(arguments) => serve::run_supervisor(arguments),
    };
    match outcome {
        Ok(()) => Exit::Ok.into(),
        Err(failure) => {
            failure.print();
            failure.exit.into()
        }
    }
}
