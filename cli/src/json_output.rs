// SPDX-License-Identifier: Apache-2.0

//! The error of a command with `--json`: an object on standard output, so that its reader gets a
//! JSON document in any case. People read the line on standard error.
//!
//! A command that has printed its document already says there what failed, as `inspect` and
//! `doctor` do. Commands that print a line for each item end with the error as a further line.

use std::sync::OnceLock;

use clap::ArgMatches;
use serde_json::json;

use crate::cli_error::{CliError, CliResult};
use crate::terminal::{is_stdout_used, print_stdout};

/// The flag of all commands that print JSON.
const FLAG: &str = "json";
/// Commands that print JSON Lines.
const LINES_COMMANDS: [&str; 4] = ["generate", "ps", "serve", "tokenize"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum JsonOutput {
    No,
    Document,
    Lines,
}

static OUTPUT: OnceLock<JsonOutput> = OnceLock::new();

/// Remembers whether the command line asks for JSON.
pub(crate) fn remember(matches: &ArgMatches) {
    let (mut deepest, mut name) = (matches, "");
    while let Some((subcommand, matches)) = deepest.subcommand() {
        (deepest, name) = (matches, subcommand);
    }
    // `bench serve --json FILE` is no flag.
    let is_set = deepest.try_get_one::<bool>(FLAG).ok().flatten().copied().unwrap_or(false);
    // Set once, by `main`.
    let _ = OUTPUT.set(output(is_set, name));
}

/// The same for a command line with an error.
pub(crate) fn remember_unparsed(arguments: impl Iterator<Item = String>) {
    let is_set = arguments.take_while(|argument| argument != "--").any(|argument| argument == "--json");
    let _ = OUTPUT.set(output(is_set, ""));
}

fn output(is_set: bool, command: &str) -> JsonOutput {
    match is_set {
        false => JsonOutput::No,
        true if LINES_COMMANDS.contains(&command) => JsonOutput::Lines,
        true => JsonOutput::Document,
    }
}

/// Whether standard output is JSON.
pub(crate) fn is_requested() -> bool {
    OUTPUT.get().is_some_and(|output| *output != JsonOutput::No)
}

/// Prints the error of the command as JSON, if its reader expects JSON and has none yet.
pub(crate) fn print_error(failure: &CliError) -> CliResult {
    let is_due = match OUTPUT.get() {
        None | Some(JsonOutput::No) => false,
        Some(JsonOutput::Document) => !is_stdout_used(),
        Some(JsonOutput::Lines) => true,
    };
    match is_due {
        true => print_stdout(&format!("{}\n", error_object(failure))),
        false => Ok(()),
    }
}

fn error_object(failure: &CliError) -> serde_json::Value {
    let message = match failure.message() {
        "" => "interrupted",
        message => message,
    };
    json!({"error": {"message": message, "exit_code": failure.exit.code()}})
}
