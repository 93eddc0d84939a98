// SPDX-License-Identifier: Apache-2.0

//! [`Metadata`]: the key-value section of a file. It keeps the raw bytes and an index of where each
//! value is.

use crate::cursor::{Cursor, HeaderReadError, SliceCursor};
use crate::limits::{MAX_KEY_BYTES, MAX_KEYS};
use crate::value::{Array, FromValue, Value, ValueType};
use bytes::Bytes;
use std::collections::HashMap;
use std::ops::Range;

/// What is wrong with a metadata section. Offsets count from the start of the file, or from the
/// start of the section if [`Metadata::parse`] read it alone.
#[derive(Debug, thiserror::Error)]
pub enum MetadataError {
    #[error("cannot read key number {index}")]
    ReadKey { index: u64, source: HeaderReadError },
    #[error("cannot read the value of key {key}")]
    ReadValue { key: String, source: HeaderReadError },
    #[error("there are more than {MAX_KEYS} keys before byte {offset}")]
    TooManyKeys { offset: u64 },
    #[error("key {index} at byte {offset} is empty")]
    EmptyKey { index: u64, offset: u64 },
    #[error("key {index} at byte {offset} claims {len} bytes; the limit is {MAX_KEY_BYTES}")]
    LongKey { index: u64, offset: u64, len: u64 },
    #[error("key {index} at byte {offset} is not UTF-8")]
    KeyEncoding { index: u64, offset: u64 },
    #[error("key {key} at byte {offset} occurs twice")]
    DuplicateKey { key: String, offset: u64 },
    #[error("key {key} has the unknown value type {id} at byte {offset} (known: 0 to 12)")]
    UnknownType { key: String, offset: u64, id: u32 },
    #[error("key {key} is an array of arrays at byte {offset}, which is not supported")]
    NestedArray { key: String, offset: u64 },
    #[error("key {key} has a string of {len} bytes at byte {offset}, but only {remaining} are left")]
    LongString { key: String, offset: u64, len: u64, remaining: u64 },
    #[error(
        "key {key} has an array of {len} values of type {element} at byte {offset}, but only {remaining} bytes are left"
    )]
    LongArray { key: String, offset: u64, element: ValueType, len: u64, remaining: u64 },
}

/// Why a key's value could not be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    #[error("key {key} is missing")]
    Missing { key: String },
    #[error("key {key} has type {found} and cannot be read as {wanted}")]
    Type { key: String, wanted: &'static str, found: String },
    #[error("key {key} has {found} values, but {wanted} are needed")]
    Count { key: String, wanted: usize, found: usize },
}

/// All keys of a file, in file order. Clones share the bytes.
#[derive(Clone, Debug)]
pub struct Metadata {
    bytes: Bytes,
    entries: Vec<KeyValue>,
    by_key: HashMap<String, usize>,
}

#[derive(Clone, Debug)]
struct KeyValue {
    key: String,
    value: ValueAt,
}

/// Position of a value in the section.
#[derive(Clone, Debug)]
enum ValueAt {
    Single { value_type: ValueType, range: Range<usize> },
    Array { element: ValueType, len: usize, range: Range<usize> },
}

impl Metadata {
    /// Parses a section that is not part of a file. Copies nothing.
    pub fn parse(bytes: impl Into<Bytes>) -> Result<Self, MetadataError> {
        let bytes = bytes.into();
        let mut cursor = SliceCursor::new(&bytes);
        let mut index = MetadataIndex::default();
        while cursor.remaining() > 0 {
            index.read_pair(&mut cursor, 0)?;
        }
        Ok(index.over(bytes))
    }

    /// The section's bytes as stored in the file.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// All keys and values, in file order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, Value<'_>)> {
        self.entries.iter().filter_map(|entry| Some((entry.key.as_str(), self.value_at(&entry.value)?)))
    }

    pub fn value(&self, key: &str) -> Option<Value<'_>> {
        self.by_key.get(key).and_then(|&index| self.value_at(&self.entries[index].value))
    }

    /// Value of an optional key. A value of another type is an error.
    pub fn get<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<Option<T>, KeyError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        match T::from_value(value) {
            Some(value) => Ok(Some(value)),
            None => Err(KeyError::Type { key: key.into(), wanted: T::WANTED, found: describe(value) }),
        }
    }

    /// Value of a required key.
    pub fn require<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<T, KeyError> {
        self.get(key)?.ok_or_else(|| KeyError::Missing { key: key.into() })
    }

    /// One value for each layer. The file stores either an array of exactly `layers` values, or one
    /// value for all layers.
    pub fn per_layer<'a, T>(&'a self, key: &str, layers: usize) -> Result<Option<Vec<T>>, KeyError>
    where
        T: FromValue<'a> + Clone,
        Vec<T>: FromValue<'a>,
    {
        if !matches!(self.value(key), Some(Value::Array(_))) {
            return Ok(self.get::<T>(key)?.map(|value| vec![value; layers]));
        }
        let values = self.require::<Vec<T>>(key)?;
        if values.len() != layers {
            return Err(KeyError::Count { key: key.into(), wanted: layers, found: values.len() });
        }
        Ok(Some(values))
    }

    /// Value of `general.architecture`, which is also the prefix of the keys that describe the
    /// model.
    pub fn architecture(&self) -> Result<&str, KeyError> {
        self.require("general.architecture")
    }

    fn value_at(&self, value: &ValueAt) -> Option<Value<'_>> {
        match value {
            ValueAt::Single { value_type, range } => {
                Value::split_first(*value_type, self.bytes.get(range.clone())?).map(|(value, _)| value)
            }
            ValueAt::Array { element, len, range } => {
                let bytes = self.bytes.get(range.clone())?;
                Some(Value::Array(Array { element: *element, len: *len, bytes }))
            }
        }
    }
}

/// Names the type of a value for error texts; for an array, with its length and element type.
fn describe(value: Value<'_>) -> String {
    match value {
        Value::Array(array) => format!("array of {} {}", array.len, array.element),
        value => value.value_type().to_string(),
    }
}

/// The index of a section, while the section is being read.
#[derive(Default)]
pub(crate) struct MetadataIndex {
    entries: Vec<KeyValue>,
    by_key: HashMap<String, usize>,
}

impl MetadataIndex {
    /// Reads one key-value pair. `section_start` is the cursor's offset at the start of the
    /// section.
    pub(crate) fn read_pair(
        &mut self,
        cursor: &mut impl Cursor,
        section_start: u64,
    ) -> Result<(), MetadataError> {
        let offset = cursor.offset();
        if self.entries.len() as u64 >= MAX_KEYS {
            return Err(MetadataError::TooManyKeys { offset });
        }
        let key = read_key(cursor, self.entries.len() as u64)?;
        if self.by_key.contains_key(&key) {
            return Err(MetadataError::DuplicateKey { key, offset });
        }
        let value = read_value(cursor, &key, section_start)?;
        self.by_key.insert(key.clone(), self.entries.len());
        self.entries.push(KeyValue { key, value });
        Ok(())
    }

    pub(crate) fn over(self, bytes: Bytes) -> Metadata {
        Metadata { bytes, entries: self.entries, by_key: self.by_key }
    }
}

fn read_key(cursor: &mut impl Cursor, index: u64) -> Result<String, MetadataError> {
    let offset = cursor.offset();
    let read_error = |source| MetadataError::ReadKey { index, source };
    let len = cursor.u64().map_err(read_error)?;
    if len == 0 {
        return Err(MetadataError::EmptyKey { index, offset });
    }
    if len > MAX_KEY_BYTES {
        return Err(MetadataError::LongKey { index, offset, len });
    }
    let bytes = cursor.take(len).map_err(read_error)?;
    let key = std::str::from_utf8(bytes).map_err(|_| MetadataError::KeyEncoding { index, offset })?;
    Ok(key.to_owned())
}

fn read_value(cursor: &mut impl Cursor, key: &str, section_start: u64) -> Result<ValueAt, MetadataError> {
    let read_error = |source| MetadataError::ReadValue { key: key.into(), source };
    let value_type = read_type(cursor, key)?;
    let start = cursor.offset();
    if value_type != ValueType::Array {
        skip_one(cursor, key, value_type)?;
        let range = (start - section_start) as usize..(cursor.offset() - section_start) as usize;
        return Ok(ValueAt::Single { value_type, range });
    }

    let element_offset = cursor.offset();
    let element = read_type(cursor, key)?;
    if element == ValueType::Array {
        return Err(MetadataError::NestedArray { key: key.into(), offset: element_offset });
    }
    let len_offset = cursor.offset();
    let len = cursor.u64().map_err(read_error)?;
    let start = cursor.offset();
    let remaining = cursor.remaining();
    // A string takes at least the 8 bytes of its length. This bounds the loop below by the size of
    // the file.
    let least = element.fixed_bytes().unwrap_or(8);
    let bytes = len.checked_mul(least).filter(|&bytes| bytes <= remaining).ok_or_else(|| {
        MetadataError::LongArray { key: key.into(), offset: len_offset, element, len, remaining }
    })?;
    if element == ValueType::String {
        for _ in 0..len {
            skip_one(cursor, key, element)?;
        }
    } else {
        cursor.take(bytes).map_err(read_error)?;
    }
    let range = (start - section_start) as usize..(cursor.offset() - section_start) as usize;
    Ok(ValueAt::Array { element, len: len as usize, range })
}

fn read_type(cursor: &mut impl Cursor, key: &str) -> Result<ValueType, MetadataError> {
    let offset = cursor.offset();
    let id = cursor.u32().map_err(|source| MetadataError::ReadValue { key: key.into(), source })?;
    ValueType::from_id(id).ok_or_else(|| MetadataError::UnknownType { key: key.into(), offset, id })
}

/// Skips one scalar or string.
fn skip_one(cursor: &mut impl Cursor, key: &str, value_type: ValueType) -> Result<(), MetadataError> {
    let read_error = |source| MetadataError::ReadValue { key: key.into(), source };
    let offset = cursor.offset();
    let len = match value_type.fixed_bytes() {
        Some(len) => len,
        None => {
            let len = cursor.u64().map_err(read_error)?;
            let remaining = cursor.remaining();
            if len > remaining {
                return Err(MetadataError::LongString { key: key.into(), offset, len, remaining });
            }
            len
        }
    };
    cursor.take(len).map(|_| ()).map_err(read_error)
}
