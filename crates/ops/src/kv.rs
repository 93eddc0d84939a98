//! What the key/value cache of a model looks like, and what its element types make of the values that they store.

use half::{bf16, f16};
use quant::{Block, BlockQ8_0};
use std::fmt;
use std::str::FromStr;

/// Element type of stored keys and values. A head of a token is stored by itself, whatever is written beside it (I5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KvType {
    F32,
    #[default]
    F16,
    Bf16,
    /// Signed bytes and an f16 scale for each 32 values of a head; the last ones of a head may be fewer.
    Q8_0,
}

/// Values that share a scale.
const SCALED_VALUES: usize = 32;
const SCALE_BYTES: usize = 2;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no type of keys and values: f32, f16, bf16 or q8_0")]
pub struct UnknownKvType {
    text: String,
}

impl KvType {
    pub const ALL: [Self; 4] = [Self::F32, Self::F16, Self::Bf16, Self::Q8_0];

    /// Bytes of a head's keys, or values, of one token.
    pub fn head_bytes(self, head_dim: usize) -> usize {
        match self {
            Self::F32 => 4 * head_dim,
            Self::F16 | Self::Bf16 => 2 * head_dim,
            Self::Q8_0 => head_dim + SCALE_BYTES * head_dim.div_ceil(SCALED_VALUES),
        }
    }

    /// Turns a head into what is read back after it was stored. Beyond the largest f16 (a scale's for q8_0, so 127 times
    /// that) nothing finite is read back; a value that is no number makes all that share its scale so.
    pub fn round(self, head: &mut [f32]) {
        match self {
            Self::F32 => {}
            Self::F16 => head.iter_mut().for_each(|x| *x = f16::from_f32(*x).to_f32()),
            Self::Bf16 => head.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32()),
            Self::Q8_0 => head.chunks_mut(SCALED_VALUES).for_each(|part| {
                let mut whole = [0.0; SCALED_VALUES];
                whole[..part.len()].copy_from_slice(part);
                BlockQ8_0::encode(&whole).decode(&mut whole);
                if part.iter().any(|x| x.is_nan()) {
                    whole.fill(f32::NAN);
                }
                part.copy_from_slice(&whole[..part.len()]);
            }),
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Q8_0 => "q8_0",
        }
    }
}

impl fmt::Display for KvType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for KvType {
    type Err = UnknownKvType;

    fn from_str(text: &str) -> Result<Self, UnknownKvType> {
        let known = Self::ALL.into_iter().find(|kind| kind.name() == text);
        known.ok_or_else(|| UnknownKvType { text: text.to_owned() })
    }
}

/// One layer's share of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayer {
    pub kv_heads: usize,
    /// Values per head, for keys and for values.
    pub head_dim: usize,
    pub kind: KvType,
}

/// The whole cache: `blocks` blocks of `block_tokens` tokens, each holding keys and values of every layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvLayout {
    pub block_tokens: usize,
    pub blocks: usize,
    pub layers: Vec<KvLayer>,
}

impl KvLayer {
    /// Bytes of keys and values of one token.
    pub fn token_bytes(&self) -> usize {
        2 * self.kv_heads * self.kind.head_bytes(self.head_dim)
    }
}

impl KvLayout {
    /// Bytes of one block over all layers.
    pub fn block_bytes(&self) -> usize {
        self.block_tokens * self.layers.iter().map(KvLayer::token_bytes).sum::<usize>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_written_as_they_are_read() {
        for kind in KvType::ALL {
            assert_eq!(kind.to_string().parse(), Ok(kind));
        }
        let error = "q4_0".parse::<KvType>().unwrap_err();
        assert_eq!(error.to_string(), "\"q4_0\" is no type of keys and values: f32, f16, bf16 or q8_0");
    }

    #[test]
    fn a_token_takes_its_elements_and_scales() {
        let bytes = |kind, head_dim| KvLayer { kv_heads: 2, head_dim, kind }.token_bytes();
        assert_eq!(KvType::ALL.map(|kind| bytes(kind, 128)), [2048, 1024, 1024, 544]);
        // 48 values: a scale for 32, one for 16.
        assert_eq!(bytes(KvType::Q8_0, 48), 4 * (48 + 2 * 2));
        assert_eq!(bytes(KvType::Q8_0, 5), 4 * (5 + 2));
    }

    #[test]
    fn what_is_read_back_is_near() {
        let head: Vec<f32> = (0..80).map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0).collect();
        for (kind, bound) in
            [(KvType::F32, 0.0), (KvType::F16, 5e-4), (KvType::Bf16, 4e-3), (KvType::Q8_0, 4.5e-3)]
        {
            let mut rounded = head.clone();
            kind.round(&mut rounded);
            let worst = head.iter().zip(&rounded).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst <= bound, "{kind}: {worst}");
            assert!(kind == KvType::F32 || worst > bound / 10.0, "{kind} does not round: {worst}");
            let mut again = rounded.clone();
            kind.round(&mut again);
            // The stored scale of q8_0 is rounded, so the quants of what was read back may differ by one step.
            let moved = rounded.iter().zip(&again).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(moved <= if kind == KvType::Q8_0 { 9e-3 } else { 0.0 }, "{kind}: {moved}");
        }
    }

    #[test]
    fn a_scale_is_shared_inside_a_head_only_by_its_32() {
        let mut head = vec![1e-3_f32; 48];
        head[3] = 1000.0;
        KvType::Q8_0.round(&mut head);
        assert_eq!(head[4], 0.0, "drowned by its neighbour");
        assert!((head[40] - 1e-3).abs() < 1e-5, "{}", head[40]);
    }

    #[test]
    fn what_is_no_number_or_too_large_stays_visible() {
        for kind in KvType::ALL {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut head = [1.0; 40];
                head[2] = bad;
                kind.round(&mut head);
                assert!(!head[2].is_finite(), "{kind}, {bad}");
                assert!((head[35] - 1.0).abs() < 1e-3, "{kind}, {bad}: another scale");
            }
        }
        for (kind, too_large) in [(KvType::F16, 66e3), (KvType::Q8_0, 127.0 * 66e3)] {
            let mut head = [too_large; 2];
            kind.round(&mut head);
            assert!(!head[0].is_finite(), "{kind}");
        }
        let mut zeros = [0.0, -0.0, 1e-40, -1e-40];
        KvType::Q8_0.round(&mut zeros);
        assert_eq!(zeros, [0.0; 4]);
    }
}
