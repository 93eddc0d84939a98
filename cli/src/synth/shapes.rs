// SPDX-License-Identifier: Apache-2.0

//! Shapes of real models, and small ones for tests.

/// Dimensions of one model.
#[derive(Debug)]
pub(super) struct ModelShape {
    pub(super) name: &'static str,
    pub(super) family: ModelFamily,
    pub(super) layers: u64,
    pub(super) embedding: u64,
    pub(super) feed_forward: u64,
    pub(super) heads: u64,
    pub(super) kv_heads: u64,
    pub(super) head_size: u64,
    /// Experts per layer, experts used per token, and their feed-forward size.
    pub(super) experts: Option<(u64, u64, u64)>,
    pub(super) vocabulary: u64,
    /// Id of the first special token.
    pub(super) first_special: u64,
    /// Whether the output layer uses the embedding's weights.
    pub(super) tied: bool,
    pub(super) context: u64,
    pub(super) rope_base: f32,
    /// Divisor of rope angles in layers without a window.
    pub(super) rope_factor: Option<f32>,
    pub(super) epsilon: f32,
    /// Attention window of five of six layers.
    pub(super) window: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ModelFamily {
    Llama3,
    Qwen3,
    Gemma3,
}

/// The function of a weight, which determines its type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WeightRole {
    Embedding,
    Output,
    AttentionV { layer: u64 },
    AttentionOutput,
    FeedForwardDown { layer: u64 },
    Other,
}

/// A tensor of a shape. A tensor without a role has type f32.
pub(super) struct ShapeTensor {
    pub(super) name: String,
    pub(super) dims: Vec<u64>,
    pub(super) role: Option<WeightRole>,
}

#[derive(Debug, thiserror::Error)]
#[error("unknown shape {name}; known: {}", SHAPES.iter().map(|shape| shape.name).collect::<Vec<_>>().join(", "))]
pub(super) struct UnknownShape {
    name: String,
}

const QWEN3: ModelShape = ModelShape {
    name: "qwen3",
    family: ModelFamily::Qwen3,
    layers: 28,
    embedding: 1024,
    feed_forward: 3072,
    heads: 16,
    kv_heads: 8,
    head_size: 128,
    experts: None,
    vocabulary: 151_936,
    first_special: 151_643,
    tied: false,
    context: 40_960,
    rope_base: 1e6,
    rope_factor: None,
    epsilon: 1e-6,
    window: None,
};

const LLAMA3: ModelShape = ModelShape {
    name: "llama3",
    family: ModelFamily::Llama3,
    layers: 32,
    embedding: 4096,
    feed_forward: 14_336,
    heads: 32,
    vocabulary: 128_256,
    first_special: 128_000,
    context: 8192,
    rope_base: 500_000.0,
    epsilon: 1e-5,
    ..QWEN3
};

const GEMMA3: ModelShape = ModelShape {
    name: "gemma3",
    family: ModelFamily::Gemma3,
    head_size: 256,
    vocabulary: 262_208,
    first_special: 262_200,
    tied: true,
    context: 131_072,
    rope_factor: Some(8.0),
    window: Some(1024),
    ..QWEN3
};

/// Two layers with rows of 256 values, which every type's blocks fit.
const TINY: ModelShape = ModelShape {
    layers: 2,
    embedding: 256,
    feed_forward: 512,
    heads: 4,
    kv_heads: 2,
    head_size: 64,
    vocabulary: 1024,
    first_special: 1016,
    context: 4096,
    ..QWEN3
};

static SHAPES: [ModelShape; 17] = [
    ModelShape { name: "qwen3-0.6b", tied: true, ..QWEN3 },
    ModelShape { name: "qwen3-1.7b", tied: true, embedding: 2048, feed_forward: 6144, ..QWEN3 },
    ModelShape { name: "qwen3-8b", layers: 36, embedding: 4096, feed_forward: 12_288, heads: 32, ..QWEN3 },
    ModelShape { name: "qwen3-32b", layers: 64, embedding: 5120, feed_forward: 25_600, heads: 64, ..QWEN3 },
    ModelShape {
        name: "qwen3-30b-a3b",
        layers: 48,
        embedding: 2048,
        feed_forward: 6144,
        heads: 32,
        kv_heads: 4,
        experts: Some((128, 8, 768)),
        ..QWEN3
    },
    ModelShape { name: "llama3-8b", ..LLAMA3 },
    ModelShape { name: "llama3-70b", layers: 80, embedding: 8192, feed_forward: 28_672, heads: 64, ..LLAMA3 },
    ModelShape {
        name: "gemma3-1b",
        layers: 26,
        embedding: 1152,
        feed_forward: 6912,
        heads: 4,
        kv_heads: 1,
        vocabulary: 262_144,
        first_special: 262_136,
        context: 32_768,
        rope_factor: None,
        window: Some(512),
        ..GEMMA3
    },
    ModelShape {
        name: "gemma3-4b",
        layers: 34,
        embedding: 2560,
        feed_forward: 10_240,
        heads: 8,
        kv_heads: 4,
        ..GEMMA3
    },
    ModelShape { name: "gemma3-12b", layers: 48, embedding: 3840, feed_forward: 15_360, ..GEMMA3 },
    ModelShape {
        name: "gemma3-27b",
        layers: 62,
        embedding: 5376,
        feed_forward: 21_504,
        heads: 32,
        kv_heads: 16,
        head_size: 128,
        ..GEMMA3
    },
    ModelShape { name: "qwen3-tiny", tied: true, ..TINY },
    // A window that short texts leave, seven groups of layers, and heads and rows as long as those
    // for which GPUs have kernels of their own.
    ModelShape {
        name: "gemma3-tiny",
        family: ModelFamily::Gemma3,
        layers: 7,
        embedding: 512,
        head_size: 256,
        tied: true,
        rope_factor: Some(8.0),
        window: Some(40),
        ..TINY
    },
    ModelShape {
        name: "llama3-tiny",
        family: ModelFamily::Llama3,
        rope_base: 500_000.0,
        epsilon: 1e-5,
        ..TINY
    },
    ModelShape { name: "qwen3-moe-tiny", experts: Some((8, 2, 256)), ..TINY },
    // Needs the workspace of a real model, with little to compute.
    ModelShape { name: "qwen3-wide", layers: 2, tied: true, ..QWEN3 },
    // 37 layers of 11 tensors need several batches in a hand-off, in a few megabytes. K types do
    // not fit the rows of 128 values.
    ModelShape {
        name: "qwen3-many",
        layers: 37,
        embedding: 128,
        feed_forward: 128,
        heads: 2,
        kv_heads: 1,
        tied: true,
        ..TINY
    },
];

impl ModelShape {
    pub(super) fn find(name: &str) -> Result<&'static Self, UnknownShape> {
        SHAPES.iter().find(|shape| shape.name == name).ok_or_else(|| UnknownShape { name: name.into() })
    }

    pub(super) fn architecture(&self) -> &'static str {
        match (self.family, self.experts) {
            (ModelFamily::Llama3, _) => "llama",
            (ModelFamily::Qwen3, None) => "qwen3",
            (ModelFamily::Qwen3, Some(_)) => "qwen3moe",
            (ModelFamily::Gemma3, _) => "gemma3",
        }
    }

    /// Metadata keys under the architecture's name; all values are u32.
    pub(super) fn counts(&self) -> Vec<(&'static str, u32)> {
        let mut counts = vec![
            ("context_length", self.context),
            ("embedding_length", self.embedding),
            ("block_count", self.layers),
            ("feed_forward_length", self.feed_forward),
            ("attention.head_count", self.heads),
            ("attention.head_count_kv", self.kv_heads),
            ("attention.key_length", self.head_size),
            ("attention.value_length", self.head_size),
        ];
        if self.family == ModelFamily::Llama3 {
            counts.push(("rope.dimension_count", self.head_size));
            counts.push(("vocab_size", self.vocabulary));
        }
        if let Some(window) = self.window {
            counts.push(("attention.sliding_window", window));
        }
        if let Some((experts, used, feed_forward)) = self.experts {
            counts.push(("expert_count", experts));
            counts.push(("expert_used_count", used));
            counts.push(("expert_feed_forward_length", feed_forward));
        }
        counts.into_iter().map(|(key, count)| (key, count as u32)).collect()
    }

    pub(super) fn tensors(&self) -> Vec<ShapeTensor> {
        let mut tensors = Vec::new();
        let mut add = |name: String, dims: &[u64], role| {
            tensors.push(ShapeTensor { name: format!("{name}.weight"), dims: dims.to_vec(), role });
        };
        let (embedding, head) = (self.embedding, self.head_size);
        if !self.tied {
            add("output".into(), &[embedding, self.vocabulary], Some(WeightRole::Output));
        }
        add("output_norm".into(), &[embedding], None);
        add("token_embd".into(), &[embedding, self.vocabulary], Some(WeightRole::Embedding));
        for layer in 0..self.layers {
            let mut add = |name: &str, dims: &[u64], role| add(format!("blk.{layer}.{name}"), dims, role);
            add("attn_k", &[embedding, self.kv_heads * head], Some(WeightRole::Other));
            if self.family != ModelFamily::Llama3 {
                add("attn_k_norm", &[head], None);
            }
            add("attn_norm", &[embedding], None);
            add("attn_output", &[self.heads * head, embedding], Some(WeightRole::AttentionOutput));
            add("attn_q", &[embedding, self.heads * head], Some(WeightRole::Other));
            if self.family != ModelFamily::Llama3 {
                add("attn_q_norm", &[head], None);
            }
            add("attn_v", &[embedding, self.kv_heads * head], Some(WeightRole::AttentionV { layer }));
            let down = Some(WeightRole::FeedForwardDown { layer });
            if let Some((experts, _, feed_forward)) = self.experts {
                add("ffn_down_exps", &[feed_forward, embedding, experts], down);
                add("ffn_gate_exps", &[embedding, feed_forward, experts], Some(WeightRole::Other));
                add("ffn_gate_inp", &[embedding, experts], None);
                add("ffn_norm", &[embedding], None);
                add("ffn_up_exps", &[embedding, feed_forward, experts], Some(WeightRole::Other));
            } else {
                add("ffn_down", &[self.feed_forward, embedding], down);
                add("ffn_gate", &[embedding, self.feed_forward], Some(WeightRole::Other));
                add("ffn_norm", &[embedding], None);
                add("ffn_up", &[embedding, self.feed_forward], Some(WeightRole::Other));
            }
            if self.family == ModelFamily::Gemma3 {
                add("post_attention_norm", &[embedding], None);
                add("post_ffw_norm", &[embedding], None);
            }
        }
        tensors
    }
}
