// SPDX-License-Identifier: Apache-2.0

//! Compares `Reference` with llama.cpp's logits and greedy tokens, on small random models of every
//! architecture.

use anyhow::Result;
use models::testing::{Arithmetic, Golden, shared_data, tree_data};
use ops::Reference;
use std::path::Path;

const ARCHITECTURES: &[&str] = &["gemma3", "llama", "qwen2", "qwen3", "qwen3moe"];

fn check_all(folder: &Path) -> Result<()> {
    let mut checked = 0;
    for golden in Golden::all(folder, ARCHITECTURES)? {
        match golden.file()?.description() {
            Err(error) if format!("{error:#}").contains("cannot be computed with") => {
                eprintln!("SKIPPED: {}: {error:#}", golden.name);
                continue;
            }
            description => description?,
        };
        golden.check(Reference::dequantized, Arithmetic::Decoded)?;
        golden.check(Reference::new, Arithmetic::Rounded)?;
        checked += 1;
    }
    assert!(checked > 0, "no golden models in {}", folder.display());
    eprintln!("{checked} golden models");
    Ok(())
}

#[test]
fn golden_models_of_the_tree() -> Result<()> {
    check_all(&tree_data())
}

#[test]
fn golden_models_of_the_full_set() -> Result<()> {
    match shared_data("golden_models_of_the_full_set") {
        Some(folder) => check_all(&folder.join("data/golden")),
        None => Ok(()),
    }
}

/// `Golden::check` must fail here: rounding changes logits far beyond the tolerance of exact
/// arithmetic.
#[test]
fn rounded_activations_do_not_pass_as_exact() -> Result<()> {
    let goldens = Golden::all(&tree_data(), &["qwen3"])?;
    let error = goldens[0].check(Reference::new, Arithmetic::Decoded).expect_err("rounded activations");
    let expected = format!("logits differ from {}.logits_deq.f32", goldens[0].name);
    assert!(format!("{error:#}").contains(&expected), "{error:#}");
    Ok(())
}
