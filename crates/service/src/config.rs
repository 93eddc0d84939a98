// SPDX-License-Identifier: Apache-2.0

//! Reads and writes the TOML files of a fleet. Each process has one struct, and an unknown key is
//! an error.
//!
//! Structs carry `#[serde(deny_unknown_fields, rename_all = "kebab-case")]`. Sizes are
//! [`crate::ByteSize`], durations use `#[serde(with = "service::duration")]`.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::exit::{Exit, HasExit, exit_for_io_error};

/// A configuration file is read whole. A larger file is refused.
pub const CONFIG_BYTES_MAX: u64 = 1 << 20;

#[derive(Debug, thiserror::Error)]
pub enum ConfigFileError {
    #[error("cannot read configuration {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("configuration {} has more than {CONFIG_BYTES_MAX} bytes", path.display())]
    TooLarge { path: PathBuf },
    #[error("configuration {}, line {line}, key `{key}`: {reason}", path.display())]
    Key { path: PathBuf, line: usize, key: String, reason: String },
    #[error("configuration {}, line {line}: {reason}", path.display())]
    Syntax { path: PathBuf, line: usize, reason: String },
    #[error("cannot write configuration {}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("configuration for {} cannot be written as TOML", path.display())]
    Encode { path: PathBuf, source: toml::ser::Error },
}

impl HasExit for ConfigFileError {
    fn exit(&self) -> Exit {
        match self {
            ConfigFileError::Write { source, .. } => exit_for_io_error(source),
            _ => Exit::Usage,
        }
    }
}

/// Reads `path` into `T`.
pub fn load<T: DeserializeOwned>(path: &Path) -> Result<T, ConfigFileError> {
    let read = |source| ConfigFileError::Read { path: path.to_owned(), source };
    // A pipe or a device has no length that could be checked before.
    let mut file = File::open(path).map_err(read)?.take(CONFIG_BYTES_MAX + 1);
    let mut text = Vec::new();
    file.read_to_end(&mut text).map_err(read)?;
    if text.len() as u64 > CONFIG_BYTES_MAX {
        return Err(ConfigFileError::TooLarge { path: path.to_owned() });
    }
    let text =
        String::from_utf8(text).map_err(|error| read(io::Error::new(io::ErrorKind::InvalidData, error)))?;
    parse(&text, path)
}

/// Parses text as [`load`] does. Only error messages use `path`.
pub fn parse<T: DeserializeOwned>(text: &str, path: &Path) -> Result<T, ConfigFileError> {
    let syntax = |error: &toml::de::Error| ConfigFileError::Syntax {
        path: path.to_owned(),
        line: line_of(text, error),
        reason: error.message().to_owned(),
    };
    let deserializer = toml::de::Deserializer::parse(text).map_err(|e| syntax(&e))?;
    serde_path_to_error::deserialize(deserializer).map_err(|error| {
        let key = error.path().to_string();
        let inner = error.into_inner();
        match key.as_str() {
            // A missing key of the root table has no path. Its message names the key.
            "." => syntax(&inner),
            _ => ConfigFileError::Key {
                path: path.to_owned(),
                line: line_of(text, &inner),
                key,
                reason: inner.message().to_owned(),
            },
        }
    })
}

fn line_of(text: &str, error: &toml::de::Error) -> usize {
    let offset = error.span().map_or(0, |span| span.start.min(text.len()));
    text.as_bytes()[..offset].iter().filter(|&&b| b == b'\n').count() + 1
}

/// Writes `value` so that [`load`] reads it back. Replaces the file atomically.
pub fn store<T: Serialize>(path: &Path, value: &T) -> Result<(), ConfigFileError> {
    let text =
        toml::to_string(value).map_err(|source| ConfigFileError::Encode { path: path.to_owned(), source })?;
    let partial = path.with_extension("toml.partial");
    std::fs::write(&partial, text)
        .and_then(|()| std::fs::rename(&partial, path))
        .map_err(|source| ConfigFileError::Write { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde::Deserialize;

    use super::*;
    use crate::ByteSize;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(deny_unknown_fields, rename_all = "kebab-case")]
    struct Example {
        model: PathBuf,
        kv_bytes: ByteSize,
        #[serde(with = "crate::duration")]
        grace: Duration,
        #[serde(default)]
        nested: Vec<Nested>,
    }

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Nested {
        port: u16,
    }

    const GOOD: &str = "model = \"a.gguf\"\nkv-bytes = \"64MiB\"\ngrace = \"5s\"\n";

    fn refused(extra: &str) -> String {
        let text = format!("{GOOD}{extra}");
        parse::<Example>(&text, Path::new("b.toml")).map(|_| ()).unwrap_err().to_string()
    }

    #[test]
    fn a_written_configuration_reads_back() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.toml");
        let config = Example {
            model: "a.gguf".into(),
            kv_bytes: ByteSize::mib(64),
            grace: Duration::from_secs(5),
            nested: vec![Nested { port: 1 }],
        };
        store(&path, &config).unwrap();
        assert_eq!(load::<Example>(&path).unwrap(), config);
    }

    #[test]
    fn errors_name_file_line_and_key() {
        let unknown = refused("colour = 3\n");
        assert!(
            unknown.starts_with("configuration b.toml, line 4, key `colour`: unknown field"),
            "{unknown}"
        );
        let wrong = refused("\n[[nested]]\nport = 70000\n");
        assert!(wrong.starts_with("configuration b.toml, line 6, key `nested[0].port`: "), "{wrong}");
        let broken = refused("x = = 1\n");
        assert!(broken.starts_with("configuration b.toml, line 4: "), "{broken}");
    }

    #[test]
    fn a_missing_key_is_named() {
        let error = parse::<Example>("model = \"a\"\n", Path::new("b.toml")).unwrap_err().to_string();
        assert!(error.contains("missing field `kv-bytes`"), "{error}");
    }
}
