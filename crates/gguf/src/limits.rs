// SPDX-License-Identifier: Apache-2.0

//! Limits that the reader enforces, and constants of the GGUF format.

/// The first four bytes of a file.
pub const MAGIC: [u8; 4] = *b"GGUF";

/// Most bytes before the tensor data. The largest known vocabularies (262,144 tokens with scores,
/// types and merges) take about 20 MB. A header is held in memory, so this limit also bounds what a
/// hostile file can make the reader allocate.
pub const MAX_HEADER_BYTES: u64 = 256 << 20;

/// Most key-value pairs. Real files have 20 to 60.
pub const MAX_KEYS: u64 = 1 << 14;

/// Most tensors in one file. Files that store each expert of each layer as a tensor have about
/// 50,000.
pub const MAX_TENSORS: u64 = 1 << 17;

/// Most bytes in a key, from the GGUF specification.
pub const MAX_KEY_BYTES: u64 = (1 << 16) - 1;

/// Most bytes in a tensor's name: ggml stores it in 64 bytes with a terminator.
pub const MAX_TENSOR_NAME_BYTES: u64 = 63;

/// Most dimensions of a tensor.
pub const MAX_DIMS: u32 = 4;

/// Most files of a split model. The format allows more: it stores the count as u16.
pub const MAX_SPLIT_FILES: u32 = 1 << 10;

/// Key of the file's alignment; the value is a u32.
pub(crate) const ALIGNMENT_KEY: &str = "general.alignment";

/// Alignment of tensors in bytes where `general.alignment` is absent.
pub const DEFAULT_ALIGNMENT: u32 = 32;

/// Largest alignment that the reader accepts, in bytes: the size of a huge page. A larger one has
/// no use.
pub const MAX_ALIGNMENT: u32 = 1 << 21;

/// Smallest possible pair: key length, one byte of key, type, one byte of value.
pub(crate) const MIN_PAIR_BYTES: u64 = 8 + 1 + 4 + 1;

/// Smallest possible tensor entry: name length, one byte of name, dimension count, type, offset.
pub(crate) const MIN_TENSOR_BYTES: u64 = 8 + 1 + 4 + 4 + 8;

/// How many bytes the reader reads ahead.
pub(crate) const READ_AHEAD_BYTES: usize = 1 << 18;
