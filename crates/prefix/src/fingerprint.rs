// SPDX-License-Identifier: Apache-2.0

//! Worker fingerprints: two workers with equal fingerprints produce the same tokens, so one can
//! resume the other's streams (I5, I6).

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

/// Model digest, weight layout, instruction set and options of a worker. The text form is stable,
/// has one line, and is equal exactly when the values are: `ballast-1 model=<64 hex digits>
/// layout=0 isa=avx512 kv=f16 matmul=exact` (options in order of their names).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Fingerprint {
    model: [u8; 32],
    layout: u32,
    isa: String,
    options: BTreeMap<String, String>,
}

const VERSION: &str = "ballast-1";
/// Longest text that is parsed, far above any real one.
const TEXT_MAX: usize = 4096;
const RESERVED: [&str; 3] = ["model", "layout", "isa"];

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FingerprintError {
    #[error(
        "fingerprint starts with {found:?}, expected {VERSION:?}: the processes are of different versions"
    )]
    Version { found: String },
    #[error("fingerprint of {len} characters, at most {TEXT_MAX} are read")]
    Length { len: usize },
    #[error("fingerprint lacks {key}, or it is not in its place")]
    Missing { key: &'static str },
    #[error(
        "fingerprint field {field:?} is not key=value in lower-case letters, digits, '-', '_', '.' and '+'"
    )]
    Syntax { field: String },
    #[error("fingerprint option {key:?} stands twice, out of order, or is a reserved name")]
    Key { key: String },
    #[error("fingerprint field {key} has the malformed value {value:?}")]
    Value { key: &'static str, value: String },
}

impl Fingerprint {
    pub fn new(model: [u8; 32], layout: u32, isa: &str) -> Result<Self, FingerprintError> {
        let field = format!("isa={isa}");
        match split(&field) {
            Some(_) => Ok(Self { model, layout, isa: isa.to_owned(), options: BTreeMap::new() }),
            None => Err(FingerprintError::Syntax { field }),
        }
    }

    /// Adds an option of the kernels or the cache that changes results, such as `kv=f16`.
    pub fn with(mut self, key: &str, value: &str) -> Result<Self, FingerprintError> {
        let field = format!("{key}={value}");
        if split(&field).is_none() {
            return Err(FingerprintError::Syntax { field });
        }
        if RESERVED.contains(&key) || self.options.insert(key.to_owned(), value.to_owned()).is_some() {
            return Err(FingerprintError::Key { key: key.to_owned() });
        }
        Ok(self)
    }

    pub fn model(&self) -> &[u8; 32] {
        &self.model
    }

    pub fn isa(&self) -> &str {
        &self.isa
    }

    pub fn option(&self, key: &str) -> Option<&str> {
        self.options.get(key).map(String::as_str)
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{VERSION} model=")?;
        self.model.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        write!(f, " layout={} isa={}", self.layout, self.isa)?;
        self.options.iter().try_for_each(|(key, value)| write!(f, " {key}={value}"))
    }
}

impl FromStr for Fingerprint {
    type Err = FingerprintError;

    /// Accepts exactly what `Display` writes.
    fn from_str(text: &str) -> Result<Self, FingerprintError> {
        if text.len() > TEXT_MAX {
            return Err(FingerprintError::Length { len: text.len() });
        }
        let mut fields = text.split(' ');
        let version = fields.next().unwrap_or_default();
        if version != VERSION {
            return Err(FingerprintError::Version { found: version.to_owned() });
        }
        let mut named = |key: &'static str| match fields.next().and_then(split) {
            Some((found, value)) if found == key => Ok(value),
            _ => Err(FingerprintError::Missing { key }),
        };
        let (model, layout, isa) = (named("model")?, named("layout")?, named("isa")?);
        let malformed = |key, value: &str| FingerprintError::Value { key, value: value.to_owned() };
        let model = digest(model).ok_or_else(|| malformed("model", model))?;
        let layout = match layout.parse::<u32>() {
            Ok(number) if number.to_string() == layout => number,
            _ => return Err(malformed("layout", layout)),
        };
        let mut fingerprint = Self::new(model, layout, isa)?;
        for field in fields {
            let (key, value) =
                split(field).ok_or_else(|| FingerprintError::Syntax { field: field.to_owned() })?;
            let last = fingerprint.options.last_key_value();
            if last.is_some_and(|(last, _)| last.as_str() >= key) {
                return Err(FingerprintError::Key { key: key.to_owned() });
            }
            fingerprint = fingerprint.with(key, value)?;
        }
        Ok(fingerprint)
    }
}

fn split(field: &str) -> Option<(&str, &str)> {
    let plain = |text: &str| {
        let allowed = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-_.+".contains(&b);
        !text.is_empty() && text.bytes().all(allowed)
    };
    field.split_once('=').filter(|(key, value)| plain(key) && plain(value))
}

/// 64 lower-case hex digits.
fn digest(text: &str) -> Option<[u8; 32]> {
    let mut bytes = [0; 32];
    if text.len() != 64 {
        return None;
    }
    for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        let value = |digit: u8| match digit {
            b'0'..=b'9' => Some(digit - b'0'),
            b'a'..=b'f' => Some(digit - b'a' + 10),
            _ => None,
        };
        *byte = value(digits[0])? << 4 | value(digits[1])?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Fingerprint {
        let mut model = [0; 32];
        model[0] = 0xab;
        model[31] = 0x01;
        let fingerprint = Fingerprint::new(model, 0, "avx2+f16c").unwrap();
        fingerprint.with("matmul", "exact").unwrap().with("kv", "f16").unwrap()
    }

    #[test]
    fn text_form_is_stable_and_reads_back() {
        let text = "ballast-1 model=ab00000000000000000000000000000000000000000000000000000000000001 \
                    layout=0 isa=avx2+f16c kv=f16 matmul=exact";
        assert_eq!(sample().to_string(), text);
        assert_eq!(text.parse(), Ok(sample()));
    }

    #[test]
    fn only_the_canonical_text_is_read() {
        let good = sample().to_string();
        let refused = |text: &str| text.parse::<Fingerprint>().unwrap_err();
        for (from, to) in [
            ("ballast-1", "ballast-2"),
            ("model=ab", "model=AB"),
            ("model=ab", "model=b"),
            ("model=ab", "model=éb"),
            ("layout=0", "layout=00"),
            ("layout=0", "layout=4294967296"),
            ("layout=0 isa=avx2+f16c", "isa=avx2+f16c layout=0"),
            ("isa=avx2+f16c", "isa="),
            ("kv=f16 matmul=exact", "matmul=exact kv=f16"),
            ("kv=f16", "kv=f16 kv=f16"),
            ("kv=f16", "isa=f16"),
            ("kv=f16", "kv=f=16"),
            ("kv=f16", "kv"),
            (" kv", "  kv"),
        ] {
            let bad = good.replacen(from, to, 1);
            assert_ne!(bad, good);
            refused(&bad);
        }
        assert_eq!(refused(""), FingerprintError::Version { found: String::new() });
        assert!(matches!(refused(&"x".repeat(5000)), FingerprintError::Length { len: 5000 }));
    }

    #[test]
    fn options_are_plain_words_and_stand_once() {
        assert!(matches!(sample().with("kv", "f32"), Err(FingerprintError::Key { .. })));
        assert!(matches!(sample().with("layout", "1"), Err(FingerprintError::Key { .. })));
        assert!(matches!(sample().with("a b", "1"), Err(FingerprintError::Syntax { .. })));
        assert!(matches!(sample().with("a", ""), Err(FingerprintError::Syntax { .. })));
        assert!(Fingerprint::new([0; 32], 0, "AVX").is_err());
    }
}
