//! Structured output: which tokens a JSON schema, a regular expression or a grammar allows next.
//!
//! ```text
//! text::Tokenizer --> GrammarVocabulary --+
//!                                  +--> CompiledGrammar --matcher--> Matcher --allowed--> one bit for each token
//! GrammarSource (schema, regex, ...) -----+                             <----accept---- the token that was drawn
//! ```
//!
//! Everything here is a plain value; whoever serves requests decides on which thread it works. Sources come from clients:
//! length, nesting, states and work for each token are bounded by named constants, and what is refused is refused with
//! what was wrong, before a token is drawn. The engine underneath is llguidance.

#![forbid(unsafe_code)]

mod formats;
mod gbnf;
mod grammar_source;
mod matcher;
mod schema;
mod vocabulary;

pub use gbnf::GbnfError;
pub use grammar_source::{CompileError, GrammarSource, NESTING_MAX, SOURCE_BYTES_MAX};
pub use matcher::{CompiledGrammar, MatchError, Matcher, MatcherStatus};
pub use schema::SchemaError;
pub use vocabulary::{GrammarVocabulary, GrammarVocabularyError};

/// llguidance sets a panic hook when it is first used. Whoever wants one of their own before it calls this first.
pub fn install_panic_hook() {
    // Nothing fails: it is only there to be the first use.
    drop(llguidance::panic_utils::catch_unwind(|| Ok(())));
}
