//! One step of the engine: a ragged batch of rows, each one token of some sequence.

/// Row data of a step. Decode rows and chunks of prompts stand side by side; rows of one sequence are in position order.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// Token id of each row.
    pub tokens: &'a [u32],
    /// Absolute position of each row in its sequence.
    pub positions: &'a [u32],
    /// Index into `tables` of each row's sequence.
    pub sequences: &'a [u32],
    /// Where each row's key and value go: `block * block_tokens + offset`.
    pub kv_slots: &'a [u32],
    /// Block ids of each sequence; entry `i` holds positions `i * block_tokens ..`.
    pub tables: &'a [&'a [u32]],
    /// Rows whose logits are wanted, ascending.
    pub outputs: &'a [u32],
}

impl Step<'_> {
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }
}
