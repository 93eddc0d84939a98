// SPDX-License-Identifier: Apache-2.0

//! Vocabularies of the demo models, and of real models if BALLAST_TEST_DATA is set.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use grammar::{CompileError, CompiledGrammar, GrammarSource, GrammarVocabulary};
use text::Tokenizer;

pub(crate) struct NamedTokenizer {
    pub(crate) name: String,
    pub(crate) tokenizer: Tokenizer,
}

impl NamedTokenizer {
    fn read(path: &Path) -> Self {
        let file = std::fs::File::open(path).unwrap();
        let length = file.metadata().unwrap().len();
        let header = gguf::Header::read(std::io::BufReader::new(file), length).unwrap();
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        Self { name, tokenizer: Tokenizer::from_metadata(header.metadata()).unwrap() }
    }

    pub(crate) fn vocabulary(&self) -> GrammarVocabulary {
        GrammarVocabulary::new(&self.tokenizer).unwrap()
    }

    pub(crate) fn text(&self, output: &[u32]) -> Vec<u8> {
        self.tokenizer.decode_bytes(output)
    }
}

fn demo(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo").join(name)
}

/// The demo model's vocabulary: byte-level, 8,192 tokens.
pub(crate) static DEMO: LazyLock<NamedTokenizer> =
    LazyLock::new(|| NamedTokenizer::read(&demo("pycoder-7m-q8_0.gguf")));

/// The vocabularies of several models. Prints what the test skips.
pub(crate) fn all() -> Vec<NamedTokenizer> {
    let mut all = vec![NamedTokenizer::read(&demo("pycoder-22m-q4_k_m.gguf"))];
    match std::env::var_os("BALLAST_TEST_DATA") {
        Some(folder) => {
            for name in ["qwen3", "llama3", "tekken", "mistral-spm", "gemma"] {
                all.push(NamedTokenizer::read(
                    &Path::new(&folder).join("data/vocab").join(name).with_extension("gguf"),
                ));
            }
        }
        None => eprintln!("SKIPPED: vocabularies of real models, BALLAST_TEST_DATA is not set"),
    }
    all
}

thread_local! {
    static DEMO_VOCABULARY: GrammarVocabulary = DEMO.vocabulary();
}

/// Compiles with the demo model's vocabulary.
pub(crate) fn compile(source: &GrammarSource) -> Result<CompiledGrammar, CompileError> {
    DEMO_VOCABULARY.with(|vocabulary| CompiledGrammar::compile(source, vocabulary))
}
