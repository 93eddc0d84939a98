// SPDX-License-Identifier: Apache-2.0

//! The type of each weight: llama.cpp's mixtures, so that files have the sizes of published ones.

use super::shapes::{ModelFamily, ModelShape, WeightRole};
use quant::DType;

/// A mixture with its number in `general.file_type`.
#[derive(Debug)]
pub(super) struct QuantRecipe {
    pub(super) name: &'static str,
    pub(super) file_type: u32,
    /// The type of all weights without a rule of their own.
    base: DType,
}

#[derive(Debug, thiserror::Error)]
#[error("unknown quantization {name}; known: {}", RECIPES.iter().map(|recipe| recipe.name).collect::<Vec<_>>().join(", "))]
pub(super) struct UnknownQuantRecipe {
    name: String,
}

pub(super) static RECIPES: &[QuantRecipe] = &[
    QuantRecipe { name: "f32", file_type: 0, base: DType::F32 },
    QuantRecipe { name: "f16", file_type: 1, base: DType::F16 },
    QuantRecipe { name: "bf16", file_type: 32, base: DType::BF16 },
    QuantRecipe { name: "q8_0", file_type: 7, base: DType::Q8_0 },
    QuantRecipe { name: "q4_0", file_type: 2, base: DType::Q4_0 },
    QuantRecipe { name: "q4_1", file_type: 3, base: DType::Q4_1 },
    QuantRecipe { name: "q5_0", file_type: 8, base: DType::Q5_0 },
    QuantRecipe { name: "q5_1", file_type: 9, base: DType::Q5_1 },
    QuantRecipe { name: "q2_k", file_type: 10, base: DType::Q2_K },
    QuantRecipe { name: "q3_k_m", file_type: 12, base: DType::Q3_K },
    QuantRecipe { name: "q4_k_m", file_type: 15, base: DType::Q4_K },
    QuantRecipe { name: "q5_k_m", file_type: 17, base: DType::Q5_K },
    QuantRecipe { name: "q6_k", file_type: 18, base: DType::Q6_K },
];

impl QuantRecipe {
    pub(super) fn find(name: &str) -> Result<&'static Self, UnknownQuantRecipe> {
        let name = name.to_lowercase();
        RECIPES.iter().find(|recipe| recipe.name == name).ok_or(UnknownQuantRecipe { name })
    }

    /// Type of a weight with rows of `row` values.
    pub(super) fn dtype(&self, role: WeightRole, row: u64, shape: &ModelShape) -> DType {
        fitting(self.wanted(role, shape), row)
    }

    fn wanted(&self, role: WeightRole, shape: &ModelShape) -> DType {
        let layers = shape.layers;
        // Llama 70B shares each value head among eight query heads, so a better type costs little
        // there.
        let shares_widely = shape.family == ModelFamily::Llama3 && layers == 80;
        match (self.base, role) {
            (DType::F32 | DType::F16 | DType::BF16 | DType::Q8_0, _) => self.base,
            (_, WeightRole::Output) => DType::Q6_K,
            (_, WeightRole::Embedding) if shape.tied => DType::Q6_K,
            (DType::Q2_K, WeightRole::AttentionV { .. }) if shape.heads / shape.kv_heads >= 4 => DType::Q4_K,
            (
                DType::Q2_K,
                WeightRole::AttentionV { .. }
                | WeightRole::AttentionOutput
                | WeightRole::FeedForwardDown { .. },
            ) => DType::Q3_K,
            (DType::Q3_K, WeightRole::AttentionV { layer }) if layer < 2 => DType::Q5_K,
            (DType::Q3_K, WeightRole::AttentionV { .. }) if shares_widely => DType::Q5_K,
            (DType::Q3_K, WeightRole::FeedForwardDown { layer }) if layer < layers / 16 => DType::Q5_K,
            (
                DType::Q3_K,
                WeightRole::AttentionV { .. }
                | WeightRole::AttentionOutput
                | WeightRole::FeedForwardDown { .. },
            ) => DType::Q4_K,
            (
                DType::Q4_K | DType::Q5_K,
                WeightRole::AttentionV { layer } | WeightRole::FeedForwardDown { layer },
            ) if deserves_more_bits(layer, layers) => DType::Q6_K,
            (DType::Q4_K, WeightRole::AttentionV { .. }) if shares_widely => DType::Q5_K,
            _ => self.base,
        }
    }
}

/// The first and the last eighth of the layers, and every third layer between them.
fn deserves_more_bits(layer: u64, layers: u64) -> bool {
    layer < layers / 8 || layer >= 7 * layers / 8 || (layer - layers / 8) % 3 == 2
}

/// The type that llama.cpp uses instead of one whose blocks do not fit the row length.
fn fitting(dtype: DType, row: u64) -> DType {
    if dtype.row_bytes(row).is_ok() {
        return dtype;
    }
    let smaller = match dtype {
        DType::Q2_K | DType::Q3_K => DType::Q4_0,
        DType::Q4_K => DType::Q5_0,
        DType::Q5_K => DType::Q5_1,
        DType::Q6_K => DType::Q8_0,
        _ => DType::F16,
    };
    if smaller.row_bytes(row).is_ok() { smaller } else { DType::F16 }
}
