//! Text on one side, token ids on the other: tokenizers as GGUF files describe them, the way back to text as a
//! stream, stop strings across token borders, and chat templates.
//!
//! Everything here is a pure value: no I/O, no clock, no locks. Vocabularies and templates come from model files and
//! text comes from clients, so both are hostile input: sizes are bounded by named constants, and what is refused is
//! refused with an error that says what and where.
//!
//! ```text
//! gguf::Metadata --from_gguf--> RawVocabulary --> Tokenizer --encode--> ids --Detokenizer--> text --StopMatcher--> text
//!                \-----------------------------> ChatTemplate --render--> prompt text --Tokenizer::encode_chat--> ids
//! ```

#![forbid(unsafe_code)]

mod byte_alphabet;
mod byte_level;
mod chat;
mod detokenizer;
mod end_of_generation;
mod from_gguf;
mod merge;
mod pretokenizers;
mod sentencepiece;
mod special;
mod splitter;
mod stop;
mod token_table;
mod tokenizer;
mod vocabulary;

pub use chat::{ChatInput, ChatTemplate, LoadTemplateError, RenderError};
pub use detokenizer::{DetokenizeOptions, Detokenizer};
pub use stop::{MAX_STOP_STRING_BYTES, MAX_STOP_STRINGS, StopMatcher, StopProgress, StopStringError};
pub use tokenizer::{EncodeError, EncodeOptions, LoadTokenizerError, MAX_INPUT_BYTES, Tokenizer};
pub use vocabulary::{RawVocabulary, TokenKind};
