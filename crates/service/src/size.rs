// SPDX-License-Identifier: Apache-2.0

//! Sizes in configuration and output: a number of bytes that is read and printed with a unit.
//!
//! The units are binary (KiB, MiB, GiB, TiB). Decimal units are refused, because "MB" is ambiguous.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// A number of bytes. Parses "512MiB", "1.5 GiB", "4096" or an integer. Prints the largest unit
/// that is exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteSize(pub u64);

const UNITS: [(&str, u32); 5] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10), ("B", 0)];

/// Why a text is not a size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseSizeError {
    #[error("{text:?} is not a size; write a number of bytes, or a number with KiB, MiB, GiB or TiB")]
    Malformed { text: String },
    #[error("{text:?} is more than 2^63 bytes")]
    TooLarge { text: String },
}

impl ByteSize {
    pub const fn kib(n: u64) -> Self {
        Self(n << 10)
    }

    pub const fn mib(n: u64) -> Self {
        Self(n << 20)
    }

    pub const fn gib(n: u64) -> Self {
        Self(n << 30)
    }

    /// Three significant digits, with the largest unit that leaves at least one digit before the
    /// point.
    pub fn rounded(self) -> String {
        let (unit, shift) = UNITS.into_iter().find(|&(_, shift)| self.0 >> shift > 0).unwrap_or(("B", 0));
        let value = self.0 as f64 / (1u64 << shift) as f64;
        let decimals = match value {
            _ if shift == 0 => 0,
            v if v < 10.0 => 2,
            v if v < 100.0 => 1,
            _ => 0,
        };
        format!("{value:.decimals$} {unit}")
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match UNITS
            .into_iter()
            .find(|&(_, shift)| shift > 0 && self.0 > 0 && self.0.trailing_zeros() >= shift)
        {
            Some((unit, shift)) => write!(f, "{}{unit}", self.0 >> shift),
            None => write!(f, "{}", self.0),
        }
    }
}

impl FromStr for ByteSize {
    type Err = ParseSizeError;

    fn from_str(text: &str) -> Result<Self, ParseSizeError> {
        let malformed = || ParseSizeError::Malformed { text: text.to_owned() };
        let too_large = || ParseSizeError::TooLarge { text: text.to_owned() };
        let trimmed = text.trim();
        let digits_end = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
        let (number, unit) = (&trimmed[..digits_end], trimmed[digits_end..].trim());
        let shift = match unit {
            "" => 0,
            _ => UNITS.into_iter().find(|(name, _)| name.eq_ignore_ascii_case(unit)).ok_or_else(malformed)?.1,
        };
        if let Ok(whole) = number.parse::<u64>() {
            return whole
                .checked_mul(1 << shift)
                .filter(|&b| b < 1 << 63)
                .map(ByteSize)
                .ok_or_else(too_large);
        }
        // A fraction of a unit is allowed ("1.5GiB"), a fraction of a byte is an error.
        if !number.contains('.') && !number.is_empty() {
            return Err(too_large());
        }
        let value = number.parse::<f64>().map_err(|_| malformed())? * (1u64 << shift) as f64;
        if value >= (1u64 << 63) as f64 {
            return Err(too_large());
        }
        if value.fract() != 0.0 && shift == 0 {
            return Err(malformed());
        }
        Ok(ByteSize(value as u64))
    }
}

impl Serialize for ByteSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ByteSizeVisitor)
    }
}

struct ByteSizeVisitor;

impl de::Visitor<'_> for ByteSizeVisitor {
    type Value = ByteSize;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a size such as \"512MiB\"")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<ByteSize, E> {
        text.parse().map_err(E::custom)
    }

    fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<ByteSize, E> {
        Ok(ByteSize(bytes))
    }

    fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<ByteSize, E> {
        u64::try_from(bytes).map(ByteSize).map_err(|_| E::custom("a size is not negative"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes_read_with_and_without_units() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("4096B", 4096),
            ("512MiB", 512 << 20),
            ("512 mib", 512 << 20),
            ("1.5GiB", 3 << 29),
            ("2TiB", 2 << 40),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
    }

    #[test]
    fn ambiguous_and_too_large_sizes_are_refused() {
        for text in ["", "MiB", "12MB", "-1", "1e9", "1.5", "1..5KiB", "99999999999999999999", "8388608TiB"] {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
    }

    #[test]
    fn rounded_sizes_have_three_digits() {
        assert_eq!(ByteSize(7_523_744).rounded(), "7.18 MiB");
        assert_eq!(ByteSize(12).rounded(), "12 B");
        assert_eq!(ByteSize::gib(115).rounded(), "115 GiB");
    }

    proptest! {
        #[test]
        fn every_printed_size_reads_back(bytes in 0u64..1 << 63) {
            prop_assert_eq!(ByteSize(bytes).to_string().parse(), Ok(ByteSize(bytes)));
        }

        #[test]
        fn no_text_panics(text in "\\PC{0,24}") {
            let _: Result<ByteSize, _> = text.parse();
        }
    }
}
