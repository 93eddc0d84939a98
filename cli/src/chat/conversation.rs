// SPDX-License-Identifier: Apache-2.0

//! [`Conversation`]: the messages of a chat, as the API and saved files have them.

use std::io::ErrorKind;
use std::path::Path;

use serde::{Deserialize, Serialize};
use service::Exit;

use crate::cli_error::{CliError, CliResult, IoContext};

/// Most bytes of a saved conversation, because the file is read whole.
const FILE_BYTES_MAX: u64 = 64 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum MessageRole {
    System,
    User,
    Assistant,
    Tool,
}

/// A call of a function that the model asks for.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct ToolCall {
    pub(crate) id: String,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) function: CalledFunction,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct CalledFunction {
    pub(crate) name: String,
    /// A JSON object as text.
    pub(crate) arguments: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ChatTurnMessage {
    pub(crate) role: MessageRole,
    pub(crate) content: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) tool_calls: Vec<ToolCall>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tool_call_id: Option<String>,
}

impl ChatTurnMessage {
    pub(crate) fn new(role: MessageRole, content: impl Into<String>) -> Self {
        Self { role, content: content.into(), tool_calls: Vec::new(), tool_call_id: None }
    }
}

#[derive(Serialize, Deserialize)]
struct SavedConversation {
    model: String,
    messages: Vec<ChatTurnMessage>,
}

/// A system message, if there is one, then turns. Each turn begins with a message of the user.
#[derive(Debug, Default)]
pub(crate) struct ChatConversation {
    messages: Vec<ChatTurnMessage>,
}

impl ChatConversation {
    pub(crate) fn new(system: Option<String>) -> Self {
        Self {
            messages: system
                .into_iter()
                .map(|text| ChatTurnMessage::new(MessageRole::System, text))
                .collect(),
        }
    }

    pub(crate) fn messages(&self) -> &[ChatTurnMessage] {
        &self.messages
    }

    pub(crate) fn system(&self) -> Option<&str> {
        self.messages
            .first()
            .filter(|message| message.role == MessageRole::System)
            .map(|m| m.content.as_str())
    }

    /// Sets the system message; an empty text removes it.
    pub(crate) fn set_system(&mut self, text: &str) {
        self.messages.retain(|message| message.role != MessageRole::System);
        if !text.is_empty() {
            self.messages.insert(0, ChatTurnMessage::new(MessageRole::System, text));
        }
    }

    /// Begins a turn. A question without an answer is dropped: many chat templates refuse two
    /// messages of the user in a row.
    pub(crate) fn ask(&mut self, question: String) {
        if self.messages.last().is_some_and(|message| message.role == MessageRole::User) {
            self.messages.pop();
        }
        self.messages.push(ChatTurnMessage::new(MessageRole::User, question));
    }

    pub(crate) fn push(&mut self, message: ChatTurnMessage) {
        self.messages.push(message);
    }

    /// Removes the answer to the last question, so that it can be asked again. Returns whether
    /// there is a question.
    pub(crate) fn drop_answer(&mut self) -> bool {
        let question = self.messages.iter().rposition(|message| message.role == MessageRole::User);
        self.messages.truncate(question.map_or(self.messages.len(), |index| index + 1));
        question.is_some()
    }

    /// Removes the last question and its answer. Returns whether there was one.
    pub(crate) fn undo(&mut self) -> bool {
        let is_there = self.drop_answer();
        if is_there {
            self.messages.pop();
        }
        is_there
    }

    /// Forgets all turns and keeps the system message.
    pub(crate) fn clear(&mut self) {
        self.messages.retain(|message| message.role == MessageRole::System);
    }

    /// Writes the conversation as JSON. A file that is something else stays as it is.
    pub(crate) fn save(&self, path: &Path, model: &str) -> CliResult {
        match read_saved(path) {
            Ok(_) => {}
            Err(ReadSavedError::Io(error)) if error.kind() == ErrorKind::NotFound => {}
            Err(_) => {
                let text =
                    format!("{} exists and is no saved conversation; name another file", path.display());
                return Err(CliError::new(Exit::Usage, text));
            }
        }
        let saved = SavedConversation { model: model.to_owned(), messages: self.messages.clone() };
        let text = serde_json::to_string_pretty(&saved)
            .map_err(|error| CliError::new(Exit::Internal, format!("cannot write as JSON: {error}")))?;
        std::fs::write(path, text + "\n").with_context(|| format!("cannot write {}", path.display()))
    }

    /// Replaces the conversation by a saved one.
    pub(crate) fn load(&mut self, path: &Path) -> CliResult {
        let saved = read_saved(path).map_err(|error| {
            CliError::new(Exit::Usage, format!("cannot load {}: {error}", path.display()))
        })?;
        self.messages = saved.messages;
        Ok(())
    }
}

#[derive(Debug, thiserror::Error)]
enum ReadSavedError {
    #[error(transparent)]
    Io(#[from] std::io::Error),
    #[error("{bytes} bytes are more than {FILE_BYTES_MAX}")]
    TooLong { bytes: u64 },
    #[error("not a saved conversation: {0}")]
    Format(#[from] serde_json::Error),
}

fn read_saved(path: &Path) -> Result<SavedConversation, ReadSavedError> {
    let file = std::fs::metadata(path)?;
    if file.len() > FILE_BYTES_MAX {
        return Err(ReadSavedError::TooLong { bytes: file.len() });
    }
    if !file.is_file() {
        return Err(std::io::Error::other("not a regular file").into());
    }
    Ok(serde_json::from_str(&std::fs::read_to_string(path)?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn roles(conversation: &ChatConversation) -> Vec<MessageRole> {
        conversation.messages().iter().map(|message| message.role).collect()
    }

    #[test]
    fn a_turn_is_undone_with_its_tools_and_the_system_message_stays() {
        let mut conversation = ChatConversation::new(Some("short".to_owned()));
        conversation.ask("one".to_owned());
        conversation.push(ChatTurnMessage::new(MessageRole::Assistant, "1"));
        conversation.ask("two".to_owned());
        conversation.push(ChatTurnMessage::new(MessageRole::Assistant, ""));
        conversation.push(ChatTurnMessage::new(MessageRole::Tool, "result"));
        conversation.push(ChatTurnMessage::new(MessageRole::Assistant, "2"));
        assert!(conversation.drop_answer());
        assert_eq!(
            roles(&conversation),
            [MessageRole::System, MessageRole::User, MessageRole::Assistant, MessageRole::User]
        );
        conversation.ask("three".to_owned());
        assert_eq!(conversation.messages()[3].content, "three");
        assert!(conversation.undo() && conversation.undo() && !conversation.undo());
        assert_eq!(conversation.system(), Some("short"));
        conversation.set_system("");
        assert!(conversation.messages().is_empty());
    }

    #[test]
    fn a_saved_conversation_is_loaded_and_no_other_file_is_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let (saved, other) = (folder.path().join("saved.json"), folder.path().join("other"));
        std::fs::write(&other, "precious").unwrap();
        let mut conversation = ChatConversation::new(None);
        conversation.ask("one\ntwo".to_owned());
        conversation.save(&saved, "m").unwrap();
        conversation.push(ChatTurnMessage::new(MessageRole::Assistant, "1"));
        conversation.save(&saved, "m").unwrap();
        let mut loaded = ChatConversation::default();
        loaded.load(&saved).unwrap();
        assert_eq!(loaded.messages(), conversation.messages());
        assert!(conversation.save(&other, "m").is_err());
        assert_eq!(std::fs::read_to_string(&other).unwrap(), "precious");
        assert!(loaded.load(&other).unwrap_err().message().contains("not a saved conversation"));
        assert!(loaded.load(folder.path()).is_err());
        assert_eq!(loaded.messages().len(), 2);
    }
}
