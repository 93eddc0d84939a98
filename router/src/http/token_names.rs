// SPDX-License-Identifier: Apache-2.0

//! How log probabilities name tokens.

use crate::model::ServedModel;

#[derive(Clone, Copy)]
pub(super) struct TokenNames<'a> {
    pub(super) model: &'a ServedModel,
    /// vLLM's `return_tokens_as_token_ids`.
    pub(super) by_id: bool,
}

impl TokenNames<'_> {
    /// The text of a token. An incomplete character is U+FFFD: its bytes are listed apart.
    pub(super) fn text(self, id: u32) -> String {
        match self.by_id {
            true => token_id(id),
            false => self.model.text.token_text(id),
        }
    }

    /// The same where a name stands for its token alone. Tokens of incomplete characters have
    /// OpenAI's form, `bytes:\xe2\x80`.
    pub(super) fn key(self, id: u32) -> String {
        let bytes = self.model.text.token_bytes(id);
        match std::str::from_utf8(bytes) {
            Err(_) if !self.by_id => {
                let escaped: String = bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect();
                format!("bytes:{escaped}")
            }
            _ => self.text(id),
        }
    }
}

/// vLLM's form.
pub(super) fn token_id(id: u32) -> String {
    format!("token_id:{id}")
}
