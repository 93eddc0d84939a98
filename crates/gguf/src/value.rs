// SPDX-License-Identifier: Apache-2.0

//! Metadata values: their types, how files store them, and how callers read them.

use std::fmt;

/// Type of a value or of an array's elements. The number is the one that files store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ValueType {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    String = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

impl ValueType {
    const ALL: [Self; 13] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::Bool,
        Self::String,
        Self::Array,
        Self::U64,
        Self::I64,
        Self::F64,
    ];

    pub(crate) fn from_id(id: u32) -> Option<Self> {
        Self::ALL.get(id as usize).copied()
    }

    /// Size of one value in bytes; `None` for strings and arrays, which store their own length.
    pub(crate) fn fixed_bytes(self) -> Option<u64> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::String | Self::Array => None,
        }
    }
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::U16 => "u16",
            Self::I16 => "i16",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::F32 => "f32",
            Self::Bool => "bool",
            Self::String => "string",
            Self::Array => "array",
            Self::U64 => "u64",
            Self::I64 => "i64",
            Self::F64 => "f64",
        })
    }
}

/// A value as stored in the file. Strings are bytes, because files may contain strings that are not
/// UTF-8.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value<'a> {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(&'a [u8]),
    Array(Array<'a>),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// An array. All its elements are known to be complete.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Array<'a> {
    pub element: ValueType,
    pub len: usize,
    pub(crate) bytes: &'a [u8],
}

impl<'a> Array<'a> {
    pub fn iter(self) -> impl Iterator<Item = Value<'a>> {
        let mut bytes = self.bytes;
        (0..self.len).map_while(move |_| {
            let (value, rest) = Value::split_first(self.element, bytes)?;
            bytes = rest;
            Some(value)
        })
    }
}

impl<'a> Value<'a> {
    pub fn value_type(&self) -> ValueType {
        match self {
            Self::U8(_) => ValueType::U8,
            Self::I8(_) => ValueType::I8,
            Self::U16(_) => ValueType::U16,
            Self::I16(_) => ValueType::I16,
            Self::U32(_) => ValueType::U32,
            Self::I32(_) => ValueType::I32,
            Self::F32(_) => ValueType::F32,
            Self::Bool(_) => ValueType::Bool,
            Self::String(_) => ValueType::String,
            Self::Array(_) => ValueType::Array,
            Self::U64(_) => ValueType::U64,
            Self::I64(_) => ValueType::I64,
            Self::F64(_) => ValueType::F64,
        }
    }

    /// Decodes the scalar or string at the start of `bytes`; `None` if it is incomplete.
    pub(crate) fn split_first(value_type: ValueType, bytes: &'a [u8]) -> Option<(Self, &'a [u8])> {
        fn fixed<const N: usize>(bytes: &[u8]) -> Option<([u8; N], &[u8])> {
            bytes.split_first_chunk().map(|(value, rest)| (*value, rest))
        }
        macro_rules! number {
            ($variant:ident, $type:ty) => {{
                let (value, rest) = fixed(bytes)?;
                (Self::$variant(<$type>::from_le_bytes(value)), rest)
            }};
        }
        Some(match value_type {
            ValueType::U8 => number!(U8, u8),
            ValueType::I8 => number!(I8, i8),
            ValueType::U16 => number!(U16, u16),
            ValueType::I16 => number!(I16, i16),
            ValueType::U32 => number!(U32, u32),
            ValueType::I32 => number!(I32, i32),
            ValueType::F32 => number!(F32, f32),
            ValueType::U64 => number!(U64, u64),
            ValueType::I64 => number!(I64, i64),
            ValueType::F64 => number!(F64, f64),
            ValueType::Bool => {
                let ([value], rest) = fixed(bytes)?;
                (Self::Bool(value != 0), rest)
            }
            ValueType::String => {
                let (len, rest) = fixed(bytes)?;
                let (string, rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(len)).ok()?)?;
                (Self::String(string), rest)
            }
            ValueType::Array => return None,
        })
    }

    /// The value as an integer, whatever its stored width; `true` is 1.
    fn integer(&self) -> Option<i128> {
        Some(match *self {
            Self::U8(value) => value.into(),
            Self::I8(value) => value.into(),
            Self::U16(value) => value.into(),
            Self::I16(value) => value.into(),
            Self::U32(value) => value.into(),
            Self::I32(value) => value.into(),
            Self::U64(value) => value.into(),
            Self::I64(value) => value.into(),
            Self::Bool(value) => value.into(),
            _ => return None,
        })
    }
}

/// A type that a metadata value can be read as. Integers convert between widths if the value fits;
/// nothing else converts.
pub trait FromValue<'a>: Sized {
    /// Name of the wanted type, for error texts.
    const WANTED: &'static str;

    fn from_value(value: Value<'a>) -> Option<Self>;
}

macro_rules! from_integer {
    ($($type:ty),*) => {$(
        impl FromValue<'_> for $type {
            const WANTED: &'static str = stringify!($type);

            fn from_value(value: Value<'_>) -> Option<Self> {
                if matches!(value, Value::Bool(_)) {
                    return None;
                }
                value.integer()?.try_into().ok()
            }
        }

        impl FromValue<'_> for Vec<$type> {
            const WANTED: &'static str = concat!("array of ", stringify!($type));

            fn from_value(value: Value<'_>) -> Option<Self> {
                let Value::Array(array) = value else { return None };
                array.iter().map(|element| element.integer()?.try_into().ok()).collect()
            }
        }
    )*};
}

from_integer!(u16, u32, i32, u64, i64);

impl FromValue<'_> for f32 {
    const WANTED: &'static str = "f32";

    fn from_value(value: Value<'_>) -> Option<Self> {
        match value {
            Value::F32(value) => Some(value),
            Value::F64(value) => Some(value as f32),
            _ => None,
        }
    }
}

impl FromValue<'_> for Vec<f32> {
    const WANTED: &'static str = "array of f32";

    fn from_value(value: Value<'_>) -> Option<Self> {
        let Value::Array(array) = value else { return None };
        array.iter().map(f32::from_value).collect()
    }
}

impl FromValue<'_> for bool {
    const WANTED: &'static str = "bool";

    fn from_value(value: Value<'_>) -> Option<Self> {
        match value {
            Value::Bool(value) => Some(value),
            _ => None,
        }
    }
}

impl FromValue<'_> for Vec<bool> {
    const WANTED: &'static str = "array of bool";

    fn from_value(value: Value<'_>) -> Option<Self> {
        let Value::Array(array) = value else { return None };
        array
            .iter()
            .map(|element| match element.integer()? {
                0 => Some(false),
                1 => Some(true),
                _ => None,
            })
            .collect()
    }
}

impl<'a> FromValue<'a> for &'a str {
    const WANTED: &'static str = "UTF-8 string";

    fn from_value(value: Value<'a>) -> Option<Self> {
        match value {
            Value::String(bytes) => std::str::from_utf8(bytes).ok(),
            _ => None,
        }
    }
}

impl<'a> FromValue<'a> for &'a [u8] {
    const WANTED: &'static str = "string";

    fn from_value(value: Value<'a>) -> Option<Self> {
        match value {
            Value::String(bytes) => Some(bytes),
            _ => None,
        }
    }
}

/// An array of strings that borrows the file's bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StringArray<'a>(Array<'a>);

impl<'a> StringArray<'a> {
    pub fn len(&self) -> usize {
        self.0.len
    }

    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    pub fn iter(&self) -> impl Iterator<Item = &'a [u8]> {
        self.0.iter().filter_map(|value| match value {
            Value::String(bytes) => Some(bytes),
            _ => None,
        })
    }
}

impl<'a> FromValue<'a> for StringArray<'a> {
    const WANTED: &'static str = "array of strings";

    fn from_value(value: Value<'a>) -> Option<Self> {
        match value {
            Value::Array(array) if array.element == ValueType::String => Some(Self(array)),
            _ => None,
        }
    }
}
