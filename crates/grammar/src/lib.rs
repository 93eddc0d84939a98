// SPDX-License-Identifier: Apache-2.0

//! Structured output: computes which tokens a JSON schema, a regular expression or a grammar allows
//! next.
//!
//! ```text
//! text::Tokenizer --> GrammarVocabulary --+
//!                                         +--> CompiledGrammar --> Matcher
//! GrammarSource (schema, regex, ...) -----+                          |  ^
//!                                                       compute_mask |  | accept
//!                                          token bitmask <-----------+  +--- sampled token
//! ```
//!
//! 1. Everything here is a plain value. The caller decides on which thread it is used.
//! 2. Sources come from clients. Named constants bound their length, their nesting, the states of a
//!    matcher, and the work per token.
//! 3. A refused source gets an error that says what is wrong, before a token is sampled.
//!
//! The engine behind this crate is llguidance. Choices among fixed texts have a matcher of their
//! own (`choice.rs`).

#![forbid(unsafe_code)]

mod choice;
mod closed_objects;
mod formats;
mod gbnf;
mod grammar_source;
mod matcher;
mod probe;
mod property_names;
mod schema;
mod vocabulary;

pub use gbnf::GbnfError;
pub use grammar_source::{CHOICE_BYTES_MAX, CompileError, GrammarSource, NESTING_MAX, SOURCE_BYTES_MAX};
pub use matcher::{CompiledGrammar, MatchError, Matcher, MatcherStatus};
pub use schema::SchemaError;
pub use vocabulary::{GrammarVocabulary, GrammarVocabularyError};

/// Makes llguidance set its panic hook now instead of at its first use. A caller that needs its own
/// hook to run first calls this before it sets that hook.
pub fn install_panic_hook() {
    // The call only has to be llguidance's first use. It cannot fail.
    drop(llguidance::panic_utils::catch_unwind(|| Ok(())));
}
