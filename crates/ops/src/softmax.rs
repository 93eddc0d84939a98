// SPDX-License-Identifier: Apache-2.0

//! Softmax with the same bits on every machine: an f32 exponential, and sums in one fixed order.
//!
//! The last bit of the C library's `exp` differs between machines. [`exp`] uses f32 multiplications
//! and additions only, so it has the same bits everywhere, and the compiler can vectorize it. A GPU
//! and the host therefore draw the same token.

/// Values per partial sum. `LANES` running sums make a partial sum.
const BLOCK: usize = 1024;
const LANES: usize = 8;

/// `e^x` for `x <= 0`, within 2 units in the last place; 0 below -87, where f32 runs out of normal
/// numbers. Polynomial of Cephes' `expf` on `|r| <= ln(2) / 2`, where `x = n ln(2) + r`.
#[inline]
pub fn exp(x: f32) -> f32 {
    const LOWEST: f32 = -87.0;
    /// After this addition, the low bits of the mantissa are the nearest integer.
    const ROUND: f32 = 12_582_912.0;
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let clamped = x.max(LOWEST);
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = clamped - n * LN_2_HIGH - n * LN_2_LOW;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_2e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_6e-1;
    p = p * r + 5e-1;
    let fraction = p * (r * r) + r + 1.0;
    let exponent = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23;
    let value = fraction * f32::from_bits(exponent);
    if x < LOWEST { 0.0 } else { value }
}

/// `sum of e^(logit - max)`.
pub fn exp_sum(logits: &[f32], max: f32) -> f64 {
    logits.chunks(BLOCK).map(|block| sum(block, |logit| exp(logit - max))).sum()
}

/// SoftmaxWeights of a draw, with partial sums so that a draw need not walk all of them.
#[derive(Debug, Default)]
pub struct SoftmaxWeights {
    values: Vec<f32>,
    blocks: Vec<f64>,
}

impl SoftmaxWeights {
    /// Computes `e^((logit - max) / temperature)` of each logit.
    pub fn fill(&mut self, logits: impl Iterator<Item = f32>, max: f32, temperature: f32) {
        self.values.clear();
        self.values.extend(logits.map(|logit| exp((logit - max) / temperature)));
        self.blocks.clear();
        self.blocks.extend(self.values.chunks(BLOCK).map(|block| sum(block, |weight| weight)));
    }

    /// Sum of all weights.
    pub fn total(&self) -> f64 {
        self.blocks.iter().sum()
    }

    /// Weight `index` divided by the sum.
    pub fn probability(&self, index: usize) -> f64 {
        f64::from(self.values[index]) / self.total()
    }

    /// Draws by inversion: the first index at which the running sum exceeds `uniform` (in `[0, 1)`)
    /// times the total. An index of weight 0 is never drawn unless all weights are 0.
    pub fn pick(&self, uniform: f64) -> usize {
        let mut target = uniform * self.total();
        let mut chosen = 0;
        for (block, &total) in self.blocks.iter().enumerate() {
            if total > 0.0 {
                chosen = block;
                if target < total {
                    break;
                }
                target -= total;
            }
        }
        let start = chosen * BLOCK;
        let end = self.values.len().min(start + BLOCK);
        let mut index = start;
        let mut sum = 0.0;
        for (at, &weight) in self.values[start..end].iter().enumerate() {
            if weight > 0.0 {
                index = start + at;
                sum += f64::from(weight);
                if target < sum {
                    break;
                }
            }
        }
        index
    }
}

/// Adds `term(values[i])` to lane `i % LANES`, then adds the lanes in order.
fn sum(values: &[f32], term: impl Fn(f32) -> f32) -> f64 {
    let mut lanes = [0.0_f64; LANES];
    let (groups, rest) = values.as_chunks::<LANES>();
    for group in groups {
        // Two loops, terms then sums, so that the compiler vectorizes both.
        let terms = group.map(&term);
        lanes.iter_mut().zip(terms).for_each(|(lane, term)| *lane += f64::from(term));
    }
    lanes.iter_mut().zip(rest).for_each(|(lane, &value)| *lane += f64::from(term(value)));
    lanes.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_of_the_true_value() {
        let mut x = 0.0_f32;
        while x > -87.0 {
            let truth = f64::from(x).exp();
            let unit = f64::from((truth as f32).next_up()) - f64::from(truth as f32);
            let error = (f64::from(exp(x)) - truth).abs() / unit;
            assert!(error <= 2.0, "exp({x}) is {error} units off");
            x -= 0.000_7 + x.abs() * 1e-5;
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(-88.0), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
    }

    /// The digest was computed with numpy's float32, operation by operation.
    #[test]
    fn exp_gives_the_same_bits_everywhere() {
        let digest = (0..=8_700).fold(0_u32, |hash, i| {
            hash.rotate_left(5).wrapping_mul(0x9E37_79B9) ^ exp(-(i as f32) * 0.01).to_bits()
        });
        assert_eq!(digest, 0xe00f_a7be);
    }

    #[test]
    fn sums_cover_every_value() {
        for len in [0, 1, 7, 8, 9, 1023, 1024, 1025, 5000] {
            let logits: Vec<f32> = (0..len).map(|i| -((i % 13) as f32)).collect();
            let direct: f64 = logits.iter().map(|&logit| f64::from(exp(logit))).sum();
            assert!((exp_sum(&logits, 0.0) - direct).abs() <= direct * 1e-12);
        }
    }

    #[test]
    fn pick_inverts_the_running_sum() {
        let mut weights = SoftmaxWeights::default();
        let logits: Vec<f32> =
            (0..3000).map(|i| if i % 3 == 0 { f32::NEG_INFINITY } else { -((i % 5) as f32) }).collect();
        weights.fill(logits.iter().copied(), 0.0, 1.0);
        let total: f64 = weights.values.iter().map(|&w| f64::from(w)).sum();
        let mut sum = 0.0;
        for (index, &weight) in weights.values.iter().enumerate() {
            if weight > 0.0 {
                assert_eq!(weights.pick((sum + f64::from(weight) / 2.0) / total), index);
                sum += f64::from(weight);
            }
        }
        assert_eq!(weights.pick(0.0), 1);
        assert_eq!(weights.pick(1.0 - f64::EPSILON), 2999);
    }
}
