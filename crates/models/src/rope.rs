// SPDX-License-Identifier: Apache-2.0

//! Rope configuration: computes one frequency per pair from metadata, for plain, linear and YaRN
//! scaling and for factor tensors.

use crate::{BuildModelError, ModelConfigError, config::MetadataKeys};
use ops::{Backend, RopePairing, RopeSpec, Step, Weight};
use std::{f64::consts::TAU, ops::RangeInclusive};

/// YaRN does not scale a pair with more turns over the original context than the first number, and
/// fully interpolates one with fewer than the second.
const YARN_BETA_FAST: f64 = 32.0;
const YARN_BETA_SLOW: f64 = 1.0;
/// Smallest width of YaRN's ramp in pairs, which avoids a division by zero.
const YARN_RAMP_MIN: f64 = 0.001;

/// Lower bound of the base. Base 1 does not rotate, and YaRN divides by its logarithm.
const BASES: RangeInclusive<f32> = 1.001..=1e12;
const BASE_DEFAULT: f32 = 10_000.0;

/// The metadata keys `rope.*` of a model.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RopeConfig {
    pub(crate) pairing: RopePairing,
    /// Values of a head that are rotated.
    pub(crate) rotated: usize,
    base: f64,
    scaling: Scaling,
    magnitude: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Scaling {
    None,
    Linear { factor: f64 },
    Yarn { factor: f64, original_context: usize },
}

impl RopeConfig {
    pub(crate) fn read(
        keys: &MetadataKeys<'_>,
        pairing: RopePairing,
        head_dim: usize,
        context_length: usize,
    ) -> Result<Self, ModelConfigError> {
        let rotated = keys.count_or("rope.dimension_count", head_dim, 2..=head_dim)?;
        if !rotated.is_multiple_of(2) {
            return Err(keys.range("rope.dimension_count", rotated, 2, head_dim));
        }
        let base = keys.number("rope.freq_base", BASES)?.unwrap_or(BASE_DEFAULT);
        // A factor of 0 means no scaling.
        let factor = match keys.number("rope.scaling.factor", 0.0..=1e6)?.filter(|&factor| factor != 0.0) {
            Some(factor) => Some(factor),
            None => keys.number("rope.scale_linear", 0.0..=1e6)?.filter(|&factor| factor != 0.0),
        };
        let factor = f64::from(factor.unwrap_or(1.0));
        let scaling = match keys.text("rope.scaling.type")? {
            None | Some("linear") => Scaling::Linear { factor },
            Some("none") => Scaling::None,
            Some("yarn") => {
                let original_context = keys.count_or(
                    "rope.scaling.original_context_length",
                    context_length,
                    1..=crate::config::CONTEXT_MAX,
                )?;
                Scaling::Yarn { factor, original_context }
            }
            Some(other) => return Err(keys.choice("rope.scaling.type", other, &["none", "linear", "yarn"])),
        };
        let magnitude = keys.number("rope.scaling.attn_factor", 0.0..=1e6)?.unwrap_or(1.0);
        Ok(Self { pairing, rotated, base: base.into(), scaling, magnitude: magnitude.into() })
    }

    /// Rope of layers with an attention window: another base, and no scaling, since the window does
    /// not grow with the context.
    pub(crate) fn of_windows(&self, keys: &MetadataKeys<'_>) -> Result<Self, ModelConfigError> {
        let base = keys.number("rope.freq_base_swa", BASES)?.unwrap_or(BASE_DEFAULT);
        Ok(Self { base: base.into(), scaling: Scaling::None, ..self.clone() })
    }

    /// `factors` divide the angles, one per pair.
    pub(crate) fn spec(&self, factors: Option<&[f32]>) -> RopeSpec {
        let pairs = self.rotated / 2;
        let inverse_frequencies = (0..pairs)
            .map(|pair| {
                let plain = self.base.powf(-2.0 * pair as f64 / self.rotated as f64);
                let plain = match factors {
                    Some(factors) => plain / f64::from(factors[pair]),
                    None => plain,
                };
                self.scaled(pair, plain) as f32
            })
            .collect();
        let magnitude = match self.scaling {
            Scaling::Yarn { factor, .. } => (1.0 + 0.1 * factor.ln()) * self.magnitude,
            Scaling::None | Scaling::Linear { .. } => self.magnitude,
        };
        RopeSpec { pairing: self.pairing, inverse_frequencies, magnitude: magnitude as f32 }
    }

    fn scaled(&self, pair: usize, plain: f64) -> f64 {
        match self.scaling {
            Scaling::None => plain,
            Scaling::Linear { factor } => plain / factor,
            Scaling::Yarn { factor, original_context } => {
                let low = self.yarn_pair(YARN_BETA_FAST, original_context).floor().max(0.0);
                let high =
                    self.yarn_pair(YARN_BETA_SLOW, original_context).ceil().min(self.rotated as f64 - 1.0);
                let position = (pair as f64 - low) / (high - low).max(YARN_RAMP_MIN);
                let kept = 1.0 - position.clamp(0.0, 1.0);
                plain / factor * (1.0 - kept) + plain * kept
            }
        }
    }

    /// The fractional index of the pair with `turns` turns over the original context.
    fn yarn_pair(&self, turns: f64, original_context: usize) -> f64 {
        self.rotated as f64 * (original_context as f64 / (turns * TAU)).ln() / (2.0 * self.base.ln())
    }
}

/// Copies a factor tensor to the host. The tensor may be in GPU memory, so it is read as a row of
/// an embedding table.
pub(crate) fn read_factors<B: Backend>(
    backend: &mut B,
    weight: &Weight<B>,
) -> Result<Vec<f32>, BuildModelError> {
    let mut factors = vec![0.0; weight.cols()];
    let mut row = backend.tensor(1, weight.cols())?;
    let (zero, no_blocks): (&[u32], &[&[u32]]) = (&[0], &[&[]]);
    backend.begin(&Step {
        tokens: zero,
        positions: zero,
        sequences: zero,
        kv_slots: zero,
        tables: no_blocks,
        outputs: zero,
    })?;
    backend.embed(weight, &mut row, 1)?;
    backend.read(&row, 1, &mut factors)?;
    match factors.iter().enumerate().find(|&(_, &factor)| !(factor > 0.0 && factor.is_finite())) {
        Some((index, &value)) => Err(BuildModelError::RopeFactor { index, value }),
        None => Ok(factors),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(scaling: Scaling) -> RopeConfig {
        RopeConfig { pairing: RopePairing::Adjacent, rotated: 64, base: 10_000.0, scaling, magnitude: 1.0 }
    }

    #[test]
    fn the_first_pair_turns_once_per_radian() {
        let spec = config(Scaling::Linear { factor: 1.0 }).spec(None);
        assert_eq!(spec.inverse_frequencies.len(), 32);
        assert_eq!(spec.inverse_frequencies[0], 1.0);
        assert_eq!(spec.magnitude, 1.0);
    }

    #[test]
    fn factors_divide_the_angles() {
        let mut factors = vec![1.0; 32];
        factors[0] = 8.0;
        factors[31] = 1e30;
        let spec = config(Scaling::None).spec(Some(&factors));
        assert_eq!(spec.inverse_frequencies[0], 0.125);
        assert!(spec.inverse_frequencies[31] < 1e-30);
    }

    #[test]
    fn yarn_keeps_fast_pairs_and_interpolates_slow_ones() {
        let plain = config(Scaling::None).spec(None);
        let yarn = config(Scaling::Yarn { factor: 4.0, original_context: 4096 }).spec(None);
        assert_eq!(yarn.inverse_frequencies[0], plain.inverse_frequencies[0]);
        let slow = yarn.inverse_frequencies[31] / plain.inverse_frequencies[31];
        assert!((slow - 0.25).abs() < 1e-6, "{slow}");
        assert!((yarn.magnitude - 1.138_629_4).abs() < 1e-6, "{}", yarn.magnitude);
    }
}
