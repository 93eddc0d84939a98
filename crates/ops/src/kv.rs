//! What the key/value cache of a model looks like.

/// Element type of stored keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvType {
    F32,
    F16,
}

impl KvType {
    pub fn bytes(self) -> usize {
        match self {
            KvType::F32 => 4,
            KvType::F16 => 2,
        }
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
        2 * self.kv_heads * self.head_dim * self.kind.bytes()
    }
}

impl KvLayout {
    /// Bytes of one block over all layers.
    pub fn block_bytes(&self) -> usize {
        self.block_tokens * self.layers.iter().map(KvLayer::token_bytes).sum::<usize>()
    }
}
