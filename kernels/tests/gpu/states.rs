// SPDX-License-Identifier: Apache-2.0

//! Hidden states and labels of whole models, for embeddings and scores of pairs.
//!
//! The tolerance is that of activations rounded to 8 bits: a value near the middle of two steps is
//! rounded up on one device and down on the other.

use std::path::Path;

use anyhow::{Result, ensure};
use kernels::cuda::Cuda;
use models::testing::{ModelFile, state_rows, with_classifier};
use ops::Reference;

use crate::TestGpu;

const MODELS: [&str; 4] = ["llama.Q8_0", "llama-linear.F16", "qwen3.Q4_K_M", "qwen3moe-q.Q2_K"];
/// Of the largest value of all rows.
const TOLERANCE: f32 = 0.05;

pub(crate) fn states_and_labels_are_those_of_the_host(gpu: &TestGpu) -> Result<()> {
    let ids: Vec<u32> = (0..70).map(|place| place * 7 % 200).collect();
    for name in MODELS.into_iter().take(if gpu.small { 1 } else { MODELS.len() }) {
        let file = ModelFile::open(&Path::new("crates/models/tests/data").join(format!("{name}.gguf")))?;
        let file = with_classifier(&file, file.description()?.embedding_length)?;
        #[expect(clippy::unwrap_used, reason = "a test")]
        let found = state_rows(&file, || Cuda::new(&gpu.device).unwrap(), &ids)?;
        let expected = state_rows(&file, Reference::new, &ids)?;
        for (what, found, expected) in
            [("states", found.states, expected.states), ("labels", found.labels, expected.labels)]
        {
            let (found, expected) = (found.concat(), expected.concat());
            ensure!(found.len() == expected.len(), "{name}: {} values of {what}", found.len());
            let scale = expected.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
            let most = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            println!("  {name}: {what} differ by {most} of {scale}");
            ensure!(most < TOLERANCE * scale, "{name}: {what} differ by {most} of {scale}");
        }
    }
    Ok(())
}
