// SPDX-License-Identifier: Apache-2.0

//! The registry: one line per architecture, from its name to its configuration function.

use crate::{
    BuildModelError, ForwardLimits, Model, ModelConfigError, ModelDescription, WeightTable,
    config::MetadataKeys,
    decoder::{Decoder, DecoderConfig, DecoderWeights},
    gemma3, llama, qwen2, qwen3,
};
use gguf::Metadata;
use ops::{Backend, Reference, Weight};
use quant::DType;

type Configure = fn(&MetadataKeys<'_>) -> Result<DecoderConfig, ModelConfigError>;

const ARCHITECTURES: &[(&str, Configure)] = &[
    ("gemma3", gemma3::configure),
    ("llama", llama::configure),
    ("qwen2", qwen2::configure),
    ("qwen3", qwen3::configure),
    ("qwen3moe", qwen3::configure_moe),
];

/// Name, type and shape of a tensor, in GGUF order.
#[derive(Clone, Copy, Debug)]
pub struct TensorHead<'a> {
    pub name: &'a str,
    pub dtype: DType,
    pub dims: &'a [u64],
}

/// Builds the model that `metadata` describes from `weights`. Allocates activations for steps of up
/// to `limits`.
pub fn build<B: Backend>(
    metadata: &Metadata,
    mut weights: WeightTable<B>,
    backend: &mut B,
    limits: ForwardLimits,
) -> Result<Box<dyn Model<B>>, BuildModelError> {
    let (_, config) = configure(metadata)?;
    let weights = DecoderWeights::take(&config, &mut weights)?;
    Ok(Box::new(Decoder::new(config, weights, backend, limits)?))
}

/// Runs the checks of [`build`] on metadata and tensor table, without tensor data.
pub fn validate<'a>(
    metadata: &Metadata,
    tensors: impl IntoIterator<Item = TensorHead<'a>>,
) -> Result<ModelDescription, BuildModelError> {
    let (architecture, config) = configure(metadata)?;
    let mut table = WeightTable::<Reference>::new();
    for TensorHead { name, dtype, dims } in tensors {
        // A dimension beyond usize matches no expected shape.
        let dims = dims.iter().map(|&dim| usize::try_from(dim).unwrap_or(usize::MAX)).collect();
        let weight = Weight { dtype, dims, layout: 0, data: Default::default() };
        table.insert(name.to_owned(), weight)?;
    }
    DecoderWeights::take(&config, &mut table)?;
    Ok(config.describe(architecture, table.names().map(str::to_owned).collect()))
}

fn configure(metadata: &Metadata) -> Result<(&str, DecoderConfig), BuildModelError> {
    let keys = MetadataKeys::new(metadata)?;
    let found = keys.architecture();
    let Some((_, configure)) = ARCHITECTURES.iter().find(|(name, _)| *name == found) else {
        let known = ARCHITECTURES.iter().map(|(name, _)| *name).collect();
        return Err(BuildModelError::UnknownArchitecture { found: found.to_owned(), known });
    };
    Ok((found, configure(&keys)?))
}
