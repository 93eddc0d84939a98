// SPDX-License-Identifier: Apache-2.0

//! [`HostKv`]: the KV cache of the reference backend. A write rounds values to the cache's element
//! type.

use crate::{KvLayer, KvLayerLocation, KvLayout, OpError};

/// Blocks in host memory. The first write of a layer to a block allocates the layer's part, filled
/// with NaN.
#[derive(Debug)]
pub struct HostKv {
    layout: KvLayout,
    groups: usize,
    /// By layer.
    locations: Vec<KvLayerLocation>,
    blocks: Vec<HostKvBlock>,
}

#[derive(Clone, Debug, Default)]
struct HostKvBlock {
    /// The KV cache group that wrote the block last.
    group: usize,
    /// By slot: `block_tokens` times keys then values of one token.
    parts: Vec<Option<Box<[f32]>>>,
}

impl HostKv {
    pub(super) fn new(layout: &KvLayout) -> Result<Self, OpError> {
        if layout.block_tokens == 0 {
            return Err(OpError::Shape { op: "kv", what: "tokens of a block", found: 0, expected: 1 });
        }
        let groups = layout.groups();
        Ok(Self {
            layout: layout.clone(),
            locations: layout.layer_locations(&groups),
            blocks: vec![HostKvBlock::default(); layout.blocks],
            groups: groups.len(),
        })
    }

    pub(super) fn block_tokens(&self) -> usize {
        self.layout.block_tokens
    }

    pub(super) fn groups(&self) -> usize {
        self.groups
    }

    pub(super) fn layer(
        &self,
        op: &'static str,
        layer: usize,
    ) -> Result<(KvLayer, KvLayerLocation), OpError> {
        let len = self.layout.layers.len();
        let shape =
            self.layout.layers.get(layer).ok_or(OpError::Index { op, what: "layer", index: layer, len })?;
        Ok((*shape, self.locations[layer]))
    }

    pub(super) fn write(
        &mut self,
        op: &'static str,
        layer: usize,
        slot: usize,
        key: &[f32],
        value: &[f32],
    ) -> Result<(), OpError> {
        let (shape, location) = self.layer(op, layer)?;
        let (index, offset) = self.locate(op, slot)?;
        let token_values = key.len() + value.len();
        let block = &mut self.blocks[index];
        if block.group != location.group {
            *block = HostKvBlock { group: location.group, parts: Vec::new() };
        }
        if block.parts.len() <= location.slot {
            block.parts.resize(location.slot + 1, None);
        }
        let part = block.parts[location.slot]
            .get_or_insert_with(|| vec![f32::NAN; self.layout.block_tokens * token_values].into());
        let token = &mut part[offset * token_values..][..token_values];
        let (stored_key, stored_value) = token.split_at_mut(key.len());
        for (stored, new) in [(stored_key, key), (stored_value, value)] {
            stored.copy_from_slice(new);
            stored.chunks_exact_mut(shape.head_dim.max(1)).for_each(|head| shape.kind.round(head));
        }
        Ok(())
    }

    pub(super) fn bytes(&self) -> u64 {
        let parts = self.blocks.iter().flat_map(|block| block.parts.iter().flatten());
        parts.map(|part| size_of_val(&**part) as u64).sum()
    }

    pub(super) fn trim(&mut self, blocks: usize) {
        self.blocks.iter_mut().skip(blocks).for_each(|block| *block = HostKvBlock::default());
    }

    pub(super) fn copy(&mut self, from: usize, to: usize) -> Result<(), OpError> {
        const OP: &str = "kv_copy";
        let len = self.layout.blocks;
        if let Some(index) = [from, to].into_iter().find(|&block| block >= len) {
            return Err(OpError::Index { op: OP, what: "block", index, len });
        }
        let block = &self.blocks[from];
        let layers = self.locations.iter().filter(|location| location.group == block.group).count();
        if block.parts.iter().flatten().count() < layers {
            return Err(OpError::Unwritten { op: OP, block: from });
        }
        self.blocks[to] = block.clone();
        Ok(())
    }

    /// Key and value of all heads in the KV slot `slot`.
    pub(super) fn read(
        &self,
        op: &'static str,
        layer: usize,
        slot: usize,
    ) -> Result<(&[f32], &[f32]), OpError> {
        let (shape, location) = self.layer(op, layer)?;
        let (index, offset) = self.locate(op, slot)?;
        let width = shape.kv_heads * shape.head_dim;
        let block = Some(&self.blocks[index]).filter(|block| block.group == location.group);
        let part = block.and_then(|block| block.parts.get(location.slot)?.as_ref());
        let part = part.ok_or(OpError::Unwritten { op, block: index })?;
        Ok(part[offset * 2 * width..][..2 * width].split_at(width))
    }

    fn locate(&self, op: &'static str, slot: usize) -> Result<(usize, usize), OpError> {
        let (index, len) = (slot / self.layout.block_tokens, self.layout.blocks);
        if index >= len {
            return Err(OpError::Index { op, what: "block", index, len });
        }
        Ok((index, slot % self.layout.block_tokens))
    }
}
