// SPDX-License-Identifier: Apache-2.0

//! [`DType`]: the ggml tensor types with their ids, names and sizes. Files, manifests and messages
//! use these ids.

use std::fmt;

/// The element type of a tensor. The names are ggml's.
#[expect(non_camel_case_types, reason = "names as files and ggml write them")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u32)]
pub enum DType {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q8_1 = 9,
    Q2_K = 10,
    Q3_K = 11,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    Q8_K = 15,
    IQ2_XXS = 16,
    IQ2_XS = 17,
    IQ3_XXS = 18,
    IQ1_S = 19,
    IQ4_NL = 20,
    IQ3_S = 21,
    IQ2_S = 22,
    IQ4_XS = 23,
    I8 = 24,
    I16 = 25,
    I32 = 26,
    I64 = 27,
    F64 = 28,
    IQ1_M = 29,
    BF16 = 30,
    TQ1_0 = 34,
    TQ2_0 = 35,
    MXFP4 = 39,
    NVFP4 = 40,
    Q1_0 = 41,
    Q2_0 = 42,
}

/// A type id that ggml never had or has removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{id} is not the id of a tensor type (known: 0 to 42 without 4, 5, 31 to 33, 36 to 38)")]
pub struct UnknownDType {
    pub id: u32,
}

/// Why the size in bytes of a number of values does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    #[error("{values} values do not fill whole blocks of {block} as {dtype} needs")]
    PartialBlock { dtype: DType, values: u64, block: u64 },
    #[error("{values} values of {dtype} have more bytes than 64 bits can count")]
    Overflow { dtype: DType, values: u64 },
}

impl DType {
    /// Every type, in the order of ids.
    pub const ALL: [Self; 35] = [
        Self::F32,
        Self::F16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q8_1,
        Self::Q2_K,
        Self::Q3_K,
        Self::Q4_K,
        Self::Q5_K,
        Self::Q6_K,
        Self::Q8_K,
        Self::IQ2_XXS,
        Self::IQ2_XS,
        Self::IQ3_XXS,
        Self::IQ1_S,
        Self::IQ4_NL,
        Self::IQ3_S,
        Self::IQ2_S,
        Self::IQ4_XS,
        Self::I8,
        Self::I16,
        Self::I32,
        Self::I64,
        Self::F64,
        Self::IQ1_M,
        Self::BF16,
        Self::TQ1_0,
        Self::TQ2_0,
        Self::MXFP4,
        Self::NVFP4,
        Self::Q1_0,
        Self::Q2_0,
    ];

    pub fn from_id(id: u32) -> Result<Self, UnknownDType> {
        Self::ALL.into_iter().find(|dtype| dtype.id() == id).ok_or(UnknownDType { id })
    }

    /// Finds a type by its name. Case is ignored.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name().eq_ignore_ascii_case(name))
    }

    /// The id of the type in files, manifests and messages.
    pub const fn id(self) -> u32 {
        self as u32
    }

    pub const fn name(self) -> &'static str {
        self.format().0
    }

    /// Values per block.
    pub const fn block_len(self) -> usize {
        self.format().1
    }

    pub const fn block_bytes(self) -> usize {
        self.format().2
    }

    pub fn bits_per_value(self) -> f64 {
        8.0 * self.block_bytes() as f64 / self.block_len() as f64
    }

    /// Bytes of `values` values, which must fill whole blocks: one row, or several.
    pub const fn row_bytes(self, values: u64) -> Result<u64, SizeError> {
        let (_, block, bytes) = self.format();
        let (block, bytes) = (block as u64, bytes as u64);
        if !values.is_multiple_of(block) {
            return Err(SizeError::PartialBlock { dtype: self, values, block });
        }
        match (values / block).checked_mul(bytes) {
            Some(bytes) => Ok(bytes),
            None => Err(SizeError::Overflow { dtype: self, values }),
        }
    }

    /// The type to which a kernel converts activations before it multiplies them with weights of
    /// this type. `None` if no kernel reads this type.
    pub const fn activation(self) -> Option<Self> {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => Some(self),
            Self::Q4_0 | Self::Q5_0 | Self::Q8_0 => Some(Self::Q8_0),
            Self::Q4_1 | Self::Q5_1 => Some(Self::Q8_1),
            Self::Q2_K | Self::Q3_K | Self::Q4_K | Self::Q5_K | Self::Q6_K => Some(Self::Q8_K),
            _ => None,
        }
    }

    /// Name, values per block, bytes per block.
    const fn format(self) -> (&'static str, usize, usize) {
        match self {
            Self::F32 => ("F32", 1, 4),
            Self::F16 => ("F16", 1, 2),
            Self::Q4_0 => ("Q4_0", 32, 18),
            Self::Q4_1 => ("Q4_1", 32, 20),
            Self::Q5_0 => ("Q5_0", 32, 22),
            Self::Q5_1 => ("Q5_1", 32, 24),
            Self::Q8_0 => ("Q8_0", 32, 34),
            Self::Q8_1 => ("Q8_1", 32, 36),
            Self::Q2_K => ("Q2_K", 256, 84),
            Self::Q3_K => ("Q3_K", 256, 110),
            Self::Q4_K => ("Q4_K", 256, 144),
            Self::Q5_K => ("Q5_K", 256, 176),
            Self::Q6_K => ("Q6_K", 256, 210),
            Self::Q8_K => ("Q8_K", 256, 292),
            Self::IQ2_XXS => ("IQ2_XXS", 256, 66),
            Self::IQ2_XS => ("IQ2_XS", 256, 74),
            Self::IQ3_XXS => ("IQ3_XXS", 256, 98),
            Self::IQ1_S => ("IQ1_S", 256, 50),
            Self::IQ4_NL => ("IQ4_NL", 32, 18),
            Self::IQ3_S => ("IQ3_S", 256, 110),
            Self::IQ2_S => ("IQ2_S", 256, 82),
            Self::IQ4_XS => ("IQ4_XS", 256, 136),
            Self::I8 => ("I8", 1, 1),
            Self::I16 => ("I16", 1, 2),
            Self::I32 => ("I32", 1, 4),
            Self::I64 => ("I64", 1, 8),
            Self::F64 => ("F64", 1, 8),
            Self::IQ1_M => ("IQ1_M", 256, 56),
            Self::BF16 => ("BF16", 1, 2),
            Self::TQ1_0 => ("TQ1_0", 256, 54),
            Self::TQ2_0 => ("TQ2_0", 256, 66),
            Self::MXFP4 => ("MXFP4", 32, 17),
            Self::NVFP4 => ("NVFP4", 64, 36),
            Self::Q1_0 => ("Q1_0", 128, 18),
            Self::Q2_0 => ("Q2_0", 64, 18),
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_and_names_round_trip_and_removed_ids_are_refused() {
        for dtype in DType::ALL {
            assert_eq!(DType::from_id(dtype.id()), Ok(dtype));
            assert_eq!(DType::from_name(&dtype.name().to_lowercase()), Some(dtype));
        }
        for id in [4, 5, 31, 32, 33, 36, 37, 38, 43, u32::MAX] {
            assert_eq!(DType::from_id(id), Err(UnknownDType { id }));
        }
        assert_eq!(DType::ALL.len(), (0..=42).filter(|&id| DType::from_id(id).is_ok()).count());
    }

    #[test]
    fn row_bytes_refuses_partial_blocks_and_overflow() {
        assert_eq!(DType::Q4_K.row_bytes(4096), Ok(2304));
        assert_eq!(DType::F32.row_bytes(0), Ok(0));
        assert!(matches!(DType::Q4_K.row_bytes(4097), Err(SizeError::PartialBlock { block: 256, .. })));
        assert!(matches!(DType::F64.row_bytes(1 << 61), Err(SizeError::Overflow { .. })));
        assert_eq!(DType::Q4_0.row_bytes(u64::MAX - 31), Ok((u64::MAX / 32) * 18));
    }
}
