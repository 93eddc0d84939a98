// SPDX-License-Identifier: Apache-2.0

//! `ballast key`: makes an API key. The key itself is printed once and stored nowhere.

use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write as _};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};

use crate::cli_error::{CliResult, IoContext};
use crate::terminal::{print_stderr, print_stdout};

/// Marks the key for secret scanners.
const PREFIX: &str = "sk-ballast-";
const SECRET_BYTES: usize = 32;
/// Only the fleet's user reads the file.
const FILE_MODE: u32 = 0o600;

#[derive(clap::Args)]
pub(crate) struct KeyArguments {
    /// Name of the key, which is the tenant of its requests
    name: String,
    /// Key file to add the key to; it is created if it does not exist
    #[arg(long, value_name = "FILE.toml")]
    file: PathBuf,
}

pub(crate) fn run(arguments: KeyArguments) -> CliResult {
    let path = &arguments.file;
    let mut secret = [0; SECRET_BYTES];
    let what = || "cannot read random bytes from /dev/urandom".to_owned();
    File::open("/dev/urandom").and_then(|mut random| random.read_exact(&mut secret)).with_context(what)?;
    let key = secret.iter().fold(PREFIX.to_owned(), |mut key, byte| {
        // Writing to a string cannot fail.
        let _: std::fmt::Result = write!(key, "{byte:02x}");
        key
    });
    let (name, hash) = (toml::Value::from(arguments.name), blake3::hash(key.as_bytes()).to_hex());
    let text = existing(path)? + &format!("[[keys]]\nname = {name}\nblake3 = \"{hash}\"\n");
    router::check_key_text(&text, path)?;
    replace(path, &text).with_context(|| format!("cannot write {}", path.display()))?;
    print_stdout(&format!("{key}\n"))?;
    print_stderr(&format!("added to {}; the key is not stored, so keep it now\n", path.display()))
}

/// The text of the file, with an empty line at the end if it has any text.
fn existing(path: &Path) -> CliResult<String> {
    match std::fs::read_to_string(path) {
        Ok(text) if text.trim().is_empty() => Ok(String::new()),
        Ok(text) => Ok(format!("{}\n\n", text.trim_end())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(String::new()),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

/// Replaces the file in one step, so that a running router reads the old text or the new one. The
/// file keeps its mode and owner.
fn replace(path: &Path, text: &str) -> std::io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let new = path.with_file_name(name);
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(FILE_MODE).open(&new)?;
    file.write_all(text.as_bytes())?;
    if let Ok(present) = std::fs::metadata(path) {
        file.set_permissions(present.permissions())?;
        fchown(&file, Some(present.uid()), Some(present.gid()))?;
    }
    file.sync_all()?;
    std::fs::rename(new, path)
}
