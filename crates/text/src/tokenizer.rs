//! A vocabulary made ready: text to ids, ids to bytes. Immutable and shared: build once, keep in an `Arc`.

use std::fmt;

use crate::byte_alphabet::decode_into;
use crate::byte_level::ByteLevel;
use crate::end_of_generation;
use crate::merge::Merger;
use crate::pretokenizers;
use crate::sentencepiece::{SPACE_MARK, Sentencepiece, byte_of};
use crate::special::{Fragment, SpecialTokens};
use crate::token_table::{Index, Strings};
use crate::vocabulary::{TokenKind, Vocabulary};

/// Longest text that one `encode` takes: about 900,000 tokens of English. The working memory of the worst text (one
/// piece of single bytes) is about 60 times its length.
pub const MAX_INPUT_BYTES: usize = 4 << 20;
/// Most tokens in a vocabulary; the largest known have 262,144.
pub(crate) const MAX_TOKENS: usize = 1 << 22;
/// Most bytes in all token texts together: offsets into them are 32 bits.
pub(crate) const MAX_VOCABULARY_BYTES: usize = 1 << 30;

/// How [`Tokenizer::encode`] reads a text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EncodeOptions {
    /// Put BOS before and EOS after, as the file says.
    pub add_special: bool,
    /// Texts of control tokens become those tokens. Only for text whose author may write control tokens.
    pub parse_special: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum EncodeError {
    #[error("text of {bytes} bytes is longer than {MAX_INPUT_BYTES}")]
    TooLong { bytes: usize },
    #[error("the vocabulary has no token for byte 0x{byte:02x} and no unknown token")]
    NoTokenForByte { byte: u8 },
}

/// Why a vocabulary cannot be used. Keys are those of the model file.
#[derive(Debug, thiserror::Error)]
pub enum LoadTokenizerError {
    #[error("the file has no {key}: it is not a model with a tokenizer, or was converted without one")]
    MissingKey { key: &'static str },
    #[error("the tokenizer keys of the file")]
    Metadata {
        #[from]
        source: gguf::KeyError,
    },
    #[error("{key}: entry {index} is not UTF-8")]
    NotUtf8 { key: &'static str, index: usize },
    #[error("tokenizer.ggml.model is {model:?}, which is not supported (supported: gpt2, llama, gemma4)")]
    UnknownModel { model: String },
    #[error("tokenizer.ggml.pre is {pre:?}, which is not supported (supported: {})", supported_pre())]
    UnknownPre { pre: String },
    #[error("{key} has {found} entries for {tokens} tokens")]
    LengthMismatch { key: &'static str, found: usize, tokens: usize },
    #[error("tokenizer.ggml.tokens has {tokens} entries, more than {MAX_TOKENS}")]
    TooManyTokens { tokens: usize },
    #[error("the texts of tokenizer.ggml.tokens have {bytes} bytes, more than {MAX_VOCABULARY_BYTES}")]
    TooManyBytes { bytes: usize },
    #[error("tokenizer.ggml.tokens: {first} and {second} are the same text")]
    DuplicateToken { first: u32, second: u32 },
    #[error("tokenizer.ggml.token_type: token {id} has type {number}, known are 1 to 6")]
    BadTokenType { id: usize, number: i32 },
    #[error("tokenizer.ggml.tokens: byte token {id} is not written as <0xXX>")]
    BadByteToken { id: u32 },
    #[error("tokenizer.ggml.scores: the score of token {id} is not a number")]
    BadScore { id: usize },
    #[error("tokenizer.ggml.merges: rank {rank}, {merge:?}, is not two tokens that join to a third")]
    BadMerge { rank: usize, merge: String },
    #[error("{key} is {id}, but there are {tokens} tokens")]
    SpecialOutOfRange { key: &'static str, id: u32, tokens: usize },
    #[error("{asked} asks for a token that {missing} does not name")]
    SpecialMissing { asked: &'static str, missing: &'static str },
    #[error("the expressions of the pre-tokenizer cannot be compiled")]
    Expression { source: Box<regex_automata::meta::BuildError> },
    #[error("the texts of the special tokens are too many or too long")]
    SpecialTokens { source: aho_corasick::BuildError },
}

fn supported_pre() -> String {
    let names: Vec<&str> = pretokenizers::PRE_TOKENIZERS.iter().flat_map(|row| row.names).copied().collect();
    names.join(", ")
}

#[derive(Debug)]
enum Model {
    ByteLevel(ByteLevel),
    Sentencepiece(Sentencepiece),
}

pub struct Tokenizer {
    /// What each token contributes to text.
    bytes: Strings,
    kinds: Vec<TokenKind>,
    special: SpecialTokens,
    model: Model,
    bos: Option<u32>,
    eos: Option<u32>,
    add_bos: bool,
    add_eos: bool,
    end_of_generation: Vec<u32>,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer").field("tokens", &self.kinds.len()).finish_non_exhaustive()
    }
}

impl Tokenizer {
    pub fn new(vocabulary: &Vocabulary<'_>) -> Result<Self, LoadTokenizerError> {
        let tokens = vocabulary.tokens.len();
        let text_bytes = vocabulary.tokens.iter().map(|text| text.len()).sum();
        if tokens == 0 {
            return Err(LoadTokenizerError::MissingKey { key: "tokenizer.ggml.tokens" });
        }
        if tokens > MAX_TOKENS {
            return Err(LoadTokenizerError::TooManyTokens { tokens });
        }
        if text_bytes > MAX_VOCABULARY_BYTES {
            return Err(LoadTokenizerError::TooManyBytes { bytes: text_bytes });
        }
        let kinds = match vocabulary.kinds.len() {
            0 => vec![TokenKind::Normal; tokens],
            // A vocabulary may be shorter than its types, as an embedding may be padded.
            found if found >= tokens => vocabulary.kinds[..tokens].to_vec(),
            found => {
                return Err(LoadTokenizerError::LengthMismatch {
                    key: "tokenizer.ggml.token_type",
                    found,
                    tokens,
                });
            }
        };
        check_ids(vocabulary)?;

        let special = SpecialTokens::new(&vocabulary.tokens, &kinds)?;
        let (bytes, model, default_add_bos) = match vocabulary.model {
            "gpt2" => {
                let pre =
                    vocabulary.pre.ok_or(LoadTokenizerError::MissingKey { key: "tokenizer.ggml.pre" })?;
                let pre = pretokenizers::find(pre)
                    .ok_or_else(|| LoadTokenizerError::UnknownPre { pre: pre.to_owned() })?;
                let (bytes, index) = byte_level_strings(vocabulary, &kinds, text_bytes)?;
                let model = ByteLevel::new(vocabulary, pre, &bytes, index)?;
                (bytes, Model::ByteLevel(model), pre.add_bos)
            }
            "llama" => {
                let model = Sentencepiece::by_score(vocabulary, &kinds)?;
                (marked_strings(vocabulary, &kinds, text_bytes), Model::Sentencepiece(model), true)
            }
            "gemma4" => {
                let model = Sentencepiece::by_pairs(vocabulary, &kinds)?;
                (marked_strings(vocabulary, &kinds, text_bytes), Model::Sentencepiece(model), true)
            }
            other => return Err(LoadTokenizerError::UnknownModel { model: other.to_owned() }),
        };

        // Gemma's files say false by mistake; its models do not work without.
        let add_bos = vocabulary.model == "gemma4" || vocabulary.add_bos.unwrap_or(default_add_bos);
        let add_eos = vocabulary.add_eos.unwrap_or(false);
        for (asked, adds, missing, id) in [
            ("tokenizer.ggml.add_bos_token", add_bos, "tokenizer.ggml.bos_token_id", vocabulary.bos),
            ("tokenizer.ggml.add_eos_token", add_eos, "tokenizer.ggml.eos_token_id", vocabulary.eos),
        ] {
            if adds && id.is_none() {
                return Err(LoadTokenizerError::SpecialMissing { asked, missing });
            }
        }
        Ok(Self {
            end_of_generation: end_of_generation::tokens(vocabulary, &kinds),
            bytes,
            kinds,
            special,
            model,
            bos: vocabulary.bos,
            eos: vocabulary.eos,
            add_bos,
            add_eos,
        })
    }

    pub fn encode(&self, text: &str, options: EncodeOptions) -> Result<Vec<u32>, EncodeError> {
        if text.len() > MAX_INPUT_BYTES {
            return Err(EncodeError::TooLong { bytes: text.len() });
        }
        // About four bytes a token in most languages.
        let mut ids = Vec::with_capacity(text.len() / 4 + 8);
        ids.extend(self.bos.filter(|_| options.add_special && self.add_bos));
        let mut merger = Merger::default();
        for fragment in self.special.split(text, options.parse_special) {
            match (fragment, &self.model) {
                (Fragment::Token(id), _) => ids.push(id),
                (Fragment::Text(text), Model::ByteLevel(model)) => {
                    model.encode(text, &self.bytes, &mut merger, &mut ids)?;
                }
                (Fragment::Text(text), Model::Sentencepiece(model)) => {
                    model.encode(text, &mut merger, &mut ids)?
                }
            }
        }
        ids.extend(self.eos.filter(|_| options.add_special && self.add_eos));
        Ok(ids)
    }

    /// Ids of a rendered chat template: control tokens are parsed, and BOS is added only if the template did not
    /// write it itself.
    pub fn encode_chat(&self, rendered: &str) -> Result<Vec<u32>, EncodeError> {
        let mut ids = self.encode(rendered, EncodeOptions { add_special: false, parse_special: true })?;
        if let Some(bos) = self.bos.filter(|bos| self.add_bos && ids.first() != Some(bos)) {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// Number of tokens; the model's embedding may have more rows.
    pub fn len(&self) -> usize {
        self.kinds.len()
    }

    /// Never true: a vocabulary without tokens is refused.
    pub fn is_empty(&self) -> bool {
        self.kinds.is_empty()
    }

    /// What the token contributes to text, control tokens with their name; `None` for an id outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.bytes.get(id)
    }

    pub fn kind(&self, id: u32) -> Option<TokenKind> {
        self.kinds.get(id as usize).copied()
    }

    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    pub fn is_end_of_generation(&self, id: u32) -> bool {
        self.end_of_generation.binary_search(&id).is_ok()
    }

    /// All tokens that end a generation, sorted.
    pub fn end_of_generation(&self) -> &[u32] {
        &self.end_of_generation
    }

    /// Whether encoding put a space before the text that decoding from its start has to take away again.
    pub(crate) fn adds_space_prefix(&self) -> bool {
        matches!(&self.model, Model::Sentencepiece(model) if model.adds_space_prefix())
    }
}

fn check_ids(vocabulary: &Vocabulary<'_>) -> Result<(), LoadTokenizerError> {
    let tokens = vocabulary.tokens.len();
    for (key, id) in [
        ("tokenizer.ggml.bos_token_id", vocabulary.bos),
        ("tokenizer.ggml.eos_token_id", vocabulary.eos),
        ("tokenizer.ggml.eot_token_id", vocabulary.eot),
        ("tokenizer.ggml.eom_token_id", vocabulary.eom),
        ("tokenizer.ggml.unknown_token_id", vocabulary.unknown),
        ("tokenizer.ggml.fim_pad_token_id", vocabulary.fim_pad),
        ("tokenizer.ggml.fim_rep_token_id", vocabulary.fim_rep),
        ("tokenizer.ggml.fim_sep_token_id", vocabulary.fim_sep),
    ] {
        if let Some(id) = id.filter(|&id| id as usize >= tokens) {
            return Err(LoadTokenizerError::SpecialOutOfRange { key, id, tokens });
        }
    }
    Ok(())
}

/// Token bytes of a byte-level vocabulary, and those of them that merging may produce.
fn byte_level_strings(
    vocabulary: &Vocabulary<'_>,
    kinds: &[TokenKind],
    text_bytes: usize,
) -> Result<(Strings, Index), LoadTokenizerError> {
    let mut strings = Strings::with_capacity(kinds.len(), text_bytes);
    let mut index = Index::with_capacity(kinds.len());
    for ((id, text), kind) in (0..).zip(&vocabulary.tokens).zip(kinds) {
        let mut in_alphabet = false;
        strings.push_with(|out| match kind {
            TokenKind::Normal | TokenKind::Unused | TokenKind::Byte => {
                in_alphabet = !text.is_empty() && decode_into(text, out);
                if !in_alphabet {
                    out.extend_from_slice(text.as_bytes());
                }
            }
            // These are written as they are.
            TokenKind::Unknown | TokenKind::Control | TokenKind::UserDefined => {
                out.extend_from_slice(text.as_bytes());
            }
        });
        if in_alphabet {
            index
                .insert_last(&strings)
                .map_err(|first| LoadTokenizerError::DuplicateToken { first, second: id })?;
        }
    }
    Ok((strings, index))
}

/// Token bytes of a vocabulary written with U+2581.
fn marked_strings(vocabulary: &Vocabulary<'_>, kinds: &[TokenKind], text_bytes: usize) -> Strings {
    let mut strings = Strings::with_capacity(kinds.len(), text_bytes);
    for (text, kind) in vocabulary.tokens.iter().zip(kinds) {
        strings.push_with(|out| match (kind, byte_of(text)) {
            (TokenKind::Byte, Some(byte)) => out.push(byte),
            (TokenKind::Normal | TokenKind::Unused, _) => {
                out.extend_from_slice(text.replace(SPACE_MARK, " ").as_bytes())
            }
            _ => out.extend_from_slice(text.as_bytes()),
        });
    }
    strings
}

const _: fn() = || {
    fn shared_between_threads<T: Send + Sync>() {}
    shared_between_threads::<Tokenizer>();
};
