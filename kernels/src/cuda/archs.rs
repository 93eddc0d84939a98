// SPDX-License-Identifier: Apache-2.0

//! Tells which GPUs the embedded kernel images can run on, without asking a driver.

/// The architectures that build.rs compiled for, such as `sm_90a,compute_120`.
const ARCHS: &str = env!("BALLAST_CUDA_ARCHS");

/// What the embedded images were compiled for, such as "sm_90a,compute_120".
pub fn compiled_archs() -> &'static str {
    ARCHS
}

/// Whether an embedded image runs on a GPU of this compute capability (10 * major + minor).
pub fn runs_on(compute_capability: u32) -> bool {
    ARCHS.split(',').any(|arch| serves(arch.trim(), compute_capability))
}

/// Whether the embedded images use wgmma on a GPU of this compute capability (10 * major + minor).
/// Only code for exactly Hopper has these instructions.
pub(super) fn has_wgmma(compute_capability: u32) -> bool {
    const HOPPER: u32 = 90;
    compute_capability == HOPPER && ARCHS.split(',').any(|arch| arch.trim() == "sm_90a")
}

/// - `sm_90` is machine code for that major version, from its minor version on.
/// - `sm_90a` is machine code for exactly that version.
/// - `compute_90` is PTX, which the driver compiles for that version and every newer one.
fn serves(arch: &str, capability: u32) -> bool {
    let Some((kind, version)) = arch.split_once('_') else { return false };
    let number = version.trim_end_matches(|letter: char| letter.is_ascii_lowercase());
    let Ok(compiled) = number.parse::<u32>() else { return false };
    match (kind, version.len() > number.len()) {
        (_, true) => capability == compiled,
        ("sm", false) => capability / 10 == compiled / 10 && capability >= compiled,
        ("compute", false) => capability >= compiled,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_runs_where_its_architecture_says() {
        for (arch, runs, does_not) in [
            ("sm_90a", &[90][..], &[89, 91, 100][..]),
            ("sm_80", &[80, 86, 89], &[75, 90]),
            ("sm_120", &[120, 121], &[100, 90]),
            ("compute_90", &[90, 100, 121], &[89]),
            ("compute_90a", &[90], &[100]),
            ("nonsense", &[], &[90]),
        ] {
            assert!(runs.iter().all(|&capability| serves(arch, capability)), "{arch}");
            assert!(!does_not.iter().any(|&capability| serves(arch, capability)), "{arch}");
        }
    }
}
