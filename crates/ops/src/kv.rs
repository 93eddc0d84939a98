// SPDX-License-Identifier: Apache-2.0

//! Layout of the KV cache: element types, attention spans, and groups of layers that share a block
//! table.
//!
//! A block holds the keys and values of `block_tokens` tokens, for all layers of one KV cache
//! group:
//!
//! ```text
//! group 0 (layers 5, 11)       block table: 7 2 9    block 7 = | layer 5: keys, values | layer 11: keys, values |
//! group 1 (layers 0, 1, 2, 3)  block table: 4 1      block 4 = | layer 0 | layer 1 | layer 2 | layer 3 |
//! ```

use half::{bf16, f16};
use quant::{BlockFormat, BlockQ8_0};
use std::fmt;
use std::str::FromStr;

/// Element type of stored keys and values. What is stored for a head of a token depends on that
/// head only (I5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KvType {
    F32,
    #[default]
    F16,
    Bf16,
    /// Signed bytes with an f16 scale for each 32 values of a head. The last group of a head may
    /// have fewer values.
    Q8_0,
}

/// Values that share one scale.
const SCALED_VALUES: usize = 32;
const SCALE_BYTES: usize = 2;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a KV cache type; use f32, f16, bf16 or q8_0")]
pub struct UnknownKvType {
    text: String,
}

impl KvType {
    pub const ALL: [Self; 4] = [Self::F32, Self::F16, Self::Bf16, Self::Q8_0];

    /// Bytes of the key, or of the value, of one head and one token.
    pub fn head_bytes(self, head_dim: usize) -> usize {
        match self {
            Self::F32 => 4 * head_dim,
            Self::F16 | Self::Bf16 => 2 * head_dim,
            Self::Q8_0 => head_dim + SCALE_BYTES * head_dim.div_ceil(SCALED_VALUES),
        }
    }

    /// Replaces a head by the values that a reader gets after the head was stored.
    ///
    /// A magnitude above the largest f16 becomes infinite; for q8_0, whose scale is an f16, above
    /// 127 times that. A NaN turns all values that share its scale into NaN.
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

/// Which positions of its sequence a row attends to in a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum AttentionSpan {
    /// All positions up to the row's own.
    #[default]
    Full,
    /// The last `tokens` positions, the row's own included.
    Window { tokens: usize },
}

impl AttentionSpan {
    /// Length of the window, if there is one.
    pub fn window_tokens(self) -> Option<usize> {
        match self {
            Self::Full => None,
            Self::Window { tokens } => Some(tokens),
        }
    }

    /// The first position that a row at `position` attends to.
    pub fn first_position(self, position: usize) -> usize {
        match self {
            Self::Full => 0,
            Self::Window { tokens } => (position + 1).saturating_sub(tokens.max(1)),
        }
    }
}

/// Shape, element type and span of one layer's keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayer {
    pub kv_heads: usize,
    /// Values per head, for keys and for values.
    pub head_dim: usize,
    pub kind: KvType,
    pub span: AttentionSpan,
}

/// The KV cache: `blocks` blocks of `block_tokens` tokens. Each block holds the keys and values of
/// one group's layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvLayout {
    pub block_tokens: usize,
    pub blocks: usize,
    pub layers: Vec<KvLayer>,
}

/// A KV cache group: layers of the same span that share a block table and a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvGroup {
    pub span: AttentionSpan,
    /// Layer numbers, in their order inside a block.
    pub layers: Vec<usize>,
}

/// Where a layer's keys and values stand: in blocks of one group, at one location in them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvLayerLocation {
    pub group: usize,
    /// Index among the layers of the group.
    pub slot: usize,
}

/// A sequence has a block table for each group, and a step carries all tables. [`KvLayout::groups`]
/// makes more groups only if the model has more than this many different spans.
const GROUPS_MAX: usize = 16;

impl KvLayer {
    /// Bytes of the keys and values of one token; `usize::MAX` if there are more.
    pub fn token_bytes(&self) -> usize {
        self.kv_heads.saturating_mul(2).saturating_mul(self.kind.head_bytes(self.head_dim))
    }
}

impl KvLayout {
    /// Divides the layers into KV cache groups.
    ///
    /// All blocks have one size, that of the largest group, so groups should be about equally
    /// large. The candidates are the total sizes of the layers of each span. For each candidate,
    /// the layers of a span are cut into groups of at most that size; the candidate that takes the
    /// fewest bytes wins.
    ///
    /// 1. Layers of one group have the same span.
    /// 2. If all layers have the same span, there is one group.
    /// 3. If any layer has full attention, group 0 has.
    pub fn groups(&self) -> Vec<KvGroup> {
        let mut spans: Vec<AttentionSpan> = Vec::new();
        for layer in &self.layers {
            if !spans.contains(&layer.span) {
                spans.push(layer.span);
            }
        }
        spans.sort_by_key(|&span| span != AttentionSpan::Full);
        let bytes_of = |span: AttentionSpan| -> usize {
            let of_past = self.layers.iter().filter(|layer| layer.span == span);
            of_past.map(KvLayer::token_bytes).fold(0, usize::saturating_add)
        };
        let sizes = spans.iter().map(|&span| bytes_of(span));
        let ways = sizes.map(|size| self.cut(&spans, size));
        // The largest candidate makes one group of each span.
        let fit = ways.filter(|groups| groups.len() <= GROUPS_MAX.max(spans.len()));
        fit.min_by_key(|groups| (self.group_bytes(groups).saturating_mul(groups.len()), groups.len()))
            .unwrap_or_default()
    }

    /// Cuts the layers into groups of at most `size` bytes per token, or of one layer.
    fn cut(&self, spans: &[AttentionSpan], size: usize) -> Vec<KvGroup> {
        let mut groups = Vec::new();
        for &span in spans {
            let mut left = 0;
            let of_past = self.layers.iter().enumerate().filter(|(_, layer)| layer.span == span);
            for (index, bytes) in of_past.map(|(index, layer)| (index, layer.token_bytes())) {
                match groups.last_mut() {
                    Some(KvGroup { span: same, layers }) if *same == span && bytes <= left => {
                        layers.push(index);
                        left -= bytes;
                    }
                    _ => {
                        groups.push(KvGroup { span, layers: vec![index] });
                        left = size.saturating_sub(bytes);
                    }
                }
            }
        }
        groups
    }

    /// Bytes per token of the largest group.
    fn group_bytes(&self, groups: &[KvGroup]) -> usize {
        let bytes = |group: &KvGroup| -> usize {
            let layers = group.layers.iter().map(|&layer| self.layers[layer].token_bytes());
            layers.fold(0, usize::saturating_add)
        };
        groups.iter().map(bytes).max().unwrap_or(0)
    }

    /// The location of each layer, for `groups` of this layout.
    pub fn layer_locations(&self, groups: &[KvGroup]) -> Vec<KvLayerLocation> {
        let mut locations = vec![KvLayerLocation::default(); self.layers.len()];
        for (group, layers) in groups.iter().map(|group| &group.layers).enumerate() {
            for (slot, &layer) in layers.iter().enumerate() {
                locations[layer] = KvLayerLocation { group, slot };
            }
        }
        locations
    }

    /// Bytes of one block, which fits the largest group.
    pub fn block_bytes(&self) -> usize {
        self.block_tokens * self.group_bytes(&self.groups())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn type_names_round_trip() {
        for kind in KvType::ALL {
            assert_eq!(kind.to_string().parse(), Ok(kind));
        }
        let error = "q4_0".parse::<KvType>().unwrap_err();
        assert_eq!(error.to_string(), "\"q4_0\" is not a KV cache type; use f32, f16, bf16 or q8_0");
    }

    #[test]
    fn token_bytes_count_elements_and_scales() {
        let bytes =
            |kind, head_dim| KvLayer { kv_heads: 2, head_dim, kind, span: AttentionSpan::Full }.token_bytes();
        assert_eq!(KvType::ALL.map(|kind| bytes(kind, 128)), [2048, 1024, 1024, 544]);
        // 48 values have two scales: one for 32 values, one for 16.
        assert_eq!(bytes(KvType::Q8_0, 48), 4 * (48 + 2 * 2));
        assert_eq!(bytes(KvType::Q8_0, 5), 4 * (5 + 2));
    }

    /// Makes a layout with one layer per letter. `f` has full attention; a digit is the length of a
    /// window. Layers of `F` and `9` take twice the bytes.
    fn layout(text: &str) -> KvLayout {
        let layer = |letter: char| {
            let span = match letter.to_digit(10) {
                Some(tokens) => AttentionSpan::Window { tokens: tokens as usize },
                None => AttentionSpan::Full,
            };
            let kind = if letter == 'F' || letter == '9' { KvType::F32 } else { KvType::F16 };
            KvLayer { kv_heads: 1, head_dim: 1, kind, span }
        };
        KvLayout { block_tokens: 2, blocks: 1, layers: text.chars().map(layer).collect() }
    }

    fn groups(text: &str) -> Vec<Vec<usize>> {
        layout(text).groups().into_iter().map(|group| group.layers).collect()
    }

    #[test]
    fn layers_of_one_span_are_one_group_for_any_element_type() {
        assert_eq!(groups(""), Vec::<Vec<usize>>::new());
        assert_eq!(groups("ffF"), [[0, 1, 2]]);
        assert_eq!(groups("444"), [[0, 1, 2]]);
        assert_eq!(layout("ffF").block_bytes(), 2 * (4 + 4 + 8));
        assert_eq!(layout("").block_bytes(), 0);
    }

    #[test]
    fn groups_have_similar_sizes() {
        // There are five layers with a window per layer with full attention.
        assert_eq!(groups("44444f"), [[5], [0], [1], [2], [3], [4]]);
        let two = groups("44444f44444f");
        assert_eq!(two, [[5, 11], [0, 1], [2, 3], [4, 6], [7, 8], [9, 10]]);
        assert_eq!(layout("44444f44444f").block_bytes(), 2 * 8);
        // The groups have 28 locations, two of which stay empty.
        let many: String = "44444f".repeat(5)[..26].to_owned();
        let sizes: Vec<usize> = groups(&many).iter().map(Vec::len).collect();
        assert_eq!(sizes, [4, 4, 4, 4, 4, 4, 2]);
        // Groups of five layers leave one of their locations empty. Groups of four would leave
        // three empty.
        assert_eq!(groups("4f4f4f4f4"), [vec![1, 3, 5, 7], vec![0, 2, 4, 6, 8]]);
        // Groups of one layer, like that of the full layer, would be 61 groups.
        assert_eq!(groups(&format!("f{}", "4".repeat(60))).len(), 2);
    }

    #[test]
    fn group_size_counts_bytes_not_layers() {
        assert_eq!(groups("Ff44444"), [vec![0, 1], vec![2, 3, 4], vec![5, 6]]);
        assert_eq!(groups("f99"), [[0], [1], [2]]);
        assert_eq!(layout("f99").block_bytes(), 2 * 8, "a group is at least one layer");
    }

    #[test]
    fn windows_of_different_lengths_are_separate_groups() {
        assert_eq!(groups("3434"), [[0, 2], [1, 3]]);
        assert_eq!(groups("34f"), [[2], [0], [1]]);
    }

    #[test]
    fn every_layer_has_one_location_and_a_group_fits_a_block() {
        for code in 0..3_usize.pow(7) {
            let layers: String = (0..7).map(|at| ['f', '4', '9'][code / 3_usize.pow(at) % 3]).collect();
            let layout = layout(&layers);
            let groups = layout.groups();
            let mut seen: Vec<usize> = groups.iter().flat_map(|group| group.layers.clone()).collect();
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..7), "{layers}");
            let locations = layout.layer_locations(&groups);
            for (layer, location) in locations.iter().enumerate() {
                assert_eq!(groups[location.group].layers[location.slot], layer, "{layers}");
                assert_eq!(groups[location.group].span, layout.layers[layer].span, "{layers}");
            }
            for group in &groups {
                let bytes: usize = group.layers.iter().map(|&layer| layout.layers[layer].token_bytes()).sum();
                assert!(2 * bytes <= layout.block_bytes(), "{layers}");
            }
            let sees_all = layers.contains('f');
            assert_eq!(groups[0].span == AttentionSpan::Full, sees_all, "{layers}");
        }
    }

    #[test]
    fn a_window_includes_the_position_of_the_row() {
        assert_eq!(
            [0, 5, 6, 9].map(|position| AttentionSpan::Window { tokens: 6 }.first_position(position)),
            [0, 0, 1, 4]
        );
        assert_eq!(AttentionSpan::Window { tokens: 1 }.first_position(7), 7);
        // Even if a file says 0, a row attends to itself.
        assert_eq!(AttentionSpan::Window { tokens: 0 }.first_position(7), 7);
        assert_eq!(AttentionSpan::Full.first_position(7), 0);
    }

    #[test]
    fn rounding_error_is_bounded() {
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
            // The stored scale of q8_0 is rounded, so a second rounding may move a quant by one
            // step.
            let moved = rounded.iter().zip(&again).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(moved <= if kind == KvType::Q8_0 { 9e-3 } else { 0.0 }, "{kind}: {moved}");
        }
    }

    #[test]
    fn a_q8_0_scale_covers_32_values() {
        let mut head = vec![1e-3_f32; 48];
        head[3] = 1000.0;
        KvType::Q8_0.round(&mut head);
        assert_eq!(head[4], 0.0, "rounded to 0 by the scale of its large neighbour");
        assert!((head[40] - 1e-3).abs() < 1e-5, "{}", head[40]);
    }

    #[test]
    fn nan_and_overflow_stay_visible() {
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
