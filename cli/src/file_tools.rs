// SPDX-License-Identifier: Apache-2.0

//! `ballast inspect` and `ballast synth`: commands on model files that need no fleet.

use std::io::ErrorKind;

use service::exit::one_line;
use service::{Exit, HasExit};

use crate::cli_error::{CliError, CliResult};
use crate::inspect::{InspectArguments, inspect};
use crate::running_fleet::block_on;
use crate::synth::{SynthError, SynthOptions, synth};
use crate::terminal::print_stdout;

#[derive(clap::Args)]
pub(crate) struct SynthArguments {
    #[command(flatten)]
    synth: SynthOptions,
    /// Print one JSON object about the written file
    #[arg(long)]
    json: bool,
}

pub(crate) fn run_inspect(arguments: InspectArguments) -> CliResult {
    let text = block_on(async { Ok(weight_server::check_text_of_file(&arguments.model).await) })?;
    // A check that did not happen says nothing about the model.
    let text = match text {
        Err(error) if error.exit() != Exit::ModelRefused => return Err(error.into()),
        checked => checked,
    };
    let refused = |text| CliError::new(Exit::ModelRefused, text);
    let report = inspect(&arguments.model, text)?;
    match arguments.json {
        true => print_stdout(&format!("{}\n", serde_json::to_string(&report).map_err(unprintable)?))?,
        false => print_stdout(&report.to_string())?,
    }
    match report.refused() {
        Some(reason) => Err(refused(reason.to_owned())),
        None => Ok(()),
    }
}

pub(crate) fn run_synth(arguments: SynthArguments) -> CliResult {
    let written = synth(&arguments.synth).map_err(|error| {
        let exit = match &error {
            SynthError::File { source, .. } if source.kind() == ErrorKind::NotFound => Exit::Usage,
            SynthError::File { source, .. } => service::exit::exit_for_io_error(source),
            SynthError::Format { .. } => Exit::Internal,
        };
        CliError::new(exit, one_line(&error))
    })?;
    match arguments.json {
        true => print_stdout(&format!("{}\n", serde_json::to_string(&written).map_err(unprintable)?)),
        false => print_stdout(&format!("{written}\n")),
    }
}

fn unprintable(error: serde_json::Error) -> CliError {
    CliError::new(Exit::Internal, format!("cannot write as JSON: {error}"))
}
