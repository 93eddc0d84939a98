// SPDX-License-Identifier: Apache-2.0

//! [`CpuRope`]: cosines and sines of a step's positions. The first layer computes them, and all
//! layers use them.

use super::math::sin_cos;
use ops::{RopePairing, RopeSpec};
use std::sync::Mutex;

pub struct CpuRope {
    spec: RopeSpec,
    angles: Mutex<Angles>,
}

/// Cosines and sines of the rows of one step.
#[derive(Default)]
pub(super) struct Angles {
    /// Number of the step, counted from 1.
    step: u64,
    /// `pairs` values per row.
    pub(super) cos: Vec<f32>,
    pub(super) sin: Vec<f32>,
}

impl CpuRope {
    pub(super) fn new(spec: &RopeSpec) -> Self {
        Self { spec: spec.clone(), angles: Mutex::default() }
    }

    pub(super) fn pairs(&self) -> usize {
        self.spec.inverse_frequencies.len()
    }

    pub(super) fn is_adjacent(&self) -> bool {
        self.spec.pairing == RopePairing::Adjacent
    }

    /// The angles of `positions`, the positions of step number `step`.
    pub(super) fn angles(&self, step: u64, positions: &[u32]) -> std::sync::MutexGuard<'_, Angles> {
        let mut angles = self.angles.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if angles.step != step {
            let Angles { cos, sin, .. } = &mut *angles;
            cos.clear();
            sin.clear();
            let magnitude = f64::from(self.spec.magnitude);
            for &position in positions {
                for &frequency in &self.spec.inverse_frequencies {
                    let (s, c) = sin_cos(f64::from(position) * f64::from(frequency));
                    cos.push((c * magnitude) as f32);
                    sin.push((s * magnitude) as f32);
                }
            }
            angles.step = step;
        }
        angles
    }
}
