// SPDX-License-Identifier: Apache-2.0

//! `ballast run`: one answer of a running fleet, or of another OpenAI-compatible server. A
//! conversation is `ballast chat`; raw text on a fleet of its own is `ballast generate`.

use std::io::{self, IsTerminal, Read};
use std::path::PathBuf;

use serde_json::{Value, json};
use service::{Exit, Shutdown};
use tracing::Level;

use crate::chat::{AnswerPrinter, AnswerStyle, ChatSamplingArguments, ServerSelector};
use crate::cli_error::{CliError, CliResult, IoContext};
use crate::running_fleet::block_on;
use crate::terminal::{print_stdout, stream_styled};

/// Most bytes of a prompt on standard input, because it is read whole.
const PROMPT_BYTES_MAX: u64 = 16 << 20;

#[derive(clap::Args)]
pub(crate) struct RunArguments {
    /// Prompt [default: standard input, if it is no terminal]
    prompt: Option<String>,
    #[command(flatten)]
    place: ServerSelector,
    /// Runtime directory of the fleet [default: that of the only running fleet]
    #[arg(long, value_name = "DIR")]
    runtime_dir: Option<PathBuf>,
    /// System message
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Do not show the reasoning of models that reason
    #[arg(long)]
    hide_reasoning: bool,
    /// Print one JSON object when the answer is complete
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    sampling: ChatSamplingArguments,
}

pub(crate) fn run(arguments: RunArguments) -> CliResult {
    let prompt = match &arguments.prompt {
        Some(prompt) => prompt.clone(),
        None => prompt_of_stdin()?,
    };
    service::logging::init("supervisor", Level::ERROR);
    block_on(async {
        let shutdown = Shutdown::install().with_context(|| "cannot listen to signals".to_owned())?;
        tokio::select! {
            answered = answer(&prompt, &arguments) => answered,
            () = shutdown.requested() => Err(CliError::interrupted()),
        }
    })
}

fn prompt_of_stdin() -> CliResult<String> {
    if io::stdin().is_terminal() {
        let text = "there is no prompt: write ballast run PROMPT, or ballast chat for a conversation";
        return Err(CliError::new(Exit::Usage, text));
    }
    let mut prompt = String::new();
    let read = io::stdin().lock().take(PROMPT_BYTES_MAX + 1).read_to_string(&mut prompt);
    read.with_context(|| "cannot read standard input".to_owned())?;
    match prompt.trim() {
        "" => Err(CliError::new(Exit::Usage, "the prompt on standard input is empty")),
        _ if prompt.len() as u64 > PROMPT_BYTES_MAX => {
            let text = format!("the prompt on standard input is longer than {PROMPT_BYTES_MAX} bytes");
            Err(CliError::new(Exit::Usage, text))
        }
        _ => Ok(prompt),
    }
}

async fn answer(prompt: &str, arguments: &RunArguments) -> CliResult {
    let (server, model) = arguments.place.server(arguments.runtime_dir.as_deref()).await?;
    let system = arguments.system.iter().map(|text| json!({"role": "system", "content": text}));
    let messages: Vec<Value> = system.chain([json!({"role": "user", "content": prompt})]).collect();
    let mut body = json!({
        "model": model, "messages": messages, "stream": true, "stream_options": {"include_usage": true},
    });
    arguments.sampling.parameters().add_to(&mut body);
    let mut stream = server.open(&body).await?;
    let mut printer = AnswerPrinter::new(AnswerStyle::of_stdout(), !arguments.hide_reasoning);
    while let Some(pieces) = stream.next().await? {
        if !arguments.json {
            stream_styled(pieces.iter().map(|piece| printer.piece(piece)).collect()).await?;
        }
    }
    if !arguments.json {
        return stream_styled(printer.finish()).await;
    }
    let answer = &stream.answer;
    let object = json!({
        "model": model,
        "text": answer.text,
        "reasoning": answer.reasoning,
        "finish_reason": answer.finish_reason,
        "usage": answer.usage,
    });
    print_stdout(&format!("{object}\n"))
}
