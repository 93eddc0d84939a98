// SPDX-License-Identifier: Apache-2.0

//! `ballast completions` and `ballast man`: what shells and `man` read, made from the definition of
//! the command line. `scripts/install` and the Debian package install both.

use std::fs;
use std::path::{Path, PathBuf};

use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;
use service::Exit;

use crate::arguments::Cli;
use crate::cli_error::{CliError, CliResult, IoContext};
use crate::terminal::print_stdout;

#[derive(clap::Args)]
pub(crate) struct CompletionsArguments {
    /// The shell that reads the script
    shell: Shell,
}

#[derive(clap::Args)]
pub(crate) struct ManArguments {
    /// Folder for the pages; made if it is missing
    #[arg(value_name = "DIR")]
    folder: PathBuf,
}

/// The command line without hidden subcommands, which completion scripts would offer.
fn visible_command() -> Command {
    let whole = Cli::command();
    let visible = whole.get_subcommands().filter(|command| !command.is_hide_set()).cloned();
    Command::new(env!("CARGO_BIN_NAME"))
        .version(env!("CARGO_PKG_VERSION"))
        .propagate_version(true)
        .about(whole.get_about().cloned().unwrap_or_default())
        .args(whole.get_arguments().cloned())
        .subcommands(visible)
}

pub(crate) fn completions(arguments: CompletionsArguments) -> CliResult {
    let mut command = visible_command();
    let name = command.get_name().to_owned();
    // The library panics if it cannot write.
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut command, name, &mut script);
    let script =
        String::from_utf8(script).map_err(|error| CliError::new(Exit::Internal, error.to_string()))?;
    print_stdout(&script)
}

pub(crate) fn man(arguments: ManArguments) -> CliResult {
    let folder = arguments.folder;
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let mut command = visible_command();
    // Names each subcommand's page: `ballast-serve`.
    command.build();
    write_pages(&command, &folder)
}

fn write_pages(command: &Command, folder: &Path) -> CliResult {
    let page = Man::new(command.clone());
    let file = folder.join(page.get_filename());
    let mut text = Vec::new();
    page.render(&mut text)
        .and_then(|()| fs::write(&file, &text))
        .with_context(|| format!("cannot write {}", file.display()))?;
    let mut subcommands = command.get_subcommands().filter(|command| command.get_name() != "help");
    subcommands.try_for_each(|command| write_pages(command, folder))
}
