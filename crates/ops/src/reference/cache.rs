//! Keys and values in blocks of host memory. Values are rounded to the cache's type when they are written.

use crate::{KvLayer, KvLayout, OpError};

/// The cache of [`crate::Reference`]: a block comes into being, filled with NaN, when it is first written.
#[derive(Debug)]
pub struct HostKv {
    layout: KvLayout,
    /// By layer, then by block: `block_tokens` times keys then values of one token.
    blocks: Vec<Vec<Option<Box<[f32]>>>>,
}

impl HostKv {
    pub(super) fn new(layout: &KvLayout) -> Result<Self, OpError> {
        if layout.block_tokens == 0 {
            return Err(OpError::Shape { op: "kv", what: "tokens of a block", found: 0, expected: 1 });
        }
        let blocks = layout.layers.iter().map(|_| vec![None; layout.blocks]).collect();
        Ok(Self { layout: layout.clone(), blocks })
    }

    pub(super) fn block_tokens(&self) -> usize {
        self.layout.block_tokens
    }

    pub(super) fn layer(&self, op: &'static str, layer: usize) -> Result<KvLayer, OpError> {
        let len = self.layout.layers.len();
        self.layout.layers.get(layer).copied().ok_or(OpError::Index { op, what: "layer", index: layer, len })
    }

    pub(super) fn write(
        &mut self,
        op: &'static str,
        layer: usize,
        slot: usize,
        key: &[f32],
        value: &[f32],
    ) -> Result<(), OpError> {
        let shape = self.layer(op, layer)?;
        let (block, offset) = self.locate(op, slot)?;
        let token_values = key.len() + value.len();
        let block = self.blocks[layer][block]
            .get_or_insert_with(|| vec![f32::NAN; self.layout.block_tokens * token_values].into());
        let token = &mut block[offset * token_values..][..token_values];
        let (stored_key, stored_value) = token.split_at_mut(key.len());
        for (stored, new) in [(stored_key, key), (stored_value, value)] {
            stored.copy_from_slice(new);
            stored.chunks_exact_mut(shape.head_dim.max(1)).for_each(|head| shape.kind.round(head));
        }
        Ok(())
    }

    pub(super) fn bytes(&self) -> u64 {
        self.blocks.iter().flatten().flatten().map(|block| size_of_val(&**block) as u64).sum()
    }

    pub(super) fn trim(&mut self, blocks: usize) {
        self.blocks
            .iter_mut()
            .flat_map(|layer| layer.iter_mut().skip(blocks))
            .for_each(|block| *block = None);
    }

    pub(super) fn copy(&mut self, from: usize, to: usize) -> Result<(), OpError> {
        const OP: &str = "kv_copy";
        let len = self.layout.blocks;
        if let Some(index) = [from, to].into_iter().find(|&block| block >= len) {
            return Err(OpError::Index { op: OP, what: "block", index, len });
        }
        for layer in &mut self.blocks {
            let content = layer[from].clone().ok_or(OpError::Unwritten { op: OP, block: from })?;
            layer[to] = Some(content);
        }
        Ok(())
    }

    /// Key and value of all heads in `slot`.
    pub(super) fn read(
        &self,
        op: &'static str,
        layer: usize,
        slot: usize,
    ) -> Result<(&[f32], &[f32]), OpError> {
        let shape = self.layer(op, layer)?;
        let (index, offset) = self.locate(op, slot)?;
        let width = shape.kv_heads * shape.head_dim;
        let block = self.blocks[layer][index].as_ref().ok_or(OpError::Unwritten { op, block: index })?;
        Ok(block[offset * 2 * width..][..2 * width].split_at(width))
    }

    fn locate(&self, op: &'static str, slot: usize) -> Result<(usize, usize), OpError> {
        let (index, len) = (slot / self.layout.block_tokens, self.layout.blocks);
        if index >= len {
            return Err(OpError::Index { op, what: "block", index, len });
        }
        Ok((index, slot % self.layout.block_tokens))
    }
}
