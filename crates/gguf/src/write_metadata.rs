// SPDX-License-Identifier: Apache-2.0

//! [`MetadataBuilder`]: encodes key-value pairs as a file stores them, in insertion order.

use crate::limits::{ALIGNMENT_KEY, MAX_KEY_BYTES, MAX_KEYS};
use crate::metadata::Metadata;
use crate::value::{Value, ValueType};
use crate::write_error::WriteError;
use std::collections::HashSet;

/// The metadata section that a [`crate::GgufWriter`] writes first.
#[derive(Clone, Debug, Default)]
pub struct MetadataBuilder {
    bytes: Vec<u8>,
    keys: HashSet<String>,
}

impl MetadataBuilder {
    /// Adds a pair. Refuses a duplicate key, and `general.alignment`, because files are written
    /// with the default alignment.
    pub fn put(&mut self, key: &str, value: impl ToValue) -> Result<(), WriteError> {
        if key == ALIGNMENT_KEY {
            return Err(WriteError::Alignment);
        }
        let valid = !key.is_empty() && key.len() as u64 <= MAX_KEY_BYTES;
        if !valid || self.keys.len() as u64 >= MAX_KEYS {
            return Err(WriteError::Key { key: key.into() });
        }
        if !self.keys.insert(key.into()) {
            return Err(WriteError::DuplicateKey { key: key.into() });
        }
        string(key.as_bytes(), &mut self.bytes);
        value.write(&mut self.bytes);
        Ok(())
    }

    /// Copies every pair of `metadata` whose key `keep` accepts, except `general.alignment`.
    pub fn copy(&mut self, metadata: &Metadata, keep: impl Fn(&str) -> bool) -> Result<(), WriteError> {
        for (key, value) in metadata.iter().filter(|(key, _)| *key != ALIGNMENT_KEY && keep(key)) {
            self.put(key, value)?;
        }
        Ok(())
    }

    pub fn len(&self) -> usize {
        self.keys.len()
    }

    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// The encoded pairs; [`Metadata::parse`] reads them.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// A value that can be stored: a number, a bool, a string, or a slice of one of these as an array.
pub trait ToValue {
    /// Appends the type id and the encoded value.
    fn write(&self, out: &mut Vec<u8>);
}

macro_rules! number_to_value {
    ($($type:ty => $variant:ident),*) => {$(
        impl ToValue for $type {
            fn write(&self, out: &mut Vec<u8>) {
                type_id(ValueType::$variant, out);
                out.extend(self.to_le_bytes());
            }
        }

        impl ToValue for &[$type] {
            fn write(&self, out: &mut Vec<u8>) {
                array_head(ValueType::$variant, self.len(), out);
                out.extend(self.iter().flat_map(|value| value.to_le_bytes()));
            }
        }
    )*};
}

number_to_value!(u8 => U8, i8 => I8, u16 => U16, i16 => I16, u32 => U32, i32 => I32, f32 => F32, u64 => U64, i64 => I64, f64 => F64);

impl ToValue for bool {
    fn write(&self, out: &mut Vec<u8>) {
        type_id(ValueType::Bool, out);
        out.push(u8::from(*self));
    }
}

impl ToValue for &[bool] {
    fn write(&self, out: &mut Vec<u8>) {
        array_head(ValueType::Bool, self.len(), out);
        out.extend(self.iter().map(|&value| u8::from(value)));
    }
}

impl ToValue for &str {
    fn write(&self, out: &mut Vec<u8>) {
        type_id(ValueType::String, out);
        string(self.as_bytes(), out);
    }
}

macro_rules! strings_to_value {
    ($($type:ty),*) => {$(
        impl ToValue for &[$type] {
            fn write(&self, out: &mut Vec<u8>) {
                array_head(ValueType::String, self.len(), out);
                for text in *self {
                    string(text.as_ref(), out);
                }
            }
        }
    )*};
}

strings_to_value!(&str, String, Vec<u8>);

impl ToValue for Value<'_> {
    fn write(&self, out: &mut Vec<u8>) {
        match *self {
            Value::U8(value) => value.write(out),
            Value::I8(value) => value.write(out),
            Value::U16(value) => value.write(out),
            Value::I16(value) => value.write(out),
            Value::U32(value) => value.write(out),
            Value::I32(value) => value.write(out),
            Value::F32(value) => value.write(out),
            Value::U64(value) => value.write(out),
            Value::I64(value) => value.write(out),
            Value::F64(value) => value.write(out),
            Value::Bool(value) => value.write(out),
            Value::String(bytes) => {
                type_id(ValueType::String, out);
                string(bytes, out);
            }
            Value::Array(array) => {
                array_head(array.element, array.len, out);
                out.extend(array.bytes);
            }
        }
    }
}

pub(crate) fn string(bytes: &[u8], out: &mut Vec<u8>) {
    out.extend((bytes.len() as u64).to_le_bytes());
    out.extend(bytes);
}

fn type_id(value_type: ValueType, out: &mut Vec<u8>) {
    out.extend((value_type as u32).to_le_bytes());
}

fn array_head(element: ValueType, len: usize, out: &mut Vec<u8>) {
    type_id(ValueType::Array, out);
    type_id(element, out);
    out.extend((len as u64).to_le_bytes());
}
