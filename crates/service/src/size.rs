//! Sizes in configuration and output: a plain count of bytes that reads and prints with a unit.
//!
//! Binary units only (KiB, MiB, GiB, TiB) plus a bare number of bytes: one way to write a size, so that nobody wonders
//! whether "MB" means 10^6.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// A number of bytes. Reads "512MiB", "1.5 GiB", "4096" or a bare integer; prints the largest unit that is exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

const UNITS: [(&str, u32); 5] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10), ("B", 0)];

/// Why a text is no size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    #[error("{text:?} is not a size; write a number of bytes, or a number with KiB, MiB, GiB or TiB")]
    Malformed { text: String },
    #[error("{text:?} is more than 2^63 bytes")]
    TooLarge { text: String },
}

impl Bytes {
    pub const fn kib(n: u64) -> Self {
        Self(n << 10)
    }

    pub const fn mib(n: u64) -> Self {
        Self(n << 20)
    }

    pub const fn gib(n: u64) -> Self {
        Self(n << 30)
    }

    /// For people: three significant digits with the largest unit that leaves at least one before the point.
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

impl fmt::Display for Bytes {
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

impl FromStr for Bytes {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let malformed = || SizeError::Malformed { text: text.to_owned() };
        let too_large = || SizeError::TooLarge { text: text.to_owned() };
        let trimmed = text.trim();
        let digits_end = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
        let (number, unit) = (&trimmed[..digits_end], trimmed[digits_end..].trim());
        let shift = match unit {
            "" => 0,
            _ => UNITS.into_iter().find(|(name, _)| name.eq_ignore_ascii_case(unit)).ok_or_else(malformed)?.1,
        };
        if let Ok(whole) = number.parse::<u64>() {
            return whole.checked_mul(1 << shift).filter(|&b| b < 1 << 63).map(Bytes).ok_or_else(too_large);
        }
        // A fraction of a unit is convenient ("1.5GiB"); a fraction of a byte is a mistake.
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
        Ok(Bytes(value as u64))
    }
}

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(BytesVisitor)
    }
}

struct BytesVisitor;

impl de::Visitor<'_> for BytesVisitor {
    type Value = Bytes;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a size such as \"512MiB\"")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Bytes, E> {
        text.parse().map_err(E::custom)
    }

    fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<Bytes, E> {
        Ok(Bytes(bytes))
    }

    fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<Bytes, E> {
        u64::try_from(bytes).map(Bytes).map_err(|_| E::custom("a size is not negative"))
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
            assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
        }
    }

    #[test]
    fn ambiguous_and_absurd_sizes_are_refused() {
        for text in ["", "MiB", "12MB", "-1", "1e9", "1.5", "1..5KiB", "99999999999999999999", "8388608TiB"] {
            assert!(text.parse::<Bytes>().is_err(), "{text}");
        }
    }

    #[test]
    fn people_see_three_digits() {
        assert_eq!(Bytes(7_523_744).rounded(), "7.18 MiB");
        assert_eq!(Bytes(12).rounded(), "12 B");
        assert_eq!(Bytes::gib(115).rounded(), "115 GiB");
    }

    proptest! {
        #[test]
        fn every_printed_size_reads_back(bytes in 0u64..1 << 63) {
            prop_assert_eq!(Bytes(bytes).to_string().parse(), Ok(Bytes(bytes)));
        }

        #[test]
        fn no_text_panics(text in "\\PC{0,24}") {
            let _: Result<Bytes, _> = text.parse();
        }
    }
}
