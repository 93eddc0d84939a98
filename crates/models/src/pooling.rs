// SPDX-License-Identifier: Apache-2.0

//! [`Pooling`]: how the hidden states of a text become one embedding or one score.

use crate::ModelConfigError;
use crate::config::MetadataKeys;

/// The key that says how a model pools.
const KEY: &str = "pooling_type";

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pooling {
    /// The mean of the hidden states of all tokens.
    Mean,
    /// The hidden state of the last token.
    Last,
    /// The classifier's labels for the last token.
    Rank,
}

impl Pooling {
    /// llama.cpp's numbers: 0 none, 1 mean, 2 CLS, 3 last, 4 rank. With CLS, the first token's
    /// state stands for the text. In a decoder that state does not depend on the text, so such a
    /// file counts as one without pooling.
    pub(crate) fn read(keys: &MetadataKeys<'_>) -> Result<Option<Self>, ModelConfigError> {
        Ok(match keys.optional_count(KEY, 0..=4)? {
            Some(1) => Some(Self::Mean),
            Some(3) => Some(Self::Last),
            Some(4) => Some(Self::Rank),
            _ => None,
        })
    }
}
