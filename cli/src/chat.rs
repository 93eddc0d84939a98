// SPDX-License-Identifier: Apache-2.0

//! `ballast chat`: a conversation on the terminal with a model of a temporary fleet.

use std::io::{self, BufRead, IsTerminal};
use std::path::{Path, PathBuf};

use proto::v1::generate_frame::Frame;
use proto::v1::generate_request::Prompt;
use proto::v1::{Chat, ChatMessage};
use service::{Exit, Notify};
use tokio::sync::mpsc;
use tracing::Level;

use crate::cli_error::{CliError, CliResult, IoContext};
use crate::fleet_arguments::{ChatTemplateArgument, FleetArguments};
use crate::generate::SamplingArguments;
use crate::running_fleet::{RunningFleet, block_on};
use crate::terminal::stream_stdout;

#[derive(clap::Args)]
pub(crate) struct ChatArguments {
    /// Model file; it must have a chat template
    #[arg(value_name = "MODEL.gguf")]
    model: PathBuf,
    /// System message at the start of the conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    #[command(flatten)]
    chat_template: ChatTemplateArgument,
    #[command(flatten)]
    sampling: SamplingArguments,
    #[command(flatten)]
    fleet: FleetArguments,
}

pub(crate) fn run(arguments: ChatArguments) -> CliResult {
    service::logging::init("supervisor", Level::ERROR);
    let mut config = arguments.fleet.clone().config(&arguments.model, None);
    let chat_template = arguments.chat_template.file();
    block_on(async {
        // A given template is tried when the fleet starts.
        if chat_template.is_none() {
            check_own_template(&arguments.model).await?;
        }
        if let Some(model) = config.models.first_mut() {
            model.chat_template = chat_template;
        }
        let fleet = RunningFleet::start(&config, Notify::disabled(), Level::ERROR).await?;
        fleet
            .finish(async |fleet| {
                fleet.ready().await?;
                converse(fleet, &arguments).await
            })
            .await
    })
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

/// Runs turns of the conversation until standard input ends.
async fn converse(fleet: &RunningFleet, arguments: &ChatArguments) -> CliResult {
    let message = |role: &str, content: String| ChatMessage { role: role.to_owned(), content };
    let mut messages: Vec<ChatMessage> =
        arguments.system.iter().map(|text| message("system", text.clone())).collect();
    let mut lines = lines_of_stdin();
    loop {
        if std::io::stdin().is_terminal() {
            stream_stdout("> ").await?;
        }
        let Some(line) = lines.recv().await else { return stream_stdout("\n").await };
        let line = line.with_context(|| "cannot read standard input".to_owned())?;
        if line.trim().is_empty() {
            continue;
        }
        messages.push(message("user", line));
        let answer = answer(fleet, arguments, messages.clone()).await?;
        messages.push(message("assistant", answer));
    }
}

/// Streams one reply to standard output and returns it.
async fn answer(
    fleet: &RunningFleet,
    arguments: &ChatArguments,
    messages: Vec<ChatMessage>,
) -> CliResult<String> {
    let refused = |status: tonic::Status| CliError::from_status("the fleet", &status);
    let request = arguments.sampling.request(Prompt::Chat(Chat { messages }));
    let mut frames = fleet.client()?.generate(request).await.map_err(refused)?.into_inner();
    let mut text = String::new();
    while let Some(frame) = frames.message().await.map_err(refused)? {
        match frame.frame {
            Some(Frame::Delta(piece)) => {
                text.push_str(&piece.text);
                stream_stdout(piece.text).await?;
            }
            Some(Frame::Finished(_)) => {
                stream_stdout("\n").await?;
                return Ok(text);
            }
            Some(Frame::Started(_)) | None => {}
        }
    }
    Err(CliError::new(Exit::PeerLost, "the stream ended without a final frame"))
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
