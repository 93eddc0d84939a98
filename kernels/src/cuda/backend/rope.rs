// SPDX-License-Identifier: Apache-2.0

//! [`CudaRope`] holds the frequencies of one rotary embedding in device memory.

use std::sync::Arc;

use ops::{RopePairing, RopeSpec};

use super::operand::FloatRange;
use crate::cuda::{Buffer, CudaError, Stream};

pub struct CudaRope {
    pub(super) pairing: RopePairing,
    pub(super) magnitude: f32,
    frequencies: Arc<Buffer<f32>>,
}

impl CudaRope {
    pub(super) fn new(stream: &Stream, spec: &RopeSpec) -> Result<Self, CudaError> {
        let frequencies = Arc::new(Buffer::from_host(stream, &spec.inverse_frequencies)?);
        Ok(Self { pairing: spec.pairing, magnitude: spec.magnitude, frequencies })
    }

    pub(super) fn pairs(&self) -> usize {
        self.frequencies.len()
    }

    pub(super) fn owner(&self) -> Arc<Buffer<f32>> {
        self.frequencies.clone()
    }

    pub(super) fn frequencies(&self) -> FloatRange {
        FloatRange { address: self.frequencies.view().address(), len: self.pairs() }
    }
}
