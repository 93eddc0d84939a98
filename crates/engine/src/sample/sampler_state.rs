// SPDX-License-Identifier: Apache-2.0

//! Sampler state that a resumed request passes back.

/// Sampler state besides tokens, seed and position: at most 32 bytes, which the router carries
/// unread. Random numbers are keyed by position and need no state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SamplerState {
    bytes: [u8; SamplerState::BYTES_MAX],
    len: u8,
}

impl SamplerState {
    pub const BYTES_MAX: usize = 32;

    /// `None` if `state` is longer than [`Self::BYTES_MAX`].
    pub fn from_bytes(state: &[u8]) -> Option<Self> {
        let mut bytes = [0; Self::BYTES_MAX];
        bytes.get_mut(..state.len())?.copy_from_slice(state);
        Some(Self { bytes, len: state.len() as u8 })
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}
