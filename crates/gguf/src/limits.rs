//! What a header may have at most, and the numbers of the format.

/// The first four bytes of a file.
pub const MAGIC: [u8; 4] = *b"GGUF";

/// Bytes up to the tensor data. The largest known vocabularies (262,144 tokens with scores, types and merges) take
/// about 20 MB; a header is held in memory, so this also bounds what a hostile file can make a reader allocate.
pub const MAX_HEADER_BYTES: u64 = 256 << 20;

/// Key-value pairs. Real files have 20 to 60.
pub const MAX_KEYS: u64 = 1 << 14;

/// Tensors of one file. Files that store each expert of each layer by itself come to some 50,000.
pub const MAX_TENSORS: u64 = 1 << 17;

/// Bytes of a key, from the GGUF specification.
pub const MAX_KEY_BYTES: u64 = (1 << 16) - 1;

/// Bytes of a tensor's name: ggml keeps it in 64 bytes with a terminator.
pub const MAX_TENSOR_NAME_BYTES: u64 = 63;

/// Dimensions of a tensor.
pub const MAX_DIMS: u32 = 4;

/// Files of a split model: the count is stored as u16, and the name has five digits.
pub const MAX_SPLIT_FILES: u32 = 1 << 10;

/// The key of a file's alignment, a u32.
pub(crate) const ALIGNMENT_KEY: &str = "general.alignment";

/// Where tensors start unless `general.alignment` says otherwise, in bytes.
pub const DEFAULT_ALIGNMENT: u32 = 32;

/// The largest alignment taken, in bytes. Offsets are padded to it; a page or a huge page is the most that makes sense.
pub const MAX_ALIGNMENT: u32 = 1 << 21;

/// A pair has at least a key length, one byte of key, a type and one byte of value.
pub(crate) const MIN_PAIR_BYTES: u64 = 8 + 1 + 4 + 1;

/// A tensor has at least a name length, one byte of name, a number of dimensions, a type and an offset.
pub(crate) const MIN_TENSOR_BYTES: u64 = 8 + 1 + 4 + 4 + 8;

/// How much a file is read ahead, in bytes.
pub(crate) const READ_AHEAD_BYTES: usize = 1 << 18;
