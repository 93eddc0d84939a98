// SPDX-License-Identifier: Apache-2.0

//! The file of API keys. It holds hashes only: a key has 256 random bits, so its hash says nothing
//! about it, and a slow hash would add nothing.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;
use service::config::ConfigFileError;
use service::{Exit, HasExit};

use super::ModelAccess;
use crate::tenant;

#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    #[error(transparent)]
    File(#[from] ConfigFileError),
    #[error("key file {}: `name` {name:?}: {}", path.display(), tenant::NAME_RULE)]
    Name { path: PathBuf, name: String },
    #[error("key file {}: `blake3` of {name:?} is not a hash of 64 hexadecimal digits; `ballast key` makes one", path.display())]
    Hash { path: PathBuf, name: String },
    #[error("key file {}: {first:?} and {second:?} have the same {field}", path.display())]
    Duplicate { path: PathBuf, field: &'static str, first: String, second: String },
    #[error("key file {}: `{field}` of {name:?} is 0; remove the key to refuse all its requests", path.display())]
    Zero { path: PathBuf, field: &'static str, name: String },
}

impl HasExit for KeyFileError {
    fn exit(&self) -> Exit {
        Exit::Usage
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct KeyFile {
    #[serde(default)]
    keys: Vec<KeyEntry>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct KeyEntry {
    name: String,
    blake3: String,
    models: Option<Vec<String>>,
    #[serde(default)]
    gateway: bool,
    requests_per_minute: Option<u32>,
    concurrent_requests: Option<u32>,
    tokens_per_day: Option<u64>,
}

/// One entry of the file.
#[derive(Debug, PartialEq)]
pub(crate) struct ApiKey {
    /// The tenant of the key's requests.
    pub(crate) name: Arc<str>,
    /// Compared in constant time.
    pub(super) hash: blake3::Hash,
    pub(crate) models: ModelAccess,
    /// Whether `x-ballast-tenant` is honoured.
    pub(crate) is_gateway: bool,
    pub(super) limits: KeyLimits,
}

/// `None`: unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct KeyLimits {
    pub(super) requests_per_minute: Option<u32>,
    pub(super) concurrent_requests: Option<u32>,
    /// Prompt and output tokens of a day in UTC.
    pub(super) tokens_per_day: Option<u64>,
}

/// Reads and checks the file whole.
pub(crate) fn read_keys(path: &Path) -> Result<Vec<Arc<ApiKey>>, KeyFileError> {
    check_file(service::config::load(path)?, path)
}

/// Checks the text of a key file. Only error messages use `path`.
pub fn check_key_text(text: &str, path: &Path) -> Result<(), KeyFileError> {
    check_file(service::config::parse(text, path)?, path).map(drop)
}

fn check_file(file: KeyFile, path: &Path) -> Result<Vec<Arc<ApiKey>>, KeyFileError> {
    let mut keys: Vec<Arc<ApiKey>> = Vec::with_capacity(file.keys.len());
    for entry in file.keys {
        let key = check_entry(entry, path)?;
        let duplicate = |field, first: &ApiKey| KeyFileError::Duplicate {
            path: path.to_owned(),
            field,
            first: first.name.to_string(),
            second: key.name.to_string(),
        };
        if let Some(first) = keys.iter().find(|known| known.name == key.name) {
            return Err(duplicate("name", first));
        }
        if let Some(first) = keys.iter().find(|known| known.hash == key.hash) {
            return Err(duplicate("hash", first));
        }
        keys.push(Arc::new(key));
    }
    Ok(keys)
}

fn check_entry(entry: KeyEntry, path: &Path) -> Result<ApiKey, KeyFileError> {
    let (path, name) = (|| path.to_owned(), entry.name);
    if !tenant::is_name(name.as_bytes()) {
        return Err(KeyFileError::Name { path: path(), name });
    }
    let Ok(hash) = blake3::Hash::from_hex(&entry.blake3) else {
        return Err(KeyFileError::Hash { path: path(), name });
    };
    let limits = [
        ("requests-per-minute", entry.requests_per_minute.map(u64::from)),
        ("concurrent-requests", entry.concurrent_requests.map(u64::from)),
        ("tokens-per-day", entry.tokens_per_day),
    ];
    if let Some((field, _)) = limits.into_iter().find(|(_, limit)| *limit == Some(0)) {
        return Err(KeyFileError::Zero { path: path(), field, name });
    }
    Ok(ApiKey {
        name: name.into(),
        hash,
        models: entry.models.map_or_else(ModelAccess::default, ModelAccess::only),
        is_gateway: entry.gateway,
        limits: KeyLimits {
            requests_per_minute: entry.requests_per_minute,
            concurrent_requests: entry.concurrent_requests,
            tokens_per_day: entry.tokens_per_day,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Vec<Arc<ApiKey>>, String> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("keys.toml");
        std::fs::write(&path, text).unwrap();
        read_keys(&path).map_err(|error| service::exit::one_line(&error))
    }

    fn entry(name: &str, key: &str, rest: &str) -> String {
        let hash = blake3::hash(key.as_bytes()).to_hex();
        format!("[[keys]]\nname = {name:?}\nblake3 = \"{hash}\"\n{rest}\n")
    }

    #[test]
    fn entries_have_their_limits_and_models() {
        let limited =
            "models = [\"m\"]\nrequests-per-minute = 6\nconcurrent-requests = 2\ntokens-per-day = 9";
        let keys = read(&(entry("a", "k1", limited) + &entry("b", "k2", "gateway = true"))).unwrap();
        assert!(keys[0].models.allows("m") && !keys[0].models.allows("n") && !keys[0].is_gateway);
        let limits = keys[0].limits;
        assert_eq!(limits.requests_per_minute, Some(6));
        assert_eq!((limits.concurrent_requests, limits.tokens_per_day), (Some(2), Some(9)));
        assert!(keys[1].models.allows("n") && keys[1].is_gateway);
        assert_eq!(keys[1].limits, KeyLimits::default());
        assert!(read("").unwrap().is_empty());
    }

    #[test]
    fn a_file_with_a_wrong_entry_is_refused_with_what_is_wrong() {
        let cases = [
            (entry("a b", "k", ""), "a b"),
            (entry("a", "k", "models = 3"), "models"),
            (entry("a", "k", "colour = 3"), "colour"),
            (entry("a", "k", "tokens-per-day = 0"), "`tokens-per-day` of \"a\" is 0"),
            (entry("a", "k1", "") + &entry("a", "k2", ""), "the same name"),
            (entry("a", "k", "") + &entry("b", "k", ""), "\"a\" and \"b\" have the same hash"),
            ("[[keys]]\nname = \"a\"\nblake3 = \"sk-1\"\n".to_owned(), "ballast key"),
        ];
        for (text, words) in cases {
            let error = read(&text).unwrap_err();
            assert!(error.contains(words) && error.contains("keys.toml"), "{error}");
        }
    }
}
