// SPDX-License-Identifier: Apache-2.0

//! [`Header`]: everything before a file's tensor data, read and checked.

use crate::cursor::{Cursor, FileCursor, HeaderReadError};
use crate::limits::{
    ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAGIC, MAX_ALIGNMENT, MAX_KEYS, MAX_TENSORS, MIN_PAIR_BYTES,
    MIN_TENSOR_BYTES,
};
use crate::metadata::{Metadata, MetadataError, MetadataIndex};
use crate::tensor::{TensorInfo, TensorInfoError};
use crate::value::{Value, ValueType};
use bytes::Bytes;
use std::collections::HashMap;
use std::io::Read;

/// Why a file's header was refused.
#[derive(Debug, thiserror::Error)]
pub enum HeaderError {
    #[error("not a GGUF file: it begins with {found:02x?} instead of \"GGUF\"")]
    Magic { found: [u8; 4] },
    #[error("the file is big-endian (version field {found:#010x}): convert it to little-endian first")]
    BigEndian { found: u32 },
    #[error("GGUF version {found} is not supported, only 2 and 3 are: convert the model again")]
    Version { found: u32 },
    #[error("cannot read the counts at the start of the file")]
    ReadCounts(#[source] HeaderReadError),
    #[error("the file claims {count} keys, but at most {most} fit ({remaining} bytes are left)")]
    KeyCount { count: u64, most: u64, remaining: u64 },
    #[error("the file claims {count} tensors, but at most {most} fit ({remaining} bytes are left)")]
    TensorCount { count: u64, most: u64, remaining: u64 },
    #[error("in the metadata")]
    Metadata(#[from] MetadataError),
    #[error("{ALIGNMENT_KEY} has type {found} but must be u32")]
    AlignmentType { found: ValueType },
    #[error("{ALIGNMENT_KEY} is {found} but must be a power of two up to {MAX_ALIGNMENT}")]
    Alignment { found: u32 },
    #[error("in the tensor table")]
    Tensor(#[from] TensorInfoError),
    #[error("tensor {name} occurs twice in the tensor table")]
    DuplicateTensor { name: String },
    #[error("the total size of the tensors up to {name} overflows 64 bits")]
    TotalBytes { name: String },
    #[error(
        "tensor {name} is at offset {found} of the tensor data, but the tensors before it end at {expected}"
    )]
    TensorOffset { name: String, expected: u64, found: u64 },
    #[error("tensor {name} ends at byte {end}, but the file has {file_len} bytes: it is truncated")]
    TensorBeyondEnd { name: String, end: u64, file_len: u64 },
}

/// A file's header, already checked:
///
/// 1. Every tensor lies inside the file, and no two tensors overlap.
/// 2. Every length in the metadata is valid, so reading a value needs no further checks.
#[derive(Clone, Debug)]
pub struct Header {
    version: u32,
    alignment: u32,
    bytes: Bytes,
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
    data_start: u64,
    file_len: u64,
}

impl Header {
    /// Reads the header from the start of a file of `file_len` bytes. It may read a little further
    /// than the header. It checks tensor positions against `file_len` and does not read tensor
    /// data.
    pub fn read(source: impl Read, file_len: u64) -> Result<Self, HeaderError> {
        let mut cursor = FileCursor::new(source, file_len);
        let HeaderCounts { version, keys, tensors } = read_counts(&mut cursor)?;

        let section_start = cursor.offset();
        let mut index = MetadataIndex::default();
        for _ in 0..keys {
            index.read_pair(&mut cursor, section_start)?;
        }
        let section_end = cursor.offset();

        // This count was checked before the keys were read; they have used up bytes since.
        check_count(tensors, MAX_TENSORS, MIN_TENSOR_BYTES, cursor.remaining()).map_err(
            |ExcessCount { count, most, remaining }| HeaderError::TensorCount { count, most, remaining },
        )?;
        let mut table = Vec::with_capacity(tensors as usize);
        for tensor in 0..tensors {
            table.push(TensorInfo::read(&mut cursor, tensor)?);
        }

        let bytes = Bytes::from(cursor.into_bytes());
        let metadata = index.over(bytes.slice(section_start as usize..section_end as usize));
        let alignment = read_alignment(&metadata)?;
        // This cannot overflow: header length and alignment are bounded far below 2^63.
        let data_start = (bytes.len() as u64).next_multiple_of(alignment.into());
        let by_name = check_table(&table, alignment, data_start, file_len)?;
        Ok(Self { version, alignment, bytes, metadata, tensors: table, by_name, data_start, file_len })
    }

    pub fn version(&self) -> u32 {
        self.version
    }

    /// Alignment of tensor data in bytes: every tensor's offset is a multiple of it.
    pub fn alignment(&self) -> u32 {
        self.alignment
    }

    /// The header's bytes as stored in the file, without the padding after it.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// All tensors in the order of the table, which is also the order of their data.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.get(name).map(|&index| &self.tensors[index])
    }

    /// Offset of the tensor data from the start of the file.
    pub fn data_start(&self) -> u64 {
        self.data_start
    }

    /// Offset of `tensor`'s first byte from the start of the file.
    pub fn file_offset(&self, tensor: &TensorInfo) -> u64 {
        self.data_start + tensor.offset
    }

    pub fn file_len(&self) -> u64 {
        self.file_len
    }
}

struct HeaderCounts {
    version: u32,
    keys: u64,
    tensors: u64,
}

fn read_counts(cursor: &mut impl Cursor) -> Result<HeaderCounts, HeaderError> {
    let found: [u8; 4] = cursor.array().map_err(HeaderError::ReadCounts)?;
    if found != MAGIC {
        return Err(HeaderError::Magic { found });
    }
    let version = cursor.u32().map_err(HeaderError::ReadCounts)?;
    if version & 0xFFFF == 0 && version != 0 {
        return Err(HeaderError::BigEndian { found: version });
    }
    if !(2..=3).contains(&version) {
        return Err(HeaderError::Version { found: version });
    }
    let tensors = cursor.u64().map_err(HeaderError::ReadCounts)?;
    let keys = cursor.u64().map_err(HeaderError::ReadCounts)?;
    let remaining = cursor.remaining();
    check_count(keys, MAX_KEYS, MIN_PAIR_BYTES, remaining)
        .map_err(|ExcessCount { count, most, remaining }| HeaderError::KeyCount { count, most, remaining })?;
    check_count(tensors, MAX_TENSORS, MIN_TENSOR_BYTES, remaining).map_err(
        |ExcessCount { count, most, remaining }| HeaderError::TensorCount { count, most, remaining },
    )?;
    Ok(HeaderCounts { version, keys, tensors })
}

struct ExcessCount {
    count: u64,
    most: u64,
    remaining: u64,
}

/// Refuses a count above `limit`, and one whose entries cannot fit into the remaining bytes.
fn check_count(count: u64, limit: u64, least_bytes: u64, remaining: u64) -> Result<(), ExcessCount> {
    let most = limit.min(remaining / least_bytes);
    if count > most { Err(ExcessCount { count, most, remaining }) } else { Ok(()) }
}

fn read_alignment(metadata: &Metadata) -> Result<u32, HeaderError> {
    let found = match metadata.value(ALIGNMENT_KEY) {
        None => DEFAULT_ALIGNMENT,
        Some(Value::U32(found)) => found,
        Some(other) => return Err(HeaderError::AlignmentType { found: other.value_type() }),
    };
    if !found.is_power_of_two() || found > MAX_ALIGNMENT {
        return Err(HeaderError::Alignment { found });
    }
    Ok(found)
}

/// Checks that tensors follow each other in table order, padded to the alignment, and end inside
/// the file.
fn check_table(
    tensors: &[TensorInfo],
    alignment: u32,
    data_start: u64,
    file_len: u64,
) -> Result<HashMap<String, usize>, HeaderError> {
    let mut by_name = HashMap::with_capacity(tensors.len());
    let mut expected = 0_u64;
    for (index, tensor) in tensors.iter().enumerate() {
        let name = || tensor.name.clone();
        if by_name.insert(name(), index).is_some() {
            return Err(HeaderError::DuplicateTensor { name: name() });
        }
        if tensor.offset != expected {
            return Err(HeaderError::TensorOffset { name: name(), expected, found: tensor.offset });
        }
        let end = expected.checked_add(tensor.bytes);
        let padded = end.and_then(|end| end.checked_next_multiple_of(alignment.into()));
        let (Some(end), Some(padded)) = (end.and_then(|end| end.checked_add(data_start)), padded) else {
            return Err(HeaderError::TotalBytes { name: name() });
        };
        if end > file_len {
            return Err(HeaderError::TensorBeyondEnd { name: name(), end, file_len });
        }
        expected = padded;
    }
    Ok(by_name)
}
