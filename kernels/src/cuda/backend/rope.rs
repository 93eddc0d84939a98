//! The angles of one rotary embedding: its frequencies, on the device.

use std::sync::Arc;

use ops::{RopePairing, RopeSpec};

use super::command::Floats;
use crate::cuda::{Buffer, CudaError, Stream};

pub struct Rope {
    pub(super) pairing: RopePairing,
    pub(super) magnitude: f32,
    frequencies: Arc<Buffer<f32>>,
}

impl Rope {
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

    pub(super) fn frequencies(&self) -> Floats {
        Floats { address: self.frequencies.view().address(), len: self.pairs() }
    }
}
