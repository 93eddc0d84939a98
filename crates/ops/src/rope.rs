//! Rotary position embedding: which values of a head turn together, and how fast.

/// Which two values form a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairing {
    /// `(x[2i], x[2i + 1])`: llama files, whose rows the converter permuted.
    Adjacent,
    /// `(x[i], x[i + n_rot / 2])`: NEOX style, qwen and most others.
    Halves,
}

/// Angle of pair `i` at position `p` is `p * inverse_frequencies[i]`; cos and sin are multiplied by `magnitude`.
/// Scaling (linear, YaRN, factor tensors) is already in the frequencies. Values beyond the pairs do not turn.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeSpec {
    pub pairing: RopePairing,
    /// `n_rot / 2` values.
    pub inverse_frequencies: Vec<f32>,
    pub magnitude: f32,
}
