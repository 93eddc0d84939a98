// SPDX-License-Identifier: Apache-2.0

//! Converts between text and token ids: tokenizers loaded from GGUF files, streaming
//! detokenization, stop strings, and chat templates.
//!
//! All types here are plain values: no I/O, no clock, no locks. Vocabularies and templates come
//! from model files, and text comes from clients. The crate treats both as hostile input: named
//! constants bound all sizes, and errors say what is wrong and where.
//!
//! ```text
//! gguf::Metadata --from_gguf--> RawVocabulary --> Tokenizer --encode--> ids
//!                                                                        |
//!                text <--StopMatcher-- text <--Detokenizer--------------'
//!
//! gguf::Metadata --> ChatTemplate --render--> prompt text --Tokenizer::encode_chat--> ids
//! ```

#![forbid(unsafe_code)]

mod byte_alphabet;
mod byte_level;
mod chat;
mod detokenizer;
mod end_of_generation;
mod fill_in_middle;
mod from_gguf;
mod merge;
mod pair;
mod pretokenizers;
mod sentencepiece;
mod special;
mod splitter;
mod stop;
mod token_table;
mod tokenizer;
mod tokenizer_error;
mod vocabulary;

pub use chat::{ChatInput, ChatTemplate, LoadTemplateError, MAX_TEMPLATE_BYTES, RenderError};
pub use detokenizer::{DetokenizeOptions, Detokenizer};
pub use fill_in_middle::{EncodeMiddleError, MiddlePrefix};
pub use from_gguf::{CHAT_TEMPLATE, end_of_generation_keys};
pub use pair::PairTemplate;
pub use stop::{MAX_STOP_STRING_BYTES, MAX_STOP_STRINGS, StopMatcher, StopProgress, StopStringError};
pub use tokenizer::{EncodeOptions, Tokenizer};
pub use tokenizer_error::{EncodeError, LoadTokenizerError, MAX_INPUT_BYTES};
pub use vocabulary::{RawVocabulary, TokenKind};
