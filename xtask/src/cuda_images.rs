// SPDX-License-Identifier: Apache-2.0

//! `cargo xtask cuda-images FILE`: names the targets of the CUDA images in an executable, and fails
//! unless each image has exactly those of a release. Reads the file alone: the list that the
//! executable was built with is no evidence.
//!
//! An image is a fat binary of nvcc, a header and then one entry for each target:
//!
//! ```text
//! header  u32 magic, u16 version, u16 header bytes, u64 bytes of all entries
//! entry   u16 kind, u16 version, u32 header bytes, u64 payload bytes, ..., u32 architecture at 28
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use anyhow::{Context, Result, ensure};

/// What a release compiles kernels for (docs/decisions/0013). `scripts/release` reads it too.
pub(crate) const RELEASE_ARCHS: &str = include_str!("../../kernels/release-archs").trim_ascii_end();

const MAGIC: [u8; 4] = 0xba55_ed50_u32.to_le_bytes();
const VERSION: u16 = 1;
/// The fields of an entry that are read.
const ENTRY_BYTES: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct CudaTarget {
    is_ptx: bool,
    /// Without the letter of `sm_90a`.
    architecture: u32,
}

impl fmt::Display for CudaTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.is_ptx { "compute" } else { "sm" };
        write!(f, "{kind}_{}", self.architecture)
    }
}

/// Each list of targets, and how many images have it.
type TargetLists = BTreeMap<Vec<CudaTarget>, usize>;

pub(crate) fn run(file: &Path) -> Result<()> {
    let bytes = std::fs::read(file).with_context(|| format!("reading {}", file.display()))?;
    let found = targets_of_images(&bytes);
    for (targets, images) in &found {
        eprintln!("cuda-images: {}: {images} images for {}", file.display(), names(targets));
    }
    check(&found).with_context(|| format!("{} is no release", file.display()))
}

fn check(found: &TargetLists) -> Result<()> {
    let wanted = release_targets()?;
    ensure!(!found.is_empty(), "it has no CUDA image");
    ensure!(found.keys().all(|targets| *targets == wanted), "each image has to be for {}", names(&wanted));
    Ok(())
}

fn names(targets: &[CudaTarget]) -> String {
    targets.iter().map(CudaTarget::to_string).collect::<Vec<_>>().join(", ")
}

fn release_targets() -> Result<Vec<CudaTarget>> {
    let mut targets = RELEASE_ARCHS.split(',').map(parse).collect::<Result<Vec<CudaTarget>>>()?;
    targets.sort_unstable();
    Ok(targets)
}

fn parse(arch: &str) -> Result<CudaTarget> {
    let (kind, version) = arch.split_once('_').with_context(|| format!("{arch:?} is no target"))?;
    let number = version.trim_end_matches(|letter: char| letter.is_ascii_lowercase());
    let architecture = number.parse().with_context(|| format!("{arch:?} is no target"))?;
    Ok(CudaTarget { is_ptx: kind == "compute", architecture })
}

fn targets_of_images(bytes: &[u8]) -> TargetLists {
    let mut lists = TargetLists::new();
    let mut at = 0;
    while let Some(next) = bytes[at..].windows(MAGIC.len()).position(|window| window == MAGIC) {
        at += next;
        if let Some(targets) = targets_of_image(&bytes[at..]) {
            *lists.entry(targets).or_default() += 1;
        }
        at += MAGIC.len();
    }
    lists
}

/// The targets of the image that begins here. `None` if the bytes are something else.
fn targets_of_image(bytes: &[u8]) -> Option<Vec<CudaTarget>> {
    let header_bytes = usize::from(u16_at(bytes, 6)?);
    let entry_bytes = usize::try_from(u64_at(bytes, 8)?).ok()?;
    let mut rest = bytes.get(header_bytes..header_bytes.checked_add(entry_bytes)?)?;
    if u16_at(bytes, 4)? != VERSION || rest.is_empty() {
        return None;
    }
    let mut targets = Vec::new();
    while rest.len() >= ENTRY_BYTES {
        let is_ptx = match u16_at(rest, 0)? {
            1 => true,
            2 => false,
            _ => return None,
        };
        targets.push(CudaTarget { is_ptx, architecture: u32_at(rest, 28)? });
        let bytes = usize::try_from(u64_at(rest, 8)?).ok()?.checked_add(u32_at(rest, 4)? as usize)?;
        rest = rest.get(bytes.max(ENTRY_BYTES)..)?;
    }
    targets.sort_unstable();
    Some(targets)
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As nvcc 13 writes it.
    fn image(targets: &[(u16, u32)]) -> Vec<u8> {
        let mut entries = Vec::new();
        for (kind, architecture) in targets {
            let mut entry = vec![0; 64 + 24];
            entry[0..2].copy_from_slice(&kind.to_le_bytes());
            entry[4..8].copy_from_slice(&64u32.to_le_bytes());
            entry[8..16].copy_from_slice(&24u64.to_le_bytes());
            entry[28..32].copy_from_slice(&architecture.to_le_bytes());
            entries.extend(entry);
        }
        let length = (entries.len() as u64).to_le_bytes();
        [&MAGIC[..], &VERSION.to_le_bytes(), &16u16.to_le_bytes(), &length, &entries].concat()
    }

    const RELEASE: [(u16, u32); 5] = [(2, 90), (2, 100), (2, 120), (2, 121), (1, 120)];

    #[test]
    fn an_executable_is_a_release_if_each_image_has_all_targets() {
        let check =
            |parts: &[&[u8]]| check(&targets_of_images(&parts.concat())).map_err(|error| error.to_string());
        let (whole, part) = (image(&RELEASE), image(&RELEASE[..4]));
        assert_eq!(check(&[b"\x7fELF", &whole, b"text", &whole]), Ok(()));
        let missing = check(&[b"\x7fELF", &whole, &part]).unwrap_err();
        assert_eq!(missing, "each image has to be for sm_90, sm_100, sm_120, sm_121, compute_120");
        assert_eq!(check(&[b"\x7fELF", &MAGIC, b"no image"]).unwrap_err(), "it has no CUDA image");
        let cut_off = check(&[&whole[..whole.len() - 1]]);
        assert_eq!(cut_off.unwrap_err(), "it has no CUDA image");
    }
}
