// SPDX-License-Identifier: Apache-2.0

//! The command line. Each subcommand's arguments are defined next to its code.

use clap::{Parser, Subcommand};

use crate::{
    bench, chat, devices, doctor, eval, file_tools, fleet_commands, generate, inspect, key, plan, process,
    ps, quarantine, run, serve, shell_files, swap, tokenize, top, worker_lifecycle,
};

/// Serve GGUF models: one copy of the weights in shared memory, many worker processes
#[derive(Parser)]
#[command(name = "ballast", version, propagate_version = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: CliCommand,
}

#[derive(Subcommand)]
pub(crate) enum CliCommand {
    /// Serve models over OpenAI-compatible HTTP and gRPC until Ctrl-C
    Serve(serve::ServeArguments),
    /// Generate text from prompts, then exit
    Generate(generate::GenerateArguments),
    /// Chat with a model on the terminal (needs a chat template)
    Chat(Box<chat::ChatArguments>),
    /// Print one answer of a running fleet or of another OpenAI-compatible server
    Run(run::RunArguments),
    /// Print the token ids of texts
    Tokenize(tokenize::TokenizeArguments),
    /// Compute logits of given tokens, or the perplexity of a text
    Eval(eval::EvalArguments),
    /// Print metadata, tensors and sizes of a model file
    Inspect(inspect::InspectArguments),
    /// Write a model file with random weights and the shape of a real model, for tests and
    /// benchmarks
    Synth(file_tools::SynthArguments),
    /// List the GPUs of this machine
    Devices(devices::DevicesArguments),
    /// Check whether this machine can run a fleet, and how fast its memory is
    Doctor(doctor::DoctorArguments),
    /// Child process of `doctor`; not for direct use
    #[command(hide = true)]
    DoctorPeer(doctor::PeerArguments),
    /// Show how much memory a fleet will need on each device, without loading it
    Plan(plan::PlanArguments),
    /// Benchmark a fleet
    Bench(bench::BenchArguments),
    /// List the processes of a running fleet with their memory
    Ps(ps::PsArguments),
    /// Show devices, models and processes of a running fleet with their rates, until q is pressed
    Top(top::TopArguments),
    /// Load another model into a running fleet
    Load(fleet_commands::LoadArguments),
    /// Drain the workers of a model of a running fleet, remove them and unload the model
    Unload(fleet_commands::UnloadArguments),
    /// Load a model again that `unload --idle` has unloaded; a request does it too
    Wake(fleet_commands::WakeArguments),
    /// Replace the file of a model of a running fleet; no request is lost
    Swap(swap::SwapArguments),
    /// Start another worker in a running fleet
    AddWorker(fleet_commands::AddWorkerArguments),
    /// Drain a worker of a running fleet and remove it
    RemoveWorker(fleet_commands::RemoveWorkerArguments),
    /// Take a worker of a running fleet out of service: its requests finish, then it stops
    Drain(worker_lifecycle::DrainArguments),
    /// Restart a process of a running fleet, or all workers one after the other
    Restart(worker_lifecycle::RestartArguments),
    /// Take a device of a running fleet out of service, as a fault of the device does
    Quarantine(quarantine::QuarantineArguments),
    /// Make an API key: print it, and add its hash to a key file
    Key(key::KeyArguments),
    /// Read the configuration file of a running fleet again and apply what differs
    Reload(fleet_commands::ReloadArguments),
    /// Empty the prefix caches of all workers of a running fleet
    ResetPrefixCache(fleet_commands::FleetSelector),
    /// Print a shell's completion script for this command line
    Completions(shell_files::CompletionsArguments),
    /// Write the manual pages
    Man(shell_files::ManArguments),
    /// Run the process that holds the weights (started by the supervisor)
    WeightServer(process::ProcessArguments),
    /// Read a model file into memory (started by the weight-server)
    #[command(hide = true)]
    Loader,
    /// Run the process that computes a model (started by the supervisor)
    Worker(process::ProcessArguments),
    /// Run the process that serves the public API (started by the supervisor)
    Router(process::ProcessArguments),
    /// Run NVIDIA's MPS for the workers (started by the supervisor)
    Mps(process::ProcessArguments),
    /// Report figures and faults of the GPUs (started by the supervisor)
    DeviceMonitor(process::ProcessArguments),
    /// Run a fleet from its configuration file, for systemd and other service managers
    Supervisor(serve::SupervisorArguments),
}
