//! What can be typed. Each subcommand's own arguments stand beside its code.

use clap::{Parser, Subcommand};

use crate::{
    bench, chat, devices, doctor, eval, file_tools, fleet_commands, generate, inspect, plan, process, ps,
    serve, tokenize,
};

/// One copy of a model's weights, many processes that work with it.
#[derive(Parser)]
#[command(name = "ballast", version, propagate_version = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: CliCommand,
}

#[derive(Subcommand)]
pub(crate) enum CliCommand {
    /// Run a fleet in the foreground: OpenAI-compatible HTTP and gRPC
    Serve(serve::ServeArguments),
    /// Start a fleet, continue prompts, stop it
    Generate(generate::GenerateArguments),
    /// Start a fleet and talk to a model that has a chat template
    Chat(chat::ChatArguments),
    /// Show the token ids of texts
    Tokenize(tokenize::TokenizeArguments),
    /// Teacher-forced logits, or the perplexity of a text
    Eval(eval::EvalArguments),
    /// Show header, metadata, tensors and sizes of a model file
    Inspect(inspect::InspectArguments),
    /// Write a file of random weights with the shape of a real model
    Synth(file_tools::SynthArguments),
    /// List the GPUs that a fleet can use
    Devices(devices::DevicesArguments),
    /// Find out what this machine can do
    Doctor(doctor::DoctorArguments),
    /// The other process of the doctor's hand-off
    #[command(hide = true)]
    DoctorPeer(doctor::PeerArguments),
    /// Work out what a fleet will take of each device, without loading anything
    Plan(plan::PlanArguments),
    /// Measure a fleet
    Bench(bench::BenchArguments),
    /// List the processes of a running fleet
    Ps(ps::PsArguments),
    /// Load one more model into a running fleet
    Load(fleet_commands::LoadArguments),
    /// Unload a model from a running fleet
    Unload(fleet_commands::UnloadArguments),
    /// Start one more worker in a running fleet
    AddWorker(fleet_commands::AddWorkerArguments),
    /// Drain a worker of a running fleet and forget it
    RemoveWorker(fleet_commands::ChildArguments),
    /// Stop a process of a running fleet and start it again
    Restart(fleet_commands::ChildArguments),
    /// Have the workers of a running fleet forget the prompts that they keep
    ResetPrefixCache(fleet_commands::FleetSelector),
    /// One process of a fleet: holds the weights
    WeightServer(process::ProcessArguments),
    /// One process of a fleet: reads a model file; started by the weight-server only
    #[command(hide = true)]
    Loader,
    /// One process of a fleet: runs the model
    Worker(process::ProcessArguments),
    /// One process of a fleet: the public API
    Router(process::ProcessArguments),
    /// A fleet from its configuration file, for a service manager
    Supervisor(serve::SupervisorArguments),
}
