// SPDX-License-Identifier: Apache-2.0

//! The pre-tokenizers: how text is split before merging, by the value of `tokenizer.ggml.pre`. A
//! new pre-tokenizer is one row of the table.
//!
//! The expressions are those of the models' own tokenizer.json. Each expression is applied to the
//! pieces that the previous one produced; `splitter` runs them. A name that is not in the table is
//! an error. There is no default: a model whose input is split wrongly gives worse answers without
//! any error.

/// The properties of one pre-tokenizer.
#[derive(Debug)]
pub(crate) struct PreTokenizer {
    pub(crate) names: &'static [&'static str],
    pub(crate) expressions: &'static [&'static str],
    /// A piece that is a token as a whole becomes that token, even if merging would not produce it.
    pub(crate) ignore_merges: bool,
    /// Text is normalized to NFC first, as the model's tokenizer.json says. llama.cpp has no such
    /// step and produces other ids for decomposed text.
    pub(crate) nfc: bool,
    /// Whether to add BOS if the file has no `add_bos_token`.
    pub(crate) add_bos: bool,
}

const GPT_2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const QWEN_2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const PLAIN: PreTokenizer =
    PreTokenizer { names: &[], expressions: &[], ignore_merges: false, nfc: false, add_bos: false };

/// Every row is checked against golden splits or golden ids of the original tokenizers. A row may
/// have further names.
pub(crate) const PRE_TOKENIZERS: &[PreTokenizer] = &[
    PreTokenizer {
        names: &["llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"],
        expressions: &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        ignore_merges: true,
        add_bos: true,
        ..PLAIN
    },
    PreTokenizer { names: &["qwen2"], expressions: &[QWEN_2], nfc: true, ..PLAIN },
    // DeepSeek's distilled models split as Qwen does, but their tokenizer.json has no normalizer.
    PreTokenizer { names: &["deepseek-r1-qwen"], expressions: &[QWEN_2], ..PLAIN },
    PreTokenizer {
        names: &["qwen35"],
        expressions: &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        nfc: true,
        ..PLAIN
    },
    PreTokenizer {
        names: &["tekken"],
        expressions: &[
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        ignore_merges: true,
        add_bos: true,
        ..PLAIN
    },
    PreTokenizer {
        names: &["gpt-4o", "llama4"],
        expressions: &[
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        ..PLAIN
    },
    PreTokenizer {
        names: &["deepseek-v3"],
        expressions: &[
            r"\p{N}{1,3}",
            r"[一-龥぀-ゟ゠-ヿ]+",
            r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
        ],
        ..PLAIN
    },
    PreTokenizer { names: &["gpt-2", "phi-2"], expressions: &[GPT_2], ..PLAIN },
    PreTokenizer { names: &["smollm", "starcoder"], expressions: &[r"\p{N}", GPT_2], ..PLAIN },
];

pub(crate) fn find(name: &str) -> Option<&'static PreTokenizer> {
    PRE_TOKENIZERS.iter().find(|row| row.names.contains(&name))
}
