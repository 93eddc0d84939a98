//! Structured output: which tokens a JSON schema, a regular expression or a grammar allows next.
//!
//! ```text
//! text::Tokenizer --> Vocabulary --+
//!                                  +--> Grammar --matcher--> Matcher --allowed--> one bit for each token
//! Source (schema, regex, ...) -----+                             <----accept---- the token that was drawn
//! ```
//!
//! Everything here is a plain value; whoever serves requests decides on which thread it works. Sources come from clients:
//! length, nesting, states and work for each token are bounded by named constants, and what is refused is refused with
//! what was wrong, before a token is drawn. The engine underneath is llguidance.

#![forbid(unsafe_code)]

mod formats;
mod gbnf;
mod matcher;
mod schema;
mod source;
mod vocabulary;

pub use gbnf::GbnfError;
pub use matcher::{Grammar, MatchError, Matcher, Next};
pub use schema::SchemaError;
pub use source::{CompileError, NESTING_MAX, SOURCE_BYTES_MAX, Source};
pub use vocabulary::{Vocabulary, VocabularyError};

/// llguidance sets a panic hook when it is first used. Whoever wants one of their own before it calls this first.
pub fn set_hooks() {
    // Nothing fails: it is only there to be the first use.
    drop(llguidance::panic_utils::catch_unwind(|| Ok(())));
}
