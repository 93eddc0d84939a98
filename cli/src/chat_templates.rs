// SPDX-License-Identifier: Apache-2.0

//! Chat templates that the configuration names, in place of those in the model files.
//!
//! A template is a program that the router runs. So each is read once and tried in a child with
//! limits before a process is configured with it. Workers get its text and not its path: a file
//! that changes or disappears has no effect until the configuration is read again.

use std::io;
use std::path::{Path, PathBuf};

use service::Exit;
use service::exit::exit_for_io_error;
use supervisor::RecordedModel;
use toml::Value;
use weight_server::{GivenTemplate, check_chat_template};
use worker::{ChatTemplateSetting, CheckedChatTemplate, WorkerConfig};

use crate::bounded_read::read_files;
use crate::cli_error::{CliError, CliResult};
use crate::running_fleet::block_on;
use crate::sized_model::SizedModel;

/// What happens if a template cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UnusableTemplate {
    /// It is an error.
    Refuse,
    /// If the fleet, which still runs, has a template from the same file, that one goes on.
    KeepPresent,
}

/// Reads the templates of these models and tries them. A template that `present` has with the same
/// model file is not tried again: the children of a dead supervisor wait 10 s for the next one.
pub(crate) async fn read_chat_templates(
    models: &mut [SizedModel],
    present: &[RecordedModel],
    unusable: UnusableTemplate,
) -> CliResult {
    let files = models.iter().filter_map(|model| model.chat_template_file().map(Path::to_owned)).collect();
    let mut texts = read_texts(files).into_iter();
    for model in models {
        let Some(file) = model.chat_template_file().map(Path::to_owned) else { continue };
        let Some(text) = texts.next() else { break };
        let known = present.iter().find(|known| known.name == model.name);
        let present = known.and_then(present_template).filter(|present| present.file == file);
        let is_tried = |text: &str| {
            known.is_some_and(|known| known.files == model.files())
                && present.as_ref().is_some_and(|present| present.text == text)
        };
        let checked = match text {
            Ok(text) if is_tried(&text) => Ok(text),
            Ok(text) => check(Some(&model.path), &file, text).await,
            Err(error) => Err(error),
        };
        let template = match (checked, present) {
            (Ok(text), _) => CheckedChatTemplate { file, text },
            (Err(error), Some(present)) if unusable == UnusableTemplate::KeepPresent => {
                tracing::error!(
                    model = model.name,
                    error = error.message(),
                    "cannot use the chat template: the present one goes on"
                );
                present
            }
            (Err(error), _) => return Err(error),
        };
        model.set_chat_template(template);
    }
    Ok(())
}

/// Reads and tries the template of a worker that no supervisor has configured.
pub(crate) fn read_workers_chat_template(worker: &mut WorkerConfig) -> CliResult {
    if let Some(ChatTemplateSetting::File(file)) = &worker.chat_template {
        let file = file.clone();
        if let Some(text) = read_texts(vec![file.clone()]).pop() {
            let text = block_on(check(None, &file, text?))?;
            worker.chat_template = Some(ChatTemplateSetting::Checked(CheckedChatTemplate { file, text }));
        }
    }
    Ok(())
}

/// The template with which the workers of a running fleet were configured.
fn present_template(known: &RecordedModel) -> Option<CheckedChatTemplate> {
    let table = known.worker_config.get("chat-template")?;
    let text = |key: &str| table.get(key).and_then(Value::as_str).map(str::to_owned);
    Some(CheckedChatTemplate { file: PathBuf::from(text("file")?), text: text("text")? })
}

fn read_texts(files: Vec<PathBuf>) -> Vec<CliResult<String>> {
    // One byte more than allowed shows that a template is too long.
    let read = read_files(files.clone(), text::MAX_TEMPLATE_BYTES as u64 + 1);
    files.iter().zip(read).map(|(file, read)| text_of(file, read)).collect()
}

fn text_of(file: &Path, read: io::Result<Vec<u8>>) -> CliResult<String> {
    let refused = |exit, problem: &dyn std::fmt::Display| {
        CliError::new(exit, format!("cannot read the chat template {}: {problem}", file.display()))
    };
    let bytes = read.map_err(|error| refused(exit_for_template(&error), &error))?;
    if bytes.len() > text::MAX_TEMPLATE_BYTES {
        let problem = format!("it has more than {} bytes", text::MAX_TEMPLATE_BYTES);
        return Err(refused(Exit::ModelRefused, &problem));
    }
    String::from_utf8(bytes).map_err(|_| refused(Exit::ModelRefused, &"it is not UTF-8 text"))
}

/// A template that cannot be read is part of a model that cannot be used.
fn exit_for_template(error: &io::Error) -> Exit {
    match exit_for_io_error(error) {
        Exit::OutOfResources => Exit::OutOfResources,
        _ => Exit::ModelRefused,
    }
}

async fn check(model: Option<&Path>, file: &Path, text: String) -> CliResult<String> {
    check_chat_template(model, GivenTemplate { file, text: &text }).await?;
    Ok(text)
}
