// SPDX-License-Identifier: Apache-2.0

//! `ballast tokenize`: prints the token ids of texts. It reads only the header of the model file.

use std::path::PathBuf;

use service::Exit;
use service::exit::one_line;
use text::EncodeOptions;

use crate::cli_error::{CliError, CliResult};
use crate::terminal::print_stdout;
use crate::{gguf_file, prompts};

#[derive(clap::Args)]
pub(crate) struct TokenizeArguments {
    /// Model file
    #[arg(value_name = "MODEL.gguf")]
    model: PathBuf,
    /// Text to tokenize
    #[arg(long, value_name = "TEXT", conflicts_with = "prompts", required_unless_present = "prompts")]
    prompt: Option<String>,
    /// File of texts, one JSON string per line
    #[arg(long, value_name = "FILE.jsonl")]
    prompts: Option<PathBuf>,
    /// Treat the text as plain: add no BOS or EOS, and do not parse control tokens
    #[arg(long)]
    no_special: bool,
    /// Print one JSON object per text: {"tokens":[...]}
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: TokenizeArguments) -> CliResult {
    let texts = match (&arguments.prompts, arguments.prompt) {
        (Some(file), _) => prompts::read(file)?,
        (None, prompt) => prompt.into_iter().collect(),
    };
    let model = gguf_file::open(&arguments.model)?;
    let tokenizer = gguf_file::tokenizer(&arguments.model, &model)?;
    let special = !arguments.no_special;
    let options = EncodeOptions { add_special: special, parse_special: special };
    for (index, text) in texts.iter().enumerate() {
        let tokens = tokenizer.encode(text, options).map_err(|error| {
            CliError::new(Exit::Usage, format!("text {}: {}", index + 1, one_line(&error)))
        })?;
        let line = match arguments.json {
            true => serde_json::json!({ "tokens": tokens }).to_string(),
            false => tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(" "),
        };
        print_stdout(&format!("{line}\n"))?;
    }
    Ok(())
}
