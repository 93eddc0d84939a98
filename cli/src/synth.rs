// SPDX-License-Identifier: Apache-2.0

//! `ballast synth`: writes model files of random weights with the shapes, types and metadata of
//! real models.
//!
//! Speed, memory and attach time measured on such a file are those of the real model; its output is
//! noise. A file depends only on shape, types and seed. It is written as a stream.

mod blocks;
mod recipe;
mod shapes;
mod vocabulary;

use blocks::WeightRng;
use gguf::{GgufWriter, MetadataBuilder, TensorLayout, WriteError};
use quant::DType;
use recipe::QuantRecipe;
use serde::Serialize;
use shapes::ModelShape;
use std::fs::File;
use std::io::{self, BufWriter};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::progress_bar::{ProgressBar, ProgressUnit, WorkProgress};

/// Bytes generated at a time, before rounding to whole blocks.
const PIECE_BYTES: usize = 4 << 20;

/// Write a model file with random weights and the shape of a real model
#[derive(Debug, clap::Args)]
pub(crate) struct SynthOptions {
    /// Shape of the model: qwen3-0.6b, qwen3-1.7b, qwen3-8b, qwen3-32b, qwen3-30b-a3b, llama3-8b,
    /// llama3-70b, gemma3-1b, gemma3-4b, gemma3-12b, gemma3-27b. For tests: qwen3-tiny,
    /// llama3-tiny, gemma3-tiny, qwen3-moe-tiny, qwen3-many (more than 400 small tensors),
    /// qwen3-wide (two layers of qwen3-0.6b)
    #[arg(value_parser = ModelShape::find)]
    shape: &'static ModelShape,
    /// Types of the weights: f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, q2_k, q3_k_m, q4_k_m,
    /// q5_k_m, q6_k
    #[arg(value_parser = QuantRecipe::find)]
    quant: &'static QuantRecipe,
    /// Output file
    out: PathBuf,
    /// Seed of the random weights
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

/// Why the file could not be written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SynthError {
    #[error("cannot write {}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("cannot write {}", path.display())]
    Format { path: PathBuf, source: WriteError },
}

/// A description of the written file.
#[derive(Debug, Serialize)]
pub(crate) struct SynthReport {
    shape: &'static str,
    quant: &'static str,
    seed: u64,
    path: PathBuf,
    tensors: usize,
    parameters: u64,
    bytes: u64,
    seconds: f64,
}

impl std::fmt::Display for SynthReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { shape, quant, path, tensors, parameters, bytes, seconds, .. } = self;
        let rate = *bytes as f64 / seconds / 1e6;
        write!(
            f,
            "{}: {shape} {quant}, {:.3} billion random weights in {tensors} tensors, {bytes} bytes in {seconds:.1} s ({rate:.0} MB/s)",
            path.display(),
            *parameters as f64 / 1e9,
        )
    }
}

/// Writes to a temporary name first, so that a file under the final name is complete.
pub(crate) fn synth(args: &SynthOptions) -> Result<SynthReport, SynthError> {
    let started = Instant::now();
    let mut partial = args.out.clone().into_os_string();
    partial.push(".partial");
    let partial = PathBuf::from(partial);
    let written = write_file(args, &partial, started);
    if written.is_err() && partial.exists() {
        // The write error is more useful than an error of cleaning up.
        let _ = std::fs::remove_file(&partial);
    }
    written
}

fn write_file(args: &SynthOptions, partial: &Path, started: Instant) -> Result<SynthReport, SynthError> {
    let file_error = |source| SynthError::File { path: args.out.clone(), source };
    let file = File::create(partial).map_err(file_error)?;
    let mut progress = ProgressBar::start();
    let show = |done, total| {
        let name = args.shape.name.to_owned();
        progress.show(WorkProgress { name, unit: ProgressUnit::Bytes, done, total });
    };
    let written = write_model(args.shape, args.quant, args.seed, BufWriter::new(file), show);
    progress.clear();
    let (layout, out) = written.map_err(|source| SynthError::Format { path: args.out.clone(), source })?;
    let bytes = out.get_ref().metadata().map_err(file_error)?.len();
    std::fs::rename(partial, &args.out).map_err(file_error)?;
    Ok(SynthReport {
        shape: args.shape.name,
        quant: args.quant.name,
        seed: args.seed,
        path: args.out.clone(),
        tensors: layout.tensors().len(),
        parameters: layout.tensors().iter().map(|tensor| tensor.values()).sum(),
        bytes,
        seconds: started.elapsed().max(Duration::from_millis(1)).as_secs_f64(),
    })
}

/// `show` gets the written bytes of weights, and all.
fn write_model<W: io::Write>(
    shape: &ModelShape,
    recipe: &QuantRecipe,
    seed: u64,
    out: W,
    show: impl Fn(u64, u64),
) -> Result<(TensorLayout, W), WriteError> {
    let metadata = metadata(shape, recipe)?;
    let layout = layout(shape, recipe)?;
    let mut writer = GgufWriter::start(out, &metadata, layout.clone())?;
    let total = layout.tensors().iter().map(|tensor| tensor.bytes).sum();
    let (mut piece, mut done) = (Vec::new(), 0);
    for (index, tensor) in layout.tensors().iter().enumerate() {
        let mut random = WeightRng::new(seed, index as u64);
        if tensor.dims.len() == 1 {
            let ones: Vec<u8> = (0..tensor.values()).flat_map(|_| 1.0_f32.to_le_bytes()).collect();
            writer.write(&ones)?;
            continue;
        }
        // This deviation keeps the variance of a matrix product at that of its input.
        let deviation = 1.0 / (tensor.row_values() as f32).sqrt();
        let block = tensor.dtype.block_bytes();
        let mut open = tensor.bytes as usize;
        while open > 0 {
            piece.resize(open.min(PIECE_BYTES / block * block), 0);
            blocks::fill(tensor.dtype, deviation, &mut random, &mut piece);
            writer.write(&piece)?;
            open -= piece.len();
            done += piece.len() as u64;
            show(done, total);
        }
    }
    Ok((layout, writer.finish()?))
}

/// Writes the keys that converters write for such a model.
fn metadata(shape: &ModelShape, recipe: &QuantRecipe) -> Result<MetadataBuilder, WriteError> {
    let mut metadata = MetadataBuilder::default();
    let architecture = shape.architecture();
    metadata.put("general.architecture", architecture)?;
    metadata.put("general.name", format!("random {}", shape.name).as_str())?;
    metadata.put("general.file_type", recipe.file_type)?;
    metadata.put("general.quantization_version", 2_u32)?;
    for (key, value) in shape.counts() {
        metadata.put(&format!("{architecture}.{key}"), value)?;
    }
    metadata.put(&format!("{architecture}.rope.freq_base"), shape.rope_base)?;
    if let Some(factor) = shape.rope_factor {
        metadata.put(&format!("{architecture}.rope.scaling.type"), "linear")?;
        metadata.put(&format!("{architecture}.rope.scaling.factor"), factor)?;
    }
    metadata.put(&format!("{architecture}.attention.layer_norm_rms_epsilon"), shape.epsilon)?;
    vocabulary::put(shape, &mut metadata)?;
    Ok(metadata)
}

/// Lists tensors in the order in which llama.cpp's quantizer writes them.
fn layout(shape: &ModelShape, recipe: &QuantRecipe) -> Result<TensorLayout, WriteError> {
    let mut layout = TensorLayout::default();
    for tensor in shape.tensors() {
        let dtype = match tensor.role {
            None => DType::F32,
            Some(role) => recipe.dtype(role, tensor.dims[0], shape),
        };
        layout.add(&tensor.name, dtype, &tensor.dims)?;
    }
    Ok(layout)
}

#[cfg(test)]
mod tests {
    use super::*;
    use gguf::{Header, check_model};

    fn model(shape: &str, recipe: &str, seed: u64) -> Vec<u8> {
        let (shape, recipe) = (ModelShape::find(shape).unwrap(), QuantRecipe::find(recipe).unwrap());
        write_model(shape, recipe, seed, Vec::new(), |_, _| {}).unwrap().1
    }

    #[test]
    fn every_small_shape_is_a_sound_file_in_every_type() {
        for shape in ["qwen3-tiny", "llama3-tiny", "gemma3-tiny", "qwen3-moe-tiny", "qwen3-many"] {
            for recipe in recipe::RECIPES {
                let file = model(shape, recipe.name, 1);
                let header = Header::read(&file[..], file.len() as u64).unwrap();
                check_model(header.metadata()).unwrap();
                for tensor in header.tensors() {
                    let start = header.file_offset(tensor) as usize;
                    check_weights(tensor, &file[start..start + tensor.bytes as usize]);
                }
            }
        }
    }

    /// Checks that weights have mean 0 and a deviation that preserves the size of activations, and
    /// that norms are 1.
    fn check_weights(tensor: &gguf::TensorInfo, bytes: &[u8]) {
        let mut values = vec![0.0; tensor.values() as usize];
        quant::decode(tensor.dtype, bytes, &mut values).unwrap();
        if tensor.dims.len() == 1 {
            assert!(values.iter().all(|&value| value == 1.0), "{}", tensor.name);
            return;
        }
        let count = values.len() as f64;
        let mean = values.iter().map(|&value| f64::from(value)).sum::<f64>() / count;
        let square = values.iter().map(|&value| f64::from(value).powi(2)).sum::<f64>() / count;
        let scaled = (square * tensor.row_values() as f64).sqrt();
        assert!((0.85..1.15).contains(&scaled), "{} {}: deviation {scaled}", tensor.name, tensor.dtype);
        assert!(mean.abs() < 0.1 * square.sqrt(), "{} {}: mean {mean}", tensor.name, tensor.dtype);
    }

    #[test]
    fn a_file_depends_on_its_seed_and_on_nothing_else() {
        let file = model("qwen3-tiny", "q4_k_m", 7);
        assert!(file == model("qwen3-tiny", "q4_k_m", 7));
        assert!(file != model("qwen3-tiny", "q4_k_m", 8));
    }

    #[test]
    fn real_shapes_have_the_parameters_of_the_real_models() {
        // Parameters in millions, from the model cards.
        for (shape, millions) in [
            ("qwen3-0.6b", 596),
            ("qwen3-1.7b", 1720),
            ("qwen3-8b", 8190),
            ("qwen3-32b", 32_762),
            ("qwen3-30b-a3b", 30_532),
            ("llama3-8b", 8030),
            ("llama3-70b", 70_553),
            ("gemma3-1b", 999),
            ("gemma3-4b", 3880),
            ("gemma3-12b", 11_766),
            ("gemma3-27b", 27_009),
        ] {
            let layout =
                layout(ModelShape::find(shape).unwrap(), QuantRecipe::find("q8_0").unwrap()).unwrap();
            let parameters: u64 = layout.tensors().iter().map(|tensor| tensor.values()).sum();
            assert!((parameters / 1_000_000).abs_diff(millions) <= 1, "{shape}: {parameters}");
        }
    }

    #[test]
    fn k_mixtures_are_those_of_llama_cpp() {
        let types = |shape, recipe, suffix: &str| -> String {
            let layout =
                layout(ModelShape::find(shape).unwrap(), QuantRecipe::find(recipe).unwrap()).unwrap();
            let matches = |name: &str| name == suffix || name.ends_with(&format!(".{suffix}"));
            let of = layout.tensors().iter().filter(|tensor| matches(&tensor.name));
            of.map(|tensor| tensor.dtype.name().trim_start_matches('Q').trim_end_matches("_K")).collect()
        };
        // As in published files: the better type goes to the first and last eighth of the layers
        // and to every third layer between.
        assert_eq!(types("qwen3-0.6b", "q4_k_m", "ffn_down.weight"), "6664464464464464464464466666");
        assert_eq!(types("qwen3-0.6b", "q5_k_m", "attn_v.weight"), "6665565565565565565565566666");
        assert_eq!(types("qwen3-0.6b", "q4_k_m", "attn_q.weight"), "4".repeat(28));
        assert_eq!(types("qwen3-0.6b", "q4_k_m", "token_embd.weight"), "6");
        assert_eq!(types("qwen3-8b", "q4_k_m", "token_embd.weight"), "4");
        assert_eq!(types("qwen3-8b", "q4_k_m", "output.weight"), "6");
        assert_eq!(types("llama3-8b", "q3_k_m", "attn_v.weight"), format!("55{}", "4".repeat(30)));
        assert_eq!(types("llama3-70b", "q4_k_m", "attn_v.weight").matches('4').count(), 0);
    }
}
