// SPDX-License-Identifier: Apache-2.0

//! Hidden states and labels of a model, computed beside logits and alone.

use super::runner::same_bits;
use super::{ModelFile, Runner};
use crate::OutputKind;
use anyhow::{Result, ensure};
use bytes::Bytes;
use gguf::{GgufWriter, MetadataBuilder, TensorLayout};
use ops::{Backend, KvType};
use quant::DType;

/// Rows of each kind for all tokens of a text.
pub struct StateRows {
    pub states: Vec<Vec<f32>>,
    pub labels: Vec<Vec<f32>>,
}

/// The file with rank pooling and a classifier of two labels, for a model of this width.
pub fn with_classifier(file: &ModelFile, width: usize) -> Result<ModelFile> {
    let header = file.header();
    let mut metadata = MetadataBuilder::default();
    metadata.copy(header.metadata(), |_| true)?;
    let architecture = header.metadata().architecture()?;
    metadata.put(&format!("{architecture}.pooling_type"), 4_u32)?;
    metadata.put(&format!("{architecture}.classifier.output_labels"), &["yes", "no"][..])?;
    let mut layout = TensorLayout::default();
    for tensor in header.tensors() {
        layout.add(&tensor.name, tensor.dtype, &tensor.dims)?;
    }
    layout.add("cls.output.weight", DType::F32, &[width as u64, 2])?;
    let mut writer = GgufWriter::start(Vec::new(), &metadata, layout)?;
    for tensor in header.tensors() {
        writer.write(file.tensor_bytes(tensor)?)?;
    }
    let values = (0..2 * width).map(|index| (index * 37 % 101) as f32 / 100.0 - 0.5);
    writer.write(&values.flat_map(f32::to_le_bytes).collect::<Vec<u8>>())?;
    ModelFile::from_bytes(writer.finish()?)
}

/// Computes the rows of `ids` alone, and checks that rows of mixed kinds in several steps have the
/// same bits. The file has a classifier.
pub fn state_rows<B: Backend<Data: From<Bytes>>>(
    file: &ModelFile,
    make: impl Fn() -> B,
    ids: &[u32],
) -> Result<StateRows> {
    let whole = |kind: OutputKind| -> Result<Vec<Vec<f32>>> {
        let mut runner = Runner::new(file, make(), KvType::F16, 1, ids.len())?;
        runner.step_of_kinds(&[(0, ids)], |_| Some(kind))
    };
    let [logits, states, labels] =
        [OutputKind::Logits, OutputKind::HiddenState, OutputKind::Labels].map(whole);
    let (logits, states, labels) = (logits?, states?, labels?);
    // Kinds alternate, so that the model divides the outputs of a step.
    let kinds = [OutputKind::HiddenState, OutputKind::Logits, OutputKind::Logits, OutputKind::Labels];
    let kind_of = |position: usize| kinds[position % kinds.len()];
    let mut runner = Runner::new(file, make(), KvType::F16, 1, ids.len())?;
    let (mut mixed, mut at) = (Vec::new(), 0);
    for size in [5, 1, ids.len()] {
        let part = &ids[at..ids.len().min(at + size)];
        mixed.extend(runner.step_of_kinds(&[(0, part)], |row| Some(kind_of(at + row)))?);
        at += part.len();
    }
    let expected: Vec<Vec<f32>> = (0..ids.len())
        .map(|position| match kind_of(position) {
            OutputKind::Logits => logits[position].clone(),
            OutputKind::HiddenState => states[position].clone(),
            OutputKind::Labels => labels[position].clone(),
        })
        .collect();
    ensure!(same_bits(&mixed, &expected), "rows have other bits beside rows of other kinds");
    Ok(StateRows { states, labels })
}
