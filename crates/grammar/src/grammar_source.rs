// SPDX-License-Identifier: Apache-2.0

//! The notations in which a client may write a grammar, and the checks before compilation.

use llguidance::api::TopLevelGrammar;
use llguidance::regex_to_lark;
use serde_json::{Map, Value, json};

use crate::gbnf::{self, GbnfError};
use crate::schema::{self, SchemaError};

/// Longest source. Real schemas have a few kilobytes.
pub const SOURCE_BYTES_MAX: usize = 256 << 10;
/// Longest list of choices: 50,000 of 20 bytes. They need no parser.
pub const CHOICE_BYTES_MAX: usize = 1 << 20;
/// Deepest nesting of brackets. Bounds the stack of the compiler. (The JSON parser has its own
/// limit, 128.)
pub const NESTING_MAX: usize = 100;
/// Most rules. A chain of rules that refer to each other uses the same stack.
const RULES_MAX: usize = 4_000;
/// White space between JSON tokens, as in llama.cpp. The limit ends a model's run of blanks.
const JSON_WHITESPACE: &str = r"([ ]|\r?\n{1,2}[ \t]{0,20})";

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum GrammarSource {
    /// If `lenient` is set, keywords that cannot be enforced are ignored instead of refused.
    JsonSchema { schema: String, lenient: bool },
    /// Rust's syntax, with ASCII `\d`, `\w` and `\s`. The whole output must match.
    Regex(String),
    /// llguidance's dialect of Lark. Starts at the rule `start`.
    Lark(String),
    /// llama.cpp's notation. Starts at the rule `root`.
    Gbnf(String),
    /// The output is one of these texts.
    Choice(Vec<String>),
}

/// Why a source is refused.
#[derive(Debug, thiserror::Error)]
pub enum CompileError {
    #[error("the grammar has {bytes} bytes, allowed are at most {max}")]
    TooLong { bytes: usize, max: usize },
    #[error("the grammar's brackets are nested deeper than {NESTING_MAX}")]
    TooDeep,
    #[error("the grammar has more than {RULES_MAX} rules")]
    TooManyRules,
    #[error("the grammar is empty")]
    Empty,
    #[error("the schema is not JSON: {0}")]
    NotJson(#[from] serde_json::Error),
    #[error(transparent)]
    Schema(#[from] SchemaError),
    #[error(transparent)]
    Gbnf(#[from] GbnfError),
    #[error("{reason}")]
    Refused { reason: String },
    #[error("no text of this vocabulary matches the grammar")]
    NothingMatches,
}

impl GrammarSource {
    pub(crate) fn check_length(&self) -> Result<(), CompileError> {
        let (bytes, max) = match self {
            Self::JsonSchema { schema: text, .. }
            | Self::Regex(text)
            | Self::Lark(text)
            | Self::Gbnf(text) => (text.len(), SOURCE_BYTES_MAX),
            // One byte more for each text, so that empty texts count too.
            Self::Choice(choices) => (choices.iter().map(|text| text.len() + 1).sum(), CHOICE_BYTES_MAX),
        };
        if bytes > max { Err(CompileError::TooLong { bytes, max }) } else { Ok(()) }
    }

    /// The grammar for llguidance. A choice has none.
    pub(crate) fn to_top_level_grammar(&self) -> Result<Option<TopLevelGrammar>, CompileError> {
        let grammar = match self {
            Self::Choice(_) => return Ok(None),
            Self::JsonSchema { schema, lenient } => {
                let mut schema: Value = serde_json::from_str(schema)?;
                schema::adapt_schema(&mut schema, *lenient)?;
                let mut keywords = match schema {
                    Value::Object(keywords) => keywords,
                    Value::Bool(true) => Map::new(),
                    _ => return Err(CompileError::NothingMatches),
                };
                let options = json!({"whitespace_pattern": JSON_WHITESPACE, "lenient": lenient});
                keywords.insert("x-guidance".to_owned(), options);
                TopLevelGrammar::from_json_schema(Value::Object(keywords))
            }
            Self::Regex(regex) => {
                check_nesting(regex)?;
                if regex.is_empty() {
                    return Err(CompileError::Empty);
                }
                TopLevelGrammar::from_lark(format!("start: /{}/", regex_to_lark(regex, "dws")))
            }
            Self::Lark(lark) => {
                check_nesting(lark)?;
                if lark.lines().filter(|line| line.contains(':')).count() > RULES_MAX {
                    return Err(CompileError::TooManyRules);
                }
                TopLevelGrammar::from_lark(schema::adapt_embedded_schemas(lark)?)
            }
            Self::Gbnf(gbnf) => {
                check_nesting(gbnf)?;
                let grammar = gbnf::Gbnf::parse(gbnf)?;
                if grammar.rules() > RULES_MAX {
                    return Err(CompileError::TooManyRules);
                }
                TopLevelGrammar::from_lark(grammar.to_lark())
            }
        };
        Ok(Some(grammar))
    }
}

/// Also counts brackets inside strings. No real grammar has that many.
fn check_nesting(text: &str) -> Result<(), CompileError> {
    let mut depth = 0_usize;
    for byte in text.bytes() {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > NESTING_MAX {
            return Err(CompileError::TooDeep);
        }
    }
    Ok(())
}
