// SPDX-License-Identifier: Apache-2.0

//! Builds GGUF files by hand, so that any field can be wrong.

/// Value types.
pub(crate) const U8: u32 = 0;
pub(crate) const U32: u32 = 4;
pub(crate) const STRING: u32 = 8;
pub(crate) const ARRAY: u32 = 9;

/// Tensor types.
pub(crate) const F32: u32 = 0;
pub(crate) const Q4_0: u32 = 2;
pub(crate) const Q8_0: u32 = 8;
pub(crate) const I8: u32 = 24;
pub(crate) const F64: u32 = 28;

#[derive(Clone, Debug)]
pub(crate) struct RawGguf {
    pub(crate) version: u32,
    /// Replaces the number of `tensor_entries`.
    pub(crate) tensors: Option<u64>,
    /// Replaces the number of `pairs`.
    pub(crate) keys: Option<u64>,
    pub(crate) pairs: Vec<Vec<u8>>,
    pub(crate) tensor_entries: Vec<Vec<u8>>,
    /// Data after the table, padded to 32 bytes if there are tensors and data.
    pub(crate) data: Vec<u8>,
}

impl Default for RawGguf {
    fn default() -> Self {
        Self { version: 3, tensors: None, keys: None, pairs: vec![], tensor_entries: vec![], data: vec![] }
    }
}

impl RawGguf {
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.tensors.unwrap_or(self.tensor_entries.len() as u64).to_le_bytes());
        out.extend(self.keys.unwrap_or(self.pairs.len() as u64).to_le_bytes());
        out.extend(self.pairs.concat());
        out.extend(self.tensor_entries.concat());
        if !self.tensor_entries.is_empty() && !self.data.is_empty() {
            out.resize(out.len().next_multiple_of(32), 0);
        }
        out.extend(&self.data);
        out
    }
}

pub(crate) fn key(name: &str) -> Vec<u8> {
    [&(name.len() as u64).to_le_bytes(), name.as_bytes()].concat()
}

pub(crate) fn pair(name: &str, value_type: u32, value: &[u8]) -> Vec<u8> {
    [key(name), value_type.to_le_bytes().to_vec(), value.to_vec()].concat()
}

pub(crate) fn array(name: &str, element: u32, len: u64, elements: &[u8]) -> Vec<u8> {
    pair(name, 9, &[&element.to_le_bytes()[..], &len.to_le_bytes(), elements].concat())
}

pub(crate) fn tensor(name: &str, dims: &[u64], dtype: u32, offset: u64) -> Vec<u8> {
    let mut out = key(name);
    out.extend((dims.len() as u32).to_le_bytes());
    out.extend(dims.iter().flat_map(|dim| dim.to_le_bytes()));
    out.extend(dtype.to_le_bytes());
    out.extend(offset.to_le_bytes());
    out
}
