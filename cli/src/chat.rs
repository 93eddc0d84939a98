// SPDX-License-Identifier: Apache-2.0

//! `ballast chat`: a conversation with a model of a fleet of its own, of a running fleet, or of
//! another OpenAI-compatible server.

mod answer;
mod answer_printer;
mod commands;
mod conversation;
mod history_file;
mod inline_markdown;
mod line_editor;
mod markdown;
mod mcp_server;
mod parameters;
mod server;
mod session;
mod styled_text;
mod terminal_modes;
mod toolbox;
mod tools_config;

use std::io::{self, BufRead, IsTerminal};
use std::path::{Path, PathBuf};

pub(crate) use answer_printer::{AnswerPrinter, AnswerStyle};
use line_editor::LineEditor;
pub(crate) use parameters::ChatSamplingArguments;
use server::ChatServer;
use service::{Exit, Notify, Shutdown};
use session::{ChatSession, greet};
use terminal_modes::TerminalModes;
use tokio::sync::mpsc;
use toolbox::Toolbox;
use tracing::Level;

use crate::cli_error::{CliError, CliResult, IoContext};
use crate::fleet_arguments::{ChatTemplateArgument, FleetArguments, model_name};
use crate::fleet_choice::find_fleet;
use crate::running_fleet::{RunningFleet, block_on};
use crate::terminal::print_stderr;

/// Most bytes of a file with an API key.
const KEY_FILE_BYTES_MAX: u64 = 64 << 10;
/// The API key for a URL if there is no file, as for OpenAI's clients.
const KEY_VARIABLE: &str = "OPENAI_API_KEY";

#[derive(clap::Args)]
#[command(
    mut_arg("name", |name| name.conflicts_with_all(OF_A_FLEET)),
    mut_arg("url", |url| url.conflicts_with_all(OF_A_FLEET)),
    mut_arg("workers", |workers| workers.requires("model")),
    mut_arg("routing", |routing| routing.requires("model")),
    mut_group("ChatTemplateArgument", |group| group.requires("model")),
    mut_group("WorkerArguments", |group| group.requires("model"))
)]
pub(crate) struct ChatArguments {
    /// Model file, for a fleet of this chat's own; it must have a chat template. Without it, a
    /// running fleet answers
    #[arg(value_name = "MODEL.gguf", conflicts_with_all = ["name", "url"])]
    model: Option<PathBuf>,
    #[command(flatten)]
    place: ServerSelector,
    /// System message at the start of the conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Do not show the reasoning of models that reason
    #[arg(long)]
    hide_reasoning: bool,
    /// Neither read nor write the history of prompts ($XDG_STATE_HOME/ballast/chat_history)
    #[arg(long)]
    no_history: bool,
    /// Commands whose tools the model may call, by the Model Context Protocol over standard input
    /// and output. Each call is asked for before
    #[arg(long, value_name = "FILE.toml")]
    tools: Option<PathBuf>,
    /// Tool that is called without a question; may be given several times
    #[arg(long, value_name = "NAME", requires = "tools", value_delimiter = ',')]
    allow_tools: Vec<String>,
    #[command(flatten)]
    sampling: ChatSamplingArguments,
    #[command(flatten)]
    own: OwnFleetArguments,
}

/// The fleet of a chat's own. Its runtime directory also selects a running fleet.
#[derive(clap::Args)]
struct OwnFleetArguments {
    #[command(flatten)]
    chat_template: ChatTemplateArgument,
    #[command(flatten)]
    fleet: FleetArguments,
}

/// Groups of arguments, and arguments, that a server that runs has decided already.
const OF_A_FLEET: [&str; 4] = ["ChatTemplateArgument", "WorkerArguments", "workers", "routing"];

/// A server that runs.
#[derive(clap::Args)]
pub(crate) struct ServerSelector {
    /// Model of the running fleet or of --url [default: the only one]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// OpenAI-compatible server, such as http://localhost:8080, instead of a fleet of this user
    #[arg(long, value_name = "URL", conflicts_with = "runtime_dir")]
    url: Option<String>,
    /// File that holds the API key for --url [default: the variable OPENAI_API_KEY]
    #[arg(long, value_name = "FILE", requires = "url")]
    api_key_file: Option<PathBuf>,
}

impl ServerSelector {
    /// The server, and the name of the model.
    pub(crate) async fn server(&self, runtime_dir: Option<&Path>) -> CliResult<(ChatServer, String)> {
        let server = match &self.url {
            Some(url) => ChatServer::at_url(url, self.api_key()?)?,
            None => ChatServer::of_fleet(&find_fleet(runtime_dir).await?)?,
        };
        let model = server.model(self.name.as_deref()).await?;
        Ok((server, model))
    }

    fn api_key(&self) -> CliResult<Option<String>> {
        let Some(file) = &self.api_key_file else { return Ok(std::env::var(KEY_VARIABLE).ok()) };
        let read = crate::bounded_read::read_files(vec![file.clone()], KEY_FILE_BYTES_MAX).pop();
        let read = read.unwrap_or_else(|| Err(io::ErrorKind::NotFound.into()));
        let bytes = read.with_context(|| format!("cannot read the API key in {}", file.display()))?;
        let key = String::from_utf8(bytes).ok().map(|key| key.trim().to_owned());
        match key.filter(|key| !key.is_empty() && key.chars().all(|c| c.is_ascii_graphic())) {
            Some(key) => Ok(Some(key)),
            None => {
                let text = format!("{} holds no API key: one line of ASCII text", file.display());
                Err(CliError::new(Exit::Usage, text))
            }
        }
    }
}

pub(crate) fn run(arguments: ChatArguments) -> CliResult {
    service::logging::init("supervisor", Level::ERROR);
    block_on(async {
        match &arguments.model {
            Some(model) => chat_with_own_fleet(model, &arguments).await,
            None => {
                let shutdown = Shutdown::install().with_context(|| "cannot listen to signals".to_owned())?;
                let conversed = async {
                    let place = arguments.own.fleet.runtime_dir();
                    let (server, model) = arguments.place.server(place).await?;
                    converse(server, model, &arguments, &shutdown).await
                };
                tokio::select! {
                    conversed = conversed => conversed,
                    () = shutdown.requested() => Err(CliError::interrupted()),
                }
            }
        }
    })
}

async fn chat_with_own_fleet(model: &Path, arguments: &ChatArguments) -> CliResult {
    let mut config = arguments.own.fleet.clone().config(model, None);
    let chat_template = arguments.own.chat_template.file();
    // A given template is tried when the fleet starts.
    if chat_template.is_none() {
        check_own_template(model).await?;
    }
    if let Some(served) = config.models.first_mut() {
        served.chat_template = chat_template;
    }
    let fleet = RunningFleet::start(&config, Notify::disabled(), Level::ERROR).await?;
    fleet
        .finish(async |fleet| {
            fleet.ready().await?;
            let server = ChatServer::of_fleet(fleet.directory())?;
            converse(server, model_name(model), arguments, &fleet.shutdown).await
        })
        .await
}

/// Refuses a model without a usable chat template before its weights are loaded.
async fn check_own_template(model: &Path) -> CliResult {
    let checked = weight_server::check_text_of_file(model).await?;
    let advice = match checked.has_tokenizer {
        true => "; name another one with --chat-template FILE",
        false => "",
    };
    match checked.chat_problem.as_str() {
        "" => Ok(()),
        problem => {
            let text = format!("cannot chat with {}: {problem}{advice}", model.display());
            Err(CliError::new(Exit::ModelRefused, text))
        }
    }
}

async fn converse(
    server: ChatServer,
    model: String,
    arguments: &ChatArguments,
    shutdown: &Shutdown,
) -> CliResult {
    let parameters = arguments.sampling.parameters();
    let shows_reasoning = !arguments.hide_reasoning;
    let system = arguments.system.clone();
    let mut session = ChatSession::new(server, model.clone(), system, parameters, shows_reasoning);
    if let Some(file) = &arguments.tools {
        let (toolbox, faults) = Toolbox::start(file, &arguments.allow_tools).await?;
        faults.iter().try_for_each(|fault| print_stderr(&format!("{fault}\n")))?;
        session = session.with_toolbox(toolbox);
    }
    let outcome = converse_with(&mut session, &model, arguments, shutdown).await;
    session.close().await;
    outcome
}

/// Converses at a prompt if standard input and output are a terminal. Otherwise each line of
/// standard input is a message.
async fn converse_with(
    session: &mut ChatSession,
    model: &str,
    arguments: &ChatArguments,
    shutdown: &Shutdown,
) -> CliResult {
    if io::stdin().is_terminal() && io::stdout().is_terminal() {
        // A signal ends the command while the prompt has the terminal in raw mode.
        let modes = TerminalModes::save();
        let mut interrupts = shutdown.interrupts();
        let history = if arguments.no_history { None } else { history_file::default_path() };
        let editor = LineEditor::start(history)?;
        greet(model).await?;
        return session.converse(&editor, &modes, &mut interrupts).await;
    }
    let mut lines = lines_of_stdin();
    while let Some(line) = lines.recv().await {
        let line = line.with_context(|| "cannot read standard input".to_owned())?;
        if !line.trim().is_empty() {
            session.answer_line(line).await?;
        }
    }
    Ok(())
}

/// Reads standard input on a thread of its own, because the read blocks; one line ahead.
fn lines_of_stdin() -> mpsc::Receiver<io::Result<String>> {
    let (sender, receiver) = mpsc::channel(1);
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            let is_last = line.is_err();
            if sender.blocking_send(line).is_err() || is_last {
                return;
            }
        }
    });
    receiver
}
