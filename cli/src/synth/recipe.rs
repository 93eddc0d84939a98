//! Which type each weight of a file gets: llama.cpp's mixtures, so that files have the sizes of published ones.

use super::shapes::{Family, Role, Shape};
use quant::DType;

/// A mixture by its name, with its number in `general.file_type`.
#[derive(Debug)]
pub(super) struct Recipe {
    pub(super) name: &'static str,
    pub(super) file_type: u32,
    /// The type of everything that no rule names.
    base: DType,
}

#[derive(Debug, thiserror::Error)]
#[error("no quantisation is called {name}; there are {}", RECIPES.iter().map(|recipe| recipe.name).collect::<Vec<_>>().join(", "))]
pub(super) struct UnknownRecipe {
    name: String,
}

pub(super) static RECIPES: &[Recipe] = &[
    Recipe { name: "f32", file_type: 0, base: DType::F32 },
    Recipe { name: "f16", file_type: 1, base: DType::F16 },
    Recipe { name: "bf16", file_type: 32, base: DType::BF16 },
    Recipe { name: "q8_0", file_type: 7, base: DType::Q8_0 },
    Recipe { name: "q4_0", file_type: 2, base: DType::Q4_0 },
    Recipe { name: "q4_1", file_type: 3, base: DType::Q4_1 },
    Recipe { name: "q5_0", file_type: 8, base: DType::Q5_0 },
    Recipe { name: "q5_1", file_type: 9, base: DType::Q5_1 },
    Recipe { name: "q2_k", file_type: 10, base: DType::Q2_K },
    Recipe { name: "q3_k_m", file_type: 12, base: DType::Q3_K },
    Recipe { name: "q4_k_m", file_type: 15, base: DType::Q4_K },
    Recipe { name: "q5_k_m", file_type: 17, base: DType::Q5_K },
    Recipe { name: "q6_k", file_type: 18, base: DType::Q6_K },
];

impl Recipe {
    pub(super) fn find(name: &str) -> Result<&'static Self, UnknownRecipe> {
        let name = name.to_lowercase();
        RECIPES.iter().find(|recipe| recipe.name == name).ok_or(UnknownRecipe { name })
    }

    /// The type of a weight with rows of `row` values.
    pub(super) fn dtype(&self, role: Role, row: u64, shape: &Shape) -> DType {
        fitting(self.wanted(role, shape), row)
    }

    fn wanted(&self, role: Role, shape: &Shape) -> DType {
        let layers = shape.layers;
        // Llama 70B shares each value head among eight query heads: a better type costs little there.
        let shares_widely = shape.family == Family::Llama3 && layers == 80;
        match (self.base, role) {
            (DType::F32 | DType::F16 | DType::BF16 | DType::Q8_0, _) => self.base,
            (_, Role::Output) => DType::Q6_K,
            (_, Role::Embedding) if shape.tied => DType::Q6_K,
            (DType::Q2_K, Role::AttentionV { .. }) if shape.heads / shape.kv_heads >= 4 => DType::Q4_K,
            (DType::Q2_K, Role::AttentionV { .. } | Role::AttentionOutput | Role::FeedForwardDown { .. }) => {
                DType::Q3_K
            }
            (DType::Q3_K, Role::AttentionV { layer }) if layer < 2 => DType::Q5_K,
            (DType::Q3_K, Role::AttentionV { .. }) if shares_widely => DType::Q5_K,
            (DType::Q3_K, Role::FeedForwardDown { layer }) if layer < layers / 16 => DType::Q5_K,
            (DType::Q3_K, Role::AttentionV { .. } | Role::AttentionOutput | Role::FeedForwardDown { .. }) => {
                DType::Q4_K
            }
            (DType::Q4_K | DType::Q5_K, Role::AttentionV { layer } | Role::FeedForwardDown { layer })
                if deserves_more_bits(layer, layers) =>
            {
                DType::Q6_K
            }
            (DType::Q4_K, Role::AttentionV { .. }) if shares_widely => DType::Q5_K,
            _ => self.base,
        }
    }
}

/// The first and the last eighth of the layers, and every third between them.
fn deserves_more_bits(layer: u64, layers: u64) -> bool {
    layer < layers / 8 || layer >= 7 * layers / 8 || (layer - layers / 8) % 3 == 2
}

/// What llama.cpp takes instead of a type whose blocks do not fill the rows.
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
