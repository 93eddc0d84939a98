//! `ballast inspect` and `ballast synth`: tools on model files, without a fleet.

use std::io::ErrorKind;

use service::Exit;
use service::exit::one_line;

use crate::failure::{Failure, Outcome};
use crate::generate::say;
use crate::inspect::{InspectArgs, inspect};
use crate::synth::{SynthArgs, SynthError, synth};

#[derive(clap::Args)]
pub(crate) struct SynthArguments {
    #[command(flatten)]
    synth: SynthArgs,
    /// Print what was written as one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run_inspect(arguments: InspectArgs) -> Outcome {
    let report =
        inspect(&arguments.model).map_err(|error| Failure::new(Exit::ModelRefused, one_line(&error)))?;
    match arguments.json {
        true => say(&format!("{}\n", serde_json::to_string(&report).map_err(unprintable)?)),
        false => say(&report.to_string()),
    }
}

pub(crate) fn run_synth(arguments: SynthArguments) -> Outcome {
    let written = synth(&arguments.synth).map_err(|error| {
        let exit = match &error {
            SynthError::File { source, .. } if source.kind() == ErrorKind::NotFound => Exit::Usage,
            SynthError::File { source, .. } => service::exit::exit_for_io_error(source),
            SynthError::Format { .. } => Exit::Internal,
        };
        Failure::new(exit, one_line(&error))
    })?;
    match arguments.json {
        true => say(&format!("{}\n", serde_json::to_string(&written).map_err(unprintable)?)),
        false => say(&format!("{written}\n")),
    }
}

fn unprintable(error: serde_json::Error) -> Failure {
    Failure::new(Exit::Internal, format!("cannot write as JSON: {error}"))
}
