// SPDX-License-Identifier: Apache-2.0

//! Mixture of experts: the choice of experts for a row, and [`Backend::experts`] in plain ops.

use crate::{Activation, Backend, Experts, Linear, OpError};

/// Smallest divisor when probabilities are renormalised (the smallest normal f16, as llama.cpp has
/// it).
const PROBABILITY_SUM_MIN: f32 = 1.0 / 16384.0;

/// An expert that a row goes through, and the factor on its output.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertChoice {
    pub expert: usize,
    pub probability: f32,
}

/// The `used` experts of one row, in falling order of probability. Their probabilities add up to 1.
pub fn choose_experts(logits: &[f32], used: usize) -> Vec<ExpertChoice> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f64> = logits.iter().map(|&logit| f64::from(logit - largest).exp()).collect();
    let total: f64 = weights.iter().sum();
    let mut ranked: Vec<ExpertChoice> = weights
        .iter()
        .enumerate()
        .map(|(expert, &weight)| ExpertChoice { expert, probability: (weight / total) as f32 })
        .collect();
    // The sort is stable, so that the lower index wins a tie.
    ranked.sort_by(|a, b| b.probability.total_cmp(&a.probability));
    ranked.truncate(used);
    let sum: f32 = ranked.iter().map(|choice| choice.probability).sum();
    for choice in &mut ranked {
        choice.probability /= sum.max(PROBABILITY_SUM_MIN);
    }
    ranked
}

/// Runs every expert once over the rows that chose it, then adds each row's contributions in rank
/// order.
pub(crate) fn by_expert<B: Backend>(
    backend: &mut B,
    layer: &Experts<B>,
    activation: Activation,
    router: &B::Tensor,
    x: &B::Tensor,
    out: &mut B::Tensor,
    rows: usize,
) -> Result<(), OpError> {
    let (n_in, hidden, count, used) = (layer.n_in(), layer.hidden(), layer.count(), layer.used);
    let mut logits = vec![0.0; rows * count];
    backend.read(router, rows, &mut logits)?;
    let mut inputs = vec![0.0; rows * n_in];
    backend.read(x, rows, &mut inputs)?;
    let choices: Vec<ExpertChoice> =
        logits.chunks_exact(count).flat_map(|row| choose_experts(row, used)).collect();

    let mut batch = backend.tensor(rows, n_in)?;
    let mut gate = backend.tensor(rows, hidden)?;
    let mut up = backend.tensor(rows, hidden)?;
    let mut result = backend.tensor(rows, n_in)?;
    // Row `r * used + j` is the output of row `r`'s expert of rank `j`.
    let mut contributions = vec![0.0; rows * used * n_in];
    for expert in 0..count {
        let slots: Vec<usize> = (0..choices.len()).filter(|&slot| choices[slot].expert == expert).collect();
        if slots.is_empty() {
            continue;
        }
        let gathered: Vec<f32> =
            slots.iter().flat_map(|&slot| &inputs[slot / used * n_in..][..n_in]).copied().collect();
        backend.write(&mut batch, slots.len(), &gathered)?;
        let plain = |weight| Linear { weight, bias: None };
        let gate_layer = plain(backend.expert(&layer.gate, expert)?);
        let up_layer = plain(backend.expert(&layer.up, expert)?);
        let down_layer = plain(backend.expert(&layer.down, expert)?);
        backend.linears(&batch, &mut [(&gate_layer, &mut gate), (&up_layer, &mut up)], slots.len())?;
        backend.gated(activation, &mut gate, &up, slots.len())?;
        backend.linear(&down_layer, &gate, &mut result, slots.len())?;
        let mut made = vec![0.0; slots.len() * n_in];
        backend.read(&result, slots.len(), &mut made)?;
        for (&slot, row) in slots.iter().zip(made.chunks_exact(n_in)) {
            contributions[slot * n_in..][..n_in].copy_from_slice(row);
        }
    }

    let mut sums = vec![0.0_f32; rows * n_in];
    for (slot, choice) in choices.iter().enumerate() {
        let sum = &mut sums[slot / used * n_in..][..n_in];
        let contribution = &contributions[slot * n_in..][..n_in];
        for (total, value) in sum.iter_mut().zip(contribution) {
            *total += choice.probability * value;
        }
    }
    backend.write(out, rows, &sums)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_experts_share_one() {
        let chosen = choose_experts(&[1.0, 3.0, 2.0, 3.0], 2);
        assert_eq!(chosen.iter().map(|choice| choice.expert).collect::<Vec<_>>(), [1, 3]);
        assert_eq!(chosen[0].probability, 0.5);
    }

    #[test]
    fn tiny_probabilities_are_not_blown_up() {
        let chosen = choose_experts(&[0.0, -100.0], 2);
        assert_eq!(chosen[0].expert, 0);
        assert!(chosen[1].probability < 1e-30);
    }
}
