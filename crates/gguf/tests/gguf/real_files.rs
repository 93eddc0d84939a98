// SPDX-License-Identifier: Apache-2.0

//! Files that llama.cpp's tools wrote: vocabularies of real models, and small models of many
//! architectures and types.

use gguf::{GgufModel, Header, Metadata, StringArray, check_model};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Parsing a vocabulary takes 30 ms. Quadratic work over 150,000 tokens would take minutes.
const PARSE_BOUND: Duration = Duration::from_secs(10);

#[test]
fn every_vocabulary_parses_fast_and_again_from_its_metadata_alone() {
    let Some(folder) = data("data/vocab") else { return };
    let expected = [
        ("qwen3.gguf", 151_669, Some(151_387)),
        ("llama3.gguf", 128_256, Some(280_147)),
        ("tekken.gguf", 131_072, Some(269_443)),
        ("mistral-spm.gguf", 32_768, None),
        ("gemma.gguf", 262_145, Some(514_906)),
        ("bert-bge.gguf", 30_522, None),
    ];
    for (name, tokens, merges) in expected {
        let path = folder.join(name);
        let file = File::open(&path).unwrap();
        let len = file.metadata().unwrap().len();
        let start = Instant::now();
        let header = Header::read(file, len).unwrap();
        check_model(header.metadata()).unwrap();
        let took = start.elapsed();
        println!("{name}: {len} bytes in {took:?}");
        assert!(took < PARSE_BOUND, "{name} took {took:?}");

        let metadata = Metadata::parse(header.metadata().bytes().clone()).unwrap();
        assert_eq!(metadata.len(), header.metadata().len());
        for ((key, value), (again_key, again)) in header.metadata().iter().zip(metadata.iter()) {
            assert_eq!((key, value), (again_key, again), "{name}");
        }
        let found: StringArray<'_> = metadata.require("tokenizer.ggml.tokens").unwrap();
        assert_eq!((found.len(), found.iter().count()), (tokens, tokens), "{name}");
        let found: Option<StringArray<'_>> = metadata.get("tokenizer.ggml.merges").unwrap();
        assert_eq!(found.map(|merges| merges.iter().count()), merges, "{name}");
    }
}

#[test]
fn every_small_model_parses_and_passes_the_checks() {
    let mut files = Vec::new();
    for folder in ["data/golden", "models"] {
        let Some(folder) = data(folder) else { return };
        let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        files.extend(entries.filter(|path| path.extension().is_some_and(|extension| extension == "gguf")));
    }
    assert!(files.len() > 50, "only {} models found", files.len());
    for path in &files {
        let model = GgufModel::open(path).unwrap_or_else(|error| panic!("{}: {error:?}", path.display()));
        check_model(model.metadata()).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let header = &model.files()[0].header;
        let last = header.tensors().last().unwrap();
        assert!(header.file_len() - (header.file_offset(last) + last.bytes) < 32, "{}", path.display());
        let layers: u32 = model
            .metadata()
            .require(&format!("{}.block_count", model.metadata().architecture().unwrap()))
            .unwrap();
        assert!(
            model.tensor(&format!("blk.{}.attn_norm.weight", layers - 1)).is_some(),
            "{}",
            path.display()
        );
    }
}

#[test]
fn encoders_give_the_bytes_that_ggml_gives() {
    let Some(folder) = data("data/golden") else { return };
    // (quantized, its source in f32)
    for (quantized, source) in [
        ("llama.Q8_0.gguf", "llama.gguf"),
        ("llama.Q4_0.gguf", "llama.gguf"),
        ("qwen3.Q8_0.gguf", "qwen3.gguf"),
        ("llama-linear.F16.gguf", "llama-linear.gguf"),
        ("llama-linear.BF16.gguf", "llama-linear.gguf"),
    ] {
        let (quantized, source) =
            (LoadedTensors::open(&folder.join(quantized)), LoadedTensors::open(&folder.join(source)));
        let mut dtypes = quantized.model.tensors().map(|(_, tensor)| tensor.dtype);
        let wanted = dtypes.find(|dtype| !matches!(dtype, quant::DType::F32 | quant::DType::Q6_K)).unwrap();
        let mut compared = 0;
        for (_, tensor) in quantized.model.tensors().filter(|(_, tensor)| tensor.dtype == wanted) {
            let mut encoded = vec![0; tensor.bytes as usize];
            quant::encode(wanted, &source.values(&tensor.name), &mut encoded).unwrap();
            assert!(encoded == quantized.bytes(&tensor.name), "{wanted} {}", tensor.name);
            compared += 1;
        }
        assert!(compared > 5, "{wanted}: only {compared} tensors compared");
    }
}

/// For K types only the format is fixed. Our encoder may lose no more than ggml's search, plus 3%.
#[test]
fn k_encoders_lose_as_little_as_ggml() {
    let Some(folder) = data("data/golden") else { return };
    let source = LoadedTensors::open(&folder.join("llama.gguf"));
    for name in
        ["llama.Q2_K.gguf", "llama.Q3_K_M.gguf", "llama.Q4_K_M.gguf", "llama.Q5_K_M.gguf", "llama.Q6_K.gguf"]
    {
        let quantized = LoadedTensors::open(&folder.join(name));
        for (_, tensor) in quantized.model.tensors().filter(|(_, tensor)| tensor.dims.len() == 2) {
            let x = source.values(&tensor.name);
            let mut encoded = vec![0; tensor.bytes as usize];
            quant::encode(tensor.dtype, &x, &mut encoded).unwrap();
            let mut ours = vec![0.0; x.len()];
            quant::decode(tensor.dtype, &encoded, &mut ours).unwrap();
            let (ours, theirs) = (error(&x, &ours), error(&x, &quantized.values(&tensor.name)));
            let limit = 1.03 * theirs;
            assert!(ours <= limit, "{} {}: ours {ours}, ggml {theirs}", tensor.dtype, tensor.name);
        }
    }
}

/// Root mean square of the differences, relative to `x`.
fn error(x: &[f32], y: &[f32]) -> f64 {
    let difference: f64 = x.iter().zip(y).map(|(x, y)| f64::from(x - y).powi(2)).sum();
    (difference / x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>()).sqrt()
}

/// A small model, with its file in memory.
struct LoadedTensors {
    model: GgufModel,
    file: Vec<u8>,
}

impl LoadedTensors {
    fn open(path: &Path) -> Self {
        Self { model: GgufModel::open(path).unwrap(), file: std::fs::read(path).unwrap() }
    }

    fn bytes(&self, name: &str) -> &[u8] {
        let (_, tensor) = self.model.tensor(name).unwrap();
        let start = self.model.files()[0].header.file_offset(tensor) as usize;
        &self.file[start..start + tensor.bytes as usize]
    }

    fn values(&self, name: &str) -> Vec<f32> {
        let (_, tensor) = self.model.tensor(name).unwrap();
        let mut values = vec![0.0; tensor.values() as usize];
        quant::decode(tensor.dtype, self.bytes(name), &mut values).unwrap();
        values
    }
}

fn data(folder: &str) -> Option<PathBuf> {
    let found = std::env::var_os("BALLAST_TEST_DATA").map(|root| PathBuf::from(root).join(folder));
    if found.is_none() {
        eprintln!("SKIPPED {folder}: set BALLAST_TEST_DATA to the folder that has it");
    }
    found
}
