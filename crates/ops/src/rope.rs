// SPDX-License-Identifier: Apache-2.0

//! [`RopeSpec`]: pairing and frequencies of a rotary position embedding (RoPE).

/// Which two values of a head rotate together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairing {
    /// `(x[2i], x[2i + 1])`: llama files, whose rows the GGUF converter permuted.
    Adjacent,
    /// `(x[i], x[i + n_rot / 2])`: NEOX style, qwen and most others.
    Halves,
}

/// Angle of pair `i` at position `p` is `p * inverse_frequencies[i]`; cos and sin are multiplied by
/// `magnitude`. The frequencies include all scaling (linear, YaRN, factor tensors). Values beyond
/// the pairs are not rotated.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeSpec {
    pub pairing: RopePairing,
    /// `n_rot / 2` values.
    pub inverse_frequencies: Vec<f32>,
    pub magnitude: f32,
}
