// SPDX-License-Identifier: Apache-2.0

//! [`ChatCommand`]: the commands of a conversation, which begin with `/`.

use std::path::PathBuf;

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ChatCommand {
    Help,
    Clear,
    /// `None` shows the system message.
    System(Option<String>),
    /// Name and value; `None` shows the parameters.
    Set(Option<(String, String)>),
    Show,
    Tools,
    Tokens,
    Save(PathBuf),
    Load(PathBuf),
    Retry,
    Undo,
    Quit,
}

/// Why a line with `/` is no command.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ChatCommandError {
    #[error("no command is called {name}; there are {}", command_names().join(", "))]
    Unknown { name: String },
    #[error("write {usage}")]
    Arguments { usage: &'static str },
}

struct CommandEntry {
    /// The first name is that of the help, the others are those of similar programs.
    names: &'static [&'static str],
    usage: &'static str,
    effect: &'static str,
}

const COMMANDS: [CommandEntry; 12] = [
    entry(&["/help", "/?"], "/help", "show this"),
    entry(&["/set"], "/set [NAME VALUE]", "set a sampling parameter, such as /set temperature 0.7"),
    entry(&["/system"], "/system [TEXT]", "show or set the system message; \"\" removes it"),
    entry(&["/show"], "/show", "show server, model, parameters and system message"),
    entry(&["/tools"], "/tools", "show the tools, and servers of tools that have failed"),
    entry(&["/tokens"], "/tokens", "show the tokens of the last answer and of the chat"),
    entry(&["/retry", "/regen"], "/retry", "answer the last question again"),
    entry(&["/undo"], "/undo", "remove the last question and its answer"),
    entry(&["/clear"], "/clear", "forget the conversation, except the system message"),
    entry(&["/save"], "/save FILE", "write the conversation as JSON"),
    entry(&["/load"], "/load FILE", "go on with a saved conversation"),
    entry(&["/quit", "/exit", "/bye"], "/quit", "end the chat, as Ctrl-D does"),
];

const fn entry(names: &'static [&'static str], usage: &'static str, effect: &'static str) -> CommandEntry {
    CommandEntry { names, usage, effect }
}

/// The names of the help, without the further ones.
pub(crate) fn command_names() -> Vec<&'static str> {
    COMMANDS.iter().map(|command| command.names[0]).collect()
}

pub(crate) fn help() -> String {
    let mut text: String =
        COMMANDS.iter().map(|command| format!("  {:20} {}\n", command.usage, command.effect)).collect();
    text += "A message of several lines: begin and end it with \"\"\", end a line with \\, press \
             Alt-Enter, or paste it.\nCtrl-C stops an answer and keeps what has come; at the prompt \
             it clears the line, twice it ends the chat.\n";
    text
}

/// The command of a line. `None` if the line is a message, as a path such as `/usr/bin` is.
pub(crate) fn parse(line: &str) -> Option<Result<ChatCommand, ChatCommandError>> {
    let (name, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
    let word = name.strip_prefix('/')?;
    if word != "?" && !word.chars().all(|character| character.is_ascii_lowercase()) {
        return None;
    }
    let Some(entry) = COMMANDS.iter().find(|command| command.names.contains(&name)) else {
        return Some(Err(ChatCommandError::Unknown { name: name.to_owned() }));
    };
    let parsed = command(entry.names[0], rest.trim());
    Some(parsed.ok_or(ChatCommandError::Arguments { usage: entry.usage }))
}

/// `None` if the arguments are wrong.
fn command(name: &str, rest: &str) -> Option<ChatCommand> {
    let alone = |command| rest.is_empty().then_some(command);
    match name {
        "/help" => Some(ChatCommand::Help),
        "/clear" => alone(ChatCommand::Clear),
        "/show" => alone(ChatCommand::Show),
        "/tools" => alone(ChatCommand::Tools),
        "/tokens" => alone(ChatCommand::Tokens),
        "/retry" => alone(ChatCommand::Retry),
        "/undo" => alone(ChatCommand::Undo),
        "/quit" => alone(ChatCommand::Quit),
        "/system" => {
            let text = if rest == "\"\"" { "" } else { rest };
            Some(ChatCommand::System((!rest.is_empty()).then(|| text.to_owned())))
        }
        "/set" if rest.is_empty() => Some(ChatCommand::Set(None)),
        "/set" => {
            let (name, value) = rest.split_once(char::is_whitespace)?;
            Some(ChatCommand::Set(Some((name.to_owned(), value.trim().to_owned()))))
        }
        "/save" | "/load" if rest.is_empty() => None,
        "/save" => Some(ChatCommand::Save(rest.into())),
        "/load" => Some(ChatCommand::Load(rest.into())),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_with_a_slash_are_commands_unless_they_are_paths() {
        let parsed = |line| parse(line).unwrap().unwrap();
        assert_eq!(parsed("/bye"), ChatCommand::Quit);
        assert_eq!(parsed("/?"), ChatCommand::Help);
        let temperature = ("temperature".to_owned(), "0.7".to_owned());
        assert_eq!(parsed("/set temperature  0.7"), ChatCommand::Set(Some(temperature)));
        assert_eq!(parsed("/system be\nshort"), ChatCommand::System(Some("be\nshort".to_owned())));
        assert_eq!(parsed("/system \"\""), ChatCommand::System(Some(String::new())));
        assert_eq!(parsed("/system"), ChatCommand::System(None));
        assert_eq!(parsed("/save my file"), ChatCommand::Save("my file".into()));
        for message in ["/usr/bin/env is what?", "hello /quit", "", "//"] {
            assert_eq!(parse(message), None, "{message}");
        }
    }

    #[test]
    fn errors_of_commands_name_what_is_allowed() {
        let error = |line| parse(line).unwrap().unwrap_err().to_string();
        assert!(error("/quite").contains("/help, /set"), "{}", error("/quite"));
        assert_eq!(error("/set temperature"), "write /set [NAME VALUE]");
        assert_eq!(error("/save"), "write /save FILE");
        assert_eq!(error("/undo 3"), "write /undo");
    }

    #[test]
    fn every_command_of_the_help_is_one() {
        for entry in &COMMANDS {
            let line = format!("{} a b", entry.names[0]);
            assert!(
                command(entry.names[0], "").or_else(|| parse(&line)?.ok()).is_some(),
                "{} has no meaning",
                entry.usage
            );
            assert!(help().contains(entry.usage));
        }
    }
}
