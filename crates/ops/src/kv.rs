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

/// What one layer keeps of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayer {
    pub kv_heads: usize,
    /// Values per head, for keys and for values.
    pub head_dim: usize,
    pub kind: KvType,
    pub span: AttentionSpan,
}

/// The whole cache: `blocks` blocks of `block_tokens` tokens, each holding keys and values of the layers of one group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvLayout {
    pub block_tokens: usize,
    pub blocks: usize,
    pub layers: Vec<KvLayer>,
}

/// Layers that see the same part of the past, whose keys and values stand in a block together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvGroup {
    pub span: AttentionSpan,
    /// In the order of the block.
    pub layers: Vec<usize>,
}

/// Where a layer's keys and values stand: in blocks of one group, at one location in them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvLayerLocation {
    pub group: usize,
    /// Index among the group's layers.
    pub slot: usize,
}

/// A sequence has a table for each group, and a step carries all of them: more groups than these are not made where it can
/// be avoided.
const GROUPS_MAX: usize = 16;

impl KvLayer {
    /// Bytes of keys and values of one token.
    pub fn token_bytes(&self) -> usize {
        2 * self.kv_heads * self.kind.head_bytes(self.head_dim)
    }
}

impl KvLayout {
    /// Layers that share blocks. Those that see the same part of the past are one group, or several, so that a block of any
    /// group is about as large as one of another: of the ways to cut at the size of all layers that see the same, the one
    /// that takes the fewest bytes. Layers that all see the same are one group. The first one sees all of the past, if
    /// any does.
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
        // The largest size makes a group of each past.
        let fit = ways.filter(|groups| groups.len() <= GROUPS_MAX.max(spans.len()));
        fit.min_by_key(|groups| (self.group_bytes(groups).saturating_mul(groups.len()), groups.len()))
            .unwrap_or_default()
    }

    /// Groups of at most `size` bytes a token, or of one layer.
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

    /// Bytes of a token in the largest group.
    fn group_bytes(&self, groups: &[KvGroup]) -> usize {
        let bytes = |group: &KvGroup| -> usize {
            let layers = group.layers.iter().map(|&layer| self.layers[layer].token_bytes());
            layers.fold(0, usize::saturating_add)
        };
        groups.iter().map(bytes).max().unwrap_or(0)
    }

    /// Where each layer's keys and values stand, for `groups` of this layout.
    pub fn layer_locations(&self, groups: &[KvGroup]) -> Vec<KvLayerLocation> {
        let mut locations = vec![KvLayerLocation::default(); self.layers.len()];
        for (group, layers) in groups.iter().map(|group| &group.layers).enumerate() {
            for (slot, &layer) in layers.iter().enumerate() {
                locations[layer] = KvLayerLocation { group, slot };
            }
        }
        locations
    }

    /// Bytes of one block: of the largest group's layers.
    pub fn block_bytes(&self) -> usize {
        self.block_tokens * self.group_bytes(&self.groups())
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
        let bytes =
            |kind, head_dim| KvLayer { kv_heads: 2, head_dim, kind, span: AttentionSpan::Full }.token_bytes();
        assert_eq!(KvType::ALL.map(|kind| bytes(kind, 128)), [2048, 1024, 1024, 544]);
        // 48 values: a scale for 32, one for 16.
        assert_eq!(bytes(KvType::Q8_0, 48), 4 * (48 + 2 * 2));
        assert_eq!(bytes(KvType::Q8_0, 5), 4 * (5 + 2));
    }

    /// `f` a layer that sees all, digits one that sees so many tokens; `F` and `9` keep twice the bytes.
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
    fn layers_that_see_the_same_are_one_group_whatever_they_are_stored_as() {
        assert_eq!(groups(""), Vec::<Vec<usize>>::new());
        assert_eq!(groups("ffF"), [[0, 1, 2]]);
        assert_eq!(groups("444"), [[0, 1, 2]]);
        assert_eq!(layout("ffF").block_bytes(), 2 * (4 + 4 + 8));
        assert_eq!(layout("").block_bytes(), 0);
    }

    #[test]
    fn groups_are_about_as_large_as_each_other() {
        // Five layers with a window for each one that sees all.
        assert_eq!(groups("44444f"), [[5], [0], [1], [2], [3], [4]]);
        let two = groups("44444f44444f");
        assert_eq!(two, [[5, 11], [0, 1], [2, 3], [4, 6], [7, 8], [9, 10]]);
        assert_eq!(layout("44444f44444f").block_bytes(), 2 * 8);
        // Of 28 locations two stay empty.
        let many: String = "44444f".repeat(5)[..26].to_owned();
        let sizes: Vec<usize> = groups(&many).iter().map(Vec::len).collect();
        assert_eq!(sizes, [4, 4, 4, 4, 4, 4, 2]);
        // One location empty in two groups is less than three in three.
        assert_eq!(groups("4f4f4f4f4"), [vec![1, 3, 5, 7], vec![0, 2, 4, 6, 8]]);
        // A single layer of one kind would make too many groups.
        assert_eq!(groups(&format!("f{}", "4".repeat(60))).len(), 2);
    }

    #[test]
    fn larger_layers_count_as_what_they_keep() {
        assert_eq!(groups("Ff44444"), [vec![0, 1], vec![2, 3, 4], vec![5, 6]]);
        assert_eq!(groups("f99"), [[0], [1], [2]]);
        assert_eq!(layout("f99").block_bytes(), 2 * 8, "no group can be smaller than a layer");
    }

    #[test]
    fn windows_of_different_lengths_are_groups_of_their_own() {
        assert_eq!(groups("3434"), [[0, 2], [1, 3]]);
        assert_eq!(groups("34f"), [[2], [0], [1]]);
    }

    #[test]
    fn every_layer_has_one_place_and_places_of_a_group_fit_a_block() {
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
    fn a_window_counts_the_rows_own_position() {
        assert_eq!(
            [0, 5, 6, 9].map(|position| AttentionSpan::Window { tokens: 6 }.first_position(position)),
            [0, 0, 1, 4]
        );
        assert_eq!(AttentionSpan::Window { tokens: 1 }.first_position(7), 7);
        // A row sees itself, whatever a file says.
        assert_eq!(AttentionSpan::Window { tokens: 0 }.first_position(7), 7);
        assert_eq!(AttentionSpan::Full.first_position(7), 0);
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
