// SPDX-License-Identifier: Apache-2.0

//! [`ChatSession`]: a conversation with a model, on a terminal or from lines of standard input.

use std::time::Duration;

use serde_json::{Value, json};
use service::Exit;
use service::printable::excerpt;
use service::shutdown::Interrupts;

use super::answer::{AnswerUsage, ChatAnswer};
use super::answer_printer::{AnswerPrinter, AnswerStyle};
use super::commands::{self, ChatCommand};
use super::conversation::{ChatConversation, ChatTurnMessage, MessageRole, ToolCall};
use super::line_editor::{Entered, LineEditor};
use super::parameters::ChatParameters;
use super::server::{ChatServer, ChatServerError};
use super::terminal_modes::TerminalModes;
use super::toolbox::Toolbox;
use crate::cli_error::{CliError, CliResult};
use crate::terminal::{print_stderr, print_stdout, stream_stdout, stream_styled};

/// Answers of one turn that call tools.
const TOOL_ROUNDS_MAX: usize = 16;
/// Characters of a call and of its result that are shown.
const CALL_CHARS_MAX: usize = 4000;
const RESULT_CHARS_MAX: usize = 200;

/// How an answer, or a turn, ended.
enum AnswerEnd {
    Complete,
    /// Ctrl-C. Dropping the stream has stopped the generation.
    Interrupted,
    Failed(ChatServerError),
    TooManyCalls,
}

/// The user at the terminal.
struct TerminalUser<'a> {
    editor: &'a LineEditor,
    interrupts: &'a mut Interrupts,
}

/// Resolves at Ctrl-C.
async fn interrupted(user: &mut Option<TerminalUser<'_>>) {
    match user {
        Some(user) => user.interrupts.next().await,
        None => std::future::pending().await,
    }
}

enum Permission {
    Granted,
    Refused,
    Interrupted,
}

/// Tokens of the last answer and of the whole chat.
#[derive(Debug, Default)]
struct ChatTokenCounts {
    last: AnswerUsage,
    last_duration: Duration,
    prompt_tokens: u64,
    completion_tokens: u64,
}

impl ChatTokenCounts {
    fn add(&mut self, usage: AnswerUsage, duration: Duration) {
        (self.last, self.last_duration) = (usage, duration);
        self.prompt_tokens += usage.prompt_tokens;
        self.completion_tokens += usage.completion_tokens;
    }
}

impl std::fmt::Display for ChatTokenCounts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let AnswerUsage { prompt_tokens, completion_tokens } = self.last;
        let rate = completion_tokens as f64 / self.last_duration.as_secs_f64().max(1e-3);
        writeln!(
            f,
            "last answer  {prompt_tokens} prompt + {completion_tokens} answer tokens, {rate:.1} tokens/s"
        )?;
        let (prompts, answers) = (self.prompt_tokens, self.completion_tokens);
        writeln!(f, "this chat    {prompts} prompt + {answers} answer tokens")
    }
}

pub(crate) struct ChatSession {
    server: ChatServer,
    model: String,
    conversation: ChatConversation,
    parameters: ChatParameters,
    toolbox: Toolbox,
    style: AnswerStyle,
    shows_reasoning: bool,
    tokens: ChatTokenCounts,
}

impl ChatSession {
    pub(crate) fn new(
        server: ChatServer,
        model: String,
        system: Option<String>,
        parameters: ChatParameters,
        shows_reasoning: bool,
    ) -> Self {
        Self {
            server,
            model,
            conversation: ChatConversation::new(system),
            parameters,
            toolbox: Toolbox::default(),
            style: AnswerStyle::of_stdout(),
            shows_reasoning,
            tokens: ChatTokenCounts::default(),
        }
    }

    pub(crate) fn with_toolbox(self, toolbox: Toolbox) -> Self {
        Self { toolbox, ..self }
    }

    /// Ends the servers of tools.
    pub(crate) async fn close(self) {
        self.toolbox.close().await;
    }

    /// Converses until the user ends it. An error of an answer is printed, and the chat goes on.
    pub(crate) async fn converse(
        &mut self,
        editor: &LineEditor,
        modes: &TerminalModes,
        interrupts: &mut Interrupts,
    ) -> CliResult {
        let mut was_interrupted = false;
        loop {
            modes.send_signals(false);
            let text = match editor.read().await? {
                Entered::End => return Ok(()),
                Entered::Interrupt if was_interrupted => return Ok(()),
                Entered::Interrupt => {
                    was_interrupted = true;
                    print_stderr("Ctrl-C again, Ctrl-D or /quit ends the chat\n")?;
                    continue;
                }
                Entered::Text(text) => text,
            };
            was_interrupted = false;
            if text.trim().is_empty() {
                continue;
            }
            match commands::parse(&text) {
                None => {
                    self.conversation.ask(text);
                    self.answer_on_terminal(editor, modes, interrupts).await?;
                }
                Some(Ok(ChatCommand::Quit)) => return Ok(()),
                Some(Ok(ChatCommand::Retry)) => match self.conversation.drop_answer() {
                    true => self.answer_on_terminal(editor, modes, interrupts).await?,
                    false => print_stderr("there is no question yet\n")?,
                },
                Some(Ok(command)) => match self.execute(command) {
                    Ok(text) => print_stdout(&text)?,
                    Err(failure) => print_stderr(&format!("{}\n", failure.message()))?,
                },
                Some(Err(error)) => print_stderr(&format!("{error}\n"))?,
            }
        }
    }

    /// Answers a line of an input that is no terminal. An error ends the chat.
    pub(crate) async fn answer_line(&mut self, line: String) -> CliResult {
        self.conversation.ask(line);
        match self.turn(None).await? {
            AnswerEnd::Failed(error) => Err(error.into()),
            AnswerEnd::TooManyCalls => Err(CliError::new(Exit::Internal, too_many_calls())),
            AnswerEnd::Complete | AnswerEnd::Interrupted => Ok(()),
        }
    }

    async fn answer_on_terminal(
        &mut self,
        editor: &LineEditor,
        modes: &TerminalModes,
        interrupts: &mut Interrupts,
    ) -> CliResult {
        interrupts.forget();
        modes.send_signals(true);
        match self.turn(Some(TerminalUser { editor, interrupts })).await? {
            AnswerEnd::Complete => Ok(()),
            AnswerEnd::Interrupted => print_stderr("interrupted; what has come is kept\n"),
            AnswerEnd::TooManyCalls => print_stderr(&format!("{}\n", too_many_calls())),
            AnswerEnd::Failed(error) => {
                print_stderr(&format!("{}\n/retry asks again\n", CliError::from(error).message()))
            }
        }
    }

    /// Answers the last question. Results of tools that the model calls lead to further answers.
    async fn turn(&mut self, mut user: Option<TerminalUser<'_>>) -> CliResult<AnswerEnd> {
        for _ in 0..TOOL_ROUNDS_MAX {
            let end = self.answer(interrupted(&mut user)).await?;
            let last = self.conversation.messages().last();
            let calls = last.map(|message| message.tool_calls.clone()).unwrap_or_default();
            if calls.is_empty() || !matches!(end, AnswerEnd::Complete) {
                return Ok(end);
            }
            if self.call_tools(&calls, &mut user).await?.is_none() {
                return Ok(AnswerEnd::Interrupted);
            }
        }
        Ok(AnswerEnd::TooManyCalls)
    }

    /// Executes the calls and adds their results to the conversation. After Ctrl-C, the rest has
    /// results too, because chat templates expect them, and this returns `None`.
    async fn call_tools(
        &mut self,
        calls: &[ToolCall],
        user: &mut Option<TerminalUser<'_>>,
    ) -> CliResult<Option<()>> {
        let mut is_interrupted = false;
        for call in calls {
            let result = match is_interrupted {
                true => None,
                false => self.call_tool(call, user).await?,
            };
            is_interrupted = result.is_none();
            let text = result.unwrap_or_else(|| "error: interrupted by the user".to_owned());
            let tool_call_id = Some(call.id.clone());
            self.conversation
                .push(ChatTurnMessage { tool_call_id, ..ChatTurnMessage::new(MessageRole::Tool, text) });
        }
        Ok((!is_interrupted).then_some(()))
    }

    /// The result of a call; `None` after Ctrl-C.
    async fn call_tool(
        &mut self,
        call: &ToolCall,
        user: &mut Option<TerminalUser<'_>>,
    ) -> CliResult<Option<String>> {
        let shown = format!("{} {}", call.function.name, call.function.arguments);
        print_stderr(&format!("tool {}\n", excerpt(&shown, CALL_CHARS_MAX)))?;
        let permission = match (self.toolbox.asks_before(call), user.as_ref()) {
            (false, _) => Permission::Granted,
            (true, None) => Permission::Refused,
            (true, Some(user)) => self.ask(call, user.editor).await?,
        };
        let result = match permission {
            Permission::Refused => "error: the user does not allow this call".to_owned(),
            Permission::Interrupted => return Ok(None),
            Permission::Granted => tokio::select! {
                result = self.toolbox.call(call) => result,
                () = interrupted(user) => return Ok(None),
            },
        };
        print_stderr(&format!("  {}\n", excerpt(&result, RESULT_CHARS_MAX)))?;
        Ok(Some(result))
    }

    async fn ask(&mut self, call: &ToolCall, editor: &LineEditor) -> CliResult<Permission> {
        loop {
            let Entered::Text(text) = editor.ask("run it? [y]es, [n]o, [a]lways: ").await? else {
                return Ok(Permission::Interrupted);
            };
            match text.trim() {
                "y" | "yes" => return Ok(Permission::Granted),
                "n" | "no" => return Ok(Permission::Refused),
                "a" | "always" => {
                    self.toolbox.allow(&call.function.name);
                    return Ok(Permission::Granted);
                }
                _ => {}
            }
        }
    }

    /// Streams the answer to standard output and adds it to the conversation, also a part of it.
    async fn answer(&mut self, interrupted: impl Future<Output = ()>) -> CliResult<AnswerEnd> {
        let body = self.request();
        let mut interrupted = std::pin::pin!(interrupted);
        let opened = tokio::select! {
            opened = self.server.open(&body) => opened,
            () = &mut interrupted => return Ok(AnswerEnd::Interrupted),
        };
        let mut stream = match opened {
            Ok(stream) => stream,
            Err(error) => return Ok(AnswerEnd::Failed(error)),
        };
        let mut printer = AnswerPrinter::new(self.style, self.shows_reasoning);
        let end = loop {
            let next = tokio::select! {
                next = stream.next() => next,
                () = &mut interrupted => break AnswerEnd::Interrupted,
            };
            match next {
                Ok(Some(pieces)) => {
                    let text: String = pieces.iter().map(|piece| printer.piece(piece)).collect();
                    stream_styled(text).await?;
                }
                Ok(None) => break AnswerEnd::Complete,
                Err(error) => break AnswerEnd::Failed(error),
            }
        };
        let duration = stream.began.elapsed();
        let answer = std::mem::take(&mut stream.answer);
        drop(stream);
        stream_styled(printer.finish()).await?;
        self.keep(&answer, &end, duration);
        Ok(end)
    }

    /// A part of an answer is kept if it has text.
    fn keep(&mut self, answer: &ChatAnswer, end: &AnswerEnd, duration: Duration) {
        let is_complete = matches!(end, AnswerEnd::Complete);
        if is_complete || !answer.text.is_empty() {
            self.conversation.push(answer.message(is_complete));
        }
        if let Some(usage) = answer.usage {
            self.tokens.add(usage, duration);
        }
    }

    fn request(&self) -> Value {
        let mut body = json!({
            "model": self.model,
            "messages": self.conversation.messages(),
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        self.parameters.add_to(&mut body);
        let tools = self.toolbox.definitions();
        if !tools.is_empty() {
            body["tools"] = tools.into();
        }
        body
    }

    /// Executes a command that needs no answer. Returns what it has to say.
    fn execute(&mut self, command: ChatCommand) -> CliResult<String> {
        match command {
            ChatCommand::Help => return Ok(commands::help()),
            ChatCommand::Clear => self.conversation.clear(),
            ChatCommand::System(Some(text)) => self.conversation.set_system(&text),
            ChatCommand::System(None) => {
                return Ok(format!("{}\n", self.conversation.system().unwrap_or("no system message")));
            }
            ChatCommand::Set(Some((name, value))) => {
                let set = self.parameters.set(&name, &value);
                set.map_err(|error| CliError::new(Exit::Usage, error.to_string()))?;
            }
            ChatCommand::Set(None) => return Ok(format!("{}\n", self.parameters)),
            ChatCommand::Show => return Ok(self.describe()),
            ChatCommand::Tools => return Ok(self.toolbox.to_string()),
            ChatCommand::Tokens => return Ok(self.tokens.to_string()),
            ChatCommand::Save(file) => {
                self.conversation.save(&file, &self.model)?;
                return Ok(format!("saved in {}\n", file.display()));
            }
            ChatCommand::Load(file) => {
                self.conversation.load(&file)?;
                let messages = self.conversation.messages().len();
                return Ok(format!("{messages} messages of {}\n", file.display()));
            }
            ChatCommand::Undo => {
                if !self.conversation.undo() {
                    return Ok("there is no question yet\n".to_owned());
                }
            }
            ChatCommand::Retry | ChatCommand::Quit => {}
        }
        Ok(String::new())
    }

    fn describe(&self) -> String {
        format!(
            "server      {}\nmodel       {}\nparameters  {}\nsystem      {}\nmessages    {}\n",
            self.server.name(),
            self.model,
            self.parameters,
            self.conversation.system().unwrap_or("-"),
            self.conversation.messages().len(),
        )
    }
}

fn too_many_calls() -> String {
    format!("the model has called tools {TOOL_ROUNDS_MAX} times in a row; ask something else")
}

/// Says how to end and to get help.
pub(crate) async fn greet(model: &str) -> CliResult {
    stream_stdout(format!("{model}: /help shows the commands, Ctrl-D ends the chat\n")).await
}
