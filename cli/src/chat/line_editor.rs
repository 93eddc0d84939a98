// SPDX-License-Identifier: Apache-2.0

//! [`LineEditor`]: the prompt on a terminal, with history, completion and messages of several
//! lines.
//!
//! Reading blocks, so a thread does it. The terminal is in raw mode then, in which Ctrl-C is a key.

use std::path::PathBuf;

use rustyline::completion::{Completer, FilenameCompleter, Pair};
use rustyline::error::{ReadlineError, Signal};
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Cmd, Config, Context, Editor, EventHandler, Helper, KeyCode, KeyEvent, Modifiers};
use service::Exit;
use tokio::sync::{mpsc, oneshot};

use super::commands::command_names;
use super::history_file;
use super::parameters::ChatParameters;
use crate::cli_error::{CliError, CliResult};
use crate::terminal::print_stderr;

const PROMPT: &str = "> ";
/// Begins and ends a message of several lines.
const QUOTES: &str = "\"\"\"";
/// Commands whose argument is a file.
const FILE_COMMANDS: [&str; 2] = ["/save ", "/load "];

/// What the user did at the prompt.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Entered {
    Text(String),
    /// Ctrl-C.
    Interrupt,
    /// Ctrl-D.
    End,
}

struct Read {
    prompt: String,
    /// A message or a command, which the history keeps.
    is_message: bool,
    reply: oneshot::Sender<rustyline::Result<Entered>>,
}

pub(crate) struct LineEditor {
    /// The thread ends when this is dropped.
    reads: mpsc::Sender<Read>,
}

impl LineEditor {
    /// `history` is the file of the history, if there is to be one.
    pub(crate) fn start(history: Option<PathBuf>) -> CliResult<Self> {
        let mut editor = open_editor().map_err(editor_error)?;
        let history = history.filter(|file| match history_file::prepare(file) {
            Ok(()) => editor.load_history(file).is_ok(),
            Err(error) => {
                // A chat without history is better than none.
                let text = format!("no history of this chat is kept: {}: {error}\n", file.display());
                print_stderr(&text).is_err()
            }
        });
        let (reads, mut requested) = mpsc::channel::<Read>(1);
        let read_on_request = move || {
            while let Some(request) = requested.blocking_recv() {
                let history = history.as_ref().filter(|_| request.is_message);
                let entered = read(&mut editor, &request, history);
                if request.reply.send(entered).is_err() {
                    return;
                }
            }
        };
        std::thread::Builder::new()
            .name("prompt".to_owned())
            .spawn(read_on_request)
            .map_err(|error| editor_error(error.into()))?;
        Ok(Self { reads })
    }

    /// Reads a message or a command.
    pub(crate) async fn read(&self) -> CliResult<Entered> {
        self.request(PROMPT.to_owned(), true).await
    }

    /// Asks a question, which begins a line.
    pub(crate) async fn ask(&self, question: &str) -> CliResult<Entered> {
        self.request(question.to_owned(), false).await
    }

    async fn request(&self, prompt: String, is_message: bool) -> CliResult<Entered> {
        let (reply, entered) = oneshot::channel();
        let gone = || CliError::new(Exit::Internal, "the thread of the prompt has ended");
        self.reads.send(Read { prompt, is_message, reply }).await.map_err(|_| gone())?;
        entered.await.map_err(|_| gone())?.map_err(editor_error)
    }
}

fn editor_error(error: ReadlineError) -> CliError {
    CliError::new(Exit::Internal, format!("cannot read from the terminal: {error}"))
}

fn open_editor() -> rustyline::Result<Editor<PromptHelper, FileHistory>> {
    let config = Config::builder().max_history_size(history_file::ENTRIES_MAX)?.history_ignore_dups(true)?;
    let mut editor = Editor::with_config(config.build())?;
    editor.set_helper(Some(PromptHelper { files: FilenameCompleter::new() }));
    let alt_enter = KeyEvent(KeyCode::Enter, Modifiers::ALT);
    editor.bind_sequence(alt_enter, EventHandler::Simple(Cmd::Newline));
    Ok(editor)
}

fn read(
    editor: &mut Editor<PromptHelper, FileHistory>,
    request: &Read,
    history: Option<&PathBuf>,
) -> rustyline::Result<Entered> {
    loop {
        match editor.readline(&request.prompt) {
            Ok(text) if !request.is_message => return Ok(Entered::Text(text)),
            Ok(text) => {
                editor.add_history_entry(text.as_str())?;
                if let Some(file) = history {
                    // A full disk costs the history, not the chat.
                    let _: rustyline::Result<()> = editor.append_history(file);
                }
                return Ok(Entered::Text(message_of(&text)));
            }
            Err(ReadlineError::Interrupted | ReadlineError::Signal(Signal::Interrupt)) => {
                return Ok(Entered::Interrupt);
            }
            Err(ReadlineError::Eof) => return Ok(Entered::End),
            Err(ReadlineError::Signal(_)) => {}
            Err(error) => return Err(error),
        }
    }
}

/// Whether more lines follow.
fn is_open(input: &str) -> bool {
    match input.strip_prefix(QUOTES) {
        Some(rest) => !rest.contains(QUOTES),
        None => input.ends_with('\\'),
    }
}

/// The message without what marks its lines.
fn message_of(input: &str) -> String {
    match input.strip_prefix(QUOTES) {
        Some(rest) => {
            let (inside, after) = rest.split_once(QUOTES).unwrap_or((rest, ""));
            format!("{}{after}", inside.trim_matches('\n'))
        }
        None => input.replace("\\\n", "\n"),
    }
}

struct PromptHelper {
    files: FilenameCompleter,
}

impl Validator for PromptHelper {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        Ok(match is_open(context.input()) {
            true => ValidationResult::Incomplete,
            false => ValidationResult::Valid(None),
        })
    }
}

impl Completer for PromptHelper {
    type Candidate = Pair;

    fn complete(
        &self,
        line: &str,
        position: usize,
        _: &Context<'_>,
    ) -> rustyline::Result<(usize, Vec<Pair>)> {
        let typed = line.get(..position).unwrap_or(line);
        if FILE_COMMANDS.iter().any(|command| typed.starts_with(command)) {
            return self.files.complete_path(line, position);
        }
        let (start, words) = match typed.strip_prefix("/set ") {
            Some(_) => ("/set ".len(), ChatParameters::names().to_vec()),
            None => (0, command_names()),
        };
        let begins = |word: &&str| typed.starts_with('/') && word.starts_with(&typed[start..]);
        let pair = |word: &str| Pair { display: word.to_owned(), replacement: format!("{word} ") };
        Ok((start, words.into_iter().filter(begins).map(pair).collect()))
    }
}

impl Hinter for PromptHelper {
    type Hint = String;
}

impl Highlighter for PromptHelper {}

impl Helper for PromptHelper {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_several_lines_are_marked_by_quotes_or_backslashes() {
        for (input, message) in [
            ("\"\"\"\na\n\nb\n\"\"\"", "a\n\nb"),
            ("\"\"\"a\"\"\" b", "a b"),
            ("a\\\nb", "a\nb"),
            ("a\nb", "a\nb"),
            ("\"\" a", "\"\" a"),
        ] {
            assert!(!is_open(input), "{input:?}");
            assert_eq!(message_of(input), message, "{input:?}");
        }
        for input in ["\"\"\"", "\"\"\"a\nb \"\"", "a\\", "a\\\nb\\"] {
            assert!(is_open(input), "{input:?}");
        }
    }
}
