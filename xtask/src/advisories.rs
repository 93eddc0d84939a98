// SPDX-License-Identifier: Apache-2.0

//! Known vulnerabilities: the lock file against the RustSec database, where that can be reached.

use anyhow::{Context, Result};
use std::path::Path;
use std::process::Command;

const DATABASE: &str = "https://github.com/RustSec/advisory-db";
const CHECKOUT: &str = "target/advisory-db";

/// A machine without a way out must not hold up the build.
const REACH_TIMEOUT_SECONDS: &str = "20";

pub(crate) fn check() -> Result<Vec<String>> {
    if !fetch()? {
        eprintln!("tidy: SKIPPED: the RustSec advisory database cannot be reached from this machine");
        return Ok(Vec::new());
    }
    let database = rustsec::Database::open(Path::new(CHECKOUT)).context("reading the advisory database")?;
    let lockfile = rustsec::Lockfile::load("Cargo.lock").context("reading Cargo.lock")?;
    Ok(database
        .vulnerabilities(&lockfile)
        .into_iter()
        .map(|found| {
            format!(
                "{} {}: {} {}",
                found.package.name, found.package.version, found.advisory.id, found.advisory.title
            )
        })
        .collect())
}

/// Whether a current copy of the database lies in `CHECKOUT`.
fn fetch() -> Result<bool> {
    let arguments: &[&str] = match Path::new(CHECKOUT).join(".git").exists() {
        true => &["git", "-C", CHECKOUT, "pull", "--quiet", "--depth", "1"],
        false => &["git", "clone", "--quiet", "--depth", "1", DATABASE, CHECKOUT],
    };
    let output = Command::new("timeout")
        .arg(REACH_TIMEOUT_SECONDS)
        .args(arguments)
        .env("GIT_TERMINAL_PROMPT", "0")
        .output()
        .context("running git")?;
    Ok(output.status.success())
}
