// SPDX-License-Identifier: Apache-2.0

//! [`Tokenizer`]: `load` builds one from a vocabulary, `encode` converts text to token ids.

mod encode;
mod load;

pub use encode::{EncodeOptions, Tokenizer};
