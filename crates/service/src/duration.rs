// SPDX-License-Identifier: Apache-2.0

//! Durations in configuration files: `#[serde(with = "service::duration")]` reads and writes "10s".

use std::time::Duration;

use serde::{Deserialize, Deserializer, Serializer, de};

const UNITS_NS: [(&str, u64); 6] = [
    ("h", 3_600_000_000_000),
    ("min", 60_000_000_000),
    ("s", 1_000_000_000),
    ("ms", 1_000_000),
    ("us", 1_000),
    ("ns", 1),
];

/// Why a text is not a duration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a duration; write a number with ns, us, ms, s, min or h, such as \"1.5s\"")]
pub struct ParseDurationError {
    text: String,
}

/// Parses "250ms", "1.5s", "10min". Refuses a number without a unit, which could mean seconds or
/// milliseconds.
pub fn parse(text: &str) -> Result<Duration, ParseDurationError> {
    let malformed = || ParseDurationError { text: text.to_owned() };
    let trimmed = text.trim();
    let digits_end = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
    let (number, unit) = (&trimmed[..digits_end], trimmed[digits_end..].trim());
    let unit_ns = UNITS_NS.into_iter().find(|&(name, _)| name == unit).ok_or_else(malformed)?.1;
    let nanoseconds = match number.parse::<u64>() {
        Ok(whole) => whole.checked_mul(unit_ns),
        Err(_) => {
            number.parse::<f64>().ok().map(|v| v * unit_ns as f64).filter(|&v| v < 1e18).map(|v| v as u64)
        }
    };
    nanoseconds.map(Duration::from_nanos).ok_or_else(malformed)
}

/// Formats with the largest unit in which the duration is a whole number.
pub fn format(duration: Duration) -> String {
    let nanoseconds = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
    let (unit, unit_ns) = UNITS_NS
        .into_iter()
        .find(|&(_, unit_ns)| nanoseconds > 0 && nanoseconds.is_multiple_of(unit_ns))
        .unwrap_or(("s", 1_000_000_000));
    format!("{}{unit}", nanoseconds / unit_ns)
}

pub fn serialize<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&format(*duration))
}

pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    parse(&String::deserialize(deserializer)?).map_err(de::Error::custom)
}

/// The same for a key that may be absent:
/// `#[serde(default, with = "service::duration::optional")]`.
pub mod optional {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer, de};

    pub fn serialize<S: Serializer>(duration: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
        match duration {
            Some(duration) => super::serialize(duration, serializer),
            None => serializer.serialize_none(),
        }
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
        let text = Option::<String>::deserialize(deserializer)?;
        text.map(|text| super::parse(&text)).transpose().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn durations_need_a_unit() {
        assert_eq!(parse("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(parse("1.5s"), Ok(Duration::from_millis(1500)));
        assert_eq!(parse(" 2 min "), Ok(Duration::from_secs(120)));
        for text in ["10", "s", "", "-1s", "1 day", "1..2s", "99999999999999999999h"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn every_printed_duration_reads_back(ns in 0u64..u64::MAX) {
            let duration = Duration::from_nanos(ns);
            prop_assert_eq!(parse(&format(duration)), Ok(duration));
        }
    }
}
